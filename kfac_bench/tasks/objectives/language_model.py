"""Language modelling: the symbol that follows each symbol."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.language import pydoc
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction


class LanguageModel(SummedTask):
    """Cross entropy of logits [n, L, symbols] with the following symbols [n, L], in nats.

    The metric `loss` is the mean over all positions of all windows; lower is better. The training
    loss is the same mean over a batch.
    """

    def __init__(self) -> None:
        self.metric = "loss"
        self.higher_is_better = False
        self.num_totals = 3
        self.likelihood = "categorical"

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy, and the logits."""
        symbols, following = batch
        logits = model(symbols)
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten()), logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [positions, sum of cross entropies, positions guessed right], float64."""
        symbols, following = batch
        logits = model(symbols).flatten(0, 1)
        losses = functional.cross_entropy(logits, following.flatten(), reduction="none").double()
        right = (logits.argmax(1) == following.flatten()).sum().double()
        return torch.stack([torch.full_like(right, following.numel()), losses.sum(), right])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `loss` and `accuracy` over all positions that the totals count."""
        positions, loss, right = totals.tolist()
        return {"loss": loss / positions, "accuracy": right / positions}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return windows with the most likely symbol at each place; the largest losses first."""
        symbols, following = batch
        logits = model(symbols)
        losses = functional.cross_entropy(logits.mT, following, reduction="none").double().mean(1)
        shown = []
        for i in losses.argsort(descending=True, stable=True)[:count].tolist():
            true, guessed = (pydoc.decode(s) for s in (following[i], logits[i].argmax(-1)))
            text = f"true:    {true!r}\nguessed: {guessed!r}"
            shown.append(Prediction(f"loss {losses[i].item():.3g}", text=text))
        return shown
