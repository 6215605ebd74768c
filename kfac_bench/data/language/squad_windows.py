"""The dataset SQuAD: questions with windows of their paragraphs, as BERT reads them.

A paragraph that does not fit beside its question is cut into overlapping windows. Each window is an
example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.files import Faults, Unreadable, summary
from kfac_bench.data.base.loader import Sample, load_batches
from kfac_bench.data.base.order import Shard, eval_indices
from kfac_bench.data.language import squad, wordpiece
from kfac_bench.data.language.squad import SquadQuestion
from kfac_bench.data.language.wordpiece import Vocabulary
from kfac_bench.errors import UsageError

VOCABULARY = "vocab.txt"
NO_CHARACTER = -1
"""The offset of a token that does not belong to the paragraph."""


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
    """Open SQuAD v1.1 in `root`.

    Args:
        root: Folder of the dataset.
        sequence_length: Tokens of an example.
        workers: Processes per rank that build examples ahead.
        vocabulary_file: The vocabulary of the model; by default vocab.txt in `root`.
        stride: Tokens from the start of one window of a paragraph to the start of the next.
        question_length: Tokens after which a question is cut.
        on_error: What happens to bad questions. "fatal": UsageError. "skip": they are left out and
            listed in `faults`.

    Raises:
        UsageError: A file is missing or has another layout, a split has no good question, or the
            lengths do not fit together.
    """
    if sequence_length < question_length + stride + 3:
        raise UsageError(
            f"data.sequence_length={sequence_length} leaves no room for a question of "
            f"{question_length} tokens and windows {stride} apart. It must be at least "
            f"data.question_length + data.stride + 3 = {question_length + stride + 3}"
        )
    if vocabulary_file is None and not (root / VOCABULARY).exists():
        raise UsageError(
            f"{root} has no {VOCABULARY}. Set data.vocabulary_file to the model's file"
        )
    vocabulary = wordpiece.read(vocabulary_file or root / VOCABULARY)
    cut = _Cut(vocabulary, sequence_length, stride, question_length)
    unreadable: list[Unreadable] = []
    splits = {}
    for split, name in squad.FILES.items():
        questions, bad = squad.read(root / name)
        splits[split] = cut.windows(root / name, questions, bad)
        unreadable += bad
    faults = Faults(skip=on_error == "skip")
    faults.add_all(root, unreadable)
    for split, windows in splits.items():
        if not windows.windows:
            path = root / squad.FILES[split]
            bad = [fault for fault in unreadable if fault.path.startswith(f"{path}:")]
            why = summary(bad) if bad else "its lists are empty"
            raise UsageError(f"{path} has no good question: {why}")
    return Squad(splits["train"], splits["eval"], vocabulary, sequence_length, workers, faults)


@dataclass(frozen=True)
class _TokenizedQuestion:
    """A question and its paragraph as tokens."""

    question: SquadQuestion
    asked: NDArray[np.int32]
    """Token ids of the question."""
    context: NDArray[np.int32]
    """Token ids of the paragraph."""
    offsets: NDArray[np.int32]
    """[tokens, 2]: first character, and last character + 1, of each token of the paragraph."""
    span: tuple[int, int]
    """First and last token of the paragraph that share a character with the first answer."""


@dataclass(frozen=True)
class _Window:
    """Tokens `start` to `stop` (excluded) of the paragraph of question `number`."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Windows:
    """The questions of a split, and all their windows."""

    questions: list[_TokenizedQuestion]
    windows: list[_Window]


class _Cut:
    """Turns questions into tokens and windows."""

    def __init__(
        self, vocabulary: Vocabulary, length: int, stride: int, question_length: int
    ) -> None:
        self._tokenizer = wordpiece.tokenizer(vocabulary)
        self._length, self._stride, self._question_length = length, stride, question_length

    def windows(
        self, file: Path, questions: Sequence[SquadQuestion], faults: list[Unreadable]
    ) -> _Windows:
        """Return the windows of all questions. Add questions that cannot be used to `faults`."""
        # Several questions share a paragraph, which is tokenized once.
        contexts = list(dict.fromkeys(q.context for q in questions))
        tokens = dict(zip(contexts, map(_arrays, self._encode(contexts)), strict=True))
        asked = [_arrays(e)[0] for e in self._encode([q.text for q in questions])]
        made = _Windows([], [])
        for question, words in zip(questions, asked, strict=True):
            ids, offsets = tokens[question.context]
            span = _span(question, offsets)
            if span is None:
                path = f"{file}: id {question.id[:40]!r}"
                faults.append(Unreadable(path, "its answer has no token"))
                continue
            words = words[: self._question_length]
            # [CLS] and two [SEP] need three places.
            made.windows.extend(
                _Window(len(made.questions), start, stop)
                for start, stop in self._ranges(len(ids), self._length - 3 - len(words))
            )
            made.questions.append(_TokenizedQuestion(question, words, ids, offsets, span))
        return made

    def _encode(self, texts: list[str]) -> Any:
        return self._tokenizer.encode_batch(texts, add_special_tokens=False)

    def _ranges(self, tokens: int, room: int) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each window; the last window ends where the paragraph ends."""
        start = 0
        while start + room < tokens:
            yield start, start + room
            start += self._stride
        yield start, tokens


def _arrays(encoded: Any) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return token ids [tokens] and offsets [tokens, 2] of one encoded text."""
    offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
    return np.array(encoded.ids, np.int32), offsets


