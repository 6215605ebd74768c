"""Weights to start from, of a run of ours or in transformers' layout; an optimizer starts anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from kfac_bench.config import BertConfig, ModelConfig
from kfac_bench.errors import UsageError
from kfac_bench.training import checkpoint

SAFETENSORS = "model.safetensors"
_MUST_BE_THERE = "bert."
_MAY_BE_NEW = "bert.pooler."
"""Of the encoder: a model that answers questions has none."""


def load(model: nn.Module, config: ModelConfig) -> list[str]:
    """Take over ``model.weights``, if it is set; lines that say what came from where.

    All must be there, in the shapes of this model. Of BERT, all of the encoder: a head that is not
    there stays as it was made, and one that this model lacks is not used. Raises
    :class:`UsageError` otherwise.
    """
    if config.weights is None:
        return []
    path = Path(config.weights)
    said, theirs = _read(path)
    if isinstance(config, BertConfig):
        theirs = _renamed(theirs)
    own = model.state_dict(keep_vars=True)
    common = own.keys() & theirs.keys()
    new = sorted(own.keys() - common)
    what, missing = config.name, new
    if isinstance(config, BertConfig):
        what, missing = "BERT", [n for n in new if _must_be_there(n)]
    if missing:
        raise UsageError(f"model.weights={path}: no weights of {what} ({missing[0]} is not there)")
    for name in sorted(common):
        if own[name].shape != theirs[name].shape:
            raise UsageError(
                f"model.weights={path}: {name} is {list(theirs[name].shape)}, in model="
                f"{config.name} with this data {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name in common:
            own[name].copy_(theirs[name])
    unused = sorted(theirs.keys() - common)
    return [
        f"weights of {said}: {len(common)} tensors"
        + (f"; new: {_names(new)}" if new else "")
        + (f"; not used: {_names(unused)}" if unused else "")
    ]


def _must_be_there(name: str) -> bool:
    return name.startswith(_MUST_BE_THERE) and not name.startswith(_MAY_BE_NEW)


def _names(names: list[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[0] or name for name in names}))


def _read(path: Path) -> tuple[str, Mapping[str, Tensor]]:
    """What it is, and tensors by name."""
    file = path if path.suffix == ".safetensors" else path / SAFETENSORS
    if (
        file.is_file() and not (path / "checkpoints").is_dir()
    ):  # else an export of ours, perhaps old
        return str(file), _safetensors(file)
    saved, bad = checkpoint.find(path)
    if saved is None:
        said = f" ({bad[0]})" if bad else ""
        raise UsageError(
            f"model.weights={path}: no good checkpoint and no {SAFETENSORS} there{said}"
        )
    model = saved.shards[0].get("model")
    if not isinstance(model, Mapping) or not all(isinstance(t, Tensor) for t in model.values()):
        raise UsageError(f"model.weights={path}: {saved.path} holds no model")
    return f"{path}, step {saved.step}", model


def _safetensors(file: Path) -> Mapping[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UsageError(
            f"{file}: reading it needs safetensors: pip install 'kfac-bench[language]'"
        ) from None
    try:
        found: Mapping[str, Tensor] = load_file(file)
    except Exception as error:  # of a damaged file, its reader raises its own
        raise UsageError(f"{file}: cannot be read ({str(error).splitlines()[0][:100]})") from None
    return found


def _renamed(theirs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The first published files call a norm's weight and bias gamma and beta; some lack `bert.`."""
    endings = {".gamma": ".weight", ".beta": ".bias"}
    prefix = "" if any(n.startswith(("bert.", "cls.")) for n in theirs) else "bert."
    renamed = {}
    for name, tensor in theirs.items():
        ending = next((e for e in endings if name.endswith(e)), None)
        new = name if ending is None else name.removesuffix(ending) + endings[ending]
        renamed[prefix + new] = tensor
    return renamed
