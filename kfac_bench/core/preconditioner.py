"""K-FAC as a gradient preconditioner: the public face of the package.

``from kfac_bench import KFAC`` gives the class of this file. :mod:`.construction` builds its parts,
and :mod:`.stepper` runs a step with them. docs/explanation/architecture.md follows one gradient
through these files.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any, Self, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_bench.core import construction, state, state_check
from kfac_bench.core.attachment import (
    Attachment,
    LossScale,
    Removable,
    Scaler,
    claim,
    owners,
    release,
)
from kfac_bench.core.capture import fisher as fishers
from kfac_bench.core.capture.hooks import Capture
from kfac_bench.core.damping import adaptive
from kfac_bench.core.distributed.collective import Collective, default_collective
from kfac_bench.core.distributed.deepspeed_zero import takes_gradient
from kfac_bench.core.eigen_adam_optimizer import Coverage, find_eigen_adam
from kfac_bench.core.execution.write_back import WriteBack
from kfac_bench.core.kernels.gram import without_autocast
from kfac_bench.core.kfac_options import (
    OPTIONS,
    KFACOptions,
    defaults,
    with_preset,
    within,
)
from kfac_bench.core.layer_plan import Report, choose_within_budget, covered_layers
from kfac_bench.core.layers.coverage import LayerTypes, SkippedModule
from kfac_bench.core.optimizer_state import OptimizerState
from kfac_bench.core.options import check_names, takes_options
from kfac_bench.core.planning.budget import NO_CHOICE, Choice
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.core.stepper import FirstSteps, Stepper, measure


@takes_options(KFACOptions, state_dtype=defaults()["state_dtype"])
class KFAC:
    """Kronecker-factored approximate curvature (K-FAC) as a preconditioner of gradients.

    K-FAC sees a layer as a linear map y = W a. For each layer it keeps two running averages: A,
    the second moment of the inputs a, and G, the second moment of the gradients g with respect to
    the outputs y. The Fisher matrix of W is approximately the Kronecker product of A and G (Martens
    & Grosse 2015). :meth:`step` multiplies the gradient of W by the damped inverse of that product
    and writes the result to ``.grad``. Any optimizer of torch can then use it. Layers that K-FAC
    does not cover keep their gradients.

    Equation numbers are those of "Deep Neural Network Training With Distributed K-FAC" (TPDS
    2022), called "the paper" below.

    There are two ways to use it. With :meth:`attach`, each ``optimizer.step()`` runs K-FAC first.
    Otherwise call :meth:`step` after the last ``backward`` and before ``optimizer.step()``. When
    K-FAC runs, gradients must be

    * averaged over ranks (DistributedDataParallel does that),
    * unscaled, if a GradScaler scaled the loss (:meth:`attach` takes care of it).

    Gradients may be clipped before K-FAC (with :meth:`attach`: before ``optimizer.step()``) or
    after it; docs/how-to/schedulers_ema_checkpoints.md compares both.

    The loss must be a mean over the examples of the step. With gradient accumulation it must be
    the mean over the examples of all micro-batches. The first dimension of the model's first
    tensor counts the examples; docs/reference/coverage.md has exceptions.

    K-FAC reads the learning rate from ``optimizer`` at each step, so learning-rate schedules just
    work.

    A backward pass leaves statistics of a layer only if it adds to ``.grad`` of its weight. If
    ``zero_grad()`` discards that gradient before :meth:`step`, the statistics are discarded too.
    :meth:`pause` leaves out any other pass. In the first steps K-FAC compares the statistics of
    each layer with its gradient. A layer for which they differ is left to the optimizer, with a
    warning.

    Example::

        preconditioner = KFAC(model, optimizer).attach()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()

    Certain misuse raises an error, probable misuse gives one warning;
    docs/reference/checks.md lists what K-FAC checks.

    A *schedule* below is a number, or a function from the step (0 is the first) to a number. On
    several ranks, every rank must pass the same options.

    Args:
        model: The model, bare or wrapped (DistributedDataParallel, FSDP2, torch.compile). K-FAC
            puts hooks on its layers; :meth:`detach` removes them.
        optimizer: The optimizer, which must hold weight and bias of all covered layers.
        preset: ``paper`` sets the options of the paper and of its released code:
            ``method="eigen"``, ``damping=0.001``, ``kl_clip=0.001``, no trust ratio, no grafting,
            running averages that start at the identity, no early decompositions, all
            decompositions in one step, and the scaling ``sc20``. Other keywords win. None
            (default): the defaults below.
        layer_types: Classes for module types of your own; see :mod:`kfac_bench.core.layers.base`.
        collective: The communication backend. By default it is torch.distributed or Horovod if
            one of them is initialized, else this process alone. It spans the ranks that hold the
            layers of ``model``: all ranks, or in a pipeline the ranks of one stage. If you pass a
            DistributedDataParallel with a group of its own, the default spans this group.
        model_parallel: A backend over the ranks that hold the *other* layers of the model, one
            per pipeline stage. The limits of the step then sum over all layers. Every stage
            must pass it, with the same ``kl_clip`` and ``trust_ratio``, and must cover at least one
            layer.
        options: The options in ``kfac_options.py``, where each has its type, default and meaning.

    Attributes:
        plan: Who computes and sends what (:class:`~kfac_bench.core.planning.plan.Plan`), equal on
            all ranks. Reports sum it.
        collective: The communication backend in use.
        fisher: The option ``fisher``.
        background: The option ``background``.
        choice: What ``max_overhead`` chose (:class:`~kfac_bench.core.planning.budget.Choice`); None
            without it, and in the first steps.
        steps: Number of finished calls of :meth:`step`, without those before a :attr:`choice`.
        in_optimizer_state: Whether ``state_dict()`` of an EigenAdam contains the state of this
            KFAC, and ``load_state_dict()`` loads it. Default True. Set False if you save
            :meth:`state_dict` of the KFAC itself.
        track_cosine: Set True before a step to compute per-layer cosines in that step; read them
            with :meth:`statistics`.
        time_stages: Set True to wait for the GPU where a stage starts and ends. Otherwise
            :attr:`stage_s` holds the time that the host waited.

    Raises:
        ValueError: An option is out of range, options do not fit together, the model has no layer
            to precondition, or the optimizer does not hold the parameters of a covered layer.
        TypeError: ``model`` is no ``torch.nn.Module``, ``optimizer`` is no optimizer object, or
            ``collective`` or ``model_parallel`` is no communication backend of K-FAC.
        RuntimeError: Ranks made different plans, or another KFAC is on a layer of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        preset: str | None = None,
        layer_types: LayerTypes | None = None,
        collective: Collective | None = None,
        model_parallel: Collective | None = None,
        **options: Unpack[KFACOptions],
    ) -> None:
        check_names("KFAC", OPTIONS, options)
        self._options = defaults() | with_preset(options, preset)
        if (damping := adaptive(self._options["damping"])) is not None:
            self._options["damping"] = replace(damping)  # two KFACs may get the same object
        self.fisher, self.background = self._options["fisher"], self._options["background"]
        self.collective = collective or default_collective(model)
        self._optimizer, self._others, self._layer_types = optimizer, model_parallel, layer_types
        self._attachment: Attachment | None = None
        self.steps = 0
        self.track_cosine = False
        self.time_stages = False
        self.in_optimizer_state = True
        self.choice: Choice | None = None
        self._first_steps: FirstSteps | None = None
        self._build(model, self._options)
        if self._options["max_overhead"] is not None:
            names = [layer.name for layer in self._layers]
            self._first_steps = FirstSteps(names, self.collective, self._layers[0].weight.device)
            if self._capture is not None and self._capture.identity is not None:
                self._capture.identity.due.clear()  # the time of statistics is measured
        if self._coverage is not None:
            self._take_waiting_state(self._coverage)

    def _build(
        self, model: nn.Module, options: KFACOptions, before: WriteBack | None = None
    ) -> None:
        """Make all parts and connect them to the model."""
        parts = construction.build(
            model,
            self._optimizer,
            options,
            self._layer_types,
            self.collective,
            self._others,
            before,
        )
        self.plan = parts.plan
        self._layers, self._skipped, self._coverage = parts.layers, parts.skipped, parts.coverage
        self._schedules, self._adaptive = parts.schedules, adaptive(options["damping"])
        self._executor, self._write_back = parts.executor, parts.write_back
        self._guards = parts.guards
        self._capture: Capture | None = parts.capture
        self._stepper = Stepper(parts, self.fisher, self._adaptive)
        hooks: list[Removable] = [parts.capture, parts.guards]
        if parts.coverage is not None:
            parts.coverage.state = OptimizerState(self, parts.executor)
            hooks.append(parts.coverage)
        self._finalizer = claim(self, self._layers, hooks)
        # An attached KFAC is built again in a hook, where torch does not allow another hook.
        if self._attachment is None:
            self._guards.watch_optimizer(self._optimizer)

    def _take_waiting_state(self, coverage: Coverage) -> None:
        """Load what EigenAdam has loaded before there was a KFAC."""
        optimizer = find_eigen_adam(self._optimizer)
        assert optimizer is not None
        try:
            optimizer.give_waiting_state(coverage)
        except ValueError:
            self.detach()
            raise

    def __getstate__(self) -> object:
        """Refuse to be copied or pickled: a copy would have no hooks, and would do nothing.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a KFAC cannot be copied or pickled, because its hooks belong to one model and one "
            "optimizer. Copy the model and the optimizer, build a KFAC for the copies, and load "
            "state_dict() of this KFAC into it"
        )

    def attach(self, scaler: Scaler | None = None) -> Self:
        """Make each ``optimizer.step()`` run K-FAC first; do not call :meth:`step` then.

        This works wherever the call of ``optimizer.step()`` is: in a script, in a GradScaler, in
        the loop of a training framework. A closure that is passed to ``optimizer.step`` runs before
        K-FAC. The preconditioner then lives as long as the optimizer.

        Args:
            scaler: The GradScaler that multiplies the loss, if there is one. K-FAC asks it for the
                loss scale of the statistics. ``scaler.unscale_`` may be called or not.

        Returns:
            The preconditioner.

        Raises:
            RuntimeError: The preconditioner is attached already, :meth:`detach` was called, or
                the model is a pipeline (``model_parallel``).
            TypeError: The optimizer is not a ``torch.optim.Optimizer``.
        """
        if self._capture is None:
            raise RuntimeError("attach() after detach(): build another KFAC")
        if self._attachment is not None:
            raise RuntimeError("attach() was called before: K-FAC already runs in optimizer.step()")
        if self._others is not None and self._others.world_size > 1:
            # A stage whose optimizer steps without gradients would leave out this step alone.
            self.detach()
            raise RuntimeError(
                "attach() with model_parallel: all stages must step together, so call step() "
                "before optimizer.step()"
            )
        try:
            self._attachment = Attachment(
                self._optimizer, self._step_in_hook, scaler, self._has_new_forward
            )
        except TypeError:
            # In KFAC(...).attach() nobody else has this object, so nobody else could detach it.
            self.detach()
            raise
        self._guards.release_optimizer()
        return self

    def step(self, loss_scale: LossScale = 1.0) -> None:
        """Precondition all gradients in place; first update factors and decompositions if due.

        All ranks of the collective must call it.

        Args:
            loss_scale: What multiplied the loss before backward, equal on all ranks. With a
                GradScaler, call ``scaler.unscale_(optimizer)`` first and pass the method
                ``scaler.get_scale``. K-FAC calls it only when factors are due. A weight that
                differs between ranks belongs to :attr:`loss_weight`.

        Raises:
            RuntimeError: :meth:`detach` or :meth:`attach` was called before, K-FAC has written
                these gradients already, or ``fisher`` is not ``empirical`` and
                :meth:`fisher_backward` was not called.
            ValueError: A schedule has a value out of range at this step, or the optimizer has
                ``lr=None`` and a limit of the step needs a learning rate.
        """
        if self._attachment is not None:
            raise RuntimeError(
                "step() after attach(): optimizer.step() runs K-FAC itself; remove this call"
            )
        self._step(loss_scale)

    def _step_in_hook(self, loss_scale: LossScale) -> None:
        if any(takes_gradient(layer.weight) for layer in self._layers):
            remedy = "remove attach(), and call step() inside whole_gradients(engine)"
            if self.plan.method == EIGEN_ADAM:
                remedy = "EigenAdam needs whole weights, so use ZeRO stage 0"
            raise RuntimeError(
                "attach() with DeepSpeed's ZeRO, which leaves each rank a part of the gradients: "
                f"{remedy} (docs/reference/backends.md)"
            )
        order = self._guards.order
        # An optimizer may step without a new backward: frameworks do so to make its state.
        is_idle = self.collective.world_size == 1 and not order.has_gradients()
        if is_idle or order.is_untouched() or self._makes_state():
            self._guards.statistics.see_model()  # other weights may have come
        else:
            self._step(loss_scale)

    def _has_new_forward(self) -> bool:
        return self._capture is not None and self._capture.has_forward

    def _makes_state(self) -> bool:
        """Return whether the optimizer steps without a backward, only to make its state.

        torch.distributed.checkpoint does so, with gradients of zeros and a learning rate of 0.
        """
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        # Other steps must not wait for the device, so a rate on the device counts as above 0.
        is_still = all(
            not (isinstance(lr, Tensor) and lr.device.type != "cpu") and lr == 0 for lr in rates
        )
        if self._capture is None or not is_still or self._capture.passes.has_gradients:
            return False
        if self.collective.world_size > 1:  # gradients may be zero on one rank only
            return not self._capture.has_forward
        return not any(x.weight.grad is not None and x.weight.grad.any() for x in self._layers)

    def _step(self, loss_scale: LossScale) -> None:
        if self._capture is None:
            raise RuntimeError(
                "step() after detach(): the hooks are off the model; build another KFAC"
            )
        if self._attachment is None:
            self._guards.order.check()
        first = self._first_steps
        with without_autocast(self._layers[0].weight):
            if first is not None:
                self._watch(first)
            else:
                self._stepper.run(
                    self.steps,
                    self._capture,
                    loss_scale,
                    track_cosine=self.track_cosine,
                    time_stages=self.time_stages,
                )
        self._capture.has_forward = False
        if self._coverage is not None:
            self._coverage.is_waiting = first is not None
        if first is not None:
            return
        self.steps += 1
        if self._coverage is not None and self._coverage.state is not None:
            self._coverage.state.forget()
        self._capture.enabled = self._schedules.factors_due(self.steps)

    def _watch(self, first: FirstSteps) -> None:
        """End one of the first steps, which the optimizer makes alone; after them, plan."""
        assert self._capture is not None
        seen = first.end_step(self._capture.pop())
        if self._capture.enabled:  # else nothing has begun, and a message would count as training
            self._executor.abandon_factors()
        self._capture.enabled = first.needs_statistics
        self._guards.see_gradients()
        if seen is not None:
            device, options = self._layers[0].weight.device, self._options
            adam = self._executor.solver.adam
            rates = measure(self.collective, device, options["method"], adam)
            ranks = self.collective.world_size
            self._rebuild(choose_within_budget(self._layers, ranks, options, seen, rates))

    def _rebuild(self, choice: Choice) -> None:
        """Build K-FAC again with the options of a choice."""
        self._guards.statistics.see_model()  # warns of layers that K-FAC will not cover
        loss_weight, model = self.loss_weight, self._stepper.wrapped() or self._stepper.model
        self._disconnect()
        self._build(model, within(self._options, choice), self._write_back)
        self.loss_weight, self.choice, self._first_steps = loss_weight, choice, None

    def fisher_backward(
        self,
        output: Tensor,
        likelihood: str = "categorical",
        *,
        dim: int | None = None,
        mask: Tensor | None = None,
        curvature: float = 1.0,
    ) -> None:
        """Send labels of the model's own distribution backward, for ``fisher="mc"`` or ``"type2"``.

        Call it between forward and ``backward`` in each step. It changes no ``.grad``. It returns
        at once if no factors are due, or with ``fisher="empirical"``.

        Args:
            output: The model's output, still attached to its graph.
            likelihood: The distribution whose negative logarithm is the loss.

                * ``categorical``: cross entropy of logits, mean over all positions.
                * ``gaussian``: ``curvature / 2`` times the squared error.
                * ``bernoulli``: binary cross entropy of logits.

                The latter two are sums over all dimensions but the first, mean over the first.
            dim: The dimension of the classes, for ``categorical``. Default: the last one. With four
                or more dimensions there is no default, because torch's ``cross_entropy`` has the
                classes of images in dimension 1.
            mask: For ``categorical``, a tensor in the shape of ``output`` without ``dim``.
                Positions with 0 are not in the loss.
            curvature: Second derivative of the loss, for ``gaussian``.

        Raises:
            ValueError: ``likelihood`` is unknown, ``output`` has no graph, or it needs ``dim``.
            RuntimeError: The model has tensor-parallel layers, whose ranks would draw different
                labels. Or an earlier call has reached a layer in the same forward.
        """
        capture = self._capture
        if capture is None or not capture.enabled or self.fisher == "empirical":
            return
        if capture.passes.paused:
            return
        if not output.requires_grad:
            raise ValueError(
                "fisher_backward(output): the output has no graph, so no labels can be sent back; "
                "pass what the model returned, without detach()"
            )
        if dim is None and likelihood == "categorical" and output.ndim > 3:
            raise ValueError(
                f"fisher_backward(output): the output has {output.ndim} dimensions; name that of "
                "the classes: dim=1 for images, dim=-1 for the last one"
            )
        dim = -1 if dim is None else dim
        self._stepper.has_sent_labels = True
        seeds, magnitude = fishers.seeds(
            output, self.fisher, likelihood, dim=dim, mask=mask, curvature=curvature
        )
        capture.backward(output, seeds, magnitude)

    @property
    def loss_weight(self) -> float:
        """The weight of this rank's loss, beside the loss scale. Set it before ``backward``.

        It is 1 unless ranks have unequal shares of a batch and weigh their mean losses by them.
        With 0 the rank adds no statistics.
        """
        return self._executor.batch_statistics.loss_weight

    @loss_weight.setter
    def loss_weight(self, weight: float) -> None:
        self._executor.batch_statistics.loss_weight = weight

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Wrap each backward of a step but the last one; only ``overlap=True`` needs it."""
        sender = None if self._capture is None else self._capture.sender
        if sender is not None:
            sender.accumulating = True
        try:
            yield
        finally:
            if sender is not None:
                sender.accumulating = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let forwards and backwards inside the block leave no statistics.

        Gradients are computed as usual. Use it for a pass that adds to ``.grad`` of the covered
        layers but does not belong to the loss whose curvature K-FAC should see. A pass whose
        gradients are discarded needs no ``pause()``.
        """
        with nullcontext() if self._capture is None else self._capture.passes.pause():
            yield

    def adapt_damping(self, loss: Tensor, loss_after: Callable[[], Tensor]) -> None:
        """Let ``damping=LevenbergMarquardt(...)`` judge the step; call it after ``optimizer.step``.

        Other dampings ignore the call. In training mode, ``loss_after`` moves the running averages
        of batch norm once more. A loss that is not finite makes the damping grow.

        Args:
            loss: The loss of the step, unscaled.
            loss_after: Computes the loss of the same batch again, with the new weights. It is
                called every few steps; see :attr:`will_adapt_damping`.
        """
        self._stepper.adapt_damping(loss, loss_after)

    def statistics(self) -> dict[str, Any]:
        """Return metrics of the last step. The call waits for the device.

        Returns:
            ``nu``: the factor by which the limits shrank the norm of the step, from 0 to 1; None
            without ``trust_ratio`` and ``kl_clip``. With ``kl_clip`` alone it is nu of eq. 16.
            ``cosine``: by layer, the cosine between the gradient and the preconditioned gradient;
            empty unless :attr:`track_cosine` was set.
            ``stage_s``: as :attr:`stage_s`.
        """
        return self._write_back.statistics() | {"stage_s": self.stage_s}

    def conditions(self) -> dict[str, float]:
        """Return the condition number of the damped curvature of each layer.

        This is the largest eigenvalue of what K-FAC inverts, divided by the smallest one: 1 means
        that K-FAC scales all directions equally. With ``method="inverse"`` it is estimated by the
        power method, usually a little too small. The call waits for the device.

        Returns:
            The condition number by layer, for layers whose decompositions this rank keeps. Empty
            if there is no new decomposition since the last call, and for ``eigen_adam`` and
            ``identity``, which invert nothing.
        """
        specs = [layer.spec for layer in self._layers]
        return self._executor.solver.conditions(specs, self.damping)

    @property
    def layer_names(self) -> list[str]:
        """The names of the covered layers, equal on all ranks."""
        return [layer.name for layer in self._layers]

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds of the last step on this rank, by kind of op; reading it waits for no device."""
        return dict(self._executor.stage_s)

    @property
    def stage_names(self) -> list[str]:
        """All keys that :attr:`stage_s` can have, sorted; equal on all ranks."""
        # The hooks' time counts as ComputeFactor, even where the plan has no such op.
        kinds = {type(op).__name__ for op in self.plan.ops()}
        return sorted(kinds | {"ComputeFactor", "WriteBack"})

    @property
    def damping(self) -> float | None:
        """The damping of the next step; None: relative to the mean eigenvalue of each layer."""
        return self._schedules.at(self.steps).damping

    @property
    def update_freq(self) -> int:
        """Steps between two decompositions of a factor, as of the next step."""
        return self._schedules.at(self.steps).update_freq

    @property
    def will_decompose_all(self) -> bool:
        """True if the next step decomposes all factors at once, and so takes long."""
        return self._first_steps is None and self._stepper.will_decompose_all(self.steps)

    @property
    def will_adapt_damping(self) -> bool:
        """True if :meth:`adapt_damping` has work to do after the next step."""
        return self._stepper.will_adapt_damping(self.steps)

    @property
    def decomposed(self) -> tuple[int, int]:
        """Two counts: factors that this rank has decomposed in this step, and all of its factors.

        Another thread may read it while :meth:`step` runs, to show progress.
        """
        return self._stepper.decomposed()

    @property
    def failed_decompositions(self) -> int:
        """Decompositions on this rank that failed in float32 and in float64, since the start."""
        return self._executor.solver.failed

    @property
    def dropped_statistics(self) -> int:
        """Statistics of this rank that were left out because they were not finite."""
        return self._executor.batch_statistics.dropped

    def fingerprint(self) -> dict[str, str]:
        """Return values, by name, that must be equal on all ranks after each step."""
        return {"K-FAC plan": self.plan.digest(), "damping": repr(self.damping)}

    def report(self) -> Report:
        """Return the report on covered layers, skipped modules, and the cost on this rank.

        ``print`` it, or read its fields.
        """
        reasons = dict.fromkeys(self._guards.statistics.missing, "its gradient has no statistics")
        left = self._executor.gradients.left
        unread = set() if self._capture is None else self._capture.unread
        reasons |= dict.fromkeys(left, "its statistics are not those of its gradient")
        reasons |= dict.fromkeys(left & unread, "K-FAC cannot read its inputs or outputs")
        left_out = [
            SkippedModule(x.name, type(x.modules[0]).__name__, x.spec.grad_numel, reasons[x.name])
            for x in self._layers
            if x.name in reasons
        ]
        layers = [layer for layer in self._layers if layer.name not in reasons]
        skipped = [*self._skipped, *left_out]
        return Report(self.plan, self.collective.rank, layers, skipped, self.choice)

    @property
    def is_detached(self) -> bool:
        """True after :meth:`detach`."""
        return self._capture is None

    def detach(self) -> None:
        """Remove all hooks from model and optimizer.

        The preconditioner cannot be used afterwards.
        """
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None
        self._disconnect()
        self._capture = None

    def _disconnect(self) -> None:
        """Remove what :meth:`_build` has put on model and optimizer."""
        if self._capture is not None:
            self._capture.remove()
        if self._executor.background is not None:
            self._executor.background.stop()
        if self._coverage is not None:
            self._coverage.remove()
        self._guards.remove()
        self._finalizer.detach()  # it keeps the hooks, and with them the factors
        release(self, self._layers)

    @staticmethod
    def detach_all(model: nn.Module) -> None:
        """Detach each KFAC that is on a layer of ``model``.

        In a notebook this removes a KFAC that no variable holds any more.
        """
        for owner in [*owners(model.modules())]:
            owner.detach()

    def state_dict(self, *, shard: bool = False) -> dict[str, Any]:
        """Return the state by layer, without communication.

        The state does not depend on wrappers of the model, the number of ranks or the strategy. By
        default it is everything that this rank holds: running factors, and decompositions of the
        layers that it preconditions. To continue bit by bit, save the shards of all ranks and pass
        all of them to :meth:`load_state_dict`. With the state of one rank, missing decompositions
        are computed again at the next step. One state is not enough if no rank keeps all factors
        (``owner_reduce``, ``local_factors``).

        Args:
            shard: Return only what this rank decomposes. The shards of all ranks together hold
                everything once.
        """
        # Without shapes, torch.distributed.checkpoint could not load into a new KFAC.
        layers = (
            state.layers_state(self._executor, shard=shard)
            if self.steps
            else dict(state.empty_layers(self._executor))
        )
        saved: dict[str, Any] = {"steps": self.steps, "layers": layers}
        if self._adaptive is not None:
            saved["damping"] = self._adaptive.value
        saved["left"] = sorted(self._executor.gradients.left)
        if (choice := self.saved_choice) is not None:
            saved["choice"] = choice
        return saved

    @property
    def saved_choice(self) -> dict[str, Any] | None:
        """The choice of ``max_overhead`` as a state contains it; None without this option."""
        if self._options["max_overhead"] is None:
            return None
        return asdict(self.choice or NO_CHOICE)

    @property
    def holds_whole_state(self) -> bool:
        """True if :meth:`state_dict` of each rank has everything."""
        return state.is_whole(self._executor)

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load one :meth:`state_dict`, or the shards of all ranks.

        Every rank must load the same dicts. With ``max_overhead``, K-FAC takes over the choice of
        the state; if the state has steps but no choice, the options stay as they are.

        Raises:
            ValueError: A layer is missing, unknown or has another shape, or the state is damaged.
                The running averages have not changed then.
        """
        merged = state.merge(states)
        layers, choice = self._layers, None
        if self._options["max_overhead"] is not None:
            choice = state_check.choice(states)
        is_first = choice is None and all(each.get("steps") == 0 for each in states)
        if (choice is not None and choice != self.choice) or (is_first and self.choice):
            # Blocks and diagonals of a choice give factors other shapes. The check comes before
            # the rebuild, which forgets the running averages.
            options = self._options if choice is None else within(self._options, choice)
            layers, _ = covered_layers(self._stepper.model, options, self._layer_types)
        steps = state_check.check(merged, states, layers, has_factors=bool(self.plan.factors))
        if choice is not None and choice != self.choice:
            self._rebuild(choice)
        if not steps:
            merged = {}
        if self._capture is not None:
            # Statistics that were collected before belong to the old state, which a thread may
            # still read.
            self._capture.pop()
            self._executor.abandon_factors()
        complete = state.load_layers(merged, self._executor, steps)
        if steps and (lacking := state_check.without_moments(merged, self.plan, states)):
            warnings.warn(
                f"the K-FAC state lacks Adam's moments of {len(lacking)} layers, such as "
                f"{lacking[0]}, which start again at zero: pass state_dict(shard=True) of all "
                "ranks",
                stacklevel=2,
            )
        self.steps = steps
        self._guards.statistics.leave(states[0].get("left", ()))
        if self._first_steps is not None and steps > 0:
            self._first_steps = None
            if self._capture is not None and self._capture.identity is not None:
                self._capture.identity.due.update(self._capture.computed - self._capture.left)
        self._stepper.decomposes_all = steps > 0 and not complete
        if self._adaptive is not None and "damping" in states[0]:
            self._adaptive.value = float(states[0]["damping"])
        if self._capture is not None and self._first_steps is None:
            self._capture.enabled = self._schedules.factors_due(steps)
