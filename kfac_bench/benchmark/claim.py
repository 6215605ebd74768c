"""A claim of a paper as data: which numbers of a table test the claim, and their limits."""

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class Check:
    """A number that must stay on one side of a limit. The limit is set before any run."""

    quantity: str = MISSING
    at: dict[str, str] = field(default_factory=dict)
    """The point, by axis and value."""
    at_most: float | None = None
    at_least: float | None = None


@dataclass
class Claim:
    """A sentence that is supported if all checks hold."""

    text: str = MISSING
    checks: list[Check] = field(default_factory=list)
    not_testable: str = ""
    """Why this table cannot test the claim; empty: it can."""
