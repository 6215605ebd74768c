"""Warnings of the guards: one for each kind of misuse, at the user's own line."""

import sys
import warnings
from pathlib import Path

import torch

INSIDE = (
    str(Path(__file__).parents[2]),
    str(Path(torch.__file__).parent),
    str(Path(warnings.__file__).parent),
)
"""Folders of frames that are not the user's: this package, torch, the standard library."""


class Notices:
    """Gives each kind of warning once.

    Args:
        is_active: Whether this rank warns at all. One rank of many is enough.
    """

    def __init__(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self._given: set[str] = set()

    def give(self, kind: str, text: str) -> None:
        """Warn with ``text``, unless ``kind`` was given before."""
        if not self._is_active or kind in self._given:
            return
        self._given.add(kind)
        warnings.warn(f"K-FAC: {text}", stacklevel=_users_level())


def _users_level() -> int:
    """Return the level of the innermost frame that is the user's, for :func:`warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level
