"""The contest of optimizers, run from a clone: ``python -m benchmarks.contest``.

It adds optimizers, experiments and benchmarks to the package (:mod:`.setup`), keeps finished runs
(:mod:`.result_store`) and compares unlike machines (:mod:`.sitting`).
docs/lab/contest.md shows the commands.
"""
