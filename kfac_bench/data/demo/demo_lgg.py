"""Demo: artificial MRI slices in the layout of the LGG segmentation dataset.

The slices show no real brain, but ellipses with texture and noise, and tumours that are smooth
blobs. The demo shows that training works; a network's metrics here say nothing about medicine.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from kfac_bench.errors import UsageError

Field = NDArray[np.float64]
"""A value at each place of a volume, [slices, size, size]."""
INSTITUTIONS = ("DEMO", "MADE")


def make(root: Path, volumes: int = 16, slices: int = 16, size: int = 64, seed: int = 0) -> None:
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
