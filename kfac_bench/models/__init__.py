"""The models, one file for each family."""
