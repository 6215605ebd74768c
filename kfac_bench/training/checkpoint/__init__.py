"""Checkpoints: written apart, hashed, renamed into place; verified when read.

``checkpoints/step-00000120/`` holds ``rank0.pt`` ... (what that rank owns; rank 0 also model and
optimizer) and, written last, ``manifest.json`` with the SHA-256 of each. A directory without
a manifest that fits does not count, so a kill, a full disk or a flipped bit costs steps, not runs.
"""

from kfac_bench.training.checkpoint.folder import MANIFEST, Figure
from kfac_bench.training.checkpoint.reading import Checkpoint, find, find_best, load
from kfac_bench.training.checkpoint.writing import Writer, Written

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "Figure",
    "Writer",
    "Written",
    "find",
    "find_best",
    "load",
]
