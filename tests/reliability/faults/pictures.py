"""A folder of small pictures, of which a case can damage a file."""

from __future__ import annotations

from pathlib import Path

from tests.reliability.faults.case import Case
from tests.support.runs import write_pictures

BATCH, TRAIN, EVAL = 8, 32, 6


def folder(case: Case) -> Path:
    """Return the folder with the pictures of a case."""
    return case.folder / "pictures"


def add(case: Case) -> None:
    """Make the pictures, and let the case train on them."""
    write_pictures(folder(case), "{}.png", train=TRAIN, val=EVAL)
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
