"""BERT's pre-training: predict masked tokens, and whether the second part follows the first."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.language.masked_text import IGNORED
from kfac_bench.tasks.evaluation import SummedTask
from kfac_bench.tasks.prediction import Prediction


class Pretraining(SummedTask):
    """Cross entropy of masked tokens, logits [n, P, V], plus that of next-sentence logits [n, 2].

    The training loss is the MEAN over examples. The loss of an example is the mean over its masked
    tokens plus its next-sentence cross entropy. So ranks and parts of a batch add up to the whole
    batch, whatever their numbers of masked tokens, and K-FAC gets the mean that it needs. (BERT's
    reference takes one mean over all masked tokens of a part, so the weight of a token depends on
    how the batch is cut up. Both agree if all examples have equally many masked tokens, as full
    sequences have.)

    Metrics: `masked_lm_loss`, the mean cross entropy in nats over all masked TOKENS of the
    evaluation set, lower is better; `masked_lm_accuracy` and `next_sentence_accuracy`, fractions in
    [0, 1]; and `loss`, the training loss. All metrics are exact sums on any number of ranks.

    The loss belongs to two likelihoods at once, so `kfac.fisher` can only be empirical.
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.metric = "masked_lm_loss"
        self.higher_is_better = False
        self.num_totals = 6
        self.likelihood = "categorical"
        self.tokens = tokens

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, mean over the examples, in nats; and the logits of masked tokens."""
        inputs, labels, random = batch
        logits, next_logits = model(inputs)
        per_token = _cross_entropies(logits, labels)
        per_example = per_token.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)
        next_loss = functional.cross_entropy(next_logits, random)
        return per_example.mean() + next_loss, logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return float64 sums, in the order of :meth:`metrics`."""
        inputs, labels, random = batch
        logits, next_logits = model(inputs)
        per_token = _cross_entropies(logits.double(), labels)
        masked = labels != IGNORED
        right = ((logits.argmax(-1) == labels) & masked).sum()
        next_loss = functional.cross_entropy(next_logits.double(), random, reduction="none")
        losses = per_token.sum(1) / masked.sum(1).clamp_min(1) + next_loss
        sums = (masked.sum(), per_token.sum(), right, (next_logits.argmax(-1) == random).sum())
        return torch.stack(
            [losses.new_tensor(len(labels)), *(x.double() for x in sums), losses.sum()]
        )

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics over all examples that the totals count."""
        examples, masked, masked_loss, right, told, loss = totals.tolist()
        return {
            "masked_lm_loss": masked_loss / max(masked, 1),
            "masked_lm_accuracy": right / max(masked, 1),
            "next_sentence_accuracy": told / examples,
            "loss": loss / examples,
        }

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return texts as the model read them, with true and predicted words; the worst first."""
        inputs, labels, random = batch
        logits, next_logits = model(inputs)
        masked = labels != IGNORED
        losses = _cross_entropies(logits.double(), labels).sum(1) / masked.sum(1).clamp_min(1)
        shown = []
        for i in losses.argsort(descending=True, stable=True)[:count].tolist():
            ids = inputs["input_ids"][i, inputs["attention_mask"][i]].tolist()
            guesses = logits[i].argmax(-1)[masked[i]].tolist()
            places = inputs["positions"][i, masked[i]].tolist()
            pairs = zip(places, guesses, labels[i, masked[i]].tolist(), strict=True)
            lines = [
                f"{at}: {self._word(guess)}, true: {self._word(true)}" for at, guess, true in pairs
            ]
            told = "follows" if next_logits[i].argmax() == 0 else "does not follow"
            right = "right" if next_logits[i].argmax() == random[i] else "wrong"
            caption = f"masked-token loss {losses[i].item():.2f}; the second part {told}: {right}"
            text = "\n".join([" ".join(map(self._word, ids)), *lines])
            shown.append(Prediction(caption, text=text))
        return shown

    def _word(self, token: int) -> str:
        return self.tokens[token] if token < len(self.tokens) else str(token)


def _cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy at each place [n, P], 0 where nothing is masked, in >= float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = functional.cross_entropy(
        logits.to(dtype).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(labels)
