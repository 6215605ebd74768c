"""SQuAD v1.1 (Rajpurkar et al. 2016): questions whose answers are stretches of a paragraph.

`<root>/train-v1.1.json` and `<root>/dev-v1.1.json`: {"data": [{"paragraphs": [{"context": ...,
"qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfac_bench.counted import counted
from kfac_bench.data.language.documents import is_unicode
from kfac_bench.errors import UsageError

FILES = {"train": "train-v1.1.json", "eval": "dev-v1.1.json"}
LAYOUT = " and ".join(FILES.values())

Fault = tuple[str, str]
"""Where, and what is wrong."""


@dataclass(frozen=True)
class Answer:
    """A stretch of the context: `context[start : start + len(text)]` is `text`."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """One question; `answers` are those that people gave, at least one."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


class _MalformedError(Exception):
    """Where the layout ends, and why."""


def read(path: Path) -> tuple[list[Question], list[Fault]]:
    """The good questions of a file in order, and (where, fault) of the others.

    A question is bad if it has no answer, one that is empty or not where its offset says, no words,
    or the id of an earlier one. Raises UsageError, naming the place, where the file is not of the
    layout at all.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        said = str(error).splitlines()[0][:100]
        raise UsageError(f"{path}: not a JSON file ({said})") from None
    questions: dict[str, Question] = {}
    faults: list[Fault] = []
    try:
        for where, context, entry in _entries(found):
            question = _question(where, context, entry)
            if reason := _fault(question, questions):
                faults.append((f"{path.name}: {where}, id {question.id[:40]!r}", reason))
            else:
                questions[question.id] = question
    except _MalformedError as error:
        raise UsageError(f"{path}: not of SQuAD v1.1's layout: {error}") from None
    return list(questions.values()), faults


def _entries(found: Any) -> Iterator[tuple[str, str, Any]]:
    """(where, context, entry of a question) throughout a file."""
    for a, article in enumerate(_field("the file", found, "data", list)):
        paragraphs = _field(f"data[{a}]", article, "paragraphs", list)
        for p, paragraph in enumerate(paragraphs):
            where = f"data[{a}].paragraphs[{p}]"
            context = _field(where, paragraph, "context", str)
            for q, entry in enumerate(_field(where, paragraph, "qas", list)):
                yield f"{where}.qas[{q}]", context, entry


def _question(where: str, context: str, entry: Any) -> Question:
    answers = []
    for i, answer in enumerate(_field(where, entry, "answers", list)):
        at = f"{where}.answers[{i}]"
        text, start = _field(at, answer, "text", str), _field(at, answer, "answer_start", int)
        answers.append(Answer(text, start))
    identity, text = (_field(where, entry, key, str) for key in ("id", "question"))
    return Question(identity, text, context, tuple(answers))


def _field(where: str, found: Any, key: str, kind: type) -> Any:
    """`found[key]`, which must be of that kind."""
    if not isinstance(found, dict) or key not in found:
        raise _MalformedError(f"{where} has no {key!r}")
    value = found[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _MalformedError(
            f"{where}: {key!r} is a {type(value).__name__}, not a {kind.__name__}"
        )
    return value


def _fault(question: Question, before: dict[str, Question]) -> str | None:
    context = question.context
    if question.id in before:
        return "an earlier question has this id"
    if not all(map(is_unicode, (question.id, question.text, context))):
        return "half of a character in its text"
    if not question.text.strip():
        return "it asks nothing"
    if not question.answers:
        return "it has no answer (v1.1 has only questions that can be answered)"
    for answer in question.answers:
        if not answer.text.strip():
            return "an answer is empty"
        if answer.start < 0 or not context.startswith(answer.text, answer.start):
            return f"the answer {answer.text[:40]!r} is not at its offset {answer.start}"
    return None


def scan(root: Path) -> tuple[str, list[tuple[Path, str]]]:
    """What there is, and (file, fault) of bad questions; for ``kfac-data verify``."""
    counts, bad = [], list[tuple[Path, str]]()
    for split, name in FILES.items():
        questions, faults = read(root / name)
        counts.append(f"{counted(len(questions), 'question')} in {split}")
        bad += [(root / name, f"{where.partition(': ')[2]}: {reason}") for where, reason in faults]
    return f"squad: {', '.join(counts)}", bad
