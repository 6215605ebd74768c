"""Question answering: where in a paragraph the answer to a question is."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.language.squad import SquadQuestion
from kfac_bench.data.language.squad_windows import NO_CHARACTER
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.tasks.answers import exact_match, f1
from kfac_bench.tasks.prediction import Prediction

AnswerSpan = tuple[float, int, int]
"""Score, first character, and last character + 1 of an answer."""


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
        self, questions: Sequence[SquadQuestion] = (), max_answer_tokens: int = 30
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
