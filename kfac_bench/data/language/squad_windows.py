"""Questions with windows of their paragraphs, as BERT reads them: `Data` of SQuAD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices
from kfac_bench.data.base.unreadable import Faults, Unreadable
from kfac_bench.data.language import squad, wordpiece
from kfac_bench.data.language.squad import Fault, Question
from kfac_bench.data.language.wordpiece import Vocabulary
from kfac_bench.errors import UsageError

VOCABULARY = "vocab.txt"
NO_CHARACTER = -1
"""The offset of a token that is none of the paragraph."""

Array = np.ndarray[Any, np.dtype[np.int32]]


def load(
    root: Path,
    sequence_length: int = 384,
    workers: int = 0,
    *,
    vocabulary_file: Path | None = None,
    stride: int = 128,
    question_length: int = 64,
    on_error: str = "fatal",
) -> Squad:
    """Open SQuAD v1.1 in `root`; tokens are those of `vocabulary_file`, or of vocab.txt there.

    A paragraph longer than fits beside its question is read in windows that start `stride` tokens
    apart; a question is cut after `question_length` tokens. With `on_error` "fatal" a UsageError
    names the first bad questions, with "skip" they are left out and noted in `faults`. Raises
    UsageError for files of another layout, and if a set has no question.
    """
    if sequence_length < question_length + stride + 3:
        raise UsageError(
            f"data.sequence_length={sequence_length} leaves no room for a question of "
            f"{question_length} tokens and windows {stride} apart: it must be at least "
            f"{question_length + stride + 3}; see data.question_length and data.stride"
        )
    if vocabulary_file is None and not (root / VOCABULARY).exists():
        raise UsageError(f"{root} has no {VOCABULARY}: set data.vocabulary_file to the model's own")
    vocabulary = wordpiece.read(vocabulary_file or root / VOCABULARY)
    cut = _Cut(vocabulary, sequence_length, stride, question_length)
    found: list[Fault] = []
    splits = {}
    for split, name in squad.FILES.items():
        questions, bad = squad.read(root / name)
        splits[split] = cut.windows(name, questions, bad)
        found += bad
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, [Unreadable(*fault) for fault in found])
    for split, windows in splits.items():
        if not windows.where:
            raise UsageError(f"{root / squad.FILES[split]} has no good question")
    return Squad(splits["train"], splits["eval"], vocabulary, sequence_length, workers, faults)


@dataclass(frozen=True)
class _Read:
    """A question in tokens, with its paragraph's.

    `offsets` [tokens, 2] are first and last character + 1 of each token of the paragraph; `span` is
    the first and the last of these tokens that the first answer has a character of.
    """

    question: Question
    asked: Array
    context: Array
    offsets: Array
    span: tuple[int, int]


@dataclass(frozen=True)
class _Window:
    """Tokens `start` to `stop` of the paragraph that the n-th question is about."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Windows:
    """A set of questions, and all their windows."""

    read: list[_Read]
    where: list[_Window]


class _Cut:
    """From questions to tokens and windows."""

    def __init__(self, vocabulary: Vocabulary, length: int, stride: int, most: int) -> None:
        self._tokenizer = wordpiece.tokenizer(vocabulary)
        self._length, self._stride, self._most = length, stride, most

    def windows(self, name: str, questions: Sequence[Question], faults: list[Fault]) -> _Windows:
        """Of all questions but those to which `faults` get a line."""
        contexts = list(dict.fromkeys(q.context for q in questions))
        tokens = dict(zip(contexts, map(_arrays, self._encode(contexts)), strict=True))
        asked = [_arrays(e)[0] for e in self._encode([q.text for q in questions])]
        made = _Windows([], [])
        for question, words in zip(questions, asked, strict=True):
            ids, offsets = tokens[question.context]
            span = _span(question, offsets)
            if span is None:
                faults.append((f"{name}: id {question.id[:40]!r}", "its answer has no token"))
                continue
            words = words[: self._most]
            made.where.extend(
                _Window(len(made.read), start, stop)
                for start, stop in self._stretches(len(ids), self._length - 3 - len(words))
            )
            made.read.append(_Read(question, words, ids, offsets, span))
        return made

    def _encode(self, texts: list[str]) -> Any:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _stretches(self, tokens: int, room: int) -> Iterator[tuple[int, int]]:
        """The last one ends where the paragraph ends."""
        start = 0
        while start + room < tokens:
            yield start, start + room
            start += self._stride
        yield start, tokens


