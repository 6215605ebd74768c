r"""Printing: the one place where lines go to the terminal.

Texts hold names and values from files, which may come from somebody else. A control character
there could change the terminal's title, hide lines or answer questions of the shell. Such
characters are shown as escapes, for example ``\x1b``.
"""

import sys
from typing import TextIO

from kfac_bench.errors import printable


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print `text`, which may have several lines, to `stream` (standard output) and flush it."""
    stream = stream or sys.stdout
    shown = "\n".join(printable(line) for line in text.split("\n"))
    encoding = stream.encoding or "utf-8"
    stream.write(shown.encode(encoding, "backslashreplace").decode(encoding) + end)
    stream.flush()
