"""Drawing for predictions: from a batch's tensors to pictures that a person can look at."""

import numpy as np
import torch
from PIL import Image, ImageChops, ImageFilter
from torch import Tensor

from kfac_bench.data.base.dataset import ImageDisplay
from kfac_bench.tasks.task import Picture

LEAST_SIDE, MOST_SIDE = 256, 512
"""Pixels of the longer side of a picture: a digit of 8 x 8 is enlarged, a photograph reduced."""

GAP = 4
"""White pixels between two pictures side by side."""


def to_rgb(image: Tensor, looks: ImageDisplay) -> Picture:
    """Return an image [C, H, W] of a batch as a picture, clipped to the range of pixels.

    uint8 images are pixels already. A float image is un-normalized with the mean and the standard
    deviation of ``looks``. If ``looks`` has none, the smallest value of the image becomes black and
    the largest one white. The first three channels are red, green and blue. An image of one or two
    channels is shown in grey, by its first channel.
    """
    pixels = image.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = pixels.double().nan_to_num()
        if looks.mean:
            mean, std = (torch.tensor(x, dtype=torch.float64) for x in (looks.mean, looks.std))
            pixels = pixels * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
        else:
            least, largest = pixels.aminmax()
            pixels = (pixels - least) / (largest - least).clamp_min(1e-12)
        pixels = (255 * pixels.clamp(0, 1)).round().to(torch.uint8)
    pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return pixels.permute(1, 2, 0).contiguous().numpy()


def fit(picture: Picture) -> Picture:
    """Return a picture of a size to be looked at.

    A small picture is enlarged by a whole factor, a large one is reduced. A mask [H, W] changes in
    the same way as the picture of its size.
    """
    height, width = picture.shape[:2]
    longer = max(height, width)
    if longer < LEAST_SIDE:
        factor = -(-LEAST_SIDE // longer)
        return picture.repeat(factor, axis=0).repeat(factor, axis=1)
    if longer <= MOST_SIDE:
        return picture
    size = tuple(max(1, round(side * MOST_SIDE / longer)) for side in (width, height))
    how = Image.Resampling.LANCZOS if picture.ndim == 3 else Image.Resampling.NEAREST
    return np.array(Image.fromarray(picture).resize((size[0], size[1]), how))


def outline(
    picture: Picture, mask: Picture, colour: tuple[int, int, int], width: int = 1
) -> Picture:
    """Return the picture with the inner edge of a mask [H, W] drawn ``width`` pixels wide.

    A pixel of the mask that is not 0 is inside.
    """
    # The frame of zeros gives a mask that reaches the border of the picture an edge there.
    inside = Image.fromarray(np.pad((mask != 0).astype(np.uint8) * 255, 1))
    edge = ImageChops.subtract(inside, inside.filter(ImageFilter.MinFilter(2 * width + 1)))
    drawn = Image.fromarray(picture)
    drawn.paste(colour, mask=edge.crop((1, 1, edge.width - 1, edge.height - 1)))
    return np.array(drawn)


def beside(left: Picture, right: Picture) -> Picture:
    """Return two pictures of one height side by side, with a white gap between them."""
    gap = np.full((len(left), GAP, 3), 255, np.uint8)
    return np.concatenate([left, gap, right], axis=1)
