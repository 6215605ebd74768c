"""Brain MRI slices with tumour masks, in the layout of the LGG MRI segmentation set (Buda et al.).

`kaggle_3m/TCGA_<institution>_<patient>_<date>/` is a volume of one patient. It holds RGB slices
`<volume>_<number>.tif` (three MR sequences as channels) and for each `<volume>_<number>_mask.tif`,
whose pixels are 0 or 255.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator
from kfac_bench.data.base.unreadable import Faults, Unreadable
from kfac_bench.errors import UsageError

PLACES = ("kaggle_3m", "lgg-mri-segmentation/kaggle_3m", ".")
LAYOUT = "kaggle_3m/TCGA_<institution>_<patient>_<date>/<volume>_<slice>.tif and ..._mask.tif"
DEGREES, SCALE = 15.0, 0.05

Array = np.ndarray[Any, np.dtype[np.uint8]]
Fault = tuple[Path, str]


@dataclass(frozen=True)
class Volume:
    """One scan: (image, mask) by slice; mean and std of its pixels in [0, 1], by channel."""

    name: str
    slices: tuple[tuple[Path, Path], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def patient(self) -> str:
        """TCGA_<institution>_<patient>: the name without the date."""
        return "_".join(self.name.split("_")[:3])


def load(
    root: Path,
    image_size: int = 256,
    workers: int = 0,
    *,
    augment: bool = True,
    eval_share: float = 0.1,
    on_error: str = "fatal",
) -> "LGG":
    """Open the volumes below `root`; images [3, size, size], masks uint8 [1, size, size] of 0, 1.

    Every file is read once, here, so that a bad one is known before hours are spent: with
    `on_error` "fatal" UsageError names the first ones, with "skip" their slices are left out
    and named in `faults`. Of the patients `eval_share`, at least one, are for evaluation: those
    whose names' hashes are least, whatever the seed. A volume is normalised by its own mean and
    std per channel. Slices of another size are resized bilinearly, masks too (1 from one half on).
    `augment` flips half of the training slices, turns them by up to 15 degrees and scales
    them by up to 5 %. `workers` processes per rank read ahead. Raises UsageError for a missing
    folder, or if either part would be without a slice.
    """
    if image_size < 1 or workers < 0:
        raise UsageError(
            f"image_size must be at least 1 and workers at least 0, got {image_size} and {workers}"
        )
    volumes, found = scan(root)
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, [Unreadable(str(path), reason) for path, reason in found])
    held_out = _held_out({v.patient for v in volumes}, eval_share)
    good = [v for v in volumes if v.slices]
    train = [v for v in good if v.patient not in held_out]
    evaluation = [v for v in good if v.patient in held_out]
    if not train or not evaluation:
        raise UsageError(
            f"{root} has {len(train)} volumes for training and {len(evaluation)} for evaluation: "
            "two patients are needed, and a data.eval_share between them"
        )
    return LGG(train, evaluation, image_size, workers, augment, faults)


def scan(root: Path) -> tuple[list[Volume], list[Fault]]:
    """Read every file below `root`: its volumes, of good slices only, and (file, fault) pairs.

    A slice is good if image and mask are there, can be decoded and have one size, the image is
    RGB and the mask's pixels are 0 or 255. Raises UsageError where there are no volumes.
    """
    found = (sorted(p for p in (root / place).glob("TCGA_*") if p.is_dir()) for place in PLACES)
    folders = next((f for f in found if f), None)
    if folders is None:
        raise UsageError(f"no LGG MRI volumes in {root}: expected {root}/{LAYOUT}")
    faults: list[Fault] = []
    volumes = [_scan_volume(folder, faults) for folder in folders]
    return volumes, sorted(faults)


def _scan_volume(folder: Path, faults: list[Fault]) -> Volume:
    files = set(folder.glob("*.tif"))
    numbers = {p: int(m[1]) for p in files if (m := re.fullmatch(r".*_(\d+)\.tif", p.name))}
    masks = {p: p.with_name(f"{p.stem}_mask.tif") for p in sorted(numbers, key=numbers.__getitem__)}
    strays = files - masks.keys() - set(masks.values())
    faults += [(p, "it is neither a slice nor the mask of one") for p in strays]
    if not masks:
        faults.append((folder, "a volume without slices"))
    slices: list[tuple[Path, Path]] = []
    count, sums, squares = 0, np.zeros(3), np.zeros(3)
    for image, mask in masks.items():
        if mask not in files:
            faults.append((image, f"there is no {mask.name}"))
            continue
        read = _read(image, mask)
        if isinstance(read, Unreadable):
            faults.append((Path(read.path), read.reason))
            continue
        pixels = read[0].reshape(-1, 3) / 255
        count, sums, squares = (
            count + len(pixels),
            sums + pixels.sum(0),
            squares + (pixels**2).sum(0),
        )
        slices.append((image, mask))
    mean = sums / max(count, 1)
    std = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0))
    std[std < 1e-6] = 1  # a channel of one grey
    return Volume(folder.name, tuple(slices), tuple(mean.tolist()), tuple(std.tolist()))


def _read(image: Path, mask: Path) -> tuple[Array, Array] | Unreadable:
    """uint8 [H, W, 3], and the mask [H, W] of 0 and 255."""
    decoded = []
    for path, mode in ((image, "RGB"), (mask, "L")):
        try:
            with Image.open(path) as file:
                if file.mode != mode:
                    return Unreadable(str(path), f"its mode is {file.mode}, not {mode}")
                decoded.append(np.array(file))
        except Exception as error:  # a damaged TIFF makes Pillow raise nearly anything
            return Unreadable(str(path), " ".join(str(error).split()) or type(error).__name__)
    pixels, inside = decoded
    if pixels.shape[:2] != inside.shape:
        sizes = [" x ".join(map(str, x.shape[1::-1])) for x in decoded]
        return Unreadable(str(mask), f"it has {sizes[1]} pixels, its slice {sizes[0]}")
    if ((inside != 0) & (inside != 255)).any():
        return Unreadable(str(mask), "a mask's pixels must be 0 or 255")
    return pixels, inside


def _held_out(patients: set[str], share: float) -> set[str]:
    by_hash = sorted(patients, key=lambda name: hashlib.sha256(name.encode()).digest())
    return set(by_hash[: max(1, round(share * len(patients)))])


class LGG(Data):
    """The two sets of volumes as `Data`; evaluation batches have each slice's volume, int64 [n].

    Volumes are numbered from 0 to `eval_volumes` - 1 in the order of their names.
    """

    def __init__(
        self,
        train: Sequence[Volume],
        evaluation: Sequence[Volume],
        image_size: int,
        workers: int,
        augment: bool,
        faults: Faults,
    ) -> None:
        self.name = "lgg"
        self.shape: tuple[int, ...] = (3, image_size, image_size)
        self.num_classes = 1
        self.train_size = sum(len(v.slices) for v in train)
        self.eval_size = sum(len(v.slices) for v in evaluation)
        self.eval_volumes = len(evaluation)
        self.faults = faults
        self._train = train
        self._evaluation = evaluation
        self._workers = workers
        self._augment = augment

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (images, masks); the augmentation of a slice depends on key and index alone."""
        samples = _Slices(self._train, self.shape[1], key if self._augment else None)
        for images, masks, _ in self._batches(samples, indices):
            yield images, masks

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's (images, masks, volumes); see Data.evaluate."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._batches(_Slices(self._evaluation, self.shape[1]), indices)

    def _batches(self, samples: "_Slices", indices: Iterator[Tensor]) -> Iterator[Batch]:
        images, volumes = torch.empty(0, *self.shape), torch.empty(0, dtype=torch.int64)
        empty = (images, images[:, :1].to(torch.uint8), volumes)
        return load_batches(samples, indices, self._workers, empty, self.faults)


