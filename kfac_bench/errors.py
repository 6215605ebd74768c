"""The one exception that means "the input is wrong", not "the program is wrong"."""


class UsageError(Exception):
    """Bad input. The message is one line: what is wrong and what to do; exit code 2."""
