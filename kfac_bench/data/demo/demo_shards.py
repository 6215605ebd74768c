"""Demo: the digits of demo_imagenet as tar shards."""

import tempfile
from pathlib import Path

from kfac_bench.data.demo import demo_imagenet
from kfac_bench.data.images import tar_shards


def make(root: Path) -> None:
    """Write `root/train-*.tar` and `root/val-*.tar` of 500 images each.

    Raise UsageError if there are such files already.
    """
    with tempfile.TemporaryDirectory() as scratch:
        demo_imagenet.make(Path(scratch))
        for _ in tar_shards.write(root, Path(scratch), per_shard=500):
            pass
