"""K-FAC as a gradient preconditioner: the public face of the package.

``from kfac_bench import KFAC`` gives the class of this file. :mod:`.construction` builds its parts,
and :mod:`.stepper` runs a step with them. docs/explanation/architecture.md follows one gradient
through these files.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import wraps
from typing import Any, ParamSpec, Self

import torch
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
from kfac_bench.core.distributed.collective import Collective, default_collective
from kfac_bench.core.distributed.deepspeed_zero import takes_gradient
from kfac_bench.core.eigen_adam_optimizer import Coverage, find_eigen_adam
from kfac_bench.core.kfac_options import KFACOptions
from kfac_bench.core.layer_plan import Report, choose_within_budget
from kfac_bench.core.layers.coverage import DEFAULT_SKIP, MAX_DIM, LayerTypes, SkippedModule
from kfac_bench.core.optimizer_state import OptimizerState
from kfac_bench.core.planning.budget import Choice
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.core.schedule import Schedule
from kfac_bench.core.stepper import FirstSteps, Stepper, measure

P = ParamSpec("P")


def _remembers_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Let the object know which keywords the user gave: they win over those of a preset."""

    @wraps(init)
    def remembering(*arguments: P.args, **given: P.kwargs) -> None:
        arguments[0]._given = given.keys()  # type: ignore[attr-defined]
        init(*arguments, **given)

    return remembering


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

    Gradients may be clipped before K-FAC or after it. Training frameworks clip before
    ``optimizer.step()``, so with :meth:`attach` the clip comes first. A clip before K-FAC limits
    the influence of one batch. A clip after K-FAC limits the length of the step and needs another
    ``max_norm`` than without K-FAC; docs/how-to/clip_gradients.md compares both.

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
        preset: ``paper`` sets what the paper describes: ``method="eigen"``, ``damping=0.001``,
            ``kl_clip=0.001``, no trust ratio, no grafting, running averages that start at the
            identity, all decompositions in one step, and the scaling ``sc20`` of the released
            code. Other keywords win. None (default): the defaults below.
        strategy: Which rank computes what. One process does not need this option. The page
            docs/explanation/strategies.md compares the strategies in time, memory and messages.

            * ``comm_opt`` (default): every rank preconditions every layer. It sends least per
              step and needs most memory.
            * ``mem_opt``: one rank preconditions a layer and sends the result to the others. It
              needs least memory of those that keep all factors.
            * ``layer_wise``: like ``mem_opt``, but layers go to ranks in turn, whatever their
              size (Osawa et al. 2019).
            * ``hybrid_opt``: some ranks precondition a layer (KAISA). It lies between
              ``comm_opt`` and ``mem_opt``; see ``grad_worker_fraction``.
            * ``owner_reduce``: a factor is kept only on the rank that decomposes it.
            * ``local_factors``: factors are not sent at all. A rank computes the factors of its
              layers from its own part of the batch, so results depend on the number of ranks.
        grad_worker_fraction: Share of the ranks that precondition a layer, in (0, 1]. Only
            ``hybrid_opt`` (default 0.5), ``owner_reduce`` and ``local_factors`` (default: one
            rank) use it. A larger share sends fewer gradients and needs more memory.
        colocate_factors: Whether one rank decomposes both factors of a layer. By default
            ``comm_opt`` gives them to two ranks, and the other strategies to one. The blocks of
            ``block_size`` go to several ranks, but with ``inverse`` in ``owner_reduce`` and
            ``local_factors`` to one. Set True if an option needs both factors on one rank; K-FAC
            raises an error that says so.
        balance: What ranks get equal shares of: ``compute`` (default) is the measured time of
            the decompositions (core/planning/planner.py), ``memory`` is bytes.
        overlap: Whether to send statistics while backward still runs. Default False. Results are
            the same, bit by bit. Try True if messages take long. With gradient accumulation, run
            all backwards of a step but the last inside :meth:`accumulate` (or inside
            DistributedDataParallel's ``no_sync``, if ``model`` is its wrapper).
        method: How the damped inverse is computed.

            * ``inverse`` (default): Cholesky inverses of A and G (eq. 9-10). The damping is added
              to each factor.
            * ``eigen``: eigendecompositions of A and G (eq. 11-13). They take several times
              longer, and preconditioning takes twice as many operations; the damping is added to
              the product of the factors.
            * ``ekfac``: like ``eigen``, with eigenvalues replaced by second moments of the
              gradients in the eigenbasis (George et al. 2018). They change at each factor update.
            * ``eigen_adam``: Adam in the eigenbasis of A and G, without damping and limits; only
              with the optimizer :class:`~kfac_bench.core.eigen_adam_optimizer.EigenAdam`. Build
              both with :func:`kfac_bench.eigen_adam`. With ``early_updates`` the first intervals
              are shorter: with both intervals of 40 steps, statistics are due at steps 0, 5, 10,
              20, 40, 80 and so on. Decompositions follow at once, or in slices (see ``spread``).
            * ``identity``: a control for experiments. A and G are identities, so only the limits
              of the step remain.
        damping: How much is added to the eigenvalues of G kron A (Tikhonov damping).

            * None (default): for each layer the mean of these eigenvalues. So the damping follows
              the scale of the loss and of the layer. ``inverse`` adds the mean eigenvalue of A
              to A, and that of G to G. ``ekfac`` adds the mean of the second moments.
            * A schedule of gamma > 0, the same for all layers, as in the papers.
            * A :class:`~kfac_bench.core.damping.LevenbergMarquardt`, which adapts gamma itself
              (see :meth:`adapt_damping`).

            If you set gamma, it is the most important option: larger values are safer and
            make K-FAC more like the plain optimizer. Try powers of 10 from 1e-4 to 1e-1.
        factored_damping: Whether to split gamma between A and G by their mean eigenvalues (the pi
            of Martens & Grosse 2015, section 6.3). A gets pi sqrt(gamma), G gets
            sqrt(gamma) / pi. Default False. ``ekfac`` ignores it.
        trust_ratio: Limit of a step (default 0.005). If the preconditioned gradients times the
            learning rate have a norm of more than this share of the norm of the weights, over all
            layers that K-FAC covers, all of them are shrunk to it. The step of SGD thus stays in
            the neighbourhood that the curvature describes. Momentum may add up to longer steps.
            With Adam the limit has hardly an effect. None turns it off.
        kl_clip: A schedule of kappa > 0 in eq. 16 (default None: no clip; the paper has 1e-3). The
            KL clip shrinks all preconditioned gradients if the step would change the model's
            predictions too much. With ``grafting`` the sum of eq. 16 is no change of predictions
            any more, and it grows with the model: set ``grafting=False`` too.
        grafting: Whether each layer's preconditioned gradient is scaled so that its part along the
            layer's gradient is the gradient itself. The part across it is shortened to at most 3
            times the norm of the gradient; before optimizers that divide each element by its size,
            such as Adam, to half of this norm. A step then lowers the loss, to first order, as much
            as a step of the optimizer alone, and the usual learning rate stays right. Default True.
            Grafting to the *norm* of the gradient (Agarwal et al. 2020; Anil et al. 2020) makes
            shorter steps, which are slow at small rates. The limits of the step come after
            grafting. Set False to repeat a paper on K-FAC.
        update_freq: A schedule: steps between two decompositions of a factor (default 100). Fewer
            steps follow the curvature better and cost more time.
        factor_update_freq: A schedule: steps between two updates of A and G (default 10).
            ``update_freq`` should be a multiple of it.
        early_updates: Whether to decompose more often before step ``update_freq``: additionally at
            a tenth of it, rounded up to a step that updates factors, and at 2, 4 and 8 times that
            step. By default these are steps 10, 20, 40 and 80. With slices (see ``spread``) each
            slice follows within the steps until the next of these. Default True. The first
            decomposition has seen one batch only. In a model whose head starts at zero, that batch
            says nothing about the other layers.
        spread: Whether to decompose in slices, at different steps of an interval, so that no
            single step is long. Each factor is still decomposed every ``update_freq`` steps.
            False decomposes everything in one step, as the papers do; ranks then share the work.
            By default a single process spreads, and several ranks do not.
        background: Whether to compute statistics and decompositions on a thread during training.
            Default False. Try True if a CPU core is free: steps become shorter, and none of them
            is long. On a GPU the thread uses a stream of its own (not tested yet).

            * Statistics enter A and G in the same step as without the thread, with the same bits.
            * Decompositions come into use late by a fixed number of steps, about the distance of
              two slices (see ``spread``; all ranks spread). So results do not depend on the speed
              of the thread: if a result is late, the step waits.
            * Until both factors of a layer have a decomposition, its gradient stays as it is,
              except for the limits. The first decompositions come into use in steps 1 to 5.
            * The thread needs memory for copies of the factors of one slice. Inputs and gradients
              of up to 8 calls of layers stay in memory until it has read them.
            * ``overlap`` and ``spread=False`` cannot be combined with it.
        factor_decay: A schedule in [0, 1): the weight of the *old* factor in the running average
            (default 0.95, as in the released code of the paper). The paper's equations 14-15 write
            xi for the weight of the new factor, that is 1 - ``factor_decay``, and print no value.
        factor_init: How the running averages start. ``debiased`` (default) weighs the statistics
            only, so the first average is the first statistic. ``identity`` starts at the identity
            without debiasing, as the released code of the paper: after k updates the identity
            still has the weight ``factor_decay ** k``. Set it to repeat a paper.
        factor_convention: How batch statistics are scaled: ``kfc`` (default), ``sc20`` or
            ``kaisa``. Papers scale differently, so the same damping means another algorithm. If
            you copy a damping from a paper, set the paper's convention; see
            :data:`~kfac_bench.core.kernels.gram.CONVENTIONS`.
        fisher: Which gradients make G. ``empirical`` (default) takes the gradients of the loss and
            costs nothing extra. ``mc`` samples labels from the model's output. ``type2`` takes
            the exact expectation over these labels, with one backward per class, or per output of
            a ``gaussian`` or ``bernoulli`` likelihood. ``mc`` and ``type2`` need a call of
            :meth:`fisher_backward` in each step.
        weight_sharing: What to do with positions that share a weight (pixels, tokens). ``expand``
            (default) counts each position as a further sample. ``reduce`` first averages a and
            sums g over the positions, which is faster (Eschenhagen et al. 2023).
        state_dtype: ``torch.float32`` (default), ``torch.bfloat16`` or ``torch.float16``. The
            latter two keep and send factors and decompositions in half the bytes. Sums,
            eigenvalues, damping and gradients stay in float32.
        skip: Regular expressions. A module whose name or class name matches one is left to the
            optimizer. The default skips normalization and embedding layers, as the papers do;
            ``[]`` covers them too.
        max_dim: Largest number of rows of a factor (default 8192). Of a larger factor only the
            diagonal is kept. The G of a vocabulary head would need gigabytes otherwise.
        block_size: Divide a larger dense factor into diagonal blocks of at most this number of rows
            (default None: never). The fewest blocks are taken, of about equal size. A block of A
            has all kernel taps of its input channels, if ``block_size`` allows one channel. The
            rest of the factor counts as zero, and is neither computed nor kept nor sent. n/N blocks
            of N rows take about (N/n)^2 of the time of n rows, and the gradient workers of a layer
            share them. So try 512 to 2048 if ``report()`` or ``kfac-plan`` says that one factor
            bounds the decompositions. The step has another direction then, and training may need
            more steps. ``max_dim`` still makes a diagonal of what it limits.
            ``eigen_adam`` cannot be combined with it.
        max_overhead: Most time per step that K-FAC may take, as a share of a step of the optimizer
            alone: 0.25 allows a quarter more, on average over an interval. None (default): no
            limit. In the first 6 steps the optimizer works alone, while K-FAC measures it and the
            device. Then K-FAC makes the options ``max_dim``, ``block_size``, ``update_freq`` and
            ``factor_update_freq`` only as much coarser as the budget demands; :attr:`choice` and
            :meth:`report` say what it chose. A choice follows from times, so a second run may
            choose differently; set these four options instead, to repeat a run. A resumed run
            keeps the choice of its state. Time that training waits for other ranks' messages
            counts only as their measured latency and bandwidth predict.
        layer_types: Classes for module types of your own; see :mod:`kfac_bench.core.layers.base`.
        collective: The communication backend. By default it is torch.distributed or Horovod if
            one of them is initialized, else this process alone. It spans the ranks that hold the
            layers of ``model``: all ranks, or in a pipeline the ranks of one stage.
        model_parallel: A backend over the ranks that hold the *other* layers of the model, one
            per pipeline stage. The limits of the step then sum over all layers. Every stage
            must pass it and must cover at least one layer.

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
        TypeError: ``model`` is no ``torch.nn.Module``, or ``optimizer`` is no optimizer object.
        RuntimeError: Ranks made different plans, or another KFAC is on a layer of the model.
    """

    _given: Collection[str] = ()
    """The keywords that the user gave."""

    @_remembers_keywords
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        preset: str | None = None,
        strategy: str = "comm_opt",
        grad_worker_fraction: float | None = None,
        colocate_factors: bool | None = None,
        balance: str = "compute",
        overlap: bool = False,
        method: str = "inverse",
        damping: Schedule | None = None,
        factored_damping: bool = False,
        trust_ratio: float | None = 0.005,
        kl_clip: Schedule | None = None,
        grafting: bool = True,
        update_freq: Schedule = 100,
        factor_update_freq: Schedule = 10,
        early_updates: bool = True,
        spread: bool | None = None,
        background: bool = False,
        factor_decay: Schedule = 0.95,
        factor_init: str = "debiased",
        factor_convention: str = "kfc",
        fisher: str = "empirical",
        weight_sharing: str = "expand",
        state_dtype: torch.dtype = torch.float32,
        skip: Sequence[str] = DEFAULT_SKIP,
        max_dim: int = MAX_DIM,
        block_size: int | None = None,
        max_overhead: float | None = None,
        layer_types: LayerTypes | None = None,
        collective: Collective | None = None,
        model_parallel: Collective | None = None,
    ) -> None:
        options = KFACOptions(
            strategy=strategy,
            grad_worker_fraction=grad_worker_fraction,
            colocate_factors=colocate_factors,
            balance=balance,
            overlap=overlap,
            method=method,
            damping=damping,
            factored_damping=factored_damping,
            trust_ratio=trust_ratio,
            kl_clip=kl_clip,
            grafting=grafting,
            update_freq=update_freq,
            factor_update_freq=factor_update_freq,
            early_updates=early_updates,
            spread=spread,
            background=background,
            factor_decay=factor_decay,
            factor_init=factor_init,
            factor_convention=factor_convention,
            fisher=fisher,
            weight_sharing=weight_sharing,
            state_dtype=state_dtype,
            skip=skip,
            max_dim=max_dim,
            block_size=block_size,
            max_overhead=max_overhead,
            layer_types=layer_types,
        ).with_preset(preset, self._given)
        self.fisher, self.background = fisher, background
        self.collective = collective or default_collective()
        self._options, self._optimizer, self._others = options, optimizer, model_parallel
        self._attachment: Attachment | None = None
        self.steps = 0
        self.track_cosine = False
        self.time_stages = False
        self.in_optimizer_state = True
        self.choice: Choice | None = None
        self._build(model, options)
        if self._coverage is not None:
            self._take_waiting_state(self._coverage)
        self._first_steps: FirstSteps | None = None
        if max_overhead is not None:
            names = [layer.name for layer in self._layers]
            self._first_steps = FirstSteps(names, self.collective, self._layers[0].weight.device)
            if self._capture is not None and self._capture.identity is not None:
                self._capture.identity.due.clear()  # the time of statistics is measured

    def _build(self, model: nn.Module, options: KFACOptions) -> None:
        """Make all parts and connect them to the model."""
        parts = construction.build(model, self._optimizer, options, self.collective, self._others)
        self.plan = parts.plan
        self._layers, self._skipped, self._coverage = parts.layers, parts.skipped, parts.coverage
        self._schedules, self._adaptive = parts.schedules, options.adaptive_damping
        self._executor, self._write_back = parts.executor, parts.write_back
        self._guards = parts.guards
        self._capture: Capture | None = parts.capture
        self._stepper = Stepper(parts, self.fisher, self._adaptive)
        hooks: list[Removable] = [parts.capture, parts.guards]
        if parts.coverage is not None:
            hooks.append(parts.coverage)
        claim(self, self._layers, hooks)
        if self._attachment is not None:
            self._guards.release_optimizer()

    def _take_waiting_state(self, coverage: Coverage) -> None:
        """Load what EigenAdam has loaded before there was a KFAC."""
        coverage.state = OptimizerState(self, self._executor)
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
            RuntimeError: The preconditioner is attached already, or :meth:`detach` was called.
            TypeError: The optimizer is not a ``torch.optim.Optimizer``.
        """
        if self._capture is None:
            raise RuntimeError("attach() after detach(): build another KFAC")
        if self._attachment is not None:
            raise RuntimeError("attach() was called before: K-FAC already runs in optimizer.step()")
        try:
            self._attachment = Attachment(self._optimizer, self._step_in_hook, scaler)
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
                f"{remedy} (docs/how-to/deepspeed.md)"
            )
        order = self._guards.order
        # An optimizer may step without a new backward: frameworks do so to make its state.
        is_idle = self.collective.world_size == 1 and not order.has_gradients()
        if is_idle or order.is_untouched() or self._makes_state():
            self._guards.statistics.see_model()  # other weights may have come
        else:
            self._step(loss_scale)

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
        if self._first_steps is not None:
            self._watch(self._first_steps)
            return
        self._stepper.run(
            self.steps,
            self._capture,
            loss_scale,
            track_cosine=self.track_cosine,
            time_stages=self.time_stages,
        )
        self.steps += 1
        self._capture.has_forward = False
        if self._coverage is not None and self._coverage.state is not None:
            self._coverage.state.forget()
        self._capture.enabled = self._schedules.factors_due(self.steps)

    def _watch(self, first: FirstSteps) -> None:
        """End one of the first steps, which the optimizer makes alone; after them, plan."""
        assert self._capture is not None
        seen = first.end_step(self._capture.pop())
        self._executor.abandon_factors()
        self._capture.enabled = first.needs_statistics
        self._guards.see_gradients()
        if seen is not None:
            device, options = self._layers[0].weight.device, self._options
            rates = measure(self.collective, device, options.method)
            ranks = self.collective.world_size
            self._take(choose_within_budget(self._layers, ranks, options, seen, rates))

    def _take(self, choice: Choice) -> None:
        """Build K-FAC again with the options of a choice."""
        loss_weight, model = self.loss_weight, self._stepper.wrapped() or self._stepper.model
        self._disconnect()
        self._build(model, self._options.within(choice))
        self.loss_weight, self.choice, self._first_steps = loss_weight, choice, None

    def fisher_backward(
        self,
        output: Tensor,
        likelihood: str = "categorical",
        *,
        dim: int = -1,
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
            dim: The dimension of the classes, for ``categorical``.
            mask: For ``categorical``, a tensor in the shape of ``output`` without ``dim``.
                Positions with 0 are not in the loss.
            curvature: Second derivative of the loss, for ``gaussian``.

        Raises:
            ValueError: ``likelihood`` is unknown.
            RuntimeError: The model has tensor-parallel layers, whose ranks would draw different
                labels. Or an earlier call has reached a layer in the same forward.
        """
        capture = self._capture
        if capture is None or not capture.enabled or self.fisher == "empirical":
            return
        if capture.passes.paused:
            return
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
            ``nu``: the factor by which the limits shrank the step (nu of eq. 16), from 0 to 1; None
            without ``trust_ratio`` and ``kl_clip``.
            ``cosine``: by layer, the cosine between the gradient and the preconditioned gradient;
            empty unless :attr:`track_cosine` was set.
            ``stage_s``: as :attr:`stage_s`.
        """
        return self._write_back.statistics() | {"stage_s": self.stage_s}

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
        """Whether the next step decomposes all factors at once, and so takes long."""
        return self._first_steps is None and self._stepper.will_decompose_all(self.steps)

    @property
    def will_adapt_damping(self) -> bool:
        """Whether :meth:`adapt_damping` has work to do after the next step."""
        return self._stepper.will_adapt_damping(self.steps)

    @property
    def decomposed(self) -> tuple[int, int]:
        """The factors that this rank has decomposed in the current step, and all of its factors.

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
        dropped = self._executor.batch_statistics.dropped
        return 0 if dropped is None else int(dropped)

    def fingerprint(self) -> dict[str, str]:
        """Return values, by name, that must be equal on all ranks after each step."""
        return {"K-FAC plan": self.plan.digest(), "damping": repr(self.damping)}

    def report(self) -> Report:
        """Return what is covered, what is not and why, and what it costs on this rank.

        ``print`` it, or read its fields.
        """
        left = self._executor.gradients.left
        reason = "its statistics are not those of its gradient"
        left_out = [
            SkippedModule(x.name, type(x.modules[0]).__name__, x.spec.grad_numel, reason)
            for x in self._layers
            if x.name in left
        ]
        layers = [layer for layer in self._layers if layer.name not in left]
        skipped = [*self._skipped, *left_out]
        return Report(self.plan, self.collective.rank, layers, skipped, self.choice)

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
            else state.empty_layers(self._executor)
        )
        saved: dict[str, Any] = {"steps": self.steps, "layers": layers}
        if self._adaptive is not None:
            saved["damping"] = self._adaptive.value
        if self._executor.gradients.left:
            saved["left"] = sorted(self._executor.gradients.left)
        if self.choice is not None:
            saved["choice"] = asdict(self.choice)
        return saved

    @property
    def holds_whole_state(self) -> bool:
        """Whether :meth:`state_dict` of each rank has everything."""
        return state.is_whole(self._executor)

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take over one :meth:`state_dict`, or the shards of all ranks.

        Every rank must load the same dicts. With ``max_overhead``, K-FAC takes over the choice of
        the state; if the state has steps but no choice, the options stay as they are.

        Raises:
            ValueError: A layer is missing, unknown or has another shape, or the state is damaged.
                The running averages have not changed then.
        """
        merged = state.merge(states)
        if self._options.max_overhead is not None:
            choice = state_check.choice(states)
            if choice is not None and choice != self.choice:
                self._take(choice)
        steps = state_check.check(merged, states, self._executor)
        if not steps:
            merged = {}
        complete = state.load_layers(merged, self._executor, steps)
        self.steps = steps
        self._guards.statistics.leave(states[0].get("left", ()))
        if steps > 0:
            self._first_steps = None
        self._stepper.decomposes_all = steps > 0 and not complete
        if self._adaptive is not None and "damping" in states[0]:
            self._adaptive.value = float(states[0]["damping"])
        if self._capture is not None:
            # Statistics that were collected before belong to the old state.
            self._capture.pop()
            self._executor.abandon_factors()
            if self._first_steps is None:
                self._capture.enabled = self._schedules.factors_due(steps)
