"""A file for each kind of model in transformers, which says how it is ours."""
