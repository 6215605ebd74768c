"""Language networks of transformers, built from a local folder with a ``config.json``.

Nothing is downloaded, and no code of the folder runs. The output of a network is made into what the
tasks of :mod:`kfac_bench.tasks` need.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kfac_bench import randomness
from kfac_bench.data.base.files import regular
from kfac_bench.errors import UsageError, one_line, shortage

HEADS = {"language_model": "causal", "pretraining": "masked", "classification": "classifier"}
"""The kind of network that each task needs."""

_AUTO: Mapping[str, Any] = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "classifier": transformers.AutoModelForSequenceClassification,
}
_ENDINGS = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForSequenceClassification": "classifier",
}
"""The kind of network by the end of its class name in ``architectures`` of config.json."""
_OFFLINE = {"local_files_only": True, "trust_remote_code": False}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class TextNetwork(nn.Module):
    """A network of transformers with the inputs and the output of our tasks.

    It reads tokens int64 [n, L], or a mapping with ``input_ids`` and ``attention_mask``, such as
    masked text. A causal network returns logits [n, L, V], a classifier logits [n, classes]. A
    masked one returns the logits [n, P, V] at ``positions`` [n, P], and None in place of
    next-sentence logits.
    """

    def __init__(self, network: nn.Module, kind: str) -> None:
        super().__init__()
        self.network, self.kind = network, kind
        # RoBERTa has the parameter, too, but the published RoBERTa knows a single type.
        is_parameter = "token_type_ids" in inspect.signature(network.forward).parameters
        self._reads_types = is_parameter and getattr(network.config, "type_vocab_size", 2) > 1

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Any:
        """Return the logits."""
        tokens = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
        given: dict[str, Tensor] = {}
        if not isinstance(inputs, Tensor):
            given["attention_mask"] = inputs["attention_mask"].long()
            if self._reads_types:
                given["token_type_ids"] = inputs["token_type_ids"]
        if tokens.is_meta:  # a dry run; transformers looks at values to make a mask of its own
            n, length = tokens.shape
            given["attention_mask"] = tokens.new_ones((n, 1, length, length), dtype=torch.bool)
        logits: Tensor = self.network(tokens, **given).logits
        if isinstance(inputs, Tensor) or self.kind != "masked":
            return logits
        places = inputs["positions"][..., None].expand(-1, -1, logits.shape[-1])
        return logits.gather(1, places), None


def build(
    folder: Path, head: str, shape: tuple[int, ...], num_classes: int, task: str
) -> TextNetwork:
    """Return the network of a folder with random weights, after it has read one example.

    Args:
        folder: The folder with ``config.json``.
        head: Kind of network; ``auto``: the kind that ``architectures`` of config.json names.
        shape: Shape of an example, (tokens,).
        num_classes: Number of tokens in the vocabulary, or of classes.
        task: Name of the task.

    Raises:
        UsageError: The folder has no usable config.json, or its network does not fit the task.
    """
    if len(shape) != 1:
        raise UsageError(
            f"model=huggingface reads text, but an example has the shape {list(shape)}. Choose a "
            "dataset of text, such as data=pydoc, or model=timm for images"
        )
    kind = HEADS[task]
    _check_kind(folder, head, kind, task)
    with _errors(folder, "cannot be built"):
        config = transformers.AutoConfig.from_pretrained(folder, **_OFFLINE)
        _fit(config, kind, num_classes)
        network = _network(kind, config)
        if kind == "causal":
            # Texts have no padding here. The embedding of a padding token would never be trained.
            network.get_input_embeddings().padding_idx = None  # type: ignore[operator]
        # A config.json may ask for half precision; the trainer keeps weights in fp32.
        model = TextNetwork(network.float(), kind)
    with _errors(folder, f"fails on {shape[0]} tokens; try a smaller data.sequence_length"):
        output = _try(model, shape[0])
    if kind == "causal" and _looks_ahead(output):
        raise UsageError(
            f"model.path={folder}: the network is not causal: a token sees the tokens that follow "
            "it. Choose a network such as GPT-2 or Llama"
        )
    return model


def _check_kind(folder: Path, head: str, kind: str, task: str) -> None:
    """Raise :class:`UsageError` if the folder's network is of another kind than the task needs."""
    file = folder / "config.json"
    try:
        content = json.loads(regular(file).read_text(encoding="utf-8"))
        names = [str(name) for name in content.get("architectures") or ()]
    except OSError as error:
        raise UsageError(
            f"model.path={folder}: config.json cannot be read ({error.strerror}). Name a folder "
            "that save_pretrained of transformers wrote"
        ) from None
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise UsageError(f"{file}: not a configuration of transformers") from None
    for key in ("quantization_config", "adapter_config"):
        if key in content or (folder / f"{key}.json").exists():
            raise UsageError(f"model.path={folder}: networks with {key} cannot be trained here")
    named = (k for name in names for end, k in _ENDINGS.items() if name.endswith(end))
    found = next(named, kind) if head == "auto" else head
    if found != kind:
        task_of = next(t for t, k in HEADS.items() if k == found)
        source = f"{file} ({', '.join(names)})" if head == "auto" else f"model.head={head}"
        raise UsageError(
            f"{source}: a {found} network does not fit task={task}, which needs a {kind} one. Set "
            f"task={task_of} with data for this task, or model.head={kind}"
        )


