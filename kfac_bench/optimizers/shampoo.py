"""Shampoo of pytorch_optimizer, whose state can be saved without objects of Python."""

from typing import Any

import torch
from pytorch_optimizer import ScalableShampoo
from torch import Tensor

_OBJECTS = ("pre_conditioner", "graft")


class Shampoo(ScalableShampoo):
    """ScalableShampoo with a state dict of tensors alone.

    The package keeps two objects for each weight. A checkpoint is read with ``weights_only=True``,
    which refuses objects. So the state dict has the tensors of the objects.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state; the tensors of an object are entries such as ``graft.momentum``."""
        found = super().state_dict()
        for number, entry in found["state"].items():
            found["state"][number] = {"momentum": entry["momentum"]} | {
                f"{name}.{key}": value
                for name in _OBJECTS
                for key, value in _tensors_of(entry[name]).items()
            }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for p in group["params"]:
                if not (kept := self.state.pop(p, None)):
                    continue
                grad, p.grad = p.grad, torch.zeros_like(p)  # init_group skips weights without one
                self.init_group({**group, "params": [p]})
                p.grad = grad
                self.state[p]["momentum"] = kept["momentum"]
                for name in _OBJECTS:
                    for key in _tensors_of(self.state[p][name]):
                        setattr(self.state[p][name], key, kept[f"{name}.{key}"])


def _tensors_of(kept: Any) -> dict[str, Any]:
    """Return the attributes of an object that are tensors or lists of tensors."""
    return {
        key: value
        for key, value in vars(kept).items()
        if isinstance(value, Tensor)
        or (isinstance(value, list) and all(isinstance(each, Tensor) for each in value))
    }
