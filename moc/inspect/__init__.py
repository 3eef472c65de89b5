"""What checkpoints hold and whether they are whole, told without torch and without unpickling anything."""
