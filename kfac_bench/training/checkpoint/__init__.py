"""Checkpoints: written apart, hashed, renamed into place, and verified when they are read.

`checkpoints/step-00000120/` holds `rank0.pt`, `rank1.pt`, ... A rank's file is its shard: what this
rank owns. Rank 0's shard also holds model and optimizer. `manifest.json`, written last, has the
SHA-256 of each file. A folder without a fitting manifest does not count. A kill, a full disk or a
flipped bit therefore costs steps, but never the run.
"""

from kfac_bench.record.checkpoint_folder import MANIFEST, ValidationMetric
from kfac_bench.training.checkpoint.reading import Checkpoint, find, find_best, load
from kfac_bench.training.checkpoint.writing import SavedCheckpoint, Writer

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "SavedCheckpoint",
    "ValidationMetric",
    "Writer",
    "find",
    "find_best",
    "load",
]
