"""Brain MRI slices with tumour masks, in the layout of the LGG segmentation dataset (Buda et al.).

`kaggle_3m/TCGA_<institution>_<patient>_<date>/` is a volume, the scan of one patient. It holds RGB
slices `<volume>_<number>.tif` (three MR sequences as channels). Each slice has a mask
`<volume>_<number>_mask.tif`, whose pixels are 0 or 255.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Generator, Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data, of_files
from kfac_bench.data.base.files import Faults, Unreadable, left_out
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices, keyed_generator
from kfac_bench.data.images.opening import open_image, rgb
from kfac_bench.errors import UsageError

FOLDERS = ("kaggle_3m", "lgg-mri-segmentation/kaggle_3m", ".")
LAYOUT = "kaggle_3m/TCGA_<institution>_<patient>_<date>/<volume>_<slice>.tif and ..._mask.tif"
DEGREES, SCALE = 15.0, 0.05
"""Largest turn, and largest relative change of size, of an augmented slice."""


@dataclass(frozen=True)
class Volume:
    """One scan of a patient.

    `slices` are the files (image, mask) in order. `mean` and `std` are those of all pixels in
    [0, 1], by channel.
    """

    name: str
    slices: tuple[tuple[Path, Path], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def patient(self) -> str:
        """The patient TCGA_<institution>_<patient>: the name of the volume without the date."""
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
    """Open the volumes in `root`: images [3, size, size], masks uint8 [1, size, size] of 0 and 1.

    This function reads every file once, so that a damaged file stops a run at its start. Each
    volume is normalized by its own mean and standard deviation per channel.

    Args:
        root: Folder of the dataset.
        image_size: Side of a slice in pixels. Slices and masks of another size are resized
            bilinearly; a pixel of the mask is 1 from one half on.
        workers: Processes per rank that read ahead.
        augment: Flip half of the training slices, turn them by up to 15 degrees and scale them by
            up to 5 %.
        eval_share: Share of the patients for evaluation; at least one patient. A hash of the name
            decides, so the patients are the same for all seeds.
        on_error: What happens to slices that cannot be used. "fatal": UsageError. "skip": they are
            left out and listed in `faults`.

    Raises:
        UsageError: The folder is missing, or training or evaluation would have no slice.
    """
    if image_size < 1 or workers < 0:
        raise UsageError(
            "data.image_size must be at least 1 and data.workers at least 0, "
            f"got {image_size} and {workers}"
        )
    volumes, unreadable = scan(root)
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, unreadable)
    held_out = _held_out({v.patient for v in volumes}, eval_share)
    good = [v for v in volumes if v.slices]
    train = [v for v in good if v.patient not in held_out]
    evaluation = [v for v in good if v.patient in held_out]
    if not train or not evaluation:
        raise UsageError(
            f"{root} has {len(train)} volumes for training and {len(evaluation)} for evaluation, "
            f"but both need one. Add patients, or change data.eval_share"
            f"{left_out(unreadable)}"
        )
    return LGG(train, evaluation, image_size, workers, augment, faults)


def folders(root: Path) -> list[Path]:
    """Return the folders of the volumes in `root`, sorted by name."""
    found = (sorted(p for p in (root / name).glob("TCGA_*") if p.is_dir()) for name in FOLDERS)
    return next((paths for paths in found if paths), [])


def scan(root: Path) -> tuple[list[Volume], list[Unreadable]]:
    """Read every file in `root`. Return the volumes, with good slices only, and all faults.

    A slice is good if image and mask exist, can be decoded and have the same size, the image is
    RGB, and the pixels of the mask are 0 or 255.

    Raises:
        UsageError: There are no volumes.
    """
    paths = folders(root)
    if not paths:
        raise UsageError(f"no LGG MRI volumes in {root}: expected {root}/{LAYOUT}")
    faults: list[Unreadable] = []
    volumes = [_scan_volume(path, faults) for path in paths]
    return volumes, sorted(faults, key=lambda fault: (fault.path, fault.reason))


def _scan_volume(folder: Path, faults: list[Unreadable]) -> Volume:
    """Read one volume; add the reasons why files cannot be used to `faults`."""
    files = set(folder.glob("*.tif"))
    numbers = {p: int(m[1]) for p in files if (m := re.fullmatch(r".*_(\d+)\.tif", p.name))}
    # Two slices may have the same number. All processes must see them in the same order.
    ordered = sorted(numbers, key=lambda p: (numbers[p], p.name))
    masks = {p: p.with_name(f"{p.stem}_mask.tif") for p in ordered}
    strays = files - masks.keys() - set(masks.values())
    faults += [Unreadable(str(p), "it is neither a slice nor a mask of a slice") for p in strays]
    if not masks:
        faults.append(Unreadable(str(folder), "the volume has no slices"))
    slices: list[tuple[Path, Path]] = []
    count, sums, squares = 0, np.zeros(3), np.zeros(3)
    for image, mask in masks.items():
        if mask not in files:
            faults.append(Unreadable(str(image), f"there is no {mask.name}"))
            continue
        read = _read(image, mask)
        if isinstance(read, Unreadable):
            faults.append(read)
            continue
        pixels = read[0].reshape(-1, 3) / 255
        count += len(pixels)
        sums += pixels.sum(0)
        squares += (pixels**2).sum(0)
        slices.append((image, mask))
    mean = sums / max(count, 1)
    std = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0))
    # A channel whose pixels are all equal has no deviation to divide by.
    std[std < 1e-6] = 1
    return Volume(folder.name, tuple(slices), tuple(mean.tolist()), tuple(std.tolist()))


def _read(image: Path, mask: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | Unreadable:
    """Return the pixels [H, W, 3] of a slice and its mask [H, W] of 0 and 255."""
    decoded = []
    for path, mode in ((image, "RGB"), (mask, "L")):
        try:
            with open_image(path) as file:
                if file.mode != mode:
                    return Unreadable(str(path), f"its mode is {file.mode}, not {mode}")
                decoded.append(rgb(file) if mode == "RGB" else np.array(file))
        # Pillow raises exceptions of many types for a damaged file.
        except Exception as error:
            return Unreadable.because(path, error)
    pixels, inside = decoded
    if pixels.shape[:2] != inside.shape:
        sizes = [" x ".join(map(str, x.shape[1::-1])) for x in decoded]
        return Unreadable(str(mask), f"it has {sizes[1]} pixels, its slice {sizes[0]}")
    if ((inside != 0) & (inside != 255)).any():
        return Unreadable(str(mask), "the pixels of a mask must be 0 or 255")
    return pixels, inside


def _held_out(patients: set[str], share: float) -> set[str]:
    # A hash spreads the patients of each institution over both sets.
    by_hash = sorted(patients, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    return set(by_hash[: max(1, round(share * len(patients)))])


class LGG(Data):
    """The dataset. Batches are (images, masks), in evaluation (images, masks, volumes).

    `volumes` int64 [n] are the numbers of the volumes, from 0 to `eval_volumes` - 1, in the order
    of their names.
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
        """Yield (images, masks); the augmentation of a slice depends only on key and index."""
        samples = _Slices(self._train, self.shape[1], key if self._augment else None)
        for images, masks, _ in self._batches(samples, indices):
            yield images, masks

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's (images, masks, volumes); see `Data.evaluate`."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._batches(_Slices(self._evaluation, self.shape[1]), indices)

    def fingerprint_parts(self, split: str) -> Iterable[bytes]:
        """Yield names and sizes of slices and masks; see `Data.fingerprint_parts`."""
        volumes = self._train if split == "train" else self._evaluation
        paths = [path for volume in volumes for pair in volume.slices for path in pair]
        # All volumes are in one folder.
        return of_files(paths, paths[0].parent.parent)

    def _batches(self, samples: "_Slices", indices: Iterator[Tensor]) -> Iterator[Batch]:
        images, volumes = torch.empty(0, *self.shape), torch.empty(0, dtype=torch.int64)
        empty = (images, images[:, :1].to(torch.uint8), volumes)
        return load_batches(samples, indices, self._workers, empty, self.faults)


