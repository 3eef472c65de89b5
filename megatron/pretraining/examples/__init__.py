"""Recipes, scripts, Slurm templates and examples, for a machine without a clone of the repository."""
