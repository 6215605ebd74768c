"""How many there are of a thing, and how long the rest will take, in words."""

from collections.abc import Sequence


def counted(number: int, noun: str, *, none: str = "0") -> str:
    """``1 fault``, ``2 faults``; ``none``: what is said for 0. The noun's plural ends in s."""
    return f"{number or none} {noun}{'' if number == 1 else 's'}"


def time_left(took_s: Sequence[float], left: int) -> str:
    """``; about 5 min left`` for ``left`` more things, by the mean of those that were done."""
    if not took_s or not left:
        return ""
    seconds = left * sum(took_s) / len(took_s)
    return (
        f"; about {seconds / 60:.0f} min left" if seconds > 90 else f"; about {seconds:.0f} s left"
    )
