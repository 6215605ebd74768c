"""The state of a run: shards of checkpoints, the hash of the weights, and agreement of ranks.

:func:`check_same_model` compares ranks by sums over the bits of the weights. Some things may
differ, so they are not compared: parts of parameters that no other rank holds (FSDP2), buffers
(between evaluations, batch norm has statistics of a rank's own examples), and the state of the
optimizer.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from kfac_bench.core import KFAC
from kfac_bench.core.distributed.dtensor import full, is_sharded, local
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError, first_line
from kfac_bench.training.checkpoint import Checkpoint

_NO_SETTINGS = {"params", "step"}
"""Keys of a parameter group that are no settings. Apex's optimizers count their steps there."""
_SINCE_TORCH_2_7 = {"decoupled_weight_decay"}
"""A key that Adam sets itself if the state of an older torch lacks it."""
_LIKE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
"""Keys of an optimizer's state whose tensors have the shape of the parameter."""
_SAME_NUMEL = {"momentum", "square"}
"""Keys whose tensors may have another shape than the parameter, but have as many elements."""
CHUNK = 1 << 16
"""Elements that are summed at a time; they stay in the cache of a CPU."""
BITS = {1: torch.uint8, 2: torch.int16}
"""Integer dtypes by the bytes of an element. Larger elements count as pieces of 32 bits."""
ODD = 0x1F3D_5B79_9B77_3D25
"""A multiplier that is 5 modulo 8: the powers of such numbers have the longest period."""


class State:
    """Model, average, optimizer, K-FAC, loss scale, random numbers. All ranks call every method."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        kfac: KFAC | None,
        scaler: GradScaler,
        backend: Backend,
        average: AveragedModel | None = None,
    ) -> None:
        self._model, self._optimizer, self._kfac = model, optimizer, kfac
        self._average = average
        self._scaler, self._backend, self._ranks = scaler, backend, backend.ranks
        if kfac is not None:
            kfac.in_optimizer_state = False  # each rank saves a shard

    def is_finite(self) -> bool:
        """Return whether all weights are finite, on all ranks."""
        parameters = self._backend.bare(self._model).parameters()
        finite = all(torch.isfinite(local(p).sum()) for p in parameters)
        return not self._ranks.any(not finite)

    def shard(self, train_s: float, owes_evaluation: bool) -> dict[str, Any]:
        """Return this rank's part of a checkpoint.

        :meth:`load` gives both arguments back to the trainer.
        """
        cuda = self._ranks.device.type == "cuda"
        shard: dict[str, Any] = {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if cuda else None,
            "kfac": None if self._kfac is None else self._kfac.state_dict(shard=True),
            **self._backend.state(self._model, self._optimizer),
        }
        if self._ranks.is_main:
            shard["scaler"] = self._scaler.state_dict()
            shard["train_s"], shard["owes_evaluation"] = train_s, owes_evaluation
            if self._average is not None:
                state = self._average.module.state_dict()
                shard["ema"] = {"model": state, "updates": int(self._average.n_averaged)}
        return shard

    def load(self, saved: Checkpoint) -> tuple[float, bool]:
        """Load a checkpoint, which any number of ranks may have written.

        Returns:
            The two arguments of :meth:`shard`.

        Raises:
            ValueError: The checkpoint does not fit.
        """
        try:
            return self._load(saved)
        except RuntimeError as error:  # torch raises it for tensors of another kind
            raise ValueError(f"{saved.path}: no state of a run ({first_line(error)})") from None

    def _load(self, saved: Checkpoint) -> tuple[float, bool]:
        main = saved.shards[0]
        train_s = _check_number(f"{saved.path}: the training time", main["train_s"])
        states = [s["kfac"] for s in saved.shards if s["kfac"] is not None]
        if self._kfac is not None and states:
            self._kfac.load_state_dict(*states)
        self._check_model(main["model"], saved.path)
        self._check_optimizer(main["optimizer"], saved.path)
        self._load_average(main, saved.path)
        settings = [
            {k: v for k, v in g.items() if k not in _NO_SETTINGS}
            for g in self._optimizer.param_groups
        ]
        try:
            self._backend.load(self._model, self._optimizer, saved.shards)
        except RuntimeError as error:
            raise ValueError(f"{saved.path}: another model ({first_line(error)})") from None
        for group, before in zip(self._optimizer.param_groups, settings, strict=True):
            # Momenta come from the checkpoint, settings from the configuration.
            group.update(before)
        if main.get("scaler") and self._scaler.is_enabled():
            _check_number(f"{saved.path}: the loss scale", main["scaler"]["scale"])
            self._scaler.load_state_dict(main["scaler"])
        if self._ranks.rank < len(saved.shards):
            own = saved.shards[self._ranks.rank]
            torch.set_rng_state(own["rng"])
            if own["cuda_rng"] is not None and self._ranks.device.type == "cuda":
                torch.cuda.set_rng_state(own["cuda_rng"])
        return train_s, bool(main.get("owes_evaluation"))

    def _load_average(self, main: dict[str, Any], path: Path) -> None:
        """Load the average of the weights; one begins with the weights of a run that had none."""
        if self._average is None:
            return
        kept = main.get("ema") or {"model": main["model"], "updates": 0}
        self._check_model(kept["model"], path)
        updates = _check_number(f"{path}: the updates of the average", kept["updates"])
        self._average.module.load_state_dict(kept["model"])
        self._average.n_averaged.fill_(int(updates))

    def _check_model(self, state: dict[str, Any], path: Path) -> None:
        own = self._backend.bare(self._model).state_dict()
        names = sorted(own.keys() ^ state.keys())
        if names:
            raise ValueError(f"{path}: another model ({names[0]} is only in one of the two)")
        for name, tensor in own.items():
            theirs = state[name]
            if theirs.shape != tensor.shape:
                shapes = f"{list(theirs.shape)}, expected {list(tensor.shape)}"
                raise ValueError(f"{path}: another model ({name} has the shape {shapes})")
            # torch would convert a tensor of another type without a word.
            if theirs.is_floating_point() != tensor.is_floating_point():
                types = f"{theirs.dtype}, expected {tensor.dtype}"
                raise ValueError(f"{path}: {name} has the type {types}")

    def _check_optimizer(self, state: dict[str, Any], path: Path) -> None:
        optional = _NO_SETTINGS | _SINCE_TORCH_2_7
        theirs = [set(g) - optional for g in state["param_groups"]]
        if [set(g) - optional for g in self._optimizer.param_groups] != theirs:
            raise ValueError(f"{path}: another optimizer")
        for group in state["param_groups"]:
            _check_number(f"{path}: the optimizer's step", group.get("step", 0))
        parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        for number, entries in state["state"].items():
            if not isinstance(number, int) or not 0 <= number < len(parameters):
                raise ValueError(f"{path}: the optimizer's state of an unknown parameter {number}")
            for key, value in entries.items():
                try:
                    _check_entry(key, value, parameters[number])
                except ValueError as error:
                    what = f"the optimizer's {key} of parameter {number}"
                    raise ValueError(f"{path}: {what} {error}") from None


def _check_entry(key: str, value: Any, parameter: Tensor) -> None:
    """Raise ``ValueError`` if an entry of an optimizer's state does not fit its parameter."""
    if value is None:  # the momentum of SGD without momentum
        return
    if key == "step":
        _check_number("", value)
        return
    expected = list(parameter.shape)
    if key in _LIKE_PARAMETER | _SAME_NUMEL:
        if not isinstance(value, Tensor):
            raise ValueError(f"is no tensor ({type(value).__name__})")
        fits = (
            list(value.shape) == expected
            if key in _LIKE_PARAMETER
            else value.numel() == parameter.numel()
        )
        if not fits:
            raise ValueError(f"has the shape {list(value.shape)}, expected {expected}")
    if isinstance(value, Tensor) and not value.is_floating_point():
        raise ValueError(f"has the type {value.dtype}, expected floating-point numbers")


