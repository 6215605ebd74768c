"""Opening images that may come from anyone: the number of pixels is limited."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kfac_bench.data.regular_file import regular

MOST_PIXELS = 64_000_000
"""Most pixels of an image. Decoded as RGB, such an image takes 192 MB."""
MOST_FILE_BYTES = 512 * 2**20
"""Largest file of an image that is read into memory."""

# The check below is stricter than the warning, which would be a second line about the same image.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextmanager
def open_image(file: Path | io.BytesIO) -> Iterator[Image.Image]:
    """Open an image with Pillow, which reads the header only. The pixels are decoded later.

    Raises:
        ValueError: The image has more than `MOST_PIXELS`, or is PostScript.
        Exception: Pillow raises exceptions of many types for a damaged file.
    """
    try:
        opened = Image.open(regular(file) if isinstance(file, Path) else file)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(
            f"it has more than {_megapixels(MOST_PIXELS)}, which is not allowed"
        ) from None
    with opened as image:
        if image.format == "EPS":
            # Whatever the name of the file is, Pillow would decode it by running Ghostscript.
            raise ValueError("it is a program in PostScript, which is never run")
        check_size(*image.size)
        yield image


def check_size(width: int, height: int) -> None:
    """Raise ValueError if an image of this size has more than `MOST_PIXELS`."""
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"it has {width} x {height} pixels ({_megapixels(width * height)}), allowed are "
            f"{_megapixels(MOST_PIXELS)}"
        )


def read_file(path: Path) -> bytes:
    """Return the content of an image file.

    Raises:
        ValueError: The file has more than `MOST_FILE_BYTES`.
        OSError: The file cannot be read.
    """
    with regular(path).open("rb") as file:
        content = file.read(MOST_FILE_BYTES + 1)
    check_file_size(len(content))
    return content


def check_file_size(size: int) -> None:
    """Raise ValueError if an encoded image has more than `MOST_FILE_BYTES`."""
    if size > MOST_FILE_BYTES:
        raise ValueError(f"it is larger than {MOST_FILE_BYTES // 2**20} MiB")


def rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels [H, W, 3] of an image. Of 16 bits per pixel the upper 8 are kept.

    Raises:
        ValueError: The pixels are fractions, or have more than 16 bits.
        Exception: Pillow raises exceptions of many types for a damaged file.
    """
    if image.mode.startswith(("I", "F")):
        # Pillow would cut these at 255, so that nearly all pixels of 16 bits become white.
        grey = np.asarray(image)
        if grey.dtype.kind == "f" or grey.min() < 0 or grey.max() >= 1 << 16:
            raise ValueError("its pixels are not whole numbers of 8 or 16 bits")
        return np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2)
    return np.array(image.convert("RGB"))


def _megapixels(pixels: int) -> str:
    return f"{pixels / 1e6:g} megapixels"
