"""The shared K-FAC package: ``from kfac_bench.core import KFAC``.

``plan`` and ``estimate`` need no torch, so the names below are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfac_bench.core.preconditioner import KFAC as KFAC

__all__ = ["KFAC"]


def __getattr__(name: str) -> Any:
    if name == "KFAC":
        from kfac_bench.core.preconditioner import KFAC

        return KFAC
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
