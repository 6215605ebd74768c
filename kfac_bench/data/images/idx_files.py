"""Reading and writing idx files, the format of MNIST and its successors, plain or with gzip.

A file has a magic number, one 32-bit big-endian size for each dimension, and then the bytes of the
array. The sizes are checked before any data is read, so a forged file cannot fill the memory.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kfac_bench.data.regular_file import regular

UINT8 = 0x08
"""Code of the only data type that is supported. It is the third byte of the magic number."""


def read(path: Path, shape: Sequence[int], most: int) -> NDArray[np.uint8]:
    """Return the array of an idx file, uint8 [n, *shape].

    Args:
        path: The file. A name that ends in ``.gz`` is unpacked while it is read.
        shape: The shape that each item of the file must have.
        most: Largest number of items that is allowed.

    Raises:
        ValueError: The file is damaged, cut, or has another type or shape.
        OSError: The file cannot be opened or read, or it is no regular file.
    """
    try:
        regular(path)
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 * (2 + len(shape)))
            count = _count(header, shape, most)
            expected = count * math.prod(shape)
            # One byte more than expected shows a file that is too long, and makes gzip read its
            # checksum.
            content = file.read(expected + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"it is not a whole gzip file: {error}") from error
    if len(content) != expected:
        found = "more" if len(content) > expected else f"only {len(content)}"
        raise ValueError(f"its header announces {expected} bytes of data, but it has {found}")
    return np.frombuffer(content, np.uint8).reshape(count, *shape)


def write(path: Path, array: NDArray[np.uint8]) -> None:
    """Write an array as an idx file, with gzip if the name ends in ``.gz``."""
    header = struct.pack(f">{1 + array.ndim}I", _magic(array.ndim), *array.shape)
    content = header + array.tobytes()
    # Without the time of day, the same array makes the same file.
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _count(header: bytes, shape: Sequence[int], most: int) -> int:
    """Return the number of items that a header announces.

    Raises:
        ValueError: The header is cut, or announces something that is not allowed.
    """
    if len(header) < 4 * (2 + len(shape)):
        raise ValueError(f"its header is cut: it has {len(header)} bytes")
    magic, count, *sizes = struct.unpack(f">{2 + len(shape)}I", header)
    wanted = _magic(1 + len(shape))
    if magic != wanted:
        raise ValueError(f"its magic number is {magic:#010x} instead of {wanted:#010x}")
    if sizes != list(shape):
        raise ValueError(f"its items have the shape {tuple(sizes)} instead of {tuple(shape)}")
    if not 1 <= count <= most:
        raise ValueError(f"its header announces {count} items, allowed are 1 to {most}")
    return int(count)


def _magic(dimensions: int) -> int:
    return UINT8 << 8 | dimensions
