"""Folders of JPEG files in the layout of ImageNet."""

from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder

from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.unreadable import Faults
from kfac_bench.data.images import reading
from kfac_bench.errors import UsageError


class Folder:
    """One of the two folders; see reading.Source."""

    def __init__(self, root: Path, split: str) -> None:
        self.root = root / split
        if not self.root.is_dir():
            raise UsageError(f"no folder {self.root}: expected {self.root}/<class>/<image>.JPEG")
        try:
            found: Any = ImageFolder(str(self.root))
        except FileNotFoundError as error:  # no classes, or a class without images
            reason = " ".join(str(error).split())
            raise UsageError(
                f"images are missing: {reason}; expected {self.root}/<class>/<image>.JPEG"
            ) from error
        self.classes: list[str] = found.classes
        self.labels: list[int] = found.targets
        self.paths: list[str] = [path for path, _ in found.samples]

    def name(self, index: int) -> str:
        """The file's path."""
        return self.paths[index]

    def read(self, index: int) -> bytes:
        """The file's content."""
        return Path(self.paths[index]).read_bytes()


def load(root: Path, image_size: int = 224, workers: int = 4, on_error: str = "fatal") -> Data:
    """Open `root/train/<class>/*.JPEG` and `root/val/<class>/*.JPEG`; see reading.ImageData.

    Raises UsageError for a missing folder, classes that differ between train and val, and, while
    iterating, a corrupt image, unless `on_error` is "skip".
    """
    train, evaluation = open_folders(root)
    faults = Faults(skip=on_error == "skip")
    return reading.ImageData(
        *("imagefolder", train, evaluation, len(train.classes)),
        *(image_size, workers, faults, train.classes),
    )


def open_folders(root: Path) -> tuple[Folder, Folder]:
    """`train` and `val`, of the same classes; raises UsageError as :func:`load` does."""
    train, evaluation = Folder(root, "train"), Folder(root, "val")
    only_train = sorted(set(train.classes) - set(evaluation.classes))
    only_val = sorted(set(evaluation.classes) - set(train.classes))
    if only_train or only_val:
        raise UsageError(
            "train and val must have the same class folders: "
            f"{_listed(only_train)} only in {train.root}, {_listed(only_val)} only in "
            f"{evaluation.root}"
        )
    return train, evaluation


def scan(root: Path) -> tuple[dict[str, int], list[tuple[Path, str]]]:
    """Decode every image: how many are good in `train` and `val`, and (file, fault) of the others.

    Raises UsageError as :func:`load` does.
    """
    counts: dict[str, int] = {}
    faults: list[tuple[Path, str]] = []
    for folder in open_folders(root):
        checked = (reading.check(folder, i) for i in range(len(folder.labels)))
        bad = [(Path(fault.path), fault.reason) for fault in checked if fault]
        faults += bad
        counts[folder.root.name] = len(folder.labels) - len(bad)
    return counts, faults


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
