"""One class per image."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.batch import Batch
from kfac_bench.tasks.evaluation import SummedTask


class Classification(SummedTask):
    """Cross entropy of logits [n, num_classes] with labels [n], smoothed in training only.

    Metrics: `accuracy`, the fraction in [0, 1] of examples whose largest logit is their label's,
    and `loss`, the mean cross entropy in nats WITHOUT smoothing, comparable between settings.

    The likelihood is the softmax of the logits, smoothed labels or not: the Fisher is that of the
    model's distribution, and smoothing does not change the loss' Hessian in the logits.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.metric = "accuracy"
        self.higher_is_better = True
        self.num_totals = 3
        self.likelihood = "categorical"
        self.label_smoothing = label_smoothing

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the smoothed cross entropy, mean over the examples, in nats; and the logits."""
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return loss, logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, correct ones, sum of cross entropies], float64."""
        images, labels = batch
        logits = model(images).double()
        correct = (logits.argmax(dim=1) == labels).sum()
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([torch.full_like(loss, len(labels)), correct.double(), loss])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `accuracy` and `loss` over all examples that the totals count."""
        examples, correct, loss = totals.tolist()
        return {"accuracy": correct / examples, "loss": loss / examples}