def _span(question: SquadQuestion, offsets: NDArray[np.int32]) -> tuple[int, int] | None:
    """Return the first and last token that share a character with the first answer."""
    answer = question.answers[0]
    end = answer.start + len(answer.text)
    inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > answer.start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


class Squad(Data):
    """The dataset. An example is a window; a question has one or more windows.

    `shape` is (L,), `num_classes` the size of the vocabulary. A training batch is (inputs, spans),
    an evaluation batch (inputs, spans, questions, offsets):

    * `inputs`: int64 `input_ids` [n, L], which are [CLS] question [SEP] window [SEP], int64
      `token_type_ids` [n, L] and bool `attention_mask` [n, L].
    * `spans`: int64 [n, 2], the places of the first and last token of the answer; 0 and 0 if the
      window does not contain the whole answer.
    * `questions`: int64 [n], indices into `eval_questions`.
    * `offsets`: int64 [n, L, 2], first character and last character + 1 of each token in its
      paragraph; NO_CHARACTER for other tokens.
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
        self.train_size, self.eval_size = len(train.windows), len(evaluation.windows)
        self.eval_questions: Sequence[SquadQuestion] = [q.question for q in evaluation.questions]
        self.faults = faults
        ends = vocabulary.special("[CLS]"), vocabulary.special("[SEP]")
        self._train = _WindowSamples(train, sequence_length, ends, False)
        self._evaluation = _WindowSamples(evaluation, sequence_length, ends, True)
        self._workers = workers

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield (inputs, spans)."""
        return load_batches(self._train, indices, self._workers, self._empty[:2], self.faults)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's batches. The windows of a question may be on two ranks."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return load_batches(self._evaluation, indices, self._workers, self._empty, self.faults)

    def fingerprint_parts(self, split: str) -> Iterator[bytes]:
        """Yield the windows, and questions and contexts as tokens; see `Data.fingerprint_parts`."""
        source = (self._train if split == "train" else self._evaluation).windows
        for window in source.windows:
            yield f"{window.number} {window.start} {window.stop}\n".encode()
        for question in source.questions:
            yield repr((question.span, question.question.answers)).encode()
            yield question.asked.tobytes()
            yield question.context.tobytes()

    @property
    def _empty(self) -> Batch:
        ids = torch.empty(0, *self.shape, dtype=torch.int64)
        inputs = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids.bool()}
        pairs = torch.empty(0, 2, dtype=torch.int64)
        return inputs, pairs, pairs[:, 0], ids[..., None].expand(-1, -1, 2)


class _WindowSamples(Dataset[Sample]):
    """Samples (inputs, span), in evaluation (inputs, span, question, offsets)."""

    def __init__(
        self, windows: _Windows, length: int, ends: tuple[int, int], evaluation: bool
    ) -> None:
        self.windows, self.length, self.evaluation = windows, length, evaluation
        self.cls, self.sep = ends

    def __getitem__(self, index: int) -> Sample:
        window = self.windows.windows[index]
        question = self.windows.questions[window.number]
        asked, inside = question.asked, question.context[window.start : window.stop]
        # The paragraph's tokens follow [CLS], the question and [SEP].
        first = len(asked) + 2
        tokens = first + len(inside) + 1
        ids = torch.zeros(self.length, dtype=torch.int64)
        ids[:tokens] = torch.tensor([self.cls, *asked, self.sep, *inside, self.sep])
        place = torch.arange(self.length)
        inputs = {
            "input_ids": ids,
            "token_type_ids": ((place >= first) & (place < tokens)).long(),
            "attention_mask": place < tokens,
        }
        span = torch.tensor(question.span)
        is_whole = window.start <= span[0] and span[1] < window.stop
        span = span - window.start + first if is_whole else torch.zeros_like(span)
        if not self.evaluation:
            return inputs, span
        offsets = torch.full((self.length, 2), NO_CHARACTER)
        of_window = question.offsets[window.start : window.stop]
        offsets[first : first + len(inside)] = torch.from_numpy(of_window.astype(np.int64))
        return inputs, span, window.number, offsets
