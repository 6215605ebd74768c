"""One line for Adam in K-FAC's eigenbasis: the optimizer and its preconditioner together."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.kfac_options import EIGEN_ADAM_BETAS, KFACOptions
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.core.preconditioner import KFAC
from kfac_bench.core.validation import check_is_model

KFAC_DEFAULTS: KFACOptions = {
    "method": EIGEN_ADAM,
    "trust_ratio": None,
    "grafting": False,
    "update_freq": 40,
    "factor_update_freq": 40,
    "factor_decay": 0.8,
    "skip": ["Norm"],
}
"""The options of :class:`KFAC` that :func:`eigen_adam` sets."""


def eigen_adam(
    model: nn.Module,
    lr: float = 1e-3,
    betas: tuple[float, float] = EIGEN_ADAM_BETAS,
    *,
    params: Iterable[Any] | None = None,
    scaler: Any = None,
    kfac: dict[str, Any] | None = None,
    **options: Any,
) -> EigenAdam:
    """Return an optimizer of the whole model: Adam in the eigenbasis of K-FAC's factors.

    It replaces the line that builds AdamW. The training loop stays as it is::

        optimizer = eigen_adam(model, lr=3e-3)

    Args:
        model: The model, bare or wrapped, as for :class:`KFAC`.
        lr: The learning rate.
        betas: Decay of the running means of the gradient and of its square.
        params: Parameter groups; by default all parameters of the model are one group.
        scaler: The GradScaler, if there is one; see :meth:`KFAC.attach`.
        kfac: Options of :class:`KFAC`, for example ``{"strategy": "mem_opt"}``. They override
            :data:`KFAC_DEFAULTS`.
        options: Options of :class:`EigenAdam`.

    Returns:
        The optimizer, whose ``state_dict()`` contains the state of the KFAC. Its attribute
        ``preconditioner`` is the KFAC.

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: As for :class:`KFAC` and :class:`EigenAdam`.
        RuntimeError: As for :class:`KFAC`.
    """
    check_is_model(model, "eigen_adam(model)")
    optimizer = EigenAdam(model.parameters() if params is None else params, lr, betas, **options)
    keywords = {**KFAC_DEFAULTS, **(kfac or {})}
    optimizer.preconditioner = KFAC(model, optimizer, **keywords).attach(scaler)
    return optimizer
