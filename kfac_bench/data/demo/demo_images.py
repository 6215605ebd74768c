"""Demo images in published layouts: digits as ImageNet has them, drawn shapes and drawn slices.

* ImageNet's folders and tar shards hold scikit-learn's digits.
* COCO's layout holds circles, boxes and triangles on an uneven background. Some shapes are behind
  others. Dozens of tiny dots form a crowd.
* The LGG segmentation dataset's layout holds artificial MRI slices. They show no real brain, but
  ellipses with texture and noise, and tumours that are smooth blobs.

The demos show that training works. A network's metrics here say nothing about photographs or
medicine.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter

from kfac_bench.data.base.order import Shard
from kfac_bench.data.images import digits, tar_shards
from kfac_bench.errors import UsageError


def make_imagenet(root: Path, size: int = 64) -> None:
    """Write `root/train/n0000000<digit>/*.JPEG` and `root/val/...`, RGB images of size x size.

    The split is the one of data=digits: 1347 images for training and 450 for evaluation. Raise
    UsageError if one of the folders exists already.
    """
    if any((root / split).exists() for split in ("train", "val")):
        raise UsageError(f"{root} has train or val already. Choose another folder")
    data = digits.load(size, normalize=False)
    splits = {
        "train": data.train(data.train_size, 0, 0, 0, Shard()),
        "val": data.evaluate(data.eval_size, Shard()),
    }
    for split, batches in splits.items():
        images, labels = next(iter(batches))
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (image[0].clamp(0, 1) * 255).byte().numpy()
            path = folder / f"n{label:08d}_{number}.JPEG"
            Image.fromarray(pixels).convert("RGB").save(path, quality=95)


def make_shards(root: Path) -> None:
    """Write `root/train-*.tar` and `root/val-*.tar` of 500 images each.

    Raise UsageError if there are such files already.
    """
    with tempfile.TemporaryDirectory() as scratch:
        make_imagenet(Path(scratch))
        for _ in tar_shards.write(root, Path(scratch), per_shard=500):
            pass


# ---- COCO

Pixels = NDArray[np.float64]
BoolMask = NDArray[np.bool_]
CATEGORIES = {1: "circle", 3: "box", 8: "triangle"}
"""Names by id. The ids have gaps, as in COCO."""
YEAR = 2017
HIDDEN = 0.4
"""No shape is drawn if a smaller share of any shape would remain visible."""


def make_coco(root: Path, train: int = 200, val: int = 50, size: int = 128) -> None:
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
            generator = np.random.default_rng([0, number, id])
            empty, crowd = id % 40 == 0, id % 10 == 0
            pixels, annotations = draw_shapes(generator, size, empty=empty, crowd=crowd)
            name = f"{id:012d}.jpg"
            Image.fromarray(pixels).save(root / split / name, quality=95)
            height, width = pixels.shape[:2]
            tables["images"].append({"id": id, "file_name": name, "height": height, "width": width})
            for annotation in annotations:
                ids = {"id": len(tables["annotations"]) + 1, "image_id": id}
                tables["annotations"].append(ids | annotation)
        file = root / "annotations" / f"instances_{split}.json"
        file.write_text(json.dumps(tables), encoding="utf-8")


def draw_shapes(
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


# ---- LGG

Field = NDArray[np.float64]
"""A value at each place of a volume, [slices, size, size]."""
INSTITUTIONS = ("DEMO", "MADE")


def make_lgg(
    root: Path, volumes: int = 16, slices: int = 16, size: int = 64, seed: int = 0
) -> None:
    """Write `volumes` folders `root/kaggle_3m/TCGA_*` of `slices` RGB slices of size x size pixels.

    Each slice has a mask of 0 and 255. As in the real dataset, about half of the slices show no
    tumour, and one volume of eight has no tumour at all. Equal arguments give equal files. Raise
    UsageError if there are such folders already.
    """
    folder = root / "kaggle_3m"
    if any(folder.glob("TCGA_*")):
        raise UsageError(f"{folder} has volumes already. Choose another folder")
    for number in range(volumes):
        name = f"TCGA_{INSTITUTIONS[number % 2]}_{1000 + number}_{20000101 + number}"
        (folder / name).mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng([seed, number])
        images, masks = make_volume(generator, slices, size, tumour=number % 8 != 7)
        for i, (image, mask) in enumerate(zip(images, masks, strict=True), start=1):
            Image.fromarray(image).save(folder / name / f"{name}_{i}.tif")
            Image.fromarray(mask).save(folder / name / f"{name}_{i}_mask.tif")


def make_volume(
    generator: np.random.Generator, slices: int, size: int, *, tumour: bool
) -> tuple[Any, Any]:
    """Return uint8 images [slices, size, size, 3] and masks [slices, size, size] of 0 and 255.

    The channels are three views of the same head. The tumour is bright in the second one, as in
    FLAIR, and faint with a ring in the others. Small bright spots are not tumours. Brightness,
    noise and an uneven field differ from volume to volume.
    """
    side = np.linspace(-1, 1, size)
    z, y, x = np.meshgrid(np.linspace(-1, 1, slices), side, side, indexing="ij")
    tilt, wide, high = generator.uniform((-0.2, 0.62, 0.75), (0.2, 0.72, 0.85))
    x, y = x * np.cos(tilt) - y * np.sin(tilt), x * np.sin(tilt) + y * np.cos(tilt)
    radius = np.sqrt((x / wide) ** 2 + (y / high) ** 2 + (0.75 * z) ** 2)
    texture = _texture(generator, radius.shape, size / 24)
    brain = radius + 0.02 * texture < 0.88
    skull = np.abs(radius - 1) < 0.05
    fluid = _ventricles(x / wide, y / high, z) * brain
    folds = brain * (_texture(generator, radius.shape, size / 40) > 0.9 - 0.6 * radius)
    blob = _blob(generator, radius, (z, y / high, x / wide), texture) if tumour else 0 * radius
    inside = (blob > 1) & brain
    rim = brain * np.exp(-(((blob - 1) / 0.25) ** 2)) * tumour
    # A network that takes every bright place for a tumour must fail.
    spots = brain * (_texture(generator, radius.shape, size / 50) > 2.2)
    # The receiver coils of a scanner give such an uneven brightness.
    uneven = 1 + 0.12 * _texture(generator, radius.shape, size / 4)
    grey = brain * (0.42 + 0.05 * texture - 0.08 * folds)
    looks = generator.uniform(0.85, 1.15, (3, 4))
    weights = ((-0.25, -0.06, 0.06, 0.35), (-0.30, 0.18, 0.03, 0.25), (0.25, 0.05, 0.14, 0.30))
    noise = generator.uniform(0.02, 0.06)
    channels = []
    for look, weight in zip(looks, weights, strict=True):
        scale = look * weight
        image = grey * look[0] + scale[0] * fluid + scale[3] * skull
        image += scale[1] * gaussian_filter(inside * 1.0, (0, 1, 1)) + scale[2] * rim + 0.15 * spots
        image = uneven * image + noise * generator.standard_normal(image.shape) * (radius < 1.1)
        channels.append(image)
    pixels = np.clip(np.stack(channels, axis=-1), 0, 1)
    return (255 * pixels).round().astype(np.uint8), (255 * inside).astype(np.uint8)


def _texture(generator: np.random.Generator, shape: tuple[int, ...], sigma: float) -> Field:
    """Return smooth noise of mean 0 and variance 1."""
    smooth: Field = gaussian_filter(generator.standard_normal(shape), (1, sigma, sigma))
    smooth -= smooth.mean()
    smooth /= smooth.std()
    return smooth


def _ventricles(x: Field, y: Field, z: Field) -> Field:
    """Return the two dark horns beside the middle."""
    horns = (((np.abs(x) - 0.16) / 0.11) ** 2 + ((y + 0.05) / 0.32) ** 2 + (z / 0.7) ** 2) < 1
    smooth: Field = gaussian_filter(horns * 1.0, (0, 0.7, 0.7))
    return smooth


def _blob(
    generator: np.random.Generator, radius: Field, axes: tuple[Field, ...], texture: Field
) -> Field:
    """Return a field above 1 inside a tumour: an ellipsoid off the middle with an uneven border."""
    turn = generator.uniform(0, 2 * np.pi)
    centre = (generator.uniform(-0.35, 0.35), 0.45 * np.sin(turn), 0.45 * np.cos(turn))
    sizes = generator.uniform((0.4, 0.2, 0.2), (0.6, 0.38, 0.38))
    parts = zip(axes, centre, sizes, strict=True)
    distance = np.sqrt(sum(((a - c) / s) ** 2 for a, c, s in parts))
    field: Field = 2 - distance - 0.12 * texture
    return field
