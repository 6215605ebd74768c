r"""Lines for the terminal: the one place that prints, and counts, names, sizes and times in words.

Texts hold names and values from files, which may come from somebody else. A control character
there could change the terminal's title, hide lines or answer questions of the shell. Such
characters are shown as escapes, for example ``\x1b``.
"""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from kfac_bench.errors import printable


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print `text`, which may have several lines, to `stream` (standard output) and flush it."""
    stream = stream or sys.stdout
    stream.write("\n".join(shown(line, stream) for line in text.split("\n")) + end)
    stream.flush()


def shown(line: str, stream: TextIO) -> str:
    """Return a line without control characters, in characters that the stream can show."""
    encoding = stream.encoding or "utf-8"
    return printable(line).encode(encoding, "backslashreplace").decode(encoding)


def is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can draw a line again."""
    # An editor's terminal (TERM=dumb) cannot move the cursor.
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def counted(number: int, noun: str, *, none: str = "0", plural: str | None = None) -> str:
    """Return a number with its noun: `1 fault`, `2 faults`.

    Args:
        number: How many there are.
        noun: The noun.
        none: The text for the number 0.
        plural: The plural of the noun, if it is not the noun with an s.
    """
    return f"{number or none} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str]) -> str:
    """Return one or more names in words: `A`, `A and B`, `A, B and C`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def size_text(size_bytes: float, decimals: int = 1) -> str:
    """Return a size with its unit, such as `35.2 MB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= size:
            return f"{size_bytes / size:.{decimals}f} {unit}"
    return f"{size_bytes / 1e3:.{decimals}f} kB"


def duration_text(seconds: float, units: int = 2) -> str:
    """Return a time in its largest units, such as `12.5 s`, `3 min 14 s` or `2 d 0 h`.

    Args:
        seconds: The time.
        units: How many units to show if the time is a minute or more.
    """
    left = round(seconds)
    if left < 60:
        return f"{seconds:.1f} s"
    words: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or words:
            words.append(f"{count} {unit}")
    return " ".join(words[:units])


def time_left(took_s: Sequence[float], left: int) -> str:
    """Return the time that `left` more things need, such as `; about 5 min left`.

    Args:
        took_s: Seconds that each of the finished things took.
        left: How many things remain.

    Returns:
        The text, or nothing if no estimate is possible or nothing is left.
    """
    if not took_s or not left:
        return ""
    return f"; about {duration_text(left * sum(took_s) / len(took_s))} left"
