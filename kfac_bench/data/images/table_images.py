"""Images with labels in Parquet and Arrow files, for example those of Hugging Face's hub."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kfac_bench.config.option_table import did_you_mean
from kfac_bench.data.base import tables
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.files import Faults, Unreadable
from kfac_bench.data.images import reading
from kfac_bench.data.images.opening import check_file_size
from kfac_bench.errors import UsageError

IMAGE = ("image", "img")
LABEL = ("label", "labels", "fine_label")
"""Names of columns that are used if the user names none, the preferred one first."""


@dataclass(frozen=True)
class TableOptions:
    """The options of a table of images; None: the usual columns, or the usual split."""

    image_column: str | None = None
    label_column: str | None = None
    train_split: str = "train"
    eval_split: str | None = None
    eval_share: float = 0.1


class TableImages:
    """Some rows of a split; a `reading.Source`."""

    def __init__(
        self,
        columns: tables.Columns,
        rows: Sequence[int],
        labels: Sequence[int],
        root: Path,
    ) -> None:
        self.labels = labels
        # A damaged image is noticed only when it is decoded.
        self.faults: list[Unreadable] = []
        self.notes: list[str] = []
        self._columns, self._rows, self._root = columns, rows, root

    def name(self, index: int) -> str:
        """Return the file and the row of an image."""
        return self._columns.place(self._rows[index])

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            ValueError: The cell has no bytes of an image.
        """
        cell = self._columns.cell(self._columns.names[0], self._rows[index])
        content = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(content, bytes):
            # A path in a table could name any file of this machine, so it is never followed.
            raise ValueError("its cell has no bytes of an image; paths to files are not followed")
        check_file_size(len(content))
        return content

    def fingerprint_parts(self) -> Iterator[bytes]:
        """Yield names and sizes of the files, the columns, the rows and their labels."""
        yield from self._columns.fingerprint_parts(self._root)
        for numbers in (self._rows, self.labels):
            yield np.asarray(numbers, np.int64).tobytes()


def load(
    root: Path,
    options: TableOptions,
    image_size: int = 224,
    workers: int = 4,
    on_error: str = "fatal",
    *,
    augment: bool | str = True,
) -> Data:
    """Open the tables in `root`; see `tables.find` and `reading.ImageData`.

    Labels are integers from 0 on, or strings, whose classes are sorted. The number of classes is
    the number of names that `datasets` stored, or else the largest training label plus 1.

    Raises:
        UsageError: A column or a split does not exist, or a file is damaged; a label is out of
            range, or files differ in their classes; unless `on_error` is "skip", the first image
            cannot be decoded. While iterating: another image cannot be decoded, unless `on_error`
            is "skip".
    """
    train, evaluation, count, classes = _open(root, options)
    faults = Faults(skip=on_error == "skip")
    # A wrong column is reported before training.
    if isinstance(first := reading.load(train, 0, image_size), Unreadable):
        faults.add(first)
    data = reading.ImageData(
        "parquet", train, evaluation, count, image_size, workers, faults, classes, augment=augment
    )
    data.notes = train.notes
    return data


def is_at(root: Path) -> bool:
    """Return whether the path has tables, and the first one has a column of images."""
    if not tables.is_at(root):
        return False
    names = tables.columns(next(iter(tables.find(root).values()))[0]).names
    return any(name in names for name in IMAGE)


def scan(root: Path) -> tuple[dict[str, int], list[Unreadable]]:
    """Decode every image; see `reading.scan`. Raise UsageError as `load`."""
    train, evaluation, _, _ = _open(root, TableOptions())
    return reading.scan({"train": train, "evaluation": evaluation})


