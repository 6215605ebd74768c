"""Commands that measure time and memory of K-FAC, such as `python benchmarks/speed.py`."""
