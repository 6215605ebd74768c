"""Labels of the model's own distribution, for ``fisher="mc"`` in the Trainer of transformers.

The Trainer calls the model and ``backward`` itself. A forward hook sees the logits in between.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_bench.core import KFAC

IGNORED = -100  # the label of positions that are not in the loss
SAME_POSITION = ("ForMaskedLM", "ForTokenClassification")
WHOLE_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
NEXT_POSITION = ("ForCausalLM",)


def send_labels(model: nn.Module, preconditioner: KFAC) -> RemovableHandle:
    """Call ``fisher_backward`` with the logits of each training forward of ``model``.

    Raises:
        ValueError: The loss of the model is not a cross entropy of its logits.
    """
    loss_type = getattr(model, "loss_type", None)
    if loss_type is None and type(model).__name__.endswith("LMHeadModel"):
        loss_type = "ForCausalLM"  # as GPT2LMHeadModel, whose name transformers does not recognize
    if loss_type not in SAME_POSITION + WHOLE_SAMPLE + NEXT_POSITION:
        raise _unsupported(preconditioner, f"loss_type={loss_type} of {type(model).__name__}")

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        labels, logits = kwargs.get("labels"), output["logits"]
        if labels is None:
            raise _unsupported(preconditioner, "a forward without the keyword labels")
        mask = _mask(preconditioner, loss_type, logits, labels)
        preconditioner.fisher_backward(logits, mask=mask)

    return model.register_forward_hook(hook, with_kwargs=True)


def _mask(preconditioner: KFAC, loss_type: str, logits: Tensor, labels: Tensor) -> Tensor | None:
    """Return which positions of ``logits`` are in the loss; None means all."""
    is_class = labels.shape == logits.shape[:-1] and not labels.is_floating_point()
    if not is_class or logits.shape[-1] == 1 or (logits.ndim < 3 and loss_type not in WHOLE_SAMPLE):
        raise _unsupported(
            preconditioner,
            f"logits of shape {list(logits.shape)} with {labels.dtype} labels of "
            f"shape {list(labels.shape)}",
        )
    if loss_type in WHOLE_SAMPLE:
        return None
    if loss_type in NEXT_POSITION:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return labels != IGNORED


def _unsupported(preconditioner: KFAC, what: str) -> ValueError:
    return ValueError(
        f"fisher={preconditioner.fisher}: the callback finds no cross entropy in {what}. "
        'Use fisher="empirical", or attach KFAC yourself and call fisher_backward in compute_loss'
    )
