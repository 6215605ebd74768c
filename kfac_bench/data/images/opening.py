"""Opening images that may come from anyone: the number of pixels is limited."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from torchvision.io import ImageReadMode, decode_png

from kfac_bench.data.base.files import regular

KINDS = {"avif", "bmp", "gif", "jfif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"}
"""Endings of names of image files, in small letters. Of an animation the first frame is read."""
MOST_PIXELS = 64_000_000
"""Most pixels of an image. Decoded as RGB, such an image takes 192 MB."""
MOST_FILE_BYTES = 512 * 2**20
"""Largest file of an image that is read into memory."""

# The check below is stricter than the warning, which would be a second line about the same image.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@contextmanager
def open_image(file: Path | io.BytesIO) -> Iterator[ImageFile]:
    """Open an image with Pillow, which reads the header only. The pixels are decoded later.

    Raises:
        ValueError: The file is no image, has more than `MOST_PIXELS`, or is PostScript.
        Exception: Pillow raises exceptions of many types for a damaged file.
    """
    try:
        opened = Image.open(regular(file) if isinstance(file, Path) else file)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(
            f"it has more than {_megapixels(MOST_PIXELS)}, which is not allowed"
        ) from None
    except UnidentifiedImageError:  # the text of Pillow has the address of an object
        raise ValueError("it is no image") from None
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


def rgb(image: ImageFile) -> NDArray[np.uint8]:
    """Return the pixels [H, W, 3] of an image, as they are stored; see `upright`.

    Of pixels with more than 8 bits the 8 highest bits are kept that the file uses. For example,
    values of 12 bits in a file of 16 bits are divided by 16.

    Raises:
        ValueError: The pixels are negative or fractions, or Pillow loses their bits.
        Exception: Pillow raises exceptions of many types for a damaged file.
    """
    if image.mode.startswith(("I", "F")):
        # Pillow would cut these at 255, so that nearly all pixels of 16 bits become white.
        grey = np.asarray(image)
        if grey.dtype.kind == "f" or grey.min() < 0:
            raise ValueError("its pixels are not whole numbers from 0 on")
        return np.repeat(_highest_bits(grey)[..., None], 3, axis=2)
    has_wide_colors = image.format in ("PNG", "TIFF") and ";16" in str(image.tile)
    if has_wide_colors and image.format == "PNG":
        # Pillow would keep the upper 8 bits, whichever bits the file uses.
        return _highest_bits(_wide_png(image))
    pixels = np.array(image.convert("RGB"))
    if has_wide_colors and pixels.max() < 64:
        raise ValueError(
            "its colours have 16 bits and use at most 14 of them, which cannot be read. Convert "
            "the file to 8 bits"
        )
    return pixels


def _highest_bits(pixels: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
    shift = max(0, int(pixels.max()).bit_length() - 8)
    return (pixels >> shift).astype(np.uint8)


def _wide_png(image: ImageFile) -> NDArray[np.uint16]:
    """Return the pixels [H, W, 3] of a PNG file with colours of 16 bits."""
    assert image.fp is not None, "the image is open"
    image.fp.seek(0)
    encoded = torch.frombuffer(bytearray(image.fp.read()), dtype=torch.uint8)
    decoded: NDArray[np.uint16] = decode_png(encoded, ImageReadMode.RGB).permute(1, 2, 0).numpy()
    return decoded


def upright(image: ImageFile, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Turn or mirror pixels [H, W, 3] as the EXIF data of their image says.

    Pillow itself turns TIFF files, so `rgb(image)` must have run before.
    """
    orientation = 1
    with suppress(Exception):  # damaged EXIF data do not make an image unreadable
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _megapixels(pixels: int) -> str:
    return f"{pixels / 1e6:g} megapixels"
