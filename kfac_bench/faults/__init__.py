"""Faults injected into real runs, and what became of them: docs/reliability.md.

The product knows nothing of this package: a rank that is to meet a fault is started through
:mod:`kfac_bench.faults.inject`, which changes one function at one step, or does it to itself.
"""
