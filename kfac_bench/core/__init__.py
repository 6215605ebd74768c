"""The K-FAC package, which does not depend on the training harness.

:class:`KFAC` is loaded on first use, because :mod:`.planning` must work without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfac_bench.core.build_eigen_adam import eigen_adam
    from kfac_bench.core.preconditioner import KFAC

__all__ = ["KFAC", "eigen_adam"]


def __getattr__(name: str) -> Any:
    if name == "KFAC":
        from kfac_bench.core.preconditioner import KFAC

        return KFAC
    if name == "eigen_adam":
        from kfac_bench.core.build_eigen_adam import eigen_adam

        return eigen_adam
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
