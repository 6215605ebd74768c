"""The one exception that means "the input is wrong", not "the program is wrong"."""


class UsageError(Exception):
    """Bad input. The message is one line: what is wrong and what to do; exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
