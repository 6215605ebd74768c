"""The optimizer of method eigen_adam: it applies the updates of KFAC, and AdamW's for the rest."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, Unpack, cast

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from kfac_bench.core.attachment import innermost
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.execution.adam import AdamRule
from kfac_bench.core.kfac_options import EIGEN_ADAM_BETAS, EigenAdamOptions
from kfac_bench.core.options import checked, takes_options

KEY = "kfac"
"""The entry of a parameter's state that holds the state of K-FAC."""

OWN_OPTIONS = "eigen_adam"
"""The entry of a parameter group that holds the options of EigenAdam that are not AdamW's."""

_COVERED: MutableMapping[Tensor, "_Cover"] = WeakTensorKeyDictionary()
"""The parameters that get their direction from some KFAC.

Horovod and DeepSpeed step a copy of the optimizer, so this cannot be an attribute.
"""


@dataclass(frozen=True, slots=True)
class _Cover:
    """The coverage that a parameter belongs to. Weak references: an entry must not keep its key."""

    owner: "Coverage"
    weight: TensorWeakRef | None
    """The weight of the parameter's layer. None: the KFAC has left the layer to the optimizer."""


class StateOfKFAC(Protocol):
    """The part of a KFAC that an optimizer's state needs; see :class:`.OptimizerState`."""

    @property
    def steps(self) -> int:
        """The steps of the KFAC."""

    @property
    def is_included(self) -> bool:
        """True if the state of the optimizer contains the state of the KFAC."""

    def by_parameter(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state without communication."""

    def load(self, saved: Mapping[Tensor, Any]) -> None:
        """Load a state."""

    def gather(self) -> None:
        """Let each rank get the whole state."""

    def forget(self) -> None:
        """Free the memory of :meth:`gather`."""


class Coverage:
    """The parameters that get their direction from one KFAC, until :meth:`remove`.

    Args:
        layers: The weight and the bias of each layer that the KFAC covers.

    Attributes:
        state: The state of the KFAC, as soon as the KFAC is complete.
        is_waiting: True in the first steps of ``max_overhead``. The optimizer trains the parameters
            as AdamW then, as after :meth:`leave`.
    """

    state: StateOfKFAC | None = None
    is_waiting = False

    def __init__(self, layers: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        self._params: list[TensorWeakRef] = []
        for weight, bias in layers:
            for p in (weight,) if bias is None else (weight, bias):
                _COVERED[p] = _Cover(self, TensorWeakRef(weight))
                self._params.append(TensorWeakRef(p))

    def remove(self) -> None:
        """Give up the parameters, but not those that another KFAC covers by now."""
        for p in self._own(reference() for reference in self._params):
            del _COVERED[p]

    def leave(self, params: Iterable[Tensor | None]) -> None:
        """Leave some parameters to the optimizer, which trains them as AdamW."""
        for p in self._own(params):
            _COVERED[p] = _Cover(self, None)

    def _own(self, params: Iterable[Tensor | None]) -> Iterator[Tensor]:
        for p in params:
            cover = None if p is None else _COVERED.get(p)
            if p is not None and cover is not None and cover.owner is self:
                yield p


def _has_direction(p: Tensor) -> bool:
    """Return whether KFAC has written a direction into ``.grad``.

    KFAC leaves a layer as it is if its weight has no gradient, or is frozen and has zeros. It also
    leaves a frozen bias as it is.
    """
    cover = _COVERED.get(p)
    if cover is None or cover.weight is None or cover.owner.is_waiting:
        return False
    if p.grad is None or not p.requires_grad:
        return False
    weight = cover.weight()
    return weight is not None and weight.grad is not None and weight.requires_grad


@takes_options(EigenAdamOptions)
class EigenAdam(AdamW):
    """Adam in the eigenbasis of K-FAC's factors; use it with :class:`KFAC` of the same model.

    :func:`kfac_bench.eigen_adam` builds both. ``KFAC(..., method="eigen_adam")`` replaces the
    gradients of the layers that it covers by Adam's direction in their eigenbases, and this
    optimizer subtracts ``lr`` times that direction. All other parameters get AdamW's update with
    the same options. Weight decay is decoupled for all parameters.

    Args:
        params: Parameters or parameter groups, as for every optimizer of torch. ``lr``, ``betas``,
            ``eps`` and ``weight_decay`` may differ between groups, and schedules may change them.
            Groups may have ``maximize=True``, but not ``amsgrad=True``.
        lr: Learning rate. Start with the rate that you use for AdamW.
        betas: Decay of the running means of the gradient and of its square.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        options: The options in ``kfac_options.py``, with type, default and meaning of each.

    Raises:
        ValueError: An option is out of range, or a group has ``amsgrad=True``.
    """

    preconditioner: Any = None
    """The KFAC, if :func:`kfac_bench.eigen_adam` built both."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = EIGEN_ADAM_BETAS,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[EigenAdamOptions],
    ) -> None:
        own: Mapping[str, Any] = options
        if not own and isinstance(params, list) and params and isinstance(params[0], dict):
            own = params[0].get(OWN_OPTIONS, {})
        values = cast("EigenAdamOptions", checked("EigenAdam", EigenAdamOptions, own))
        self._waiting: dict[Tensor, Any] = {}
        self._lacks_kfac = False
        self.rule = AdamRule(betas, eps, values)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._own_options = dict(own)
        self._note_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in every optimizer of torch.

        Raises:
            ValueError: The group has ``amsgrad=True``.
        """
        if param_group.get("amsgrad"):
            raise ValueError(
                "EigenAdam: a parameter group has amsgrad=True, which the layers of K-FAC would "
                "ignore. Remove amsgrad from the group"
            )
        super().add_param_group(param_group)

    def _note_options(self) -> None:
        """Put the options of the constructor into the parameter groups.

        Horovod's DistributedOptimizer makes another optimizer of this class from the groups alone.
        """
        for group in self.param_groups:
            group.pop(OWN_OPTIONS, None)
            if self._own_options:
                group[OWN_OPTIONS] = self._own_options

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with that of the KFAC, for a KFAC that is built for the copy."""
        waiting, packed = dict(self._waiting), super().__getstate__()
        for each in self._states():
            waiting |= each.by_parameter()
        # AdamW's own copy needs its entries for each parameter in the state.
        own = {p: entry for p, entry in self.state.items() if "exp_avg" in entry}
        packed |= {"rule": self.rule, "_own_options": self._own_options}
        return packed | {"state": defaultdict(dict, own), "_waiting": waiting, "_lacks_kfac": False}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once.

        Raises:
            RuntimeError: There is no KFAC that covers the parameters.
        """
        if not self._is_covered():
            raise RuntimeError(
                "EigenAdam has no KFAC: build KFAC(model, optimizer, method='eigen_adam', "
                "trust_ratio=None, grafting=False), or both with kfac_bench.eigen_adam(model)"
            )
        self._waiting.clear()  # a KFAC that is built later starts empty
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_loaded()
        covered: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            self._note_kinds(group["params"])
            with_grad = [p for p in group["params"] if _has_direction(p)]
            if not with_grad:
                continue
            # A model with tensor parallelism has DTensors and tensors, which are no one list.
            for alike in _by_type(with_grad):
                grads = [p.grad for p in alike if p.grad is not None]
                if group["weight_decay"]:
                    torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] if group["maximize"] else -group["lr"]
                torch._foreach_add_(alike, grads, alpha=rate)
                covered += zip(alike, grads, strict=True)
        # AdamW updates what has a gradient, so the gradients of covered parameters are set aside.
        for p, _ in covered:
            p.grad = None
        try:
            # Small models feel the time of a step that has nothing to do.
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                _step_without_hooks(self)
        finally:
            for p, grad in covered:
                p.grad = grad
        return loss

    def _note_kinds(self, params: Iterable[Tensor]) -> None:
        """Let ``state`` have an entry for each covered parameter, as tools of torch expect.

        :meth:`state_dict` fills it. AdamW expects either all of its own entries or no entry.
        """
        for p in params:
            if _has_direction(p):
                if "exp_avg" in self.state[p]:  # AdamW has made the first steps
                    self.state[p].clear()
                self.state[p].setdefault(KEY, {})
            elif p.grad is not None and "exp_avg" not in self.state[p]:
                self.state[p].clear()

    def _is_covered(self) -> bool:
        return any(p in _COVERED for group in self.param_groups for p in group["params"])

    def _states(self) -> list[StateOfKFAC]:
        """Return the states of the KFACs that cover parameters, if they belong into this state."""
        params = (p for group in self.param_groups for p in group["params"])
        owners = {id(c.owner): c.owner for p in params if (c := _COVERED.get(p)) is not None}
        states = (owner.state for owner in owners.values())
        return [each for each in states if each is not None and each.is_included]

    def consolidate_state_dict(self) -> None:
        """Let each rank get the whole state, before :meth:`state_dict`; all ranks call it.

        One process, and ``strategy="comm_opt"`` without ``background``, need no call. The state
        stays in the memory of the CPU until the next step.
        """
        for each in self._states():
            each.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, with that of the KFAC, without communication.

        Raises:
            RuntimeError: Other ranks hold a part of it, and :meth:`consolidate_state_dict` was not
                called after the last step.
        """
        packed = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in packed["param_groups"] for i in group["params"]]
        by_parameter: dict[Tensor, Any] = dict(self._waiting)
        for each in self._states():
            by_parameter |= each.by_parameter()
        state = {}
        for i, p in zip(ids, params, strict=True):
            entry = packed["state"].get(i, {})
            # A state has the same entries at any time, and first steps begin again.
            is_waiting = (cover := _COVERED.get(p)) is not None and cover.owner.is_waiting
            entry = {} if is_waiting else {k: v for k, v in entry.items() if k != KEY}
            if p in by_parameter:
                entry[KEY] = by_parameter[p]
            if entry:
                state[i] = entry
        return packed | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Without a KFAC, the part of the KFAC waits until a KFAC is built.

        Raises:
            ValueError: The state does not fit. The optimizer has not changed then.
        """
        # Loading replaces both and leaves the old ones as they are.
        before = self.state, self.param_groups
        try:
            self._load(state_dict)
        except Exception:
            self.state, self.param_groups = before
            raise

    def _load(self, state_dict: dict[str, Any]) -> None:
        own, of_kfac = {}, {}
        for i, entry in state_dict["state"].items():
            own[i] = {k: v for k, v in entry.items() if k != KEY}
            if KEY in entry:
                of_kfac[i] = entry[KEY]
        super().load_state_dict(
            state_dict | {"state": {i: entry for i, entry in own.items() if entry}}
        )
        self._note_options()
        params = (p for group in self.param_groups for p in group["params"])
        ids = (i for group in state_dict["param_groups"] for i in group["params"])
        saved = {p: of_kfac[i] for i, p in zip(ids, params, strict=True) if i in of_kfac}
        for p in saved:
            self.state[p].setdefault(KEY, {})
        states = self._states()
        if saved:
            for each in states:
                each.load(saved)
        self._lacks_kfac = not saved and bool(own or states)
        self._waiting = saved
        self._forget_covered()

    def give_waiting_state(self, coverage: Coverage) -> None:
        """Load into a new KFAC what :meth:`load_state_dict` got before there was one."""
        if self._waiting and coverage.state is not None:
            coverage.state.load(self._waiting)  # if it fails, another KFAC may be built
        self._forget_covered()

    def _forget_covered(self) -> None:
        """Forget what a KFAC has loaded; the rest waits for the KFAC of another model."""
        self._waiting = {p: saved for p, saved in self._waiting.items() if p not in _COVERED}

    def _check_loaded(self) -> None:
        """Warn in the first step after a state without that of the KFAC was loaded."""
        if not self._lacks_kfac:
            return
        self._lacks_kfac = False
        if any(each.steps <= 1 for each in self._states()):
            warnings.warn(
                "EigenAdam: the loaded state lacks the moments and factors of K-FAC, because an "
                "older version or another optimizer saved it. They start empty. If K-FAC's state "
                "was saved apart, load it with preconditioner.load_state_dict() before training",
                stacklevel=3,
            )


def find_eigen_adam(optimizer: Optimizer) -> EigenAdam | None:
    """Return the EigenAdam inside the wrappers of frameworks, None if there is none."""
    inner = innermost(optimizer)
    return inner if isinstance(inner, EigenAdam) else None


def _by_type(params: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the parameters that are DTensors, and those that are not, in lists of their own."""
    lists: dict[bool, list[Tensor]] = {}
    for p in params:
        lists.setdefault(is_sharded(p), []).append(p)
    return lists.values()


def _step_without_hooks(optimizer: AdamW) -> None:
    """Run AdamW's own step. Its hooks run around :meth:`EigenAdam.step` and must not run twice."""
    # torch wraps the step of each class that was ever instantiated, so AdamW's may be wrapped.
    inspect.unwrap(AdamW.step)(optimizer)
