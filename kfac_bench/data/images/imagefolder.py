"""Folders of JPEG files in the layout of ImageNet."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kfac_bench.data.base.dataset import Data, of_files
from kfac_bench.data.base.files import Faults, Unreadable, files_below
from kfac_bench.data.images import reading
from kfac_bench.data.images.opening import KINDS, read_file
from kfac_bench.errors import UsageError
from kfac_bench.output import counted


class Folder:
    """The images below `train` or `val`; a `reading.Source`."""

    def __init__(self, root: Path, split: str) -> None:
        self.root = root / split
        if not self.root.is_dir():
            raise UsageError(f"no folder {self.root}: expected {self.root}/<class>/<image>.JPEG")
        self.classes = sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())
        others = [entry.name for entry in os.scandir(self.root) if not entry.is_dir()]
        images = [_images(self.root / name, others) for name in self.classes]
        empty = [name for name, paths in zip(self.classes, images, strict=True) if not paths]
        if not images or empty:
            what = f"no image of the class {_listed(empty)}" if images else "no folder of a class"
            raise UsageError(f"{what} in {self.root}: expected {self.root}/<class>/<image>.JPEG")
        self.labels = [label for label, paths in enumerate(images) for _ in paths]
        self.paths = [path for paths in images for path in paths]
        # A damaged file is noticed only when it is decoded.
        self.faults: list[Unreadable] = []
        self.notes = _left_out(self.root, others)

    def name(self, index: int) -> str:
        """Return the path of an image file."""
        return self.paths[index]

    def read(self, index: int) -> bytes:
        """Return the content of an image file."""
        return read_file(Path(self.paths[index]))

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names and sizes of the files. The name of a file's folder is its class."""
        return of_files(self.paths, self.root)


def _images(folder: Path, others: list[str]) -> list[str]:
    """Return the image files of a class in the order of torchvision's ImageFolder.

    Add the names of other files to `others`.
    """
    images = list[str]()
    for path in files_below(folder):
        if _ending(path)[1:] in KINDS:
            images.append(path)
        else:
            others.append(os.path.basename(path))
    return images


def _ending(file: str) -> str:
    return os.path.splitext(file)[1].lower()


def _left_out(root: Path, others: list[str]) -> list[str]:
    """Return a line about the files that are no images of a class, if there are some."""
    # Files such as .DS_Store are hidden on purpose.
    shown = [name for name in others if not name.startswith(".")]
    if not shown:
        return []
    kinds = Counter(_ending(name) or "no ending" for name in shown)
    counts = [f"{kind} ({count})" for kind, count in kinds.most_common()]
    return [f"{root}: {counted(len(shown), 'file')} left out, by ending: {_listed(counts)}"]


def load(
    root: Path,
    image_size: int = 224,
    workers: int = 4,
    on_error: str = "fatal",
    *,
    augment: bool | str = True,
) -> Data:
    """Open `root/train/<class>/*.JPEG` and `root/val/<class>/*.JPEG`; see `reading.ImageData`.

    Raises:
        UsageError: A folder is missing, or train and val have different classes. While iterating:
            an image cannot be decoded, unless `on_error` is "skip".
    """
    train, evaluation = open_folders(root)
    data = reading.ImageData(
        "imagefolder",
        train,
        evaluation,
        len(train.classes),
        image_size,
        workers,
        Faults(skip=on_error == "skip"),
        train.classes,
        augment=augment,
    )
    data.notes = [*train.notes, *evaluation.notes]
    return data


def open_folders(root: Path) -> tuple[Folder, Folder]:
    """Return `train` and `val`, which must have the same classes; raise UsageError as `load`."""
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


def scan(root: Path) -> tuple[dict[str, int], list[str], list[Unreadable]]:
    """Decode every image; see `reading.scan`. Raise UsageError as `load`.

    The texts between the counts and the faults are about files that are left out.
    """
    train, evaluation = open_folders(root)
    counts, faults = reading.scan({"train": train, "val": evaluation})
    return counts, [*train.notes, *evaluation.notes], faults


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
