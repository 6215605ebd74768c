"""Distributed K-FAC for PyTorch, with a training harness and a benchmark suite.

``from kfac_bench import KFAC`` gives the preconditioner. ``eigen_adam`` and ``muon`` build
optimizers of a whole model. ``Problem`` describes your own problem for ``kfac-train problem=FILE``.
``train`` trains as ``kfac-train`` does and returns the validation metric. All are loaded on first
use, so that ``import kfac_bench`` stays fast and needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfac_bench.core import KFAC, eigen_adam
    from kfac_bench.optimizers.muon import muon
    from kfac_bench.problem import Problem
    from kfac_bench.training.run import train_words as train

__version__ = "0.1.0"

__all__ = ["KFAC", "Problem", "__version__", "eigen_adam", "muon", "train"]


def __getattr__(name: str) -> Any:
    if name == "KFAC":
        from kfac_bench.core import KFAC

        return KFAC
    if name == "eigen_adam":
        from kfac_bench.core import eigen_adam

        return eigen_adam
    if name == "muon":
        from kfac_bench.optimizers.muon import muon

        return muon
    if name == "Problem":
        from kfac_bench.problem import Problem

        return Problem
    if name == "train":
        from kfac_bench.errors import missing_package

        try:
            from kfac_bench.training.run import train_words
        except ModuleNotFoundError as error:
            raise missing_package(error) or error from None

        return train_words
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