def _check_number(what: str, value: Any) -> float:
    """Return a finite number that is not negative; otherwise raise ``ValueError``."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float) and 0 <= value < 1e300
    if not is_number:
        shown = list(value.shape) if isinstance(value, Tensor) else str(value)[:50]
        raise ValueError(f"{what} is {shown}, expected a finite number from 0 on".strip())
    return float(value)


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers with their names. All ranks call this."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        whole: Any = full(tensor.detach()).cpu().contiguous()
        digest.update(whole.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_same_model(model: nn.Module, kfac: KFAC | None, ranks: Ranks, step: int) -> None:
    """Check that all ranks hold the same model after ``step``. All ranks call this.

    Raises:
        RunFailedError: The model of a rank differs.
    """
    if (line := model_difference(model, kfac, ranks)) is not None:
        raise RunFailedError(
            f"after step {step} {line}: start the run again to continue from its last checkpoint; "
            "on machines of different kinds set trainer.check_ranks=false"
        )


def model_difference(model: nn.Module, kfac: KFAC | None, ranks: Ranks) -> str | None:
    """Return a line that names the ranks that differ from rank 0, or None if all agree.

    All ranks call this with the bare model. It reads each parameter once and sends one message of 8
    bytes per rank. Only if ranks differ, a second message says where.
    """
    if ranks.world_size == 1:
        return None
    mine = model_fingerprint(model, kfac)
    others = ranks.unlike_main(json.dumps(mine))
    if not others:
        return None
    each: list[dict[str, object]] = [json.loads(m) for m in ranks.gather(json.dumps(mine).encode())]
    first, lines = each[0], []
    for rank in others:
        unlike = [name for name in first if each[rank].get(name) != first[name]]
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        lines.append(f"rank {rank} has another {unlike[0] if unlike else 'set of names'}{more}")
    return f"ranks do not agree: {', '.join(lines)} than rank 0"


def model_fingerprint(model: nn.Module, kfac: KFAC | None) -> dict[str, object]:
    """Return K-FAC's fingerprint, and a checksum of each whole parameter, by name."""
    sums: dict[str, object] = {}
    if kfac is not None:
        sums |= kfac.fingerprint()
    whole = {name: p for name, p in model.named_parameters() if not _is_part(p)}
    if whole:
        with torch.no_grad():
            values = torch.stack([checksum(p) for p in whole.values()]).tolist()
        sums |= dict(zip(whole, values, strict=True))
    return sums


def checksum(x: Tensor) -> Tensor:
    """Return a checksum of the bits of ``x`` as int64 [], without a wait for the device.

    It is s = sum_i w_i b_i mod 2^64, where b_i are the bits of element i as an integer, and w_i are
    odd random numbers. A single element with other bits always changes s. Sums of integers do not
    depend on their order. If several elements differ, s is equal with a probability of 2^-32 at
    most (when all differences are signs).
    """
    bits = x.detach().contiguous().reshape(-1)
    bits = bits.view(BITS.get(bits.element_size(), torch.int32))
    weights = _weights(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    # Horner's scheme: each part has another power of ODD, so that the order of parts matters.
    for part in torch.split(bits, CHUNK):
        total = total * ODD + (part * weights[: len(part)]).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)


def _is_part(p: Tensor) -> bool:
    """Return whether this rank holds only a part of ``p``; replicated DTensors are whole."""
    return is_sharded(p) and not all(x.is_replicate() for x in p.placements)  # type: ignore[attr-defined]
