"""Commands that measure: ``python benchmarks/speed.py``, ``python benchmarks/gpu.py``."""
