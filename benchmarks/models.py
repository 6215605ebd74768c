"""The workloads to measure: models with one fixed batch and a loss, drawn from one seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.errors import UsageError
from kfac_bench.models.image_networks import cifar_resnet
from kfac_bench.models.options import TorchvisionResNetConfig


@dataclass(frozen=True)
class Workload:
    """A model in training mode, and the loss of its one batch."""

    name: str
    shape: str
    model: nn.Module
    loss: Callable[[], Tensor]
    skip: tuple[str, ...] = ()
    """Layers that K-FAC leaves to the optimizer."""


@dataclass(frozen=True)
class Size:
    """Examples per step and tokens per example. 0 means the model's usual size."""

    batch: int = 0
    tokens: int = 0
    quick: bool = False
    """Use a tiny model of the same kind, to run the code without measuring anything."""


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward network with residuals and separate q, k, v and o."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, tokens, width] to the same shape."""
        x = x + self._attend(self.norm1(x))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out


class Encoder(nn.Module):
    """A transformer encoder that maps tokens [n, tokens] to logits [n, tokens, vocabulary]."""

    def __init__(self, layers: int, width: int, hidden: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.layers = nn.Sequential(*(EncoderLayer(width, 4, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens to logits."""
        out: Tensor = self.head(self.norm(self.layers(self.embedding(tokens) + self.position)))
        return out


def _images(
    model: nn.Module, name: str, batch: int, side: int, classes: int, device: str
) -> Workload:
    x = torch.randn(batch, 3, side, side).to(device)
    y = torch.randint(classes, (batch,)).to(device)
    model = model.to(device).train()
    # channels_last is fast on a GPU, and the baseline must be fast.
    if device == "cuda":
        x = x.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    shape = f"batch {batch}, 3x{side}x{side}"
    return Workload(name, shape, model, lambda: functional.cross_entropy(model(x), y))


def _resnet32(size: Size, device: str) -> Workload:
    model = cifar_resnet(8 if size.quick else 32)
    batch, side = (4, 8) if size.quick else (128, 32)
    return _images(model, "resnet32", size.batch or batch, side, 10, device)


def _resnet50(size: Size, device: str) -> Workload:
    if not size.quick:
        model = TorchvisionResNetConfig("resnet50").build((3, 224, 224), 1000, "")
        return _images(model, "resnet50", size.batch or 8, 224, 1000, device)
    from torchvision.models.resnet import Bottleneck, ResNet

    small = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=8)
    small.layer2 = small.layer3 = small.layer4 = nn.Sequential()
    small.fc = nn.Linear(256, 10)
    return _images(small, "resnet50", min(size.batch, 4) or 4, 32, 10, device)


def _digits_resnet50(size: Size, device: str) -> Workload:
    """Make what `kfac-train model=resnet50` trains without data."""
    if size.quick:
        return replace(_resnet50(size, device), name="digits_resnet50")
    model = TorchvisionResNetConfig("resnet50").build((1, 8, 8), 10, "").to(device).train()
    batch = size.batch or 128
    x, y = torch.randn(batch, 1, 8, 8).to(device), torch.randint(10, (batch,)).to(device)
    return Workload(
        "digits_resnet50",
        f"batch {batch}, 1x8x8",
        model,
        lambda: functional.cross_entropy(model(x), y),
    )


def _encoder(size: Size, device: str) -> Workload:
    batch, tokens, vocabulary = size.batch or 32, size.tokens or 64, 512
    layers, width, hidden = 4, 256, 1024
    if size.quick:
        batch, tokens, vocabulary, layers, width, hidden = 2, 8, 32, 1, 16, 32
    model = Encoder(layers, width, hidden, vocabulary, tokens).to(device).train()
    x, y = (torch.randint(vocabulary, (batch, tokens)).to(device) for _ in range(2))
    return Workload(
        "encoder",
        f"batch {batch}, {tokens} tokens",
        model,
        lambda: functional.cross_entropy(model(x).flatten(0, 1), y.flatten()),
        ("^embedding$", "^head$"),
    )


def _bert_base(size: Size, device: str) -> Workload:
    # The import takes seconds, which other models need not wait for.
    from transformers import BertConfig, BertForMaskedLM

    batch, tokens = size.batch or 4, size.tokens or 128
    config = BertConfig()
    if size.quick:
        batch, tokens = 2, 8
        config = BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16,
        )  # fmt: skip
    model: nn.Module = BertForMaskedLM(config)
    model = model.to(device).train()
    labels = torch.randint(config.vocab_size, (batch, tokens))
    masked = torch.rand(batch, tokens) < 0.15
    # A batch without a masked token would have no loss.
    masked[:, 0] = True
    x = labels.masked_fill(masked, 3).to(device)
    labels = labels.masked_fill(~masked, -100).to(device)
    return Workload(
        "bert_base",
        f"batch {batch}, {tokens} tokens",
        model,
        lambda: model(input_ids=x, labels=labels).loss,
        ("embeddings", r"^cls\."),
    )


def _maskrcnn(size: Size, device: str) -> Workload:
    """Make random images of 800 x 1216 with seven objects each. K-FAC sees the heads only."""
    from kfac_bench.models.maskrcnn import maskrcnn_resnet50_fpn, maskrcnn_tiny

    batch, height, width = size.batch or 1, 800, 1216
    if size.quick:
        batch, height, width = 2, 64, 64
    make = maskrcnn_tiny if size.quick else maskrcnn_resnet50_fpn
    model: nn.Module = make(91, height, width).to(device).train()
    images = [torch.rand(3, height, width).to(device) for _ in range(batch)]
    targets = []
    for _ in images:
        corners = torch.rand(7, 2) * torch.tensor([width, height]) * 0.6
        boxes = torch.cat([corners, corners + 0.2 * height], 1)
        masks = torch.zeros(7, height, width, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        target = {"boxes": boxes, "labels": torch.randint(1, 91, (7,)), "masks": masks}
        targets.append({k: v.to(device) for k, v in target.items()})
    return Workload(
        "maskrcnn",
        f"batch {batch}, 3x{height}x{width}",
        model,
        lambda: torch.stack(list(model(images, targets).values())).sum(),
        ("^backbone", "^rpn", "Norm"),
    )


_MAKERS: dict[str, Callable[[Size, str], Workload]] = {
    "resnet32": _resnet32,
    "encoder": _encoder,
    "resnet50": _resnet50,
    "bert_base": _bert_base,
    "maskrcnn": _maskrcnn,
    "digits_resnet50": _digits_resnet50,
}
NAMES = tuple(_MAKERS)


def build(name: str, size: Size, device: str = "cpu") -> Workload:
    """Build a workload. The same arguments give the same weights and the same batch.

    Raises:
        UsageError: If the name is unknown or the model's package is missing.
    """
    if name not in _MAKERS:
        raise UsageError(f"unknown model {name!r}: choose from {', '.join(NAMES)}")
    torch.manual_seed(0)
    try:
        return _MAKERS[name](size, device)
    except ModuleNotFoundError as error:
        raise UsageError(f"{name} needs {error.name}: pip install {error.name}") from error
