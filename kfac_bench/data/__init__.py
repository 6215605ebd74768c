"""Readers for real data layouts, and the order in which examples are seen."""
