"""A small decoder-only transformer in plain modules: Linear, Embedding and LayerNorm."""

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
