"""``instances_*.json`` of COCO: what is in the pictures; nothing in it is trusted."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from kfac_bench.data.coco.coco_masks import RLE, BadMaskError, Polygons, read
from kfac_bench.errors import UsageError

LAYOUT = "annotations/instances_{train,val}<year>.json and the folders train<year>, val<year>"
LARGEST = 1 << 15
"""Pixels along a side: more is no picture but a mistake."""
LEAST = 0.01
"""Pixels along the side of a box: less has no area in float32."""

Fault = tuple[Path, str]


@dataclass(frozen=True, slots=True)
class Instance:
    """One thing in a picture, or a crowd of them."""

    bbox: tuple[float, float, float, float]
    """x, y, width, height in pixels, as the file has it."""
    label: int
    """From 1 on, in the order of the categories' ids; 0 is what is no thing."""
    area: float
    """Of the mask in pixels, as the file has it."""
    crowd: bool
    """Left out of training; the evaluator does not mind what is found in it."""
    segmentation: Polygons | RLE

    def corners(self, height: int, width: int) -> tuple[float, float, float, float]:
        """x1, y1, x2, y2 of the part that is inside an image of that size."""
        x, y, w, h = self.bbox
        return max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))


@dataclass(frozen=True, slots=True)
class Picture:
    """One image file, and what is in it."""

    id: int
    path: Path
    height: int
    width: int
    instances: list[Instance]

    @property
    def things(self) -> list[Instance]:
        """To learn from: no crowds."""
        return [x for x in self.instances if not x.crowd]


@dataclass
class Split:
    """One annotation file; faulty images and annotations are left out and named."""

    file: Path
    categories: dict[int, str]
    """Names by id, in the order of the ids."""
    pictures: list[Picture]
    """In the order of their ids."""
    faults: list[Fault] = field(default_factory=list)


def find(root: Path, split: str, year: int | None = None) -> tuple[Path, Path]:
    """Annotation file and image folder of ``split`` (train, val); raises :class:`UsageError`."""
    said = str(year or "")
    folder = root / "annotations"
    names = os.listdir(folder) if folder.is_dir() else []
    pattern = rf"instances_{split}({said or '[0-9]*'})\.json"
    years = sorted(m[1] for name in names if (m := re.fullmatch(pattern, name)))
    if not years:
        raise UsageError(f"no {folder}/instances_{split}{said}.json: COCO's layout is {LAYOUT}")
    if len(years) > 1:
        raise UsageError(f"{folder} has {split} of {', '.join(years)}: set data.year=YEAR")
    images = root / f"{split}{years[0]}"
    if not images.is_dir():
        raise UsageError(f"no folder {images}: COCO's layout is {LAYOUT}")
    return folder / f"instances_{split}{years[0]}.json", images


def load(file: Path, images: Path) -> Split:
    """Read one annotation file, whose pictures are in the folder ``images``.

    Raises :class:`UsageError` where it is no such file at all; single entries that are wrong
    become the result's ``faults``: an image that is named twice, has no size or is not there; an
    annotation of an unknown image or category, without a box, an area or a mask, or of zero area.
    """
    tables = _tables(file)
    categories = _categories(file, tables["categories"])
    labels = {id: label for label, id in enumerate(categories, start=1)}
    split = Split(file, categories, [])
    present = set(os.listdir(images))
    pictures: dict[int, Picture] = {}
    for number, entry in enumerate(tables["images"]):
        picture = _picture(entry, images, present)
        if isinstance(picture, Picture) and picture.id in pictures:
            picture = f"id {picture.id} is another image's, too"
        if isinstance(picture, str):
            split.faults.append((file, f"image {_id(entry, number)}: {picture}"))
        else:
            pictures[picture.id] = picture
    for number, entry in enumerate(tables["annotations"]):
        fault = _add_instance(entry, pictures, labels)
        if fault is not None:
            split.faults.append((file, f"annotation {_id(entry, number)}: {fault}"))
    split.pictures = [pictures[id] for id in sorted(pictures)]
    return split


def _tables(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) or "too deeply nested"
        raise UsageError(f"{file} is damaged, it is not JSON: {reason[:200]}") from None
    tables = {}
    for name in ("images", "annotations", "categories"):
        table = content.get(name) if isinstance(content, dict) else None
        if not isinstance(table, list) or not all(isinstance(entry, dict) for entry in table):
            raise UsageError(f"{file} is not COCO's: it has no list of objects {name!r}")
        tables[name] = table
    return tables


def _categories(file: Path, table: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, Any] = {e["id"]: e.get("name") for e in table if _is_id(e.get("id"))}
    if not found or len(found) < len(table) or not all(isinstance(n, str) for n in found.values()):
        raise UsageError(f"{file}: every category needs an id of its own and a name")
    return {id: str(found[id]) for id in sorted(found)}


def _picture(entry: dict[str, Any], folder: Path, present: set[str]) -> Picture | str:
    """Or what is wrong with it."""
    id, name = entry.get("id"), entry.get("file_name")
    height, width = entry.get("height"), entry.get("width")
    if not _is_id(id):
        return "it has no id"
    if not (_is_id(height) and _is_id(width) and 0 < height <= LARGEST and 0 < width <= LARGEST):
        return "it has no height and width"
    if not isinstance(name, str) or name not in present:
        return f"there is no file {str(name)[:100]!r} in {folder}"
    return Picture(id, folder / name, height, width, [])


def _add_instance(
    entry: dict[str, Any], pictures: dict[int, Picture], labels: dict[int, int]
) -> str | None:
    """Put an annotation into its picture; or what is wrong with it."""
    image, category = entry.get("image_id"), entry.get("category_id")
    if not _is_id(image) or image not in pictures:
        return "of an unknown image"
    if not _is_id(category) or category not in labels:
        return "of an unknown category"
    picture, bbox, area = pictures[image], entry.get("bbox"), entry.get("area")
    if not isinstance(bbox, list) or len(bbox) != 4 or not all(map(_is_number, bbox)):
        return "it has no box"
    if not _is_number(area) or not area > 0:
        return "it has no area"
    if entry.get("iscrowd", 0) not in (0, 1):
        return "iscrowd is neither 0 nor 1"
    try:
        segmentation = read(entry.get("segmentation"), picture.height, picture.width)
    except BadMaskError as error:
        return str(error)
    x, y, w, h = map(float, bbox)
    crowd = bool(entry.get("iscrowd", 0))
    made = Instance((x, y, w, h), labels[category], float(area), crowd, segmentation)
    x1, y1, x2, y2 = made.corners(picture.height, picture.width)
    if x2 - x1 < LEAST or y2 - y1 < LEAST:
        return "its box has no area inside of the image"
    picture.instances.append(made)
    return None


def _is_id(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 1 << 62


def _is_number(value: object) -> TypeGuard[float]:
    """Also not infinite and not NaN."""
    return isinstance(value, int | float) and type(value) is not bool and -1e9 < value < 1e9


def _id(entry: dict[str, Any], number: int) -> str:
    """How an entry is named in a fault."""
    id = entry.get("id")
    return str(id) if _is_id(id) else f"number {number}, without an id"
