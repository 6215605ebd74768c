"""Checks for misuse while training runs: certain misuse is an error, probable misuse a warning."""
