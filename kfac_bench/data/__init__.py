"""Readers of published data layouts, and the order in which a run sees the examples."""
