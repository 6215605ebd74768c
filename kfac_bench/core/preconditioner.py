"""K-FAC as a gradient preconditioner: the public face of the package.

Usage::

    preconditioner = KFAC(model, optimizer, damping=1e-3, update_freq=100)
    ...
    loss.backward()
    preconditioner.step()  # gradients are preconditioned in place
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_bench.core import state
from kfac_bench.core.capture import fisher as fishers
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.coverage_report import Report
from kfac_bench.core.damping import LevenbergMarquardt, Trial
from kfac_bench.core.distributed.collective import (
    Collective,
    check_same_on_all_ranks,
    default_collective,
)
from kfac_bench.core.execution.executor import Executor, Request
from kfac_bench.core.execution.sharded_gradients import any_sharded
from kfac_bench.core.execution.write_back import WriteBack
from kfac_bench.core.kernels.conventions import CONVENTIONS
from kfac_bench.core.layers.coverage import DEFAULT_SKIP, MAX_DIM, LayerTypes, find_layers, unwrap
from kfac_bench.core.planning.cost import measured_cost
from kfac_bench.core.planning.ops import ComputeFactor, ReduceFactors
from kfac_bench.core.planning.plan import IDENTITY
from kfac_bench.core.planning.planner import make_plan
from kfac_bench.core.schedule import Schedule, Schedules, Settings
from kfac_bench.core.validation import (
    check_apart,
    check_choice,
    check_sharded,
    check_single,
    check_stages,
)

WEIGHT_SHARING = ("expand", "reduce")
BATCH_NUMEL = 1 << 22
"""Elements of layers of one shape that a GPU preconditions, or decomposes, at once; on a CPU
it gains nothing (docs/performance.md)."""
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KFAC:
    """Preconditions ``.grad`` of the layers it covers by the Kronecker-factored Fisher.

    Call :meth:`step` between ``backward`` and ``optimizer.step``, with gradients already averaged
    over ranks (DistributedDataParallel does so), unscaled if a GradScaler is used, and not yet
    clipped. The loss must be a mean over the examples of the step; with gradient accumulation,
    over all micro-batches. The learning rate is read from ``optimizer`` at each step.

    Keyword arguments; those marked * take a number or a function of the step:

    strategy: who computes what on several ranks: ``comm_opt`` (default), ``layer_wise``,
        ``mem_opt``, ``hybrid_opt``, ``owner_reduce``, ``local_factors``; see
        :mod:`kfac_bench.core.planning.plan`.
    grad_worker_fraction: for ``hybrid_opt`` (None: 0.5), ``owner_reduce`` and ``local_factors``
        (None: one rank), the share of ranks that precondition a layer.
    colocate_factors: one rank decomposes both factors of a layer (True), or two may share them;
        None: only ``comm_opt`` lets two.
    balance: layers go to ranks so that these decompose for about as long (``compute``, by times
        measured once: ``core/planning/cost.py``), or keep about as many bytes (``memory``).
    overlap: start to send the statistics while backward still runs. Results are the same, bit by
        bit. With gradient accumulation, run all backwards of a step but the last within
        :meth:`accumulate` (or DistributedDataParallel's ``no_sync``, if ``model`` is its wrapper).
    method: ``eigen`` (eq. 11-13), ``inverse`` (eq. 9-10, by Cholesky), or ``ekfac``: eigen with
        eigenvalues that are second moments of the gradients in the eigenbasis (George et al. 2018).
        ``identity`` is a control: A = G = I, no statistics, of K-FAC only the KL clip.
    damping*: gamma > 0, Tikhonov; of the Kronecker product (eigen), of each factor (inverse). A
        :class:`LevenbergMarquardt` adapts itself; see :meth:`adapt_damping`.
    factored_damping: split gamma between A and G by their mean eigenvalues (the pi of Martens &
        Grosse 2015): A gets pi sqrt(gamma), G sqrt(gamma) / pi, whatever the method but ekfac.
    kl_clip*: kappa of eq. 16; None for no clip.
    update_freq*, factor_update_freq*: steps between decompositions, and between factor updates.
    spread: decompose in slices, at different steps of an interval, so that no step is long; each
        factor is still decomposed every ``update_freq`` steps. False: all at once, as the papers
        do, so that ranks share the work. None (default): where one process does it alone.
    factor_decay*: weight of the *old* factor in the running average, in [0, 1); averages are
        debiased. The paper's xi (eq. 14-15) weighs the new one: xi = 0.95 is 0.05 here.
    factor_convention: ``kfc``, ``sc20`` or ``kaisa``; see :data:`.kernels.conventions.CONVENTIONS`.
    fisher: ``empirical`` uses the loss' own gradients; ``mc`` and ``type2`` those of labels drawn
        from the model, and need :meth:`fisher_backward`; see :mod:`kfac_bench.core.capture.fisher`.
    weight_sharing: positions that share a weight are further samples (``expand``), or a is
        averaged and g summed over them first (``reduce``): Eschenhagen et al. 2023.
    state_dtype: ``torch.bfloat16`` or ``torch.float16`` keep and send factors and decompositions
        in half the bytes; sums, eigenvalues, damping and gradients stay in float32.
    skip: regular expressions of modules (by name or class name) left to the optimizer.
    max_dim: a factor of more rows is kept as a diagonal (the G of a vocabulary head).
    layer_types: classes for module types of your own; see :mod:`kfac_bench.core.layers.base`.
    collective: the communication backend; by default torch.distributed or Horovod where
        initialised. It spans the ranks that hold these layers: all of a data-, fully sharded
        (FSDP2) or tensor-parallel run, of a pipeline those of one stage.
    model_parallel: one over the ranks that hold the *other* layers of the model, one per pipeline
        stage: the sum of the KL clip goes over all layers. Every stage must pass it and cover a
        layer.

    Raises ``ValueError`` for a value out of range, a model with nothing to precondition, or
    parameters the optimizer does not know; ``RuntimeError`` if ranks disagree on the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strategy: str = "comm_opt",
        grad_worker_fraction: float | None = None,
        colocate_factors: bool | None = None,
        balance: str = "compute",
        overlap: bool = False,
        method: str = "eigen",
        damping: Schedule = 1e-3,
        factored_damping: bool = False,
        kl_clip: Schedule | None = 1e-3,
        update_freq: Schedule = 100,
        factor_update_freq: Schedule = 10,
        spread: bool | None = None,
        factor_decay: Schedule = 0.95,
        factor_convention: str = "kfc",
        fisher: str = "empirical",
        weight_sharing: str = "expand",
        state_dtype: torch.dtype = torch.float32,
        skip: Sequence[str] = DEFAULT_SKIP,
        max_dim: int = MAX_DIM,
        layer_types: LayerTypes | None = None,
        collective: Collective | None = None,
        model_parallel: Collective | None = None,
    ) -> None:
        check_choice("factor_convention", factor_convention, tuple(CONVENTIONS))
        check_choice("fisher", fisher, fishers.FISHERS)
        check_choice("weight_sharing", weight_sharing, WEIGHT_SHARING)
        check_choice("state_dtype", state_dtype, STATE_DTYPES)
        self.schedules = Schedules(damping, kl_clip, factor_decay, update_freq, factor_update_freq)
        self.fisher = fisher
        self.steps = 0
        self._decompose_now = False  # a loaded state lacked decompositions
        self._sent_labels = False  # fisher_backward was called in this step
        self.track_cosine = False
        """Compute per-layer cosines in the next step; read them with :meth:`statistics`."""
        self.time_stages = False
        """Wait for a GPU where a stage starts and ends: else ``stage_s`` is what the host waits."""
        self._model = unwrap(model)
        self._layers, self._skipped = find_layers(
            self._model, skip, layer_types=layer_types, max_dim=max_dim
        )
        if not self._layers:
            raise ValueError("the model has no layer to precondition")
        self._write_back = WriteBack(self._layers, optimizer, model_parallel)
        self.collective = collective or default_collective()
        if self.collective.world_size > 1:
            check_single(self._layers)
        if any_sharded(self._layers):
            check_sharded(self._model, strategy, overlap)
        if model_parallel is not None:
            check_stages(damping)
        device = self._layers[0].weight.device
        if spread is None:
            spread = self.collective.world_size == 1
        self.plan = make_plan(
            [layer.spec for layer in self._layers],
            self.collective.world_size,
            strategy=strategy,
            grad_worker_fraction=grad_worker_fraction,
            colocate_factors=colocate_factors,
            balance=balance,
            method="inverse" if method == IDENTITY else method,
            cost=measured_cost(method),
            spread=self.schedules.most_slices(len(self._layers)) if spread else 1,
            itemsize=state_dtype.itemsize,
            batch_numel=BATCH_NUMEL if device.type == "cuda" else 0,
            sharded=self.collective.world_size > 1 and any_sharded(self._layers),
        )
        if method == IDENTITY:
            self.plan = replace(self.plan, method=IDENTITY, factors=(), slices=())
        if not self.plan.colocated:
            check_apart(method == "inverse" and factored_damping, damping)
        adaptive = damping if isinstance(damping, LevenbergMarquardt) else None
        options = (
            f"{self.schedules.at(0)} {adaptive} {factored_damping} {factor_convention} {fisher} "
            f"{weight_sharing} {overlap}"
        )
        check_same_on_all_ranks(self.collective, f"{self.plan.digest()} {options}", device)
        if model_parallel is not None:
            model_parallel.prepare([tuple(range(model_parallel.world_size))])
        groups = sorted({op.ranks for op in self.plan.ops() if len(op.ranks) > 1})
        self.collective.prepare(groups, apart=overlap)
        self._executor = Executor(
            self.plan,
            self.collective,
            self._layers,
            CONVENTIONS[factor_convention],
            of_sums=fisher != "empirical",
            factored_damping=factored_damping,
            state_dtype=state_dtype,
        )
        self._capture: Capture | None = self._hook(ref(model), weight_sharing == "reduce", overlap)
        self._trial: Trial | None = None

    def _hook(self, wrapper: ref[nn.Module], reduce: bool, overlap: bool) -> Capture:
        """On the layers whose statistics this rank computes."""
        computed = {
            op.layer.name
            for op in self.plan.factors
            if isinstance(op, ComputeFactor) and self.collective.rank in op.ranks
        }
        sends = any(isinstance(op, ReduceFactors) for op in self.plan.factors)
        return Capture(
            self._model,
            [layer for layer in self._layers if layer.name in computed],
            reduce=reduce,
            sampled=self.fisher != "empirical",
            eigenbasis=self._executor.store.eigenbasis,
            on_complete=self._executor.begin_factors if overlap and sends else None,
            # DistributedDataParallel's own flag, False within no_sync
            is_last=lambda: getattr(wrapper(), "require_backward_grad_sync", True),
        )

    @torch.no_grad()
    def step(self, loss_scale: float | Tensor | Callable[[], float | Tensor] = 1.0) -> None:
        """Update factors and decompositions where due; precondition all gradients in place.

        ``loss_scale`` is what multiplied the loss before backward: with a GradScaler, call
        ``scaler.unscale_(optimizer)`` first and pass ``scaler.get_scale``; it is asked only when
        factors are due. It must be the same on all ranks; see :attr:`loss_weight`.
        """
        if self._capture is None:
            raise RuntimeError("step() after detach(): the hooks are off the model")
        settings = self.schedules.at(self.steps)
        self._executor.settle = self._settle if self.time_stages else None
        self._begin_trial()
        grads = {} if self.plan.sharded else self._gradients()
        preconditioned = self._executor.run(self._request(settings, grads, loss_scale))
        stage_s = self._executor.stage_s
        stage_s["ComputeFactor"] = stage_s.get("ComputeFactor", 0.0) + self._capture.seconds
        self._capture.seconds = 0.0
        with self._executor.timed("WriteBack"):
            self._write_back.write(
                *(grads, preconditioned, self._executor.shards, settings.kl_clip),
                track_cosine=self.track_cosine,
            )
        self._decompose_now = self._sent_labels = False
        self.steps += 1
        self._capture.enabled = self.schedules.factors_due(self.steps)

    def _settle(self) -> None:
        device = self._layers[0].weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _gradients(self) -> dict[str, Tensor]:
        """By layer; those that backward did not reach are missing."""
        return {n: g for n, g in ((x.name, x.get_grad()) for x in self._layers) if g is not None}

    def _request(
        self,
        settings: Settings,
        grads: Mapping[str, Tensor],
        loss_scale: float | Tensor | Callable[[], float | Tensor],
    ) -> Request:
        """What is due, with what the hooks collected for it."""
        plan, stages, collected = self.plan, [], {}
        scale: float | Tensor = 1.0
        if plan.factors and self.schedules.factors_due(self.steps):
            stages.append(plan.factors)
            assert self._capture is not None
            collected = self._capture.pop()
            if self.fisher == "empirical":
                scale = loss_scale() if callable(loss_scale) else loss_scale
            elif not self._sent_labels:
                raise RuntimeError(
                    f"fisher={self.fisher} has no statistics: call fisher_backward(output) between "
                    "forward and backward at each step"
                )
        count = len(plan.slices)
        due = range(count) if self._decompose_now else self.schedules.slices_due(self.steps, count)
        stages += [plan.slices[i] for i in due]
        stages.append(plan.precondition)
        return Request(stages, settings.damping, settings.factor_decay, collected, grads, scale)

    def fisher_backward(
        self,
        output: Tensor,
        likelihood: str = "categorical",
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        curvature: float = 1.0,
    ) -> None:
        """For ``fisher="mc"`` and ``"type2"``: call it with the model's output before ``backward``.

        A backward of its own that reaches no ``.grad``; only when factors are due, else it returns
        at once, as it does with ``fisher="empirical"``. ``likelihood`` is what the loss is the
        negative logarithm of: ``categorical`` (cross entropy of logits, classes along ``dim``, mean
        over all positions or those where ``mask`` is not 0), ``gaussian`` (``curvature / 2`` times
        the squared error) or ``bernoulli`` (binary cross entropy of logits), both summed over all
        dimensions but the first, mean over the first.
        """
        if self._capture is None or not self._capture.enabled or self.fisher == "empirical":
            return
        self._sent_labels = True
        made, magnitude = fishers.seeds(
            output, self.fisher, likelihood, dim=dim, mask=mask, curvature=curvature
        )
        self._capture.backward(output, made, magnitude)

    @property
    def loss_weight(self) -> float:
        """What multiplies this rank's loss beside the loss scale; set it before backward.

        1, unless ranks that have unequal shares of a batch weigh their means by them.
        """
        return self._executor.fresh.loss_weight

    @loss_weight.setter
    def loss_weight(self, weight: float) -> None:
        self._executor.fresh.loss_weight = weight

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around a backward that is not the last before :meth:`step`; only ``overlap`` asks."""
        capture = self._capture
        if capture is not None:
            capture.accumulating = True
        try:
            yield
        finally:
            if capture is not None:
                capture.accumulating = False

    def _begin_trial(self) -> None:
        """Where an adaptive damping wants to know what this step brings, remember what was."""
        damping = self.schedules.damping
        self._trial = None
        if isinstance(damping, LevenbergMarquardt) and damping.is_due(self.steps):
            self._trial = Trial(self._model, damping)

    @torch.no_grad()
    def adapt_damping(self, loss: Tensor, loss_after: Callable[[], Tensor]) -> None:
        """For ``damping=LevenbergMarquardt(...)``: call it after ``optimizer.step()``.

        ``loss`` is the step's loss, unscaled; ``loss_after`` computes it anew, on the same batch:
        it is called every few steps, and not at all with other dampings. On a model in training
        mode it moves batch norm's running averages once more. A loss that is no number lets the
        damping grow.
        """
        if self._trial is not None:
            store = self._executor.store
            mine = {
                p.layer.name for p in self.plan.placements if p.a_worker == self.collective.rank
            }
            factors = {key: store.factor(key) for key in store.factors if key[0] in mine}
            self._trial.finish(loss, loss_after(), self._layers, factors, self.collective)
            self._trial = None

    def statistics(self) -> dict[str, Any]:
        """Figures of the last step, on the host.

        ``nu`` of eq. 16 (None: no clip), ``cosine`` by layer (empty unless ``track_cosine`` was
        set), ``stage_s`` seconds by kind of op.
        """
        return self._write_back.statistics() | {"stage_s": self.stage_s}

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds of the last step by kind of op; waits for no device."""
        return dict(self._executor.stage_s)

    @property
    def damping(self) -> float:
        """The damping of the next step."""
        return self.schedules.at(self.steps).damping

    @property
    def failed_decompositions(self) -> int:
        """Decompositions that failed on this rank, in float32 and float64, since the start."""
        return self._executor.solver.failed

    @property
    def dropped_statistics(self) -> int:
        """Statistics of this rank that were not finite and left out, since the start."""
        dropped = self._executor.fresh.dropped
        return 0 if dropped is None else int(dropped)

    def report(self) -> Report:
        """What is covered and what not, and why; what it weighs on this rank. Printable."""
        return Report(self.plan, self.collective.rank, self._layers, self._skipped)

    def detach(self) -> None:
        """Take all hooks off the model; the preconditioner is of no use after that."""
        if self._capture is not None:
            self._capture.remove()
            self._capture = None

    def state_dict(self, *, shard: bool = False) -> dict[str, Any]:
        """State per layer, independent of wrapper, world size and strategy; no communication.

        All that this rank holds: running factors, and decompositions where it is a gradient
        worker. ``shard=True``: only what this rank decomposes, so that the ranks' shards
        together hold everything once. Save every rank's and give all to
        :meth:`load_state_dict` to go on bit-exactly; with one rank's dict alone, missing
        decompositions are made anew from the factors at the next step. Where no rank keeps all
        factors (``owner_reduce``, ``local_factors``), one rank's dict is not enough.
        """
        layers = state.layers_state(self._executor, shard=shard)
        saved: dict[str, Any] = {"steps": self.steps, "layers": layers}
        if isinstance(self.schedules.damping, LevenbergMarquardt):
            saved["damping"] = self.schedules.damping.value
        return saved

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take over the state of one or several :meth:`state_dict` (shards of all ranks).

        Raises ``ValueError`` if a layer is missing, unknown or of another shape; then nothing
        has changed. Every rank must load the same dicts.
        """
        merged, steps = state.merge(states), max(int(s["steps"]) for s in states)
        state.check(merged, self._executor, steps)
        complete = state.take(merged, self._executor)
        self.steps = steps
        self._decompose_now = steps > 0 and not complete
        damping = self.schedules.damping
        if isinstance(damping, LevenbergMarquardt) and "damping" in states[0]:
            damping.value = float(states[0]["damping"])
        if self._capture is not None:
            self._capture.pop()
            self._executor.abandon_factors()
            self._capture.enabled = self.schedules.factors_due(steps)
