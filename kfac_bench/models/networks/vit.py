"""A small vision transformer after Dosovitskiy et al. 2021, for classification and denoising."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kfac_bench.errors import UsageError
from kfac_bench.models.networks.transformer import Block, initialize


class VisionTransformer(nn.Module):
    """The blocks of `networks/transformer.py` without the causal mask, on square patches.

    A convolution whose stride is its size makes a token of each patch. The head is linear. With
    `classes` it maps the mean of all tokens to logits [n, classes]. Without `classes` it maps each
    token to the pixels of its patch, so the output has the shape of the image. Weights are drawn as
    in `Transformer`; the convolution's as those of a linear layer.

    Args:
        shape: (C, H, W) of an image.
        classes: Number of classes; None for an image as the output.
        patch: Side of a patch in pixels.
        width: Width of the residual stream.
        layers: Number of blocks.
        heads: Number of attention heads.

    Raises:
        UsageError: `patch` does not divide the sides of an image, or `heads` not `width`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int | None,
        patch: int,
        width: int,
        layers: int,
        heads: int,
    ) -> None:
        super().__init__()
        channels, rows, columns = shape
        if rows % patch or columns % patch:
            raise UsageError(
                f"model.patch={patch} must divide the sides of an image, {rows} x {columns}. Set "
                "another model.patch or data.image_size"
            )
        if width % heads:
            raise UsageError(f"model.width={width} must be a multiple of model.heads={heads}")
        self.classes, self.patch = classes, patch
        tokens = (rows // patch) * (columns // patch)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, channels * patch**2 if classes is None else classes)
        initialize(self, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [n, C, H, W] to logits [n, classes], or to images [n, C, H, W]."""
        n, channels, height, width = x.shape
        tokens = self.patches(x).flatten(2).mT
        here = torch.arange(tokens.shape[1], device=x.device)
        tokens = self.norm(self.blocks(tokens + self.positions(here)))
        if self.classes is not None:
            logits: Tensor = self.head(tokens.mean(1))
            return logits
        rows, columns, side = height // self.patch, width // self.patch, self.patch
        pixels: Tensor = self.head(tokens).view(n, rows, columns, channels, side, side)
        return pixels.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
