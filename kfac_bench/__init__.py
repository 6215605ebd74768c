"""Distributed K-FAC for PyTorch, with a training harness and a benchmark suite.

``from kfac_bench import KFAC`` gives the preconditioner. It is loaded on first use, so that
``import kfac_bench`` stays fast and needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfac_bench.core import KFAC, eigen_adam

__version__ = "0.1.0"

__all__ = ["KFAC", "__version__", "eigen_adam"]


def __getattr__(name: str) -> Any:
    if name == "KFAC":
        from kfac_bench.core import KFAC

        return KFAC
    if name == "eigen_adam":
        from kfac_bench.core import eigen_adam

        return eigen_adam
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
