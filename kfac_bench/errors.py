"""Exceptions that a user reads as one line: the program itself is not wrong."""


class UsageError(Exception):
    """Bad input. The message is one line: what is wrong and what to do; exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class OneRankError(UsageError):
    """Bad input that one rank alone has met: it says so itself, whichever it is."""


class LostRanksError(Exception):
    """Another rank died, hangs, or cannot be reached; exit code 1."""


class RunFailedError(Exception):
    """The run cannot go on, on any rank, and why: a loss that is no number, a disk that is full."""


def printable(text: str) -> str:
    """On one line, whatever a file's name or content is: control characters as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