class _Slices(Dataset[Sample]):
    """Samples (image, mask, volume), normalized.

    With a key they are augmented, as a function of key and index.
    """

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


def _to_tensor(pixels: NDArray[np.uint8], size: int) -> Tensor:
    """Resize pixels [H, W] or [H, W, C] and return them as float32 [C, size, size] in [0, 1]."""
    if pixels.shape[:2] != (size, size):
        resized = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.array(resized)
    return torch.from_numpy(pixels.reshape(size, size, -1)).permute(2, 0, 1).float() / 255


def turn_and_flip(image: Tensor, mask: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Turn, scale and perhaps mirror an image [C, H, W] and its mask in the same way.

    Both are interpolated bilinearly. Pixels from outside the image are black and not tumour.
    """
    # affine_grid maps output to input places, so `scale` divides.
    turn, grow, flip = torch.rand(3, generator=generator).tolist()
    angle, scale = math.radians(DEGREES) * (2 * turn - 1), 1 + SCALE * (2 * grow - 1)
    sine, cosine = math.sin(angle) / scale, math.cos(angle) / scale
    mirror = -1.0 if flip < 0.5 else 1.0
    theta = torch.tensor([[[mirror * cosine, -sine, 0.0], [mirror * sine, cosine, 0.0]]])
    both = torch.cat([image, mask])[None]
    grid = functional.affine_grid(theta, list(both.shape), align_corners=False)
    moved = functional.grid_sample(both, grid, align_corners=False)[0]
    return moved[: len(image)], moved[len(image) :]
