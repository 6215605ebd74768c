"""Demo: drawn shapes with exact masks in COCO's layout.

The images show circles, boxes and triangles on an uneven background. Some shapes are behind others.
Dozens of tiny dots form a crowd. The demo shows that training works; a detector's metrics here
say nothing about photographs.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from kfac_bench.errors import UsageError

Pixels = NDArray[np.float64]
BoolMask = NDArray[np.bool_]
CATEGORIES = {1: "circle", 3: "box", 8: "triangle"}
"""Names by id. The ids have gaps, as in COCO."""
YEAR = 2017
HIDDEN = 0.4
"""No shape is drawn if a smaller share of any shape would remain visible."""


def make(root: Path, train: int = 200, val: int = 50, size: int = 128, seed: int = 0) -> None:
    """Write `root/annotations/instances_{train,val}2017.json` and the images, about size x size.

    An image has one to five shapes. One image of ten also has a crowd, one of forty is empty. A
    mask covers the visible pixels: as a polygon if all of the shape is visible, else as run
    lengths. Equal arguments give equal files. Raise UsageError if one of the folders exists.
    """
    splits = {f"train{YEAR}": train, f"val{YEAR}": val}
    if any((root / name).exists() for name in ("annotations", *splits)):
        raise UsageError(f"{root} has annotations or images already. Choose another folder")
    (root / "annotations").mkdir(parents=True)
    for number, (split, images) in enumerate(splits.items()):
        (root / split).mkdir()
        tables: dict[str, list[dict[str, Any]]] = {
            "images": [],
            "annotations": [],
            "categories": [{"id": id, "name": name} for id, name in CATEGORIES.items()],
        }
        for id in range(1, images + 1):
            generator = np.random.default_rng([seed, number, id])
            pixels, annotations = draw(generator, size, empty=id % 40 == 0, crowd=id % 10 == 0)
            name = f"{id:012d}.jpg"
            Image.fromarray(pixels).save(root / split / name, quality=95)
            height, width = pixels.shape[:2]
            tables["images"].append({"id": id, "file_name": name, "height": height, "width": width})
            for annotation in annotations:
                ids = {"id": len(tables["annotations"]) + 1, "image_id": id}
                tables["annotations"].append(ids | annotation)
        file = root / "annotations" / f"instances_{split}.json"
        file.write_text(json.dumps(tables), encoding="utf-8")


def draw(
    generator: np.random.Generator, size: int, *, empty: bool = False, crowd: bool = False
) -> tuple[NDArray[np.uint8], list[dict[str, Any]]]:
    """Return an image uint8 [H, W, 3], H and W from 3/4 `size` to `size`, and its annotations."""
    height, width = generator.integers(3 * size // 4, size + 1, 2).tolist()
    pixels = _background(generator, height, width)
    # The number of the shape that each pixel shows, from 1 on; 0 is the background.
    owner = np.zeros((height, width), np.int64)
    shapes: list[tuple[int, list[float], BoolMask]] = []
    for _ in range(0 if empty else generator.integers(1, 6)):
        category, polygon = _shape(generator, height, width, size)
        mask = _filled(polygon, height, width)
        new_owner = np.where(mask, len(shapes) + 1, owner)
        areas = [m.sum() for _, _, m in shapes] + [mask.sum()]
        visible_areas = [(new_owner == i).sum() for i in range(1, len(areas) + 1)]
        if any(v < HIDDEN * area for v, area in zip(visible_areas, areas, strict=True)):
            continue
        owner = new_owner
        shapes.append((category, polygon, mask))
        pixels[mask] = _colour(generator) + generator.normal(0, 8, (int(mask.sum()), 3))
    annotations = []
    for i, (category, polygon, mask) in enumerate(shapes, start=1):
        visible = owner == i
        is_whole = bool((visible == mask).all())
        annotations.append(_annotation(category, visible, polygon if is_whole else None))
    if crowd and not empty:
        annotations.append(_draw_crowd(generator, pixels, owner))
    return pixels.clip(0, 255).astype(np.uint8), annotations


def _background(generator: np.random.Generator, height: int, width: int) -> Pixels:
    """Return [H, W, 3]: a gradient between two colours, stripes and noise."""
    y, x = np.mgrid[:height, :width]
    turn, wave = generator.uniform(0, 2 * np.pi), generator.uniform(4, 12)
    along = np.cos(turn) * x / width + np.sin(turn) * y / height
    one, two = generator.uniform(60, 190, (2, 3))
    share = np.clip(along, 0, 1)[..., None]
    stripes = 10 * np.sin(along * 2 * np.pi * wave)[..., None]
    pixels: Pixels = one * (1 - share) + two * share + stripes
    return pixels + generator.normal(0, 12, pixels.shape)


def _colour(generator: np.random.Generator) -> Pixels:
    """Return a colour, bright or dark in each channel. It does not depend on the kind of shape."""
    colour: Pixels = np.where(generator.random(3) < 0.5, generator.uniform(0, 50, 3), 205)
    return colour


def _shape(
    generator: np.random.Generator, height: int, width: int, size: int
) -> tuple[int, list[float]]:
    """Return the category and the polygon x1, y1, x2, y2, ... of a shape inside the image."""
    category = int(generator.choice(list(CATEGORIES)))
    corners = {1: 24, 3: 4, 8: 3}[category]
    radius = generator.uniform(0.1, 0.26) * size
    squeeze = generator.uniform(0.7, 1.0)
    x, y = generator.uniform(radius, np.array([width, height]) - radius - 1)
    turns = generator.uniform(0, 2 * np.pi) + np.arange(corners) * 2 * np.pi / corners
    tilt = generator.uniform(0, 2 * np.pi)
    a, b = radius * np.cos(turns), squeeze * radius * np.sin(turns)
    points = (
        x + a * np.cos(tilt) - b * np.sin(tilt),
        y + a * np.sin(tilt) + b * np.cos(tilt),
    )
    return category, np.stack(points, 1).round(2).ravel().tolist()


def _filled(polygon: list[float], height: int, width: int) -> BoolMask:
    """Return bool [H, W]: the pixels whose centres are inside the polygon."""
    # ImageDraw fills all pixels that an edge touches. So draw finely and take the centres.
    scale = 8
    fine = Image.new("1", (width * scale, height * scale))
    ImageDraw.Draw(fine).polygon([scale * v for v in polygon], fill=1)
    inside: BoolMask = np.array(fine)[scale // 2 :: scale, scale // 2 :: scale]
    return inside


def _annotation(
    category: int, mask: BoolMask, polygon: list[float] | None, crowd: bool = False
) -> dict[str, Any]:
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    x, y = int(columns[0]), int(rows[0])
    return {
        "category_id": category,
        "bbox": [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1],
        "area": int(mask.sum()),
        "iscrowd": int(crowd),
        "segmentation": _run_lengths(mask) if polygon is None else [polygon],
    }


def _run_lengths(mask: BoolMask) -> dict[str, Any]:
    """Return COCO's uncompressed run lengths: of 0, 1, 0, ... down the columns."""
    flat = np.concatenate([[False], mask.ravel(order="F"), [not mask[-1, -1]]])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff(np.concatenate([[0], changes]))
    return {"size": list(mask.shape), "counts": counts.tolist()}


def _draw_crowd(
    generator: np.random.Generator, pixels: Pixels, owner: NDArray[np.int64]
) -> dict[str, Any]:
    """Draw many tiny dots in a corner, where no shape is, and return their annotation."""
    height, width = owner.shape
    mask = np.zeros(owner.shape, bool)
    for _ in range(30):
        x, y = generator.integers(0, (width // 4, height // 4))
        mask[y : y + 4, x : x + 4] = True
    mask &= owner == 0
    mask[0, 0] = True
    pixels[mask] = 255 * (generator.random((int(mask.sum()), 1)) < 0.5)
    return _annotation(1, mask, None, crowd=True)
