"""K-FAC in a script with Hugging Face's Accelerate: one call of :func:`attach_kfac`."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from kfac_bench.core import KFAC
from kfac_bench.integrations.framework_state import load_whole_state, options_for, whole_state

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        "kfac_bench.integrations.accelerate needs accelerate: pip install 'accelerate>=1.10'"
    ) from error


def attach_kfac(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, **options: Any
) -> KFAC:
    """Attach K-FAC to a model and an optimizer that ``accelerator.prepare`` returned.

    ``accelerator.save_state`` then saves the state of K-FAC, and ``load_state`` loads it.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        preconditioner = attach_kfac(accelerator, model, optimizer)

    Args:
        accelerator: The Accelerator of the script.
        model: The prepared model.
        optimizer: The prepared optimizer.
        options: Keywords of :class:`~kfac_bench.core.preconditioner.KFAC`.

    Returns:
        The preconditioner. ``optimizer.step()`` calls its ``step``.

    Raises:
        ValueError: Accelerate runs an engine that K-FAC cannot precondition, or the optimizer was
            not prepared. Also as for ``KFAC``.
    """
    check_engine(accelerator.distributed_type)
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__} that Accelerate has not prepared: "
            "call accelerator.prepare(model, optimizer) first"
        )
    keywords = options_for(optimizer.optimizer, options)
    preconditioner = KFAC(model, optimizer.optimizer, **keywords).attach(accelerator.scaler)
    preconditioner.in_optimizer_state = False
    # Accelerate counts the checkpointed objects. So another KFAC takes the place of a detached one.
    for known in accelerator._custom_objects:
        if isinstance(known, _Checkpointed) and known.preconditioner.is_detached:
            known.preconditioner = preconditioner
            break
    else:
        accelerator.register_for_checkpointing(_Checkpointed(preconditioner))
    return preconditioner


def check_engine(distributed_type: DistributedType) -> None:
    """Check that gradients are complete when ``optimizer.step()`` begins.

    Raises:
        ValueError: DeepSpeed or Megatron-LM owns the gradients.
    """
    if distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"Accelerate runs {distributed_type.value}, which keeps the gradients to itself. Train "
            "without it, or call K-FAC in a script of DeepSpeed as examples/deepspeed_training.py"
        )


class _Checkpointed:
    """The state of a preconditioner on all ranks, as Accelerate saves and loads objects."""

    def __init__(self, preconditioner: KFAC) -> None:
        self.preconditioner = preconditioner

    def state_dict(self) -> dict[str, Any]:
        """Return the state; all ranks call it, and the main process saves what it gets."""
        return whole_state(self.preconditioner) or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on the main process."""
        load_whole_state(self.preconditioner, state)
