"""Reading the documents of a corpus: plain text, WikiText, or Wikipedia from WikiExtractor."""

import bz2
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kfac_bench.data.base.files import Unpacked, files_below
from kfac_bench.errors import UsageError, first_line

KINDS = ("wikipedia", "wikitext", "text")
ENCODING = "utf-8-sig"
"""UTF-8. Programs of Windows put a mark at the beginning of a file, which is no text."""
SKIPPED = "it has no text"
MOST_RATIO = 200
"""Largest ratio of unpacked size to compressed size of a file. Texts unpack to 3 to 10 times."""
MOST_BYTES = 64 * 2**20
"""Bytes that a small compressed file may unpack to, whatever the ratio."""
_HEADING = re.compile(r"^\s*=\s+(?P<title>[^=].*?)\s+=\s*$")
_SECTION = re.compile(r"^\s*=(\s*=)+.*=\s*$")
_FULL_STOP = re.compile(r"[。！？｡]+[\"'”’」』）】》]*")
"""The end of a sentence in a script that has no spaces."""
_SENTENCE = re.compile(
    r"(?:(?<=[.!?…؟۔।॥։።။។\u037e])|(?<=[\u0370-\u03ff\u1f00-\u1fff];))\s+"
    r"(?=(?:[—–]\s+)?[\"'(\[«„“‘¿¡]?([^\W_]))"
)
"""Space between two sentences, if the letter or digit behind it is no small letter.

A Greek question mark often is a semicolon."""


@dataclass(frozen=True)
class Document:
    """One document of a corpus."""

    where: str
    """The place of the document in the corpus, for messages."""
    text: str
    held_out: bool | None = None
    """True if the corpus holds the document out for evaluation; None if the corpus does not say."""
    fault: str = SKIPPED
    """The reason why there is no text, if there is none."""


def read(kind: str, source: Path) -> Iterator[Document]:
    """Yield the documents in `source`, in the order of file names. Documents may be empty.

    Args:
        kind: Format of the files. `text`: UTF-8, with a blank line between documents. `wikitext`:
            `wiki.train.*` and `wiki.valid.*` (held out), with a document from one title to the
            next. `wikipedia`: the output of WikiExtractor, JSON lines or `<doc ...>` blocks, also
            compressed (.bz2). A damaged JSON line becomes a document without text.
        source: A file, or a folder with files.

    Raises:
        UsageError: There is no such file, a file cannot be read as text, or a folder cannot be
            listed.
    """
    files = [source] if source.is_file() else _files_in(source)
    if kind == "wikitext":
        files = [p for p in files if source.is_file() or re.match(r"wiki\.(train|valid)\.", p.name)]
    if not files:
        raise UsageError(f"{source} has no files of {kind}")
    for path in files:
        try:
            with _open(path) as file:
                yield from {"text": _plain, "wikitext": _wikitext, "wikipedia": _wikipedia}[kind](
                    path, file
                )
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read ({first_line(error)})") from None


def _files_in(source: Path) -> list[Path]:
    if not source.is_dir():
        return []
    return sorted(path for path in map(Path, files_below(source)) if _is_text(path))


def _is_text(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".")


def _open(path: Path) -> IO[str]:
    if path.suffix == ".bz2":
        most = max(MOST_BYTES, MOST_RATIO * path.stat().st_size)
        packed = bz2.open(path)  # noqa: SIM115 - closed with the text
        plain = Unpacked(packed, most, f"{MOST_RATIO} times its size")
        return io.TextIOWrapper(io.BufferedReader(plain), encoding=ENCODING)
    return path.open(encoding=ENCODING)


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
    """Remove WikiText's marks around hyphens and separators inside words and numbers."""
    return re.sub(r" @([-.,])@ ", r"\1", text)


def _wikipedia(path: Path, file: IO[str]) -> Iterator[Document]:
    where, lines = "", list[str]()
    for number, line in enumerate(file, start=1):
        here = f"{path}:{number}"
        if line.startswith("<doc "):
            where, lines = here, []
        elif line.startswith("</doc>"):
            # The first line is the title.
            yield Document(where or here, "".join(lines[1:]))
            where, lines = "", []
        elif where:
            lines.append(line)
        elif line.strip():
            yield _of_json(here, line)
    if where:
        yield Document(where, "".join(lines[1:]))


def _of_json(where: str, line: str) -> Document:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return Document(where, "", fault="it is neither JSON nor in a <doc ...> block")
    if not isinstance(content, dict):
        return Document(where, "", fault=f"it is a {type(content).__name__}, not an object")
    if "text" not in content:
        keys = ", ".join(content)[:60] or "none"
        return Document(where, "", fault=f"it has no key 'text', its keys are: {keys!r}")
    text = content["text"]
    if not isinstance(text, str):
        return Document(where, "", fault=f"its text is a {type(text).__name__}")
    if not is_unicode(text):
        return Document(where, "", fault="its text has half of a character (a lone surrogate)")
    return Document(where, text)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode the text. JSON may contain halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, without surrounding white space. A line also ends one."""
    found = list[str]()
    for line in _FULL_STOP.sub(r"\g<0>\n", text).splitlines():
        gaps = [gap for gap in _SENTENCE.finditer(line) if not gap[1].islower()]
        starts = [0, *(gap.end() for gap in gaps)]
        ends = [*(gap.start() for gap in gaps), len(line)]
        found += [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return [sentence for sentence in found if sentence]
