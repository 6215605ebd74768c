"""One step of K-FAC: the stages that are due, and the order in which the parts run.

:class:`KFAC` calls :meth:`Stepper.run` in each of its steps. What a stage does is in
:mod:`.execution`. With ``KFAC(max_overhead=...)`` the optimizer makes the first steps alone:
:class:`FirstSteps` watches their time and :func:`measure` the rates of a rank. Rank 0 measures, and
sends to all ranks what it found. So all ranks make the same plan.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kfac_bench.core.attachment import LossScale
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.capture.moments import Collected
from kfac_bench.core.construction import KFACParts
from kfac_bench.core.damping import LevenbergMarquardt, Trial
from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.execution.adam import AdamRule, orthogonalize_and_rotate, separated
from kfac_bench.core.execution.executor import Request
from kfac_bench.core.kernels import linalg
from kfac_bench.core.planning.budget import SIZES, WIDE, Rates, Seen, UpdateRates
from kfac_bench.core.planning.plan import Decompose, Stage
from kfac_bench.core.schedule import Settings


class Stepper:
    """Runs the steps of one preconditioner. It does not refer to the KFAC.

    Args:
        parts: What the preconditioner consists of.
        fisher: The option of KFAC.
        adaptive: The damping that adapts itself, or None.

    Attributes:
        model: The model, without its wrappers.
        wrapped: A weak reference to the model as the user passed it.
        decomposes_all: Whether the next step decomposes all factors, because a loaded state lacked
            decompositions.
        has_sent_labels: Whether ``fisher_backward`` was called in this step.
    """

    def __init__(self, parts: KFACParts, fisher: str, adaptive: LevenbergMarquardt | None) -> None:
        self.decomposes_all = self.has_sent_labels = False
        self.model: nn.Module = parts.model
        self.wrapped = parts.wrapped
        self._layers, self._plan, self._schedules = parts.layers, parts.plan, parts.schedules
        self._executor, self._write_back = parts.executor, parts.write_back
        self._guards, self._is_eigen_adam = parts.guards, parts.coverage is not None
        self._fisher, self._adaptive = fisher, adaptive
        self._trial: Trial | None = None
        self._unjudged = 0

    @torch.no_grad()
    def run(
        self,
        step: int,
        capture: Capture,
        loss_scale: LossScale,
        *,
        track_cosine: bool,
        time_stages: bool,
    ) -> None:
        """Precondition all gradients in place; first update factors and decompositions if due.

        Args:
            step: Number of the step, from 0 on.
            capture: The hooks, which have the statistics.
            loss_scale: See :meth:`KFAC.step`.
            track_cosine: Whether to compute per-layer cosines.
            time_stages: Whether to wait for the device where a stage starts and ends.
        """
        self._check_wrapper((capture.wrapper or self.wrapped)())
        settings, executor = self._schedules.at(step), self._executor
        self._guards.check_dtypes()
        # Not a method: the executor outlives this object, so it must not refer to this object.
        wait = partial(_synchronize, self._layers[0].weight.device)
        executor.synchronize = wait if time_stages else None
        self._begin_trial(step)
        request = self._request(step, settings, capture, loss_scale)
        executor.run(request)
        stage_s = executor.stage_s
        stage_s["ComputeFactor"] = stage_s.get("ComputeFactor", 0.0) + capture.seconds
        capture.seconds = 0.0
        with executor.timed("WriteBack"):
            self._write_back.write(executor.gradients, settings.kl_clip, track_cosine=track_cosine)
        if executor.background_slices is not None:
            begin = self._schedules.slices_to_begin(step, len(self._plan.slices))
            executor.background_slices.begin(begin, settings.damping)
        self._guards.see_gradients()
        self.decomposes_all = self.has_sent_labels = False

    def _request(
        self, step: int, settings: Settings, capture: Capture, loss_scale: LossScale
    ) -> Request:
        """Return the stages that are due, with the statistics that the hooks collected."""
        plan, stages, collected = self._plan, [], {}
        scale: float | Tensor = 1.0
        if plan.factors and self._schedules.factors_due(step):
            stages.append(plan.factors)
            collected = capture.pop()
            if self._fisher == "empirical":
                scale = loss_scale() if callable(loss_scale) else loss_scale
            elif not self.has_sent_labels:
                raise RuntimeError(
                    f"fisher={self._fisher} has no statistics: call fisher_backward(output) "
                    "between forward and backward at each step"
                )
            self._guards.see_statistics(collected, scale)
        stages += [plan.slices[i] for i in self._slices_due(step)]
        stages.append(plan.precondition)
        is_scaled = not isinstance(loss_scale, int | float) or loss_scale != 1
        return Request(
            stages,
            settings.damping,
            settings.factor_decay,
            collected,
            scale,
            is_scaled,
            self._write_back.adam_options() if self._is_eigen_adam else {},
            self._guards.judge,
        )

    def _check_wrapper(self, wrapper: nn.Module | None) -> None:
        """Compare the ranks of DistributedDataParallel with those of K-FAC.

        More ranks than K-FAC has are a RuntimeError, fewer ranks a warning. Inside torch's
        ``Join``, ranks that ended would answer no message: that is a RuntimeError, too.
        """
        if not isinstance(wrapper, nn.parallel.DistributedDataParallel):
            return
        averaged, known = wrapper.process_group.size(), self._executor.collective.world_size
        if averaged > known:
            why = f"its collective has {known} ranks. Leave out collective"
            if known == 1:
                why = "it was built before init_process_group(). Build KFAC afterwards"
            raise RuntimeError(
                f"DistributedDataParallel averages gradients over {averaged} ranks, whose weights "
                f"would drift apart, because this KFAC does not know them all: {why}"
            )
        if known == 1:
            return
        # Ranks that hold parts of parameters have equal gradients of all other parameters.
        if averaged < known and not any(map(is_sharded, wrapper.parameters())):
            self._guards.warn_of_ranks(averaged)
        if wrapper._join_config.enable:
            raise RuntimeError(
                "K-FAC cannot run inside join(): ranks without batches would not take part in its "
                "messages. Give each rank equally many batches, for example with "
                "DistributedSampler, and remove join()"
            )

    def _slices_due(self, step: int) -> Sequence[int]:
        """Return the slices that are decomposed now, or whose decompositions come into use now."""
        count, beside = len(self._plan.slices), self._executor.background_slices
        if self.decomposes_all:
            if beside is not None:
                beside.clear()
            return range(count)
        if beside is not None:
            return beside.pop_due(step)
        return self._schedules.slices_due(step, count)

    def will_decompose_all(self, step: int) -> bool:
        """Return whether the step decomposes all factors at once, and so takes long."""
        if self.decomposes_all:
            return True
        if not self._plan.slices or self._executor.background is not None:
            return False
        if len(self._plan.slices) > 1:
            return step == 0
        return bool(self._schedules.slices_due(step, 1))

    def decomposed(self) -> tuple[int, int]:
        """Return two counts of factors.

        The first counts factors that this rank has decomposed in this step. The second counts all
        factors that this rank decomposes.
        """
        rank = self._executor.collective.rank
        mine = (op for op in self._plan.ops(Stage.DECOMPOSE) if rank in op.ranks)
        total = sum(len(op.members) for op in mine if isinstance(op, Decompose))
        return self._executor.decomposed, total

    def will_adapt_damping(self, step: int) -> bool:
        """Return whether :meth:`adapt_damping` has work to do after the step."""
        return self._adaptive is not None and self._adaptive.is_due(step)

    def _begin_trial(self, step: int) -> None:
        """Remember weights and gradients if the adaptive damping will judge this step."""
        if self._trial is not None:
            self._unjudged += 1
            if self._unjudged == MOST_UNJUDGED:
                warnings.warn(
                    "LevenbergMarquardt: the damping stays as it is, because nobody has called "
                    f"adapt_damping() after {MOST_UNJUDGED} steps that it should judge. Call "
                    "adapt_damping() after optimizer.step(), or choose another damping",
                    stacklevel=2,
                )
        self._trial = None
        if self._adaptive is not None and self._adaptive.is_due(step):
            self._trial = Trial(self.model, self._adaptive)

    @torch.no_grad()
    def adapt_damping(self, loss: Tensor, loss_after: Callable[[], Tensor]) -> None:
        """See :meth:`KFAC.adapt_damping`."""
        if self._trial is None:
            return
        self._unjudged = 0
        store, collective = self._executor.store, self._executor.collective
        mine = {p.layer.name for p in self._plan.placements if p.a_worker == collective.rank}
        factors = {key: store.factor(key) for key in store.factors if key[0] in mine}
        self._trial.finish(loss, loss_after(), self._layers, factors, collective)
        self._trial = None


MOST_UNJUDGED = 10
"""Steps without a verdict on the damping, before a warning. A GradScaler may skip some steps."""

WITH_STATISTICS, WITHOUT = 3, 3
"""First steps whose statistics are collected, and steps of the optimizer alone. The very first step
is not timed: it allocates memory and makes the state of the optimizer."""

COPY_NUMEL = 1 << 24
"""Elements of a copy that is timed: 64 MiB, more than most caches hold."""

MESSAGE_NUMEL = 1 << 20
"""Elements of a message that is timed."""


class FirstSteps:
    """Watches the first steps, in which the optimizer works alone.

    Args:
        names: The layers that K-FAC covers.
        collective: The ranks that agree on what was seen.
        device: That of the layers.
    """

    def __init__(self, names: Sequence[str], collective: Collective, device: torch.device) -> None:
        self._names, self._collective, self._device = names, collective, device
        self._ends: list[float] = []
        self._rows: dict[str, float] = {}

    @property
    def needs_statistics(self) -> bool:
        """True if the next step collects statistics."""
        return len(self._ends) < WITH_STATISTICS

    def end_step(self, collected: Mapping[str, Collected]) -> Seen | None:
        """Note the end of a step; return what was seen if it was the last one, else None."""
        _synchronize(self._device)
        self._ends.append(time.perf_counter())
        for name, statistics in collected.items():
            self._rows[name] = float(statistics.rows)
        if len(self._ends) < WITH_STATISTICS + WITHOUT:
            return None
        periods = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        alone = min(periods[WITH_STATISTICS - 1 :])
        mine = [alone, max(0.0, min(periods[: WITH_STATISTICS - 1]) - alone)]
        mine += [self._rows.get(name, 0.0) for name in self._names]
        step_s, statistics_s, *rows = _of_rank_0(
            mine, self._collective, self._device, "budget/seen"
        )
        return Seen(dict(zip(self._names, rows, strict=True)), step_s, statistics_s)


def measure(
    collective: Collective, device: torch.device, method: str, adam: AdamRule | None = None
) -> Rates:
    """Measure for about a second. All ranks call it, and get the rates of rank 0.

    Args:
        collective: The ranks.
        device: That of the layers.
        method: That of KFAC.
        adam: The options of method eigen_adam.
    """
    small = torch.ones(8, dtype=torch.float32, device=device)
    calls = 100

    def call_often() -> None:
        for _ in range(calls):
            small.add(1)

    seconds = [_fastest(call_often, device) / calls]
    numel = COPY_NUMEL
    source = torch.ones(numel, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds.append(8 * numel / _fastest(lambda: target.copy_(source), device))
    seconds += [_product_flops(n, device) for n in SIZES]
    seconds += [_decompose_s(n, device, method, adam) for n in SIZES]
    seconds += [0.0] * 3 * len(SIZES) if adam is None else _update_rates(device, adam)
    seconds += _message_rates(collective, source)
    call_s, bytes_per_s, *rest, message_s, message_bytes_per_s = _of_rank_0(
        seconds, collective, device, "budget/rates"
    )
    k = len(SIZES)
    products, decompositions, *of_updates = (tuple(rest[i : i + k]) for i in range(0, 5 * k, k))
    updates = None if adam is None else UpdateRates(*of_updates)
    return Rates(
        call_s, bytes_per_s, products, decompositions, message_s, message_bytes_per_s, updates
    )


def _of_rank_0(
    values: Sequence[float], collective: Collective, device: torch.device, name: str
) -> list[float]:
    """Return the values of rank 0."""
    if collective.world_size == 1:
        return list(values)
    sent = torch.tensor(values, dtype=torch.float64, device=device)
    collective.broadcast(sent, 0, tuple(range(collective.world_size)), name).wait()
    found: list[float] = sent.tolist()
    return found


def _product_flops(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    left, right = (torch.ones(n, k, dtype=dtype, device=device) for k in (n, 4 * n))
    return 8.0 * n**3 / _fastest(lambda: left @ right, device)


def _decompose_s(n: int, device: torch.device, method: str, adam: AdamRule | None) -> float:
    # The script may have set another default device and dtype.
    cpu = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(2 * n, n, generator=cpu, device="cpu", dtype=torch.float32).to(device)
    factor = rows.mT @ rows / len(rows)
    if method == "inverse":
        return _fastest(lambda: linalg.damped_inverse(factor, 1.0), device)
    if adam is not None and adam.options["decomposition"] == "qr":
        basis = linalg.eigendecompose(factor)[1]
        return _fastest(lambda: linalg.orthogonal_iteration(separated(factor), basis), device)
    return _fastest(lambda: linalg.eigendecompose(factor), device)


def _update_rates(device: torch.device, adam: AdamRule) -> list[float]:
    found = [_product_flops(n, device, adam.dtype_of_orthogonalized(n)) for n in SIZES]
    for width in 1, WIDE:
        found += [_orthogonalize_s(n, width * n, device, adam) for n in SIZES]
    return found


def _orthogonalize_s(m: int, n: int, device: torch.device, adam: AdamRule) -> float:
    update = torch.eye(m, n, dtype=torch.float32, device=device)[None]
    return _fastest(lambda: orthogonalize_and_rotate(update, None, None, adam), device)


def _message_rates(collective: Collective, content: Tensor) -> list[float]:
    """Return the seconds of an empty message, and the bytes per second of a large one."""
    if collective.world_size == 1:
        return [0.0, float("inf")]
    world = tuple(range(collective.world_size))
    seconds = []
    for x in (content[:1].clone(), content[:MESSAGE_NUMEL].clone()):

        def send(x: Tensor = x) -> None:
            collective.all_reduce(x, world, "budget/rate").wait()

        seconds.append(_fastest(send, content.device, times=3, limit_s=float("inf")))
    passes = 2 * (len(world) - 1) / len(world)
    return [seconds[0], passes * 4 * MESSAGE_NUMEL / max(seconds[1] - seconds[0], 1e-9)]


def _fastest(
    run: Callable[[], object], device: torch.device, times: int = 5, limit_s: float = 0.1
) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    run()
    best, end = float("inf"), time.perf_counter() + limit_s
    for _ in range(times):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