def _fit(config: Any, kind: str, num_classes: int) -> None:
    """Give the configuration the vocabulary or the classes of the dataset."""
    config.use_cache = False
    if kind == "classifier":
        config.num_labels = num_classes
    else:
        config.get_text_config().vocab_size = num_classes
    pad = getattr(config, "pad_token_id", None)
    if kind == "classifier" and pad is None:
        config.pad_token_id = 0  # without padding, transformers classifies single texts only
    elif pad is not None and kind == "masked":
        # Our vocabularies begin with [PAD]. The token with the id of config.json is not padding
        # there, and its embedding would never be trained.
        config.pad_token_id = 0
    elif pad is not None and kind == "causal" and pad >= num_classes:
        config.pad_token_id = None
    if kind == "causal":
        # Without this line a network such as BERT would see the tokens that it has to predict.
        config.is_decoder = True


def _network(kind: str, config: Any) -> nn.Module:
    """Return the network with the fastest attention of torch that it supports."""
    if type(config) not in _AUTO[kind]._model_mapping:
        raise ValueError(f"transformers has no {kind} network of model_type {config.model_type}")
    make = partial(_AUTO[kind].from_config, config, trust_remote_code=False)
    # A config.json may name another attention, whose code would come from elsewhere.
    try:
        network: nn.Module = make(attn_implementation="sdpa")
    except ValueError:
        network = make(attn_implementation="eager")
    return network


def _try(model: TextNetwork, length: int) -> Any:
    """Return the output for two texts that have only the first token in common."""
    ids = torch.zeros(2, length, dtype=torch.int64)
    ids[1, 1:] = 1
    inputs: Tensor | dict[str, Tensor] = ids
    if model.kind == "masked":
        inputs = {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids >= 0}
        inputs["positions"] = ids[:, :1]
    model.eval()
    with torch.no_grad(), randomness.preserve_rng():
        output = model(inputs)
    model.train()
    return output


def _looks_ahead(logits: Tensor) -> bool:
    """Return whether the logits [2, L, V] of equal first tokens differ, unless they are meta."""
    first, other = logits[:, 0]
    return not logits.is_meta and bool((first - other).abs().max() > 1e-4 * first.abs().max())


def has_weights(folder: Path) -> bool:
    """Return whether the folder has weights, as safetensors.

    Raises:
        UsageError: It has weights in another format only.
    """
    if any((folder / name).is_file() for name in _WEIGHTS):
        return True
    if others := sorted(folder.glob("*.bin")):
        raise UsageError(
            f"model.path={folder}: weights are read from model.safetensors, not from "
            f"{others[0].name}. Save the network with save_pretrained of transformers, or remove "
            "the file to train from random weights"
        )
    return False


def load_weights(model: nn.Module, folder: Path) -> list[str]:
    """Copy the weights of the folder, if it has any, into the network.

    Returns:
        A line for the user: what was loaded, and what stays new.

    Raises:
        UsageError: The weights are damaged.
    """
    assert isinstance(model, TextNetwork)
    config: Any = model.network.config
    if not has_weights(folder):
        return [f"{folder}: config.json without weights; the network starts at random weights"]
    with _errors(folder, "its weights cannot be read"):
        loaded, info = _AUTO[model.kind].from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            attn_implementation=config._attn_implementation,
            **_OFFLINE,
        )
    model.network.load_state_dict(loaded.state_dict())
    new = {str(key) for key in info["missing_keys"]}
    new |= {str(key[0]) for key in info["mismatched_keys"]}
    line = f"weights of {folder}: {len(loaded.state_dict()) - len(new)} tensors"
    if new:
        line += f"; new, because the weights have none of this size: {', '.join(sorted(new))}"
    return [line]


@contextlib.contextmanager
def _errors(folder: Path, what: str) -> Iterator[None]:
    """Turn errors of transformers into one line, and keep its log quiet."""
    log: Any = transformers.utils.logging
    level, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    except Exception as error:  # transformers raises exceptions of many classes
        if shortage(error):
            raise
        raise UsageError(f"model.path={folder}: {what} ({one_line(error)[:200]})") from None
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()
