"""When what is saved: which operator, at which detail, in this iteration."""
