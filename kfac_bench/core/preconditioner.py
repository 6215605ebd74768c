"""K-FAC as a gradient preconditioner: the public face of the package.

Usage::

    preconditioner = KFAC(model, optimizer, damping=1e-3, update_freq=100)
    ...
    loss.backward()
    preconditioner.step()  # gradients are preconditioned in place
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_bench.core import linalg
from kfac_bench.core.capture import Capture
from kfac_bench.core.collective import Collective, check_same_on_all_ranks, default_collective
from kfac_bench.core.executor import Executor, Request
from kfac_bench.core.factors import CONVENTIONS
from kfac_bench.core.layers import find_layers, unwrap
from kfac_bench.core.plan import FACTORS, Factor, Stage, make_plan
from kfac_bench.core.report import Report

Schedule = float | Callable[[int], float]
"""A number, or a function of the step (0 at the first)."""


class KFAC:
    """Preconditions ``.grad`` of Linear and Conv2d layers by the Kronecker-factored Fisher.

    Call :meth:`step` between ``backward`` and ``optimizer.step``, with gradients already averaged
    over ranks (DistributedDataParallel does so), unscaled if a GradScaler is used, and not yet
    clipped. The loss must be a mean over the examples of the step; with gradient accumulation,
    over all micro-batches. The learning rate is read from ``optimizer`` at each step.

    Keyword arguments; those marked * take a number or a function of the step:

    strategy: who computes what on several ranks: ``comm_opt`` (default), ``layer_wise``,
        ``mem_opt``, ``hybrid_opt``; see :mod:`kfac_bench.core.plan`.
    grad_worker_fraction: for ``hybrid_opt``, the share of ranks that precondition a layer.
    method: ``eigen`` (eq. 11-13) or ``inverse`` (eq. 9-10, by Cholesky).
    damping*: gamma > 0, Tikhonov; of the Kronecker product (eigen), of each factor (inverse).
    kl_clip*: kappa of eq. 16; None for no clip.
    update_freq*, factor_update_freq*: steps between decompositions, and between factor updates.
    factor_decay*: weight of the *old* factor in the running average, in [0, 1); averages are
        debiased. The paper's xi (eq. 14-15) weighs the new one: xi = 0.95 is 0.05 here.
    factor_convention: ``kfc``, ``sc20`` or ``kaisa``; see :data:`factors.CONVENTIONS`.
    skip: regular expressions of layers (by name or class name) left to the optimizer.
    collective: the communication backend; by default torch.distributed where initialised.

    Raises ``ValueError`` for a value out of range, a model with nothing to precondition, or
    parameters the optimizer does not know; ``RuntimeError`` if ranks disagree on the plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        strategy: str = "comm_opt",
        grad_worker_fraction: float = 0.5,
        method: str = "eigen",
        damping: Schedule = 1e-3,
        kl_clip: Schedule | None = 1e-3,
        update_freq: Schedule = 100,
        factor_update_freq: Schedule = 10,
        factor_decay: Schedule = 0.95,
        factor_convention: str = "kfc",
        skip: Sequence[str] = (),
        collective: Collective | None = None,
    ) -> None:
        if factor_convention not in CONVENTIONS:
            raise ValueError(
                f"factor_convention={factor_convention!r}: choose one of {', '.join(CONVENTIONS)}"
            )
        self.damping, self.kl_clip, self.factor_decay = damping, kl_clip, factor_decay
        self.update_freq, self.factor_update_freq = update_freq, factor_update_freq
        self.steps = 0
        self._decompose_now = False  # a loaded state lacked decompositions
        self.track_cosine = False
        """Compute per-layer cosines in the next step; read them with :meth:`statistics`."""
        self._model = unwrap(model)
        self._layers, self._skipped = find_layers(self._model, skip)
        if not self._layers:
            raise ValueError("the model has no Linear or Conv2d layer to precondition")
        self._optimizer = optimizer
        self._group_of = self._find_param_groups()
        self.collective = collective or default_collective()
        self.plan = make_plan(
            [layer.spec for layer in self._layers],
            self.collective.world_size,
            strategy=strategy,
            grad_worker_fraction=grad_worker_fraction,
            method=method,
        )
        schedules = (self.update_freq, self.factor_update_freq, self.kl_clip or 0)
        options = [*self._read_schedules(0), *(_at(s, 0) for s in schedules), factor_convention]
        device = self._layers[0].weight.device
        check_same_on_all_ranks(self.collective, f"{self.plan.digest()} {options}", device)
        self.collective.prepare(sorted({op.ranks for op in self.plan.ops() if len(op.ranks) > 1}))
        self._executor = Executor(
            self.plan, self.collective, self._layers, CONVENTIONS[factor_convention]
        )
        self._capture: Capture | None = Capture(self._model, self._layers)
        self._nu: Tensor | None = None
        self._cosine: Tensor | None = None
        self._cosine_of: list[str] = []

    def _find_param_groups(self) -> dict[str, int]:
        """Index of the optimizer's parameter group, and so the learning rate, of each layer."""
        index = {
            id(p): i
            for i, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
        }
        missing = [layer.name for layer in self._layers if id(layer.weight) not in index]
        if missing:
            raise ValueError(
                f"the optimizer does not hold the weights of {missing[:3]}: pass them to it, "
                "freeze them, or name them in skip"
            )
        return {layer.name: index[id(layer.weight)] for layer in self._layers}

    @torch.no_grad()
    def step(self) -> None:
        """Update factors and decompositions where due; precondition all gradients in place."""
        if self._capture is None:
            raise RuntimeError("step() after detach(): the hooks are off the model")
        damping, factor_decay, stages = self._read_schedules(self.steps)
        grads = {n: g for n, g in ((x.name, x.get_grad()) for x in self._layers) if g is not None}
        collected = self._capture.pop() if Stage.FACTORS in stages else {}
        preconditioned = self._executor.run(
            Request(stages, damping, factor_decay, collected, grads)
        )
        stage_s = self._executor.stage_s
        stage_s["ComputeFactor"] = stage_s.get("ComputeFactor", 0.0) + self._capture.seconds
        self._capture.seconds = 0.0
        with self._executor.timed("WriteBack"):
            self._write_back(grads, preconditioned)
        self._decompose_now = False
        self.steps += 1
        self._capture.enabled = Stage.FACTORS in self._read_schedules(self.steps)[2]

    def _read_schedules(self, step: int) -> tuple[float, float, list[Stage]]:
        """Damping, factor decay and due stages at ``step``; ``ValueError`` out of range."""
        damping, decay = _at(self.damping, step), _at(self.factor_decay, step)
        if not damping > 0:
            raise ValueError(f"damping={damping} at step {step}: must be above 0")
        if self.kl_clip is not None and not _at(self.kl_clip, step) > 0:
            raise ValueError(f"kl_clip={_at(self.kl_clip, step)} at step {step}: must be above 0")
        if not 0 <= decay < 1:
            raise ValueError(f"factor_decay={decay} at step {step}: must be in [0, 1)")
        due = []
        for stage, name in (
            (Stage.FACTORS, "factor_update_freq"),
            (Stage.DECOMPOSE, "update_freq"),
        ):
            interval = _at(getattr(self, name), step)
            if interval < 1 or interval != int(interval):
                raise ValueError(f"{name}={interval} at step {step}: must be a whole number >= 1")
            if step % int(interval) == 0:
                due.append(stage)
        if self._decompose_now and Stage.DECOMPOSE not in due:
            due.append(Stage.DECOMPOSE)
        return damping, decay, [*due, Stage.PRECONDITION]

    def _write_back(self, grads: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        names = [layer.name for layer in self._layers if layer.name in grads]
        pairs = [(new[n], grads[n]) for n in names]
        self._nu = None
        if self.kl_clip is not None and pairs:
            lrs = [float(self._optimizer.param_groups[self._group_of[n]]["lr"]) for n in names]
            self._nu = linalg.kl_clip_scale(
                [p for p, _ in pairs],
                [g for _, g in pairs],
                lrs,
                _at(self.kl_clip, self.steps),
            )
        self._cosine_of = names if self.track_cosine else []
        if self.track_cosine and pairs:
            self._cosine = torch.stack(
                [nn.functional.cosine_similarity(p.flatten(), g.flatten(), 0) for p, g in pairs]
            )
        for layer in self._layers:
            if layer.name in grads:
                grad = new[layer.name]
                layer.set_grad(grad if self._nu is None else grad * self._nu)

    def statistics(self) -> dict[str, Any]:
        """Figures of the last step, on the host.

        ``nu`` of eq. 16 (None: no clip), ``cosine`` by layer (empty unless ``track_cosine`` was
        set), ``stage_s`` seconds by kind of op.
        """
        cosine = [] if not self._cosine_of or self._cosine is None else self._cosine.tolist()
        return {
            "nu": None if self._nu is None else self._nu.item(),
            "cosine": dict(zip(self._cosine_of, cosine, strict=True)),
            "stage_s": dict(self._executor.stage_s),
        }

    @property
    def failed_decompositions(self) -> int:
        """Decompositions that failed on this rank, in float32 and float64, since the start."""
        return self._executor.failed_decompositions

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
        decompositions are made anew from the factors at the next step.
        """
        run = self._executor
        layers: dict[str, dict[str, dict[str, Any]]] = {}
        for placement in self.plan.placements:
            name = placement.layer.name
            layers[name] = {}
            for factor in FACTORS:
                key = (name, factor)
                if key not in run.factors:
                    continue
                if shard and placement.worker(factor) != self.collective.rank:
                    continue
                entry: dict[str, Any] = {"factor": run.factors[key], "weight": run.weights[key]}
                if key in run.decompositions:
                    entry[self.plan.method] = list(run.decompositions[key])
                layers[name][factor] = entry
        return {"steps": self.steps, "layers": layers}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Take over the state of one or several :meth:`state_dict` (shards of all ranks).

        Raises ``ValueError`` if a layer is missing, unknown or of another shape; then nothing
        has changed. Every rank must load the same dicts.
        """
        merged: dict[str, dict[Factor, dict[str, Any]]] = {}
        for state in states:
            for name, entries in state["layers"].items():
                for factor, entry in entries.items():
                    merged.setdefault(name, {}).setdefault(factor, {}).update(entry)
        expected = {layer.name: layer.spec for layer in self._layers}
        unknown = sorted(merged.keys() - expected.keys())
        if unknown:
            raise ValueError(f"K-FAC state has layers this model lacks: {unknown[:3]}")
        steps = max(int(state["steps"]) for state in states)
        for name, spec in expected.items():
            for factor in FACTORS:
                got = merged.get(name, {}).get(factor, {}).get("factor")
                n = spec.dim(factor)
                if steps > 0 and (got is None or tuple(got.shape) != (n, n)):
                    found = "nothing" if got is None else list(got.shape)
                    raise ValueError(
                        f"K-FAC state of {name}: expected a [{n}, {n}] {factor}, found {found}; "
                        "pass the state of every rank that saved one, and the same model"
                    )
        self._take(merged, steps)

    def _take(self, merged: Mapping[str, Mapping[Factor, Mapping[str, Any]]], steps: int) -> None:
        run, complete = self._executor, True
        for held in (run.factors, run.weights, run.decompositions):
            held.clear()
        for placement in self.plan.placements:
            name = placement.layer.name
            device = run.layers[name].weight.device
            for factor, entry in merged.get(name, {}).items():
                key = (name, factor)
                run.factors[key] = entry["factor"].to(device, copy=True)
                run.weights[key] = entry["weight"].to(device, copy=True)
                saved = entry.get(self.plan.method)
                complete = complete and saved is not None
                if saved is not None and self.collective.rank in placement.grad_workers:
                    run.decompositions[key] = tuple(x.to(device, copy=True) for x in saved)
        self.steps = steps
        self._decompose_now = steps > 0 and not complete
        if self._capture is not None:
            self._capture.pop()
            self._capture.enabled = Stage.FACTORS in self._read_schedules(steps)[2]


def _at(schedule: Schedule, step: int) -> float:
    return float(schedule(step) if callable(schedule) else schedule)
