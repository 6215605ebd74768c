"""How many there are of a thing, in words."""


def counted(number: int, noun: str, *, none: str = "0") -> str:
    """``1 fault``, ``2 faults``; ``none``: what is said for 0. The noun's plural ends in s."""
    return f"{number or none} {noun}{'' if number == 1 else 's'}"
