"""One step of K-FAC: which stages are due, and in which order the parts run.

:class:`KFAC` calls :meth:`Stepper.run` in each of its steps. What a stage does is in
:mod:`.execution`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from kfac_bench.core.attachment import LossScale
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.construction import KFACParts
from kfac_bench.core.damping import LevenbergMarquardt, Trial
from kfac_bench.core.execution.executor import Request
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
        self._refuse_join(capture.wrapper or self.wrapped)
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
            self._write_back.learning_rates() if self._is_eigen_adam else {},
            self._guards.judge,
        )

    def _refuse_join(self, wrapper: ref[nn.Module]) -> None:
        """Raise RuntimeError inside torch's ``Join``: ranks that ended would answer no message."""
        join = getattr(wrapper(), "_join_config", None)
        if join is not None and join.enable and self._executor.collective.world_size > 1:
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
        """Return the factors that this rank has decomposed in the current step, and all of its."""
        rank = self._executor.collective.rank
        mine = (op for op in self._plan.ops(Stage.DECOMPOSE) if rank in op.ranks)
        total = sum(len(op.members) for op in mine if isinstance(op, Decompose))
        return self._executor.decomposed, total

    def will_adapt_damping(self, step: int) -> bool:
        """Return whether :meth:`adapt_damping` has work to do after the step."""
        return self._adaptive is not None and self._adaptive.is_due(step)

    def _begin_trial(self, step: int) -> None:
        """Remember weights and gradients if the adaptive damping will judge this step."""
        self._trial = None
        if self._adaptive is not None and self._adaptive.is_due(step):
            self._trial = Trial(self.model, self._adaptive)

    @torch.no_grad()
    def adapt_damping(self, loss: Tensor, loss_after: Callable[[], Tensor]) -> None:
        """See :meth:`KFAC.adapt_damping`."""
        if self._trial is None:
            return
        store, collective = self._executor.store, self._executor.collective
        mine = {p.layer.name for p in self._plan.placements if p.a_worker == collective.rank}
        factors = {key: store.factor(key) for key in store.factors if key[0] in mine}
        self._trial.finish(loss, loss_after(), self._layers, factors, collective)
        self._trial = None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
