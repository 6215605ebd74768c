"""Weights alone: a run starts from them, and `kfac-bench export` writes them.

A run starts from the weights of another run, or of a file in transformers' layout. An export is one
safetensors file, which holds data and no code. `resume` continues a run with its whole state.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kfac_bench.config import ModelConfig
from kfac_bench.errors import UsageError, first_line
from kfac_bench.models import weight_files
from kfac_bench.models.library_options import ArchitectureConfig, HuggingFaceConfig
from kfac_bench.models.options import BertConfig
from kfac_bench.record.events import RunStarted, read
from kfac_bench.training import checkpoint
from kfac_bench.training.checkpoint import Checkpoint
from kfac_bench.whole_files import whole_file

SAFETENSORS = "model.safetensors"
_ENCODER, _POOLER = "bert.", "bert.pooler."


def load(model: nn.Module, config: ModelConfig) -> list[str]:
    """Copy the weights that `model.weights` names into `model`, if the option is set.

    All weights of the model must be there, in the same shapes. BERT needs its encoder only: a head
    that the file lacks keeps its initial weights, and a head that the model lacks is ignored. The
    head of an architecture of a library also stays new if the file has another number of classes.
    A network of transformers is read from its own folder, if that has weights.

    Returns:
        Lines for the user: what was loaded, what stays new, and what was not used.

    Raises:
        UsageError: If a weight is missing or has another shape.
    """
    if config.weights is None:
        return _own_weights(model, config)
    path = Path(config.weights)
    source, theirs = _read(path)
    if isinstance(config, BertConfig):
        theirs = _renamed(theirs)
    own = model.state_dict(keep_vars=True)
    common = own.keys() & theirs.keys()
    heads = _other_heads(own, theirs) if isinstance(config, ArchitectureConfig) else set()
    new = sorted(own.keys() - common)
    common -= heads
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
    line += f"; new, for another number of classes: {_names(heads)}" if heads else ""
    unused = theirs.keys() - own.keys()
    line += f"; not used: {_names(unused)}" if unused else ""
    return [line]


def _own_weights(model: nn.Module, config: ModelConfig) -> list[str]:
    """Copy the weights that belong to the folder of a network of transformers."""
    if not isinstance(config, HuggingFaceConfig):
        return []
    from kfac_bench.models import huggingface

    return huggingface.load_weights(model, Path(str(config.path)))


def _other_heads(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> set[str]:
    """Return the names of at most two layers whose number of outputs alone differs.

    A distilled transformer has two heads.
    """
    other = {
        name
        for name in own.keys() & theirs.keys()
        if own[name].shape != theirs[name].shape and own[name].shape[1:] == theirs[name].shape[1:]
    }
    return other if len({name.rpartition(".")[0] for name in other}) <= 2 else set()


def _is_required_of_bert(name: str) -> bool:
    # A model that answers questions has no pooler, so a file of such a model lacks the pooler too.
    return name.startswith(_ENCODER) and not name.startswith(_POOLER)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[0] or name for name in names}))


def _read(path: Path) -> tuple[str, Mapping[str, Tensor]]:
    """Return the source in words, and its tensors by name."""
    file = path if path.is_file() else path / SAFETENSORS
    # In a run directory the file is an export, which may be older than the checkpoints.
    if file.is_file() and not (path / "checkpoints").is_dir():
        return str(file), weight_files.read(file)
    saved, bad = checkpoint.find(path)
    if saved is None:
        reason = f" ({bad[0]})" if bad else ""
        raise UsageError(
            f"model.weights={path}: no good checkpoint and no {SAFETENSORS} there{reason}"
        )
    return f"{path}, step {saved.step}", saved.weights()


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


def export(run: Path, out: Path | None = None, *, best: bool = False) -> list[str]:
    """Write the weights of a run's newest good checkpoint to a safetensors file.

    Parameters and buffers keep the model's names. The file's metadata are strings: `format`, `step`
    and `checkpoint`; for a run directory also `run_id` and `config` (JSON).

    Args:
        run: A run directory, its `checkpoints` folder, or one checkpoint.
        out: The file to write. The default is RUN/model.safetensors.
        best: Take the best kept checkpoint, not the newest.

    Returns:
        Lines for the user: damaged checkpoints that were passed over, and what the file holds.

    Raises:
        UsageError: If a good checkpoint is missing, or the file cannot be written.
    """
    saved, bad = checkpoint.find_best(run) if best else checkpoint.find(run)
    if saved is None:
        what = "checkpoint of evaluated weights" if best else "checkpoint"
        raise UsageError("; ".join([f"{run} has no good {what}", *bad]))
    path = out or (run if run.is_dir() else Path()) / SAFETENSORS
    # The format knows no tied weights, so each tensor gets memory of its own.
    weights = {
        name: t.clone(memory_format=torch.contiguous_format) for name, t in saved.weights().items()
    }
    _write(weights, {"format": "pt", **_about(run, saved)}, path)
    numel = sum(t.numel() for t in weights.values())
    summary = f"{path}: {len(weights)} tensors with {numel:,} numbers, from step {saved.step}"
    return [*(f"passed over: {line}" for line in bad), summary]


def _about(run: Path, saved: Checkpoint) -> dict[str, str]:
    about = {"step": str(saved.step), "checkpoint": saved.path.name}
    try:
        events = read(run)
    except UsageError:
        # A single checkpoint has no event file.
        return about
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is not None:
        about |= {"run_id": str(started.run_id), "config": json.dumps(started.config)}
    return about


def _write(weights: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> None:
    if not path.name:
        raise UsageError(f"{path}: cannot be written (it is a folder). Name a file with --out")
    try:
        with whole_file(path) as temporary:
            save_file(dict(weights), temporary, metadata=dict(metadata))
    except Exception as error:
        # safetensors raises an exception type of its own, for example for a full disk.
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{path}: cannot be written ({reason})") from None
