"""Reading COCO's annotation files `instances_*.json`: which objects are in which image.

Every value of a file is checked. Entries with errors are left out and reported.
"""

import json
import os
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from kfac_bench.data.base.files import Unreadable, regular
from kfac_bench.data.images.coco_masks import RLE, BadMaskError, Polygons, read
from kfac_bench.errors import UsageError

LAYOUT = "annotations/instances_{train,val}<year>.json and the folders train<year>, val<year>"
LARGEST = 1 << 15
"""Pixels along a side of an image. A larger number in a file is an error."""
LEAST = 0.01
"""Pixels along a side of a box. The area of a smaller box can round to 0 in float32."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One annotated object in an image, or a crowd of objects."""

    bbox: tuple[float, float, float, float]
    """x, y, width, height in pixels, as in the file."""
    label: int
    """Number of the category from 1 on, in the order of the category ids; 0 is the background."""
    area: float
    """Pixels of the mask, as in the file."""
    crowd: bool
    """True if the instance is a crowd. Training leaves crowds out; the evaluator ignores detections
    in them."""
    segmentation: Polygons | RLE

    def corners(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Return x1, y1, x2, y2 of the part of the box that is inside an image of this size."""
        x, y, w, h = self.bbox
        return max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))


@dataclass(frozen=True, slots=True)
class CocoImage:
    """One image file and the objects in it."""

    id: int
    path: Path
    height: int
    width: int
    instances: list[Instance]

    @property
    def objects(self) -> list[Instance]:
        """The objects to learn from: all but crowds."""
        return [x for x in self.instances if not x.crowd]


@dataclass
class AnnotationFile:
    """The content of one annotation file, without the entries that have errors."""

    file: Path
    categories: dict[int, str]
    """Names of the categories by id, in the order of the ids."""
    images: list[CocoImage]
    """The images in the order of their ids."""
    faults: list[Unreadable] = field(default_factory=list)
    """The entries with errors."""

    def add_fault(self, entry: str, reason: str) -> None:
        """Record an entry that is left out."""
        self.faults.append(Unreadable(f"{self.file}: {entry}", reason))


def years(root: Path, split: str, year: int | str | None = None) -> list[str]:
    """Return the years of a split that have an annotation file, as in the names of the files."""
    folder = root / "annotations"
    names = os.listdir(folder) if folder.is_dir() else []
    pattern = rf"instances_{split}({year or '[0-9]*'})\.json"
    return sorted(m[1] for name in names if (m := re.fullmatch(pattern, name)))


def find(root: Path, split: str, year: int | str | None = None) -> tuple[Path, Path]:
    """Return the annotation file and the image folder of a split.

    Args:
        root: Folder of the dataset.
        split: `train` or `val`.
        year: Which year to take, if the folder has several.

    Raises:
        UsageError: The file or folder is missing, or the year must be chosen.
    """
    folder, found = root / "annotations", years(root, split, year)
    if not found:
        file = f"{folder}/instances_{split}{year or ''}.json"
        raise UsageError(f"no {file}: COCO's layout is {LAYOUT}")
    if len(found) > 1:
        raise UsageError(f"{folder} has {split} of {', '.join(found)}: set data.year")
    images = root / f"{split}{found[0]}"
    if not images.is_dir():
        raise UsageError(f"no folder {images}: COCO's layout is {LAYOUT}")
    return folder / f"instances_{split}{found[0]}.json", images


def load(file: Path, folder: Path) -> AnnotationFile:
    """Read one annotation file, whose images are in `folder`.

    These entries become `faults` of the result: an image that has the id of another image, has no
    size or has no file; an annotation of an unknown image or category, without a box, an area or
    a mask, or of zero area.

    Raises:
        UsageError: The file as a whole is not an annotation file.
    """
    tables = _tables(file)
    categories = _categories(file, tables["categories"])
    labels = {id: label for label, id in enumerate(categories, start=1)}
    content = AnnotationFile(file, categories, [])
    # One listing of the folder is faster than a question to the file system for each image.
    present = set(os.listdir(folder))
    images: dict[int, CocoImage] = {}
    for number, entry in enumerate(tables["images"]):
        image = _image(entry, folder, present)
        if isinstance(image, CocoImage) and image.id in images:
            image = f"another image has the id {image.id}, too"
        if isinstance(image, str):
            content.add_fault(f"image {_id(entry, number)}", image)
        else:
            images[image.id] = image
    for number, entry in enumerate(tables["annotations"]):
        reason = _add_instance(entry, images, labels)
        if reason is not None:
            content.add_fault(f"annotation {_id(entry, number)}", reason)
    content.images = [images[id] for id in sorted(images)]
    return content


def _tables(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(regular(file).read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) or "too deeply nested"
        raise UsageError(f"{file} is not JSON: {reason[:200]}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{_no_coco(file)}: it is a {type(content).__name__}, not an object")
    tables = {}
    for name in ("images", "annotations", "categories"):
        table = content.get(name)
        if not isinstance(table, list):
            keys = ", ".join(map(repr, content))[:100] or "none"
            raise UsageError(f"{_no_coco(file)}: it has no list of objects {name!r}. Keys: {keys}")
        bad = next((n for n, entry in enumerate(table) if not isinstance(entry, dict)), None)
        if bad is not None:
            raise UsageError(
                f"{_no_coco(file)}: {name}[{bad}] is a {type(table[bad]).__name__}, and not one of "
                f"objects {name!r}"
            )
        tables[name] = table
    return tables


def _no_coco(file: Path) -> str:
    return f"{file} is not in COCO's format"


def _categories(file: Path, table: list[dict[str, Any]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for number, entry in enumerate(table):
        id, name, problem = entry.get("id"), entry.get("name"), None
        if not _is_id(id):
            problem = f"its id is {_shown(id)}, not a whole number"
        elif id in names:
            problem = f"an earlier category has its id {id}"
        elif not isinstance(name, str):
            problem = f"its name is {_shown(name)}, not a text"
        if problem is not None or not _is_id(id):
            raise UsageError(
                f"{file}: categories[{number}]: {problem}; every category needs an id of its own "
                "and a name"
            )
        names[id] = str(name)
    if not names:
        raise UsageError(f"{file}: the list 'categories' is empty")
    return {id: names[id] for id in sorted(names)}


def _image(entry: dict[str, Any], folder: Path, present: set[str]) -> CocoImage | str:
    """Return the image of an entry, or the reason why the entry cannot be used."""
    id, name = entry.get("id"), entry.get("file_name")
    height, width = entry.get("height"), entry.get("width")
    if not _is_id(id):
        return f"its id is {_shown(id)}, not a whole number"
    if not (_is_id(height) and _is_id(width) and 0 < height <= LARGEST and 0 < width <= LARGEST):
        return (
            f"its height is {_shown(height)} and its width {_shown(width)}, not numbers of pixels "
            f"up to {LARGEST}"
        )
    if not isinstance(name, str) or name not in present:
        return f"there is no file {str(name)[:100]!r} in {folder}"
    return CocoImage(id, folder / name, height, width, [])


def _add_instance(
    entry: dict[str, Any], images: dict[int, CocoImage], labels: dict[int, int]
) -> str | None:
    """Add an annotation to its image, or return the reason why it cannot be used."""
    image_id, category = entry.get("image_id"), entry.get("category_id")
    if not _is_id(image_id) or image_id not in images:
        return f"its image {_shown(image_id)} is unknown or left out"
    if not _is_id(category) or category not in labels:
        return f"its category {_shown(category)} is unknown"
    image, bbox, area = images[image_id], entry.get("bbox"), entry.get("area")
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        return f"its box is {_shown(bbox)}, not four numbers"
    if not _is_number(area) or not area > 0:
        return f"its area is {_shown(area)}, not a number above 0"
    if entry.get("iscrowd", 0) not in (0, 1):
        return f"iscrowd is {_shown(entry['iscrowd'])}, neither 0 nor 1"
    try:
        segmentation = read(entry.get("segmentation"), image.height, image.width)
    except BadMaskError as error:
        return str(error)
    x, y, w, h = map(float, bbox)
    crowd = bool(entry.get("iscrowd", 0))
    instance = Instance((x, y, w, h), labels[category], float(area), crowd, segmentation)
    x1, y1, x2, y2 = instance.corners(image.height, image.width)
    if x2 - x1 < LEAST or y2 - y1 < LEAST:
        return "its box has no area inside the image"
    image.instances.append(instance)
    return None


def _is_id(value: object) -> TypeGuard[int]:
    # bool is a subclass of int, and ids must fit into an int64 tensor.
    return type(value) is int and abs(value) < 1 << 62


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite number, and not absurdly large."""
    return isinstance(value, int | float) and type(value) is not bool and -1e9 < value < 1e9


def _shown(value: object) -> str:
    """Return a value of a file for a fault."""
    return "missing" if value is None else reprlib.repr(value)


def _id(entry: dict[str, Any], number: int) -> str:
    """Return the name of an entry for a fault."""
    id = entry.get("id")
    return str(id) if _is_id(id) else f"number {number} (without an id)"
