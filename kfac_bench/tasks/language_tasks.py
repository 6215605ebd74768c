"""Tasks on text: language modelling, BERT's pre-training, and question answering."""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.language import pydoc
from kfac_bench.data.language.masked_text import IGNORED
from kfac_bench.data.language.squad import SquadQuestion
from kfac_bench.data.language.squad_windows import NO_CHARACTER
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.tasks.task import Prediction, SummedTask


class LanguageModel(SummedTask):
    """Cross entropy of logits [n, L, symbols] with the following symbols [n, L], in nats.

    The metric `loss` is the mean over all positions of all windows; lower is better. The training
    loss is the same mean over a batch. With `tokens`, a symbol is a token of this WordPiece
    vocabulary, else a character of `pydoc`.
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.tokens = tokens
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
            true, guessed = (self._text(s) for s in (following[i], logits[i].argmax(-1)))
            text = f"true:    {true!r}\nguessed: {guessed!r}"
            shown.append(Prediction(f"loss {losses[i].item():.3g}", text=text))
        return shown

    def _text(self, symbols: Tensor) -> str:
        if not self.tokens:
            return pydoc.decode(symbols)
        return " ".join(self.tokens[symbol] for symbol in symbols.tolist()).replace(" ##", "")


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
    [0, 1]; and `loss`, the training loss. All metrics are exact sums on any number of ranks. A
    model that gives None in place of next-sentence logits has neither that loss nor that metric.

    The loss belongs to two likelihoods at once, so `kfac.fisher` can only be empirical.
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.metric = "masked_lm_loss"
        self.higher_is_better = False
        self.num_totals = 7
        self.likelihood = "categorical"
        self.tokens = tokens

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, mean over the examples, in nats; and the logits of masked tokens."""
        inputs, labels, random = batch
        logits, next_logits = model(inputs)
        per_token = _cross_entropies(logits, labels)
        per_example = per_token.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)
        loss = per_example.mean()
        if next_logits is not None:
            loss = loss + functional.cross_entropy(next_logits, random)
        return loss, logits

    @torch.no_grad()
    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return float64 sums, in the order of :meth:`metrics`."""
        inputs, labels, random = batch
        logits, next_logits = model(inputs)
        per_token = _cross_entropies(logits.double(), labels)
        masked = labels != IGNORED
        right = ((logits.argmax(-1) == labels) & masked).sum()
        losses = per_token.sum(1) / masked.sum(1).clamp_min(1)
        told, asked = losses.new_zeros(()), losses.new_zeros(())
        if next_logits is not None:
            next_loss = functional.cross_entropy(next_logits.double(), random, reduction="none")
            losses = losses + next_loss
            told, asked = (next_logits.argmax(-1) == random).sum(), asked + len(labels)
        sums = (masked.sum(), per_token.sum(), right, told, losses.sum(), asked)
        return torch.stack([losses.new_tensor(len(labels)), *(x.double() for x in sums)])

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return the metrics over all examples that the totals count."""
        examples, masked, masked_loss, right, told, loss, asked = totals.tolist()
        metrics = {
            "masked_lm_loss": masked_loss / max(masked, 1),
            "masked_lm_accuracy": right / max(masked, 1),
            "next_sentence_accuracy": told / max(asked, 1),
            "loss": loss / examples,
        }
        if not asked:
            del metrics["next_sentence_accuracy"]
        return metrics

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
            caption = f"masked-token loss {losses[i].item():.2f}"
            if next_logits is not None:
                told = "follows" if next_logits[i].argmax() == 0 else "does not follow"
                right = "right" if next_logits[i].argmax() == random[i] else "wrong"
                caption += f"; the second part {told}: {right}"
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


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and a, an, the."""
    plain = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_match(answer: str, truth: str) -> float:
    """Return 1 if both have the same :func:`words` in the same order, else 0."""
    return float(words(answer) == words(truth))


def f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the words, repeated words included."""
    ours, theirs = Counter(words(answer)), Counter(words(truth))
    same = (ours & theirs).total()
    return 2 * same / (ours.total() + theirs.total()) if same else 0.0


AnswerSpan = tuple[float, int, int]
"""Score, first character, and last character + 1 of an answer."""
MOST_ANSWER_TOKENS = 30
"""Tokens of the longest answer that is considered."""


