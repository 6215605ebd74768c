"""Optimizers that this package implements itself."""
