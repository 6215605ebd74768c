"""Weights to start a run from: another run's, or a file in transformers' layout.

The optimizer's state is not taken over. `resume` continues a run with its whole state.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from kfac_bench.config import ModelConfig
from kfac_bench.errors import UsageError, first_line
from kfac_bench.models.bert import BertConfig
from kfac_bench.training import checkpoint

SAFETENSORS = "model.safetensors"
_ENCODER, _POOLER = "bert.", "bert.pooler."


def load(model: nn.Module, config: ModelConfig) -> list[str]:
    """Copy the weights that `model.weights` names into `model`, if the option is set.

    All weights of the model must be there, in the same shapes. BERT needs its encoder only: a head
    that the file lacks keeps its initial weights, and a head that the model lacks is ignored.

    Returns:
        Lines for the user: what was loaded, what stays new, and what was not used.

    Raises:
        UsageError: If a weight is missing or has another shape.
    """
    if config.weights is None:
        return []
    path = Path(config.weights)
    source, theirs = _read(path)
    if isinstance(config, BertConfig):
        theirs = _renamed(theirs)
    own = model.state_dict(keep_vars=True)
    common = own.keys() & theirs.keys()
    new = sorted(own.keys() - common)
    what, missing = config.name, new
    if isinstance(config, BertConfig):
        what, missing = "BERT", [n for n in new if _is_required_of_bert(n)]
    if missing:
        raise UsageError(f"model.weights={path}: no weights of {what} ({missing[0]} is missing)")
    for name in sorted(common):
        if own[name].shape != theirs[name].shape:
            raise UsageError(
                f"model.weights={path}: {name} has shape {list(theirs[name].shape)}, but model="
                f"{config.name} with this data needs {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name in common:
            own[name].copy_(theirs[name])
    line = f"weights of {source}: {len(common)} tensors"
    line += f"; new: {_names(new)}" if new else ""
    unused = theirs.keys() - common
    line += f"; not used: {_names(unused)}" if unused else ""
    return [line]


def _is_required_of_bert(name: str) -> bool:
    # A model that answers questions has no pooler, so a file of such a model lacks the pooler too.
    return name.startswith(_ENCODER) and not name.startswith(_POOLER)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[0] or name for name in names}))


def _read(path: Path) -> tuple[str, Mapping[str, Tensor]]:
    """Return what `path` is, in words, and its tensors by name."""
    file = path if path.suffix == ".safetensors" else path / SAFETENSORS
    # In a run directory the file is an export, which may be older than the checkpoints.
    if file.is_file() and not (path / "checkpoints").is_dir():
        return str(file), _safetensors(file)
    saved, bad = checkpoint.find(path)
    if saved is None:
        reason = f" ({bad[0]})" if bad else ""
        raise UsageError(
            f"model.weights={path}: no good checkpoint and no {SAFETENSORS} there{reason}"
        )
    return f"{path}, step {saved.step}", saved.weights()


def _safetensors(file: Path) -> Mapping[str, Tensor]:
    # Imported here, because most runs start from no weights.
    from safetensors.torch import load_file

    try:
        tensors: Mapping[str, Tensor] = load_file(file)
    except Exception as error:
        # safetensors raises an exception type of its own for a damaged file.
        raise UsageError(f"{file}: cannot be read ({first_line(error)[:100]})") from None
    return tensors


def _renamed(theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors under today's names.

    The first published files call a norm's weight and bias gamma and beta. Some lack the prefix
    `bert.`.
    """
    endings = {".gamma": ".weight", ".beta": ".bias"}
    prefix = "" if any(n.startswith(("bert.", "cls.")) for n in theirs) else "bert."
    renamed = {}
    for name, tensor in theirs.items():
        ending = next((e for e in endings if name.endswith(e)), None)
        new = name if ending is None else name.removesuffix(ending) + endings[ending]
        renamed[prefix + new] = tensor
    return renamed
