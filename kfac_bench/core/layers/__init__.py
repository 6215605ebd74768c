"""Modules seen as linear maps y = W a: one file per kind of layer, and what is covered."""
