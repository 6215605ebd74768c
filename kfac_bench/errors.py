"""Exceptions that a user reads as one line, because the program itself is not wrong."""


class UsageError(Exception):
    """An error in the input. Its message is one line: what is wrong and what to do. Exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class OneRankError(UsageError):
    """An error in the input that only one rank has met, so this rank reports it."""


class LostRanksError(Exception):
    """Another rank died, hangs, or cannot be reached. Exit code 1."""


class WorkerLostError(Exception):
    """A process of this rank that reads data died. Exit code 1."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "a process that reads data died (killed, or out of memory). Start the same command "
            f"again; fewer data.workers need less memory. {printable(reason.strip())}".strip()
        )


class RunFailedError(Exception):
    """The reason why a run cannot go on, on all ranks: an infinite loss or a full disk."""


def printable(text: str) -> str:
    """Return `text` on one line, with control characters as escapes.

    Names and contents of files may hold such characters.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
