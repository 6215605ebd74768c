"""Reading SQuAD v1.1 (Rajpurkar et al. 2016): questions about paragraphs, answered by quotations.

`<root>/train-v1.1.json` and `<root>/dev-v1.1.json`: {"data": [{"paragraphs": [{"context": ...,
"qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.data.base.files import Unreadable, regular
from kfac_bench.data.language.documents import is_unicode
from kfac_bench.errors import UsageError, first_line

FILES = {"train": "train-v1.1.json", "eval": "dev-v1.1.json"}


@dataclass(frozen=True)
class Answer:
    """A quotation from the context: `context[start : start + len(text)]` is `text`."""

    text: str
    start: int


@dataclass(frozen=True)
class SquadQuestion:
    """One question about a paragraph, with the answers that people gave; at least one."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


class _MalformedError(Exception):
    """The file does not have the layout; the message is the place and the reason."""


def read(path: Path) -> tuple[list[SquadQuestion], list[Unreadable]]:
    """Return the good questions of a file in order, and the faults of the others.

    A question is bad if it has no words, no answer, an empty answer, an answer that is not at its
    offset, or the id of an earlier question.

    Raises:
        UsageError: The file cannot be read, or does not have the layout of SQuAD v1.1.
    """
    try:
        content = json.loads(regular(path).read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        cause = first_line(error)[:100]
        raise UsageError(f"{path}: not a JSON file ({cause})") from None
    questions: dict[str, SquadQuestion] = {}
    faults: list[Unreadable] = []
    try:
        for where, context, entry in _entries(content):
            question = _question(where, context, entry)
            reason = _fault(question, questions)
            if reason:
                faults.append(Unreadable(f"{path}: {where}, id {question.id[:40]!r}", reason))
            else:
                questions[question.id] = question
    except _MalformedError as error:
        raise UsageError(f"{path}: not in the layout of SQuAD v1.1: {error}") from None
    return list(questions.values()), faults


def _entries(content: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, context, entry) of each question of a file."""
    for a, article in enumerate(_field("the file", content, "data", list)):
        paragraphs = _field(f"data[{a}]", article, "paragraphs", list)
        for p, paragraph in enumerate(paragraphs):
            where = f"data[{a}].paragraphs[{p}]"
            context = _field(where, paragraph, "context", str)
            for q, entry in enumerate(_field(where, paragraph, "qas", list)):
                yield f"{where}.qas[{q}]", context, entry


def _question(where: str, context: str, entry: Any) -> SquadQuestion:
    answers = []
    for i, answer in enumerate(_field(where, entry, "answers", list)):
        at = f"{where}.answers[{i}]"
        text, start = _field(at, answer, "text", str), _field(at, answer, "answer_start", int)
        answers.append(Answer(text, start))
    identity, text = (_field(where, entry, key, str) for key in ("id", "question"))
    return SquadQuestion(identity, text, context, tuple(answers))


def _field(where: str, entry: Any, key: str, kind: type) -> Any:
    """Return `entry[key]`, which must be of the type `kind`."""
    if not isinstance(entry, dict) or key not in entry:
        raise _MalformedError(f"{where} has no {key!r}")
    value = entry[key]
    # bool is a subclass of int.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _MalformedError(
            f"{where}: {key!r} is a {type(value).__name__}, not a {kind.__name__}"
        )
    return value


def _fault(question: SquadQuestion, before: dict[str, SquadQuestion]) -> str | None:
    """Return why the question cannot be used; None if it can."""
    context = question.context
    if question.id in before:
        return "an earlier question has this id"
    if not all(map(is_unicode, (question.id, question.text, context))):
        return "its text has half of a character (a lone surrogate)"
    if not question.text.strip():
        return "its text is empty"
    if not question.answers:
        return "it has no answer (v1.1 has only questions that can be answered)"
    for answer in question.answers:
        if not answer.text.strip():
            return "an answer is empty"
        if answer.start < 0 or not context.startswith(answer.text, answer.start):
            return f"the answer {answer.text[:40]!r} is not at its offset {answer.start}"
    return None


def scan(root: Path) -> tuple[dict[str, int], list[Unreadable]]:
    """Return the number of good questions of each split, and all faults."""
    counts: dict[str, int] = {}
    faults: list[Unreadable] = []
    for split, name in FILES.items():
        questions, bad = read(root / name)
        counts[split] = len(questions)
        faults += bad
    return counts, faults
