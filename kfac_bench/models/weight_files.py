"""Files of weights, which may come from somebody else: a state dict of tensors and nothing more."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfac_bench import torch_archive
from kfac_bench.data.base.files import regular
from kfac_bench.errors import UsageError, first_line

_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys below which training scripts save the state dict of a model."""


def read(path: Path, option: str = "model.weights") -> Mapping[str, Tensor]:
    """Return the tensors of a file by name, on the CPU.

    Args:
        path: A .safetensors file, or a file of ``torch.save``, which is read with
            ``weights_only=True``. The prefix ``module.`` of DistributedDataParallel is removed.
        option: The option that names the file, for error messages.

    Raises:
        UsageError: The file cannot be read, is damaged, or holds more than tensors.
    """
    try:
        state = _content(path)
        for wrapper in _WRAPPERS:
            if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
                state = state[wrapper]
        if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) for x in state.values()):
            raise ValueError("it holds no state dict")
    except OSError as error:
        raise UsageError(f"{option}={path}: cannot be read ({error.strerror or error})") from None
    except (pickle.UnpicklingError, EOFError) as error:
        raise UsageError(f"{option}={path}: it is damaged, or holds more than tensors") from error
    except Exception as error:  # of torch, or of a class that safetensors does not export
        raise UsageError(
            f"{option}={path}: cannot be read as a file of safetensors or torch.save "
            f"({first_line(error)[:100]})"
        ) from None
    return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(regular(path))
    with regular(path).open("rb") as content:
        torch_archive.check_weights(content)
        return torch.load(content, map_location="cpu", weights_only=True)