class QuestionAnswering:
    """Cross entropy of logits [n, 2, L] for the tokens where an answer begins and ends.

    The training loss is the mean of the two cross entropies, and the mean over the examples
    (windows of paragraphs).

    The metrics are `f1` and `exact_match` over all questions of the evaluation set, in PERCENT as
    SQuAD's own script prints them. A question without a predicted answer counts 0. The predicted
    answer is the span of at most `max_answer_tokens` tokens with the highest sum of both logits,
    over all windows of the paragraph. All spans are compared; a search of n-best lists, as in the
    reference, approximates this.
    """

    def __init__(
        self, questions: Sequence[SquadQuestion] = (), max_answer_tokens: int = MOST_ANSWER_TOKENS
    ) -> None:
        self.metric = "f1"
        self.higher_is_better = True
        self.likelihood = "categorical"
        self.questions = questions
        self.max_answer_tokens = max_answer_tokens

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross entropy (nats), mean over examples and both ends; and the logits."""
        inputs, spans = batch[:2]
        logits = model(inputs)
        return functional.cross_entropy(logits.flatten(0, 1), spans.flatten()), logits

    def evaluation(self) -> "Answers":
        """Start a pass that keeps the best answer to each question."""
        return Answers(self.questions, self.max_answer_tokens)

    @torch.no_grad()
    def show(self, model: nn.Module, batch: Batch, count: int) -> list[Prediction]:
        """Return questions with true answers and the best of these windows; the worst first."""
        found = Answers(self.questions, self.max_answer_tokens)
        found.add(model, batch)
        scored = []
        for number, answer in found.texts().items():
            question = self.questions[number]
            truths = list(dict.fromkeys(a.text for a in question.answers))
            score = max(f1(answer, truth) for truth in truths)
            text = f"{question.text}\ntrue: {' | '.join(truths)}\npredicted: {answer}"
            scored.append(
                (score, Prediction(f"F1 {100 * score:.0f}", text=f"{text}\n{question.context}"))
            )
        return [prediction for _, prediction in sorted(scored, key=lambda pair: pair[0])[:count]]


class Answers:
    """A pass over the evaluation set: the best answer so far to each question, by its number."""

    def __init__(self, questions: Sequence[SquadQuestion], max_answer_tokens: int) -> None:
        self.best: dict[int, AnswerSpan] = {}
        self._questions, self._most = questions, max_answer_tokens

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Find answers in windows of this rank."""
        inputs, _, numbers, offsets = batch
        scores, first, last = best_spans(model(inputs), offsets[..., 0] != NO_CHARACTER, self._most)
        rows = torch.arange(len(numbers), device=offsets.device)
        begins, ends = offsets[rows, first, 0], offsets[rows, last, 1]
        found = (x.tolist() for x in (numbers, scores, begins, ends))
        for number, *answer in zip(*found, strict=True):
            self._keep(number, tuple(answer))

    def _keep(self, number: int, answer: AnswerSpan) -> None:
        """Keep the better answer; of equal scores the earlier one, in any order of windows."""
        old = self.best.get(number)
        if answer[0] > float("-inf") and (old is None or _rank(answer) > _rank(old)):
            self.best[number] = answer

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return `f1` and `exact_match` over all questions; all ranks call it."""
        for content in ranks.gather(json.dumps(list(self.best.items())).encode()):
            for number, answer in json.loads(content):
                self._keep(number, tuple(answer))
        scores = {"f1": f1, "exact_match": exact_match}
        totals = dict.fromkeys(scores, 0.0)
        for number, text in self.texts().items():
            truths = [answer.text for answer in self._questions[number].answers]
            for name, score in scores.items():
                totals[name] += max(score(text, truth) for truth in truths)
        return {name: 100 * total / len(self._questions) for name, total in totals.items()}

    def texts(self) -> dict[int, str]:
        """Return the texts of the answers, by the number of the question."""
        return {
            number: self._questions[number].context[begin:end]
            for number, (_, begin, end) in sorted(self.best.items())
        }


def _rank(answer: AnswerSpan) -> tuple[float, int, int]:
    return answer[0], -answer[1], -answer[2]


def best_spans(logits: Tensor, inside: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score [n] of the best span, and its first and last token [n].

    Args:
        logits: Logits [n, 2, L] of the first and the last token.
        inside: bool [n, L]: the tokens that are allowed. A window without any scores -inf.
        most: Tokens of the longest span.
    """
    begins, ends = logits.float().masked_fill(~inside[:, None], float("-inf")).unbind(1)
    # The end logits are padded, so that spans from the last tokens have `most` ends to choose from.
    after = functional.pad(ends, (0, most - 1), value=float("-inf"))
    # [n, L, most]: the score of each span, by its first token and its length.
    scores = begins[..., None] + after.unfold(1, most, 1)
    best, where = scores.flatten(1).max(1)
    first = where // most
    return best, first, (first + where % most).clamp_max(logits.shape[-1] - 1)
