"""Classification: one class for each image."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, Looks
from kfac_bench.tasks import pictures
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction


class Classification(SummedTask):
    """Cross entropy of logits [n, num_classes] with labels [n], smoothed in training only.

    The metrics are `accuracy`, the fraction in [0, 1] of examples whose label has the largest
    logit, and `loss`, the mean cross entropy in nats WITHOUT smoothing, so that settings can be
    compared.

    The likelihood is the softmax of the logits, with smoothed labels too: the Fisher belongs to the
    distribution of the model, and smoothing does not change the Hessian of the loss in the logits.
    """

    def __init__(self, label_smoothing: float = 0.0, looks: Looks = UNKNOWN) -> None:
        self.metric = "accuracy"
        self.higher_is_better = True
        self.num_totals = 3
        self.likelihood = "categorical"
        self.label_smoothing = label_smoothing
        self.looks = looks

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the smoothed cross entropy, mean over the examples, in nats; and the logits."""
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return loss, logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return [examples, correct examples, sum of cross entropies], float64."""
        images, labels = batch
        logits = model(images).double()
        correct = (logits.argmax(dim=1) == labels).sum()
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return torch.stack([torch.full_like(loss, len(labels)), correct.double(), loss])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return `accuracy` and `loss` over all examples that the totals count."""
        examples, correct, loss = totals.tolist()
        return {"accuracy": correct / examples, "loss": loss / examples}

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return images with their true class, the predicted class, and its probability.

        Wrong predictions come first. Among the wrong ones, and among the right ones, the images
        whose true class is least likely come first.
        """
        images, labels = batch
        probabilities = model(images).double().softmax(dim=1)
        likeliest, predicted = probabilities.max(dim=1)
        true = probabilities.gather(1, labels[:, None])[:, 0]
        worst = (true + (predicted == labels)).argsort(stable=True)[:count]
        return [
            Prediction(
                self._caption(int(labels[i]), int(predicted[i]), likeliest[i].item()),
                pictures.fit(pictures.to_rgb(images[i], self.looks)),
            )
            for i in worst.tolist()
        ]

    def _caption(self, label: int, predicted: int, probability: float) -> str:
        names = dict(enumerate(self.looks.classes))
        true, said = (names.get(c, str(c)) for c in (label, predicted))
        if label == predicted:
            return f"right: {said} ({probability:.2f})"
        return f"wrong: {said} ({probability:.2f}), true: {true}"
