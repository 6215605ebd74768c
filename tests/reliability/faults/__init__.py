"""Fault injection: faults in real runs, and a page about it: docs/lab/faults.md.

The product does not know this package. A rank that must meet a fault starts through `inject.py`,
which replaces one function of the product, or sends a signal to itself.
"""
