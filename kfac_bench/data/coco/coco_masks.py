"""Masks of COCO: polygons and run lengths, checked before C code sees them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from kfac_bench.errors import UsageError

Mask = np.ndarray[Any, np.dtype[np.uint8]]
"""[H, W] of 0 and 1."""
RLE = dict[str, Any]
"""``size`` [H, W] and ``counts``: lengths of runs of 0 and 1 in turn, down the columns; in
COCO's own compression, as bytes."""
Polygons = tuple["array[float]", ...]
"""Each x1, y1, x2, y2, ... in pixels; a mask is what any of them covers."""


def api() -> Any:
    """pycocotools.mask, which not everybody needs."""
    try:
        from pycocotools import mask
    except ImportError:
        raise UsageError(
            "COCO's masks and its evaluator need pycocotools: pip install 'kfac-bench[detection]'"
        ) from None
    return mask


class BadMaskError(ValueError):
    """A segmentation that is none, and why."""


def read(segmentation: object, height: int, width: int) -> Polygons | RLE:
    """What an annotation file has as ``segmentation``, checked; raises :class:`BadMaskError`."""
    if isinstance(segmentation, list):
        return _polygons(segmentation, height, width)
    if not isinstance(segmentation, dict):
        raise BadMaskError("it has no segmentation")
    if segmentation.get("size") != [height, width]:
        raise BadMaskError("its mask has another size than its image")
    runs = segmentation.get("counts")
    if isinstance(runs, str):
        runs = _uncompressed(runs, height * width)
    if not isinstance(runs, list) or not all(type(n) is int and n >= 0 for n in runs):
        raise BadMaskError("its mask is no list of run lengths")
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
            # C code walks along the edges: a point far away would take minutes and all memory
            if not all(type(v) in (int, float) and -size <= v <= 2 * size for v in values):
                raise BadMaskError("a polygon's point is no number, or far outside of its image")
        read.append(array("d", polygon))
    if not read:
        raise BadMaskError("it has no segmentation")
    return tuple(read)


def _uncompressed(text: str, pixels: int) -> list[int]:
    """Run lengths from COCO's compression: six bits a character, five of them a number's.

    From the third on, a run is given by its difference to the one before the last.
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
    """One mask of an image of that size, compressed."""
    if isinstance(segmentation, dict):
        return segmentation
    mask = api()
    rle: RLE = mask.merge(mask.frPyObjects([list(p) for p in segmentation], height, width))
    return rle


def decode(segmentations: Sequence[Polygons | RLE], height: int, width: int) -> Mask:
    """[n, height, width] of 0 and 1."""
    if not segmentations:
        return np.zeros((0, height, width), np.uint8)
    masks = api().decode([to_rle(s, height, width) for s in segmentations])
    return np.ascontiguousarray(masks.transpose(2, 0, 1))


def encode(masks: Mask) -> list[RLE]:
    """[n, H, W] of 0 and 1, each compressed."""
    encoded: list[RLE] = api().encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return encoded
