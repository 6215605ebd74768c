"""Counts, names, sizes and remaining time in words."""

from collections.abc import Sequence


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


def size_text(size_bytes: float) -> str:
    """Return a size with its unit, such as `35.2 MB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes / 1e3:.1f} kB"


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
    seconds = left * sum(took_s) / len(took_s)
    return (
        f"; about {seconds / 60:.0f} min left" if seconds > 90 else f"; about {seconds:.0f} s left"
    )
