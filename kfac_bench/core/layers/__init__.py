"""Modules seen as linear maps y = W a, and which modules of a model are covered."""
