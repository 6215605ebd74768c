"""A folder of small pictures, of which a case can damage a file."""

from __future__ import annotations

from pathlib import Path

from tests.reliability.faults.case import Case

BATCH, TRAIN, EVAL = 8, 32, 6


def folder(case: Case) -> Path:
    """Return the folder with the pictures of a case."""
    return case.folder / "pictures"


def add(case: Case) -> None:
    """Make the pictures, and let the case train on them."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", EVAL)):
        for i in range(count):
            path = folder(case) / split / f"class{i % 2}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(path)
    case.more = (
        "data=imagefolder",
        f"data.root={folder(case)}",
        "data.image_size=4",
        "data.workers=0",
        f"trainer.batch_size={BATCH}",
        "optimizer.lr=0.02",
        "kfac.damping=0.1",
        *case.more,
    )
