"""Faults injected into real runs, and what became of them: docs/reliability.md.

The product knows nothing of this package: a rank that is to meet a fault is started through
``inject.py``, which changes one function at one step, or does it to itself.
"""