def _open(root: Path, options: TableOptions) -> tuple[TableImages, TableImages, int, list[str]]:
    """Return both sources, the number of classes, and the names of the classes or nothing."""
    splits = tables.find(root)
    train, evaluation = tables.pick(splits, root, options.train_split, options.eval_split)
    first = splits[train][0]
    schema = tables.columns(first)
    image = tables.choose(schema, options.image_column, IMAGE, "data.image_column", first)
    label = tables.choose(schema, options.label_column, LABEL, "data.label_column", first)
    if image == label:
        raise UsageError(
            f"{first}: the column {image} is used for images and for labels. Set data.image_column "
            "or data.label_column to another column"
        )
    parts = [tables.Columns(splits[name], (image, label)) for name in (train, evaluation) if name]
    values = [_values(part, label) for part in parts]
    if len({isinstance(each[0], str) for each in values if each}) > 1:
        raise UsageError(
            f"{root}: labels of one split are strings, those of the other integers. Store the "
            f"column {label} alike in both"
        )
    stored = tables.class_names(schema, label)
    for path in (path for part in parts for path in part.paths):
        theirs = tables.class_names(tables.columns(path), label)
        # An integer label is the place of its class in the names of its own file.
        if stored and theirs and theirs != stored:
            raise UsageError(
                f"{path}: the classes of the column {label} are {_listed(theirs)}, but "
                f"{_listed(stored)} in {first.name}. Store the same classes in all files"
            )
    names = stored or _sorted_classes(values[0], label, root)
    count = len(names) or min(max(values[0], default=0) + 1, reading.MOST_CLASSES)
    labels = [_labels(*each, names, count) for each in zip(values, parts, strict=True)]
    if evaluation is None:
        rows = tables.shares(len(parts[0]), options.eval_share)
    else:
        rows = [*range(len(parts[0]))], [*range(len(parts[1]))]
    for name, own in zip(("training", "evaluation"), rows, strict=True):
        if not own:
            raise UsageError(
                f"{root} has no row for {name}. Add rows, or set data.eval_split or data.eval_share"
            )
    sources = [
        TableImages(parts[i], own, [labels[i][row] for row in own], root)
        for own, i in zip(rows, (0, len(parts) - 1), strict=True)
    ]
    held_out = f"the split {evaluation}" if evaluation else f"{options.eval_share:g} of the rows"
    sources[0].notes = [
        f"{root}: images are in the column {image}, labels in {label} (data.image_column, "
        f"data.label_column). Training reads the split {train}, evaluation {held_out}"
    ]
    return sources[0], sources[1], count, names


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _values(columns: tables.Columns, label: str) -> list[Any]:
    """Return the labels of a split as they are stored: all integers, or all strings."""
    stored = columns.all_of(label)
    values: list[Any] = stored.to_pylist()
    if {type(value) for value in values} <= {bool, int} or all(isinstance(v, str) for v in values):
        return values
    bad = next(i for i, value in enumerate(values) if not isinstance(value, bool | int | str))
    raise UsageError(
        f"{columns.place(bad)}: the label is {str(values[bad])[:40]!r} (type {stored.type}), but "
        "labels must be integers or strings. Set data.label_column"
    )


def _sorted_classes(values: Sequence[Any], label: str, root: Path) -> list[str]:
    """Return the classes of labels that are strings; nothing if labels are integers."""
    if not values or not isinstance(values[0], str):
        return []
    names = sorted(set(values))
    if len(names) > reading.MOST_CLASSES:
        raise UsageError(f"{root}: the column {label} has {len(names)} classes, too many")
    return names


def _labels(
    values: Sequence[Any], columns: tables.Columns, names: Sequence[str], count: int
) -> list[int]:
    """Return the numbers of the classes; raise UsageError if one is out of range."""
    if values and isinstance(values[0], str):
        numbers = {name: number for number, name in enumerate(names)}
        for row, value in enumerate(values):
            if value not in numbers:
                raise UsageError(
                    f"{columns.place(row)}: no training image has the label {value[:40]!r}"
                    f"{did_you_mean(value, names)}. Correct the label or the split"
                )
        return [numbers[value] for value in values]
    for row, value in enumerate(values):
        if not 0 <= value < count:
            raise UsageError(
                f"{columns.place(row)}: the label {value} is out of range; the classes are 0 to "
                f"{count - 1}. Some test splits have no labels: choose another split with "
                "data.eval_split"
            )
    return [int(value) for value in values]
