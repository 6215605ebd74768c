"""Opening images that may come from anyone: the number of pixels is limited."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        ValueError: The image has more than `MOST_PIXELS`.
        Exception: Pillow raises exceptions of many types for a damaged file.
    """
    try:
        opened = Image.open(regular(file) if isinstance(file, Path) else file)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(
            f"it has more than {_megapixels(MOST_PIXELS)}, which is not allowed"
        ) from None
    with opened as image:
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
    if len(content) > MOST_FILE_BYTES:
        raise ValueError(f"it is larger than {MOST_FILE_BYTES // 2**20} MiB")
    return content


def _megapixels(pixels: int) -> str:
    return f"{pixels / 1e6:g} megapixels"
