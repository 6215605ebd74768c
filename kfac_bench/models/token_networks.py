"""Networks on tokens, in plain modules: a transformer, a vision transformer, and an LSTM.

The vision transformer of Dosovitskiy et al. 2021 makes tokens of the patches of an image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.errors import UsageError


class Transformer(nn.Module):
    """Pre-norm blocks of causal attention and a GELU network of 4 `width`: a small GPT-2.

    It maps int64 [n, L], with L up to `length`, to logits [n, L, symbols]. Weights are drawn from
    torch's global generator, N(0, 0.02^2); the weights that write to the residual stream are
    smaller by sqrt(2 `layers`). Biases are 0. Raises UsageError if `heads` does not divide `width`.
    """

    def __init__(self, symbols: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"model.width={width} must be a multiple of model.heads={heads}")
        self.tokens = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        initialize(self, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map symbols to the logits of the symbol that follows each."""
        here = torch.arange(x.shape[1], device=x.device)
        hidden = self.blocks(self.tokens(x) + self.positions(here))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def initialize(model: nn.Module, layers: int) -> None:
    """Draw the weights of a transformer of `layers` blocks, as :class:`Transformer` says."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            inner = (2 * layers) ** -0.5 if name.endswith((".out", ".down")) else 1.0
            nn.init.normal_(module.weight, std=0.02 * inner)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, L, width] to the same shape. If causal, a position sees no later position."""
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        made: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return made


class VisionTransformer(nn.Module):
    """The blocks of :class:`Transformer` without the causal mask, on square patches.

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


class LSTMLanguageModel(nn.Module):
    """An embedding, `layers` LSTM layers of `width` units, and a linear layer to the logits.

    It maps int64 [n, L], of any L, to logits [n, L, symbols]. Each window starts with a hidden
    state and a cell state of zero. Weights are drawn from torch's global generator, as torch does
    for the three modules. Only the bias of the forget gates differs: it starts at 1, so that cells
    keep their content at first (Jozefowicz et al. 2015).
    """

    def __init__(self, symbols: int, embedding: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, symbols)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_"):
                # A gate has two biases, which are added up: one of 1 and one of 0 make 1. torch
                # orders the gates as input, forget, cell and output.
                forget = parameter.detach()[width : 2 * width]
                nn.init.constant_(forget, 1.0 if name.startswith("bias_ih") else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map symbols to the logits of the symbol that follows each."""
        hidden, _ = self.lstm(self.tokens(x))
        logits: Tensor = self.head(hidden)
        return logits