class _Slices(Dataset[Sample]):
    """(image, mask, volume) of slices, normalised; with a key, a pure function of key and index."""

    def __init__(
        self, volumes: Sequence[Volume], size: int, key: tuple[int, int] | None = None
    ) -> None:
        self.volumes, self.size, self.key = volumes, size, key
        self.places = [(v, pair) for v, volume in enumerate(volumes) for pair in volume.slices]

    def __getitem__(self, index: int) -> Sample:
        volume, paths = self.places[index]
        read = _read(*paths)
        if isinstance(read, Unreadable):
            return read
        image, mask = (_to_tensor(x, self.size) for x in read)
        if self.key is not None:
            image, mask = turn_and_flip(image, mask, keyed_generator(*self.key, index))
        mean, std = self.volumes[volume].mean, self.volumes[volume].std
        image = (image - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        return image, (mask >= 0.5).to(torch.uint8), volume


def _to_tensor(pixels: Array, size: int) -> Tensor:
    """[H, W] or [H, W, C] as float32 [C, size, size] in [0, 1]."""
    if pixels.shape[:2] != (size, size):
        resized = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.array(resized)
    return torch.from_numpy(pixels.reshape(size, size, -1)).permute(2, 0, 1).float() / 255


def turn_and_flip(image: Tensor, mask: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Turn, scale and perhaps mirror [C, H, W] and its mask alike; all randomness from `generator`.

    Both are interpolated bilinearly; what comes in from outside is black and no tumour.
    """
    turn, grow, flip = torch.rand(3, generator=generator).tolist()
    angle, scale = math.radians(DEGREES) * (2 * turn - 1), 1 + SCALE * (2 * grow - 1)
    sine, cosine = math.sin(angle) / scale, math.cos(angle) / scale
    mirror = -1.0 if flip < 0.5 else 1.0
    theta = torch.tensor([[[mirror * cosine, -sine, 0.0], [mirror * sine, cosine, 0.0]]])
    both = torch.cat([image, mask])[None]
    grid = functional.affine_grid(theta, list(both.shape), align_corners=False)
    moved = functional.grid_sample(both, grid, align_corners=False)[0]
    return moved[: len(image)], moved[len(image) :]
