"""Recovery: from what has survived to the state that the run resumes from."""
