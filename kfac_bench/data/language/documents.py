"""Documents of a corpus, one by one: plain text, WikiText's raw files, Wikipedia as extracted."""

from __future__ import annotations

import bz2
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kfac_bench.errors import UsageError

KINDS = ("wikipedia", "wikitext", "text")
SKIPPED = "it has no text"
_HEADING = re.compile(r"^\s*=\s+(?P<title>[^=].*?)\s+=\s*$")
_SECTION = re.compile(r"^\s*=(\s*=)+.*=\s*$")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])")


@dataclass(frozen=True)
class Document:
    """One document; `where` names it, `held_out` says so if its corpus does (None: it does not)."""

    where: str
    text: str
    held_out: bool | None = None


def read(kind: str, source: Path) -> Iterator[Document]:
    """Documents below `source`, a file or a folder, in the order of file names; some may be empty.

    `text`: UTF-8, a blank line between documents. `wikitext`: `wiki.train.*` and `wiki.valid.*`
    (held out), a document from one title to the next. `wikipedia`: what WikiExtractor writes, as
    JSON lines or `<doc ...>` blocks, also compressed (.bz2); a damaged line is a document without
    text.
    Raises UsageError for a missing folder or a file that is no such text.
    """
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if _is_text(p))
    if kind == "wikitext":
        files = [p for p in files if source.is_file() or re.match(r"wiki\.(train|valid)\.", p.name)]
    if not files:
        raise UsageError(f"{source}: no file with text there (prepare {kind})")
    for path in files:
        try:
            with _open(path) as file:
                yield from {"text": _plain, "wikitext": _wikitext, "wikipedia": _wikipedia}[kind](
                    path, file
                )
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None


def _is_text(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _open(path: Path) -> IO[str]:
    if path.suffix == ".bz2":
        return bz2.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _plain(path: Path, file: IO[str]) -> Iterator[Document]:
    lines: list[str] = []
    first, empty = 1, True
    for number, line in enumerate(file, start=1):
        if line.strip():
            first = first if lines else number
            lines.append(line)
            empty = False
        elif lines:
            yield Document(f"{path}:{first}", "".join(lines))
            lines = []
    if lines or empty:
        yield Document(f"{path}:{first}", "".join(lines))


def _wikitext(path: Path, file: IO[str]) -> Iterator[Document]:
    split = re.match(r"wiki\.(train|valid)\.", path.name)
    held_out = split[1] == "valid" if split else None
    where, lines = str(path), list[str]()
    for number, line in enumerate(file, start=1):
        if not _SECTION.match(line) and _HEADING.match(line):
            if "".join(lines).strip() or where != str(path):
                yield Document(where, _undo_wikitext("".join(lines)), held_out)
            where, lines = f"{path}:{number}", []
        elif not _SECTION.match(line):
            lines.append(line)
    yield Document(where, _undo_wikitext("".join(lines)), held_out)


def _undo_wikitext(text: str) -> str:
    """Its own marks of hyphens and separators inside words and numbers."""
    return re.sub(r" @([-.,])@ ", r"\1", text)


def _wikipedia(path: Path, file: IO[str]) -> Iterator[Document]:
    where, lines = "", list[str]()
    for number, line in enumerate(file, start=1):
        here = f"{path}:{number}"
        if line.startswith("<doc "):
            where, lines = here, []
        elif line.startswith("</doc>"):
            yield Document(where or here, "".join(lines[1:]))  # the first line is the title
            where, lines = "", []
        elif where:
            lines.append(line)
        elif line.strip():
            yield Document(here, _text_of_json(line))
    if where:
        yield Document(where, "".join(lines[1:]))


def _text_of_json(line: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    text = found.get("text") if isinstance(found, dict) else None
    return text if isinstance(text, str) and is_unicode(text) else ""


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can say it: JSON may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def sentences(text: str) -> list[str]:
    """The parts of a document: a line, or each sentence of one, without white space around."""
    parts = (s.strip() for line in text.splitlines() for s in _SENTENCE.split(line))
    return [s for s in parts if s]