def _arrays(encoded: Any) -> tuple[Array, Array]:
    """Ids [tokens], and first and last character + 1 of each [tokens, 2]."""
    offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
    return np.array(encoded.ids, np.int32), offsets


def _span(question: Question, offsets: Array) -> tuple[int, int] | None:
    """First and last token that share a character with the first answer."""
    answer = question.answers[0]
    end = answer.start + len(answer.text)
    inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > answer.start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


class Squad(Data):
    """The two sets as `Data`; an example is a window, and a question has one or more.

    `shape` is (L,), `num_classes` the size of the vocabulary. A batch is (inputs, spans), followed
    in evaluation by (questions, offsets). `inputs` are int64 `input_ids` [n, L], [CLS] question
    [SEP] window [SEP], int64 `token_type_ids` [n, L] and bool `attention_mask` [n, L]. `spans`
    int64 [n, 2] are the places of the answer's first and last token, 0 and 0 if the window has not
    all of it. `questions` int64 [n] index :attr:`eval_questions`; `offsets` int64 [n, L, 2] are
    characters of its context, :data:`NO_CHARACTER` where a token is none of it.
    """

    def __init__(
        self,
        train: _Windows,
        evaluation: _Windows,
        vocabulary: Vocabulary,
        sequence_length: int,
        workers: int,
        faults: Faults,
    ) -> None:
        self.name = "squad"
        self.shape: tuple[int, ...] = (sequence_length,)
        self.num_classes = len(vocabulary)
        self.train_size, self.eval_size = len(train.where), len(evaluation.where)
        self.eval_questions: Sequence[Question] = [r.question for r in evaluation.read]
        self.faults = faults
        ends = vocabulary.special("[CLS]"), vocabulary.special("[SEP]")
        self._train = _Examples(train, sequence_length, ends, False)
        self._evaluation = _Examples(evaluation, sequence_length, ends, True)
        self._workers = workers

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield windows and where their answers are."""
        return load_batches(self._train, indices, self._workers, self._empty[:2], self.faults)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's batches; a question's windows may be on two ranks."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return load_batches(self._evaluation, indices, self._workers, self._empty, self.faults)

    @property
    def _empty(self) -> Batch:
        ids = torch.empty(0, *self.shape, dtype=torch.int64)
        inputs = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids.bool()}
        pairs = torch.empty(0, 2, dtype=torch.int64)
        return inputs, pairs, pairs[:, 0], ids[..., None].expand(-1, -1, 2)


class _Examples(Dataset[Sample]):
    """Windows as tensors; with `evaluation` followed by their question and offsets."""

    def __init__(
        self, windows: _Windows, length: int, ends: tuple[int, int], evaluation: bool
    ) -> None:
        self.windows, self.length, self.evaluation = windows, length, evaluation
        self.cls, self.sep = ends

    def __getitem__(self, index: int) -> Sample:
        window = self.windows.where[index]
        read = self.windows.read[window.number]
        asked, inside = read.asked, read.context[window.start : window.stop]
        first = len(asked) + 2  # of the paragraph's tokens, after [CLS] and [SEP]
        tokens = first + len(inside) + 1
        ids = torch.zeros(self.length, dtype=torch.int64)
        ids[:tokens] = torch.tensor([self.cls, *asked, self.sep, *inside, self.sep])
        place = torch.arange(self.length)
        inputs = {
            "input_ids": ids,
            "token_type_ids": ((place >= first) & (place < tokens)).long(),
            "attention_mask": place < tokens,
        }
        span = torch.tensor(read.span)
        whole = window.start <= span[0] and span[1] < window.stop
        span = span - window.start + first if whole else torch.zeros_like(span)
        if not self.evaluation:
            return inputs, span
        offsets = torch.full((self.length, 2), NO_CHARACTER)
        of_window = read.offsets[window.start : window.stop]
        offsets[first : first + len(inside)] = torch.from_numpy(of_window.astype(np.int64))
        return inputs, span, window.number, offsets
