"""Recovery: selects the state that a run resumes from."""
