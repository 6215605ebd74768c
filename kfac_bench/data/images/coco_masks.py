"""COCO's notations of masks: polygons and run lengths, and conversion between them.

Every segmentation from a file is checked here, because the C code of pycocotools does not check.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfac_bench.errors import MissingPackageError

Mask = NDArray[np.uint8]
"""[H, W] of 0 and 1."""
RLE = dict[str, Any]
"""Run lengths of a mask: `size` [H, W], and `counts`, bytes in COCO's compression.

The runs are of 0 and 1 in turn and go down the columns."""
Polygons = tuple["array[float]", ...]
"""Polygons x1, y1, x2, y2, ... in pixels. The mask covers what at least one polygon covers."""


def api() -> Any:
    """Return the module pycocotools.mask, which only detection needs."""
    try:
        from pycocotools import mask
    except ImportError:
        raise MissingPackageError("pycocotools", "COCO's masks and its evaluator") from None
    return mask


class BadMaskError(ValueError):
    """A segmentation is invalid; the message is the reason."""


def read(segmentation: object, height: int, width: int) -> Polygons | RLE:
    """Check and convert the `segmentation` of an annotation; raise BadMaskError."""
    if isinstance(segmentation, list):
        return _polygons(segmentation, height, width)
    if not isinstance(segmentation, dict):
        raise BadMaskError("it has no segmentation")
    if segmentation.get("size") != [height, width]:
        raise BadMaskError("its mask has another size than its image")
    runs = segmentation.get("counts")
    if isinstance(runs, str):
        runs = _uncompressed(runs)
    if not isinstance(runs, list) or not all(type(n) is int and n >= 0 for n in runs):
        raise BadMaskError("its mask is not a list of run lengths")
    if sum(runs) != height * width:
        raise BadMaskError("its mask's run lengths do not add up to its image")
    rle: RLE = api().frPyObjects({"size": [height, width], "counts": runs}, height, width)
    return rle


def _polygons(polygons: list[object], height: int, width: int) -> Polygons:
    read = []
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            raise BadMaskError("a polygon needs three points, x and y of each")
        for values, size in ((polygon[::2], width), (polygon[1::2], height)):
            # pycocotools walks along the edges pixel by pixel: a distant point would take minutes
            # and all memory.
            if not all(type(v) in (int, float) and -size <= v <= 2 * size for v in values):
                raise BadMaskError("a point of a polygon is not a number, or far outside the image")
        read.append(array("d", polygon))
    if not read:
        raise BadMaskError("it has no segmentation")
    return tuple(read)


def _uncompressed(text: str) -> list[int]:
    """Decode run lengths from COCO's compression.

    A character has six bits: five bits of a number, and one that says whether the number goes on.
    From the fourth run on, the number is the difference to the run two places before.
    """
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 30:
            raise BadMaskError("its mask's compressed run lengths are damaged")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    if shift:
        raise BadMaskError("its mask's compressed run lengths are damaged")
    return runs


def to_rle(segmentation: Polygons | RLE, height: int, width: int) -> RLE:
    """Return the compressed run lengths of one mask of an image of this size."""
    if isinstance(segmentation, dict):
        return segmentation
    mask = api()
    rle: RLE = mask.merge(mask.frPyObjects([list(p) for p in segmentation], height, width))
    return rle


def decode(segmentations: Sequence[Polygons | RLE], height: int, width: int) -> Mask:
    """Return the masks [n, height, width] of 0 and 1."""
    if not segmentations:
        return np.zeros((0, height, width), np.uint8)
    masks = api().decode([to_rle(s, height, width) for s in segmentations])
    return np.ascontiguousarray(masks.transpose(2, 0, 1))


def encode(masks: Mask) -> list[RLE]:
    """Return the compressed run lengths of each mask [n, H, W] of 0 and 1."""
    encoded: list[RLE] = api().encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return encoded
