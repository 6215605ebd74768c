"""Collect the statistics of a step: hooks on the layers, and the moments that the hooks sum."""
