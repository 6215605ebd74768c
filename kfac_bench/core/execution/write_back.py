"""The end of a step: write preconditioned gradients, grafted and clipped, into ``.grad``."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kfac_bench.core.distributed.collective import Collective
from kfac_bench.core.execution.adam import AdamOptions
from kfac_bench.core.execution.gradients import Gradients
from kfac_bench.core.kernels import linalg
from kfac_bench.core.layers.base import Layer


class WriteBack:
    """Writes the gradients of ``layers``, and keeps the metrics of the last step on the device.

    Args:
        layers: The layers that K-FAC covers.
        optimizer: Has the learning rates that both limits of the step read.
        others: Spans the ranks that hold the other layers of the model, if there are any.
        grafting: The option of KFAC.
        trust_ratio: The option of KFAC.
        before: What wrote until now, if K-FAC is built again.

    Raises:
        ValueError: The optimizer does not hold the weight or the bias of a layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        others: Collective | None,
        *,
        grafting: bool = False,
        trust_ratio: float | None = None,
        before: "WriteBack | None" = None,
    ) -> None:
        self._layers, self._optimizer, self._others = layers, optimizer, others
        self._has_grafting, self._trust_ratio = grafting, trust_ratio
        self._most_across = (
            linalg.MOST_ACROSS_ELEMENTWISE if _is_elementwise(optimizer) else linalg.MOST_ACROSS
        )
        self._group_of: dict[str, int] = {} if before is None else before._group_of
        self._group_ids: list[int] = [] if before is None else before._group_ids
        self._groups()
        self._nu: Tensor | None = None
        self._rows_of: tuple[list[str], Tensor] | None = None
        self._cosine: Tensor | None = None
        self._cosine_of: list[str] = []

    @property
    def names(self) -> set[str]:
        """The names of the layers."""
        return {layer.name for layer in self._layers}

    def _groups(self) -> dict[str, int]:
        """Return each layer's index in the optimizer's groups; a script may add or remove some."""
        ids, before = [id(group) for group in self._optimizer.param_groups], self._group_ids
        if ids != before:
            try:
                self._group_of = _find_param_groups(self._layers, self._optimizer)
            except ValueError:
                # DeepSpeed replaces the parameters of each group by one flat parameter, and loading
                # a state replaces the groups.
                if len(ids) != len(before):
                    raise
            self._group_ids = ids
        return self._group_of

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each layer's weight.

        Raises:
            ValueError: The optimizer chooses its rate itself.
        """
        groups = self._optimizer.param_groups
        rates: dict[str, float] = {}
        for name, index in self._groups().items():
            if (rate := groups[index].get("lr")) is None:
                raise ValueError(
                    f"{type(self._optimizer).__name__} has no lr, but K-FAC needs the learning "
                    "rate: give the optimizer a rate, or set trust_ratio=None and kl_clip=None"
                )
            rates[name] = float(rate)
        return rates

    def adam_options(self) -> dict[str, AdamOptions]:
        """Return the options of the parameter group of each layer's weight, for EigenAdam."""
        made = []
        for group in self._optimizer.param_groups:
            beta1, beta2 = group["betas"]
            made.append(
                AdamOptions(float(group["lr"]), (float(beta1), float(beta2)), float(group["eps"]))
            )
        return {name: made[index] for name, index in self._groups().items()}

    def write(self, gradients: Gradients, kl_clip: float | None, *, track_cosine: bool) -> None:
        """Write preconditioned gradients into ``.grad``; no KL clip if ``kl_clip`` is None."""
        names, has_limit = gradients.names, kl_clip is not None or self._trust_ratio is not None
        self._nu, products = None, None
        scales: tuple[Tensor, Tensor] | None = None
        limits: Tensor | None = None
        if names and (has_limit or self._has_grafting):
            products = gradients.products()
        if products is not None and self._has_grafting:
            dot, new, old = products.unbind(1)
            scales = p, g = linalg.graft(dot, new, old, self._most_across)
            # The limits judge what is written: p times the preconditioned gradient plus g times
            # the gradient.
            square = p.square() * new + 2 * p * g * dot + g.square() * old
            # A preconditioned gradient that does not count (p = 0) may be infinite.
            square = torch.where(p > 0, square, g.square() * old)
            products = torch.stack([torch.where(p > 0, p * dot, 0.0) + g * old, square, old], 1)
        if has_limit:
            limits = self._limit(gradients, products, kl_clip)
        self._cosine_of = names if track_cosine else []
        if self._cosine_of:
            self._cosine = gradients.cosines()
        if scales is not None:
            shrunk = scales if limits is None else (scales[0] * limits, scales[1] * limits)
            gradients.write(shrunk[0].unbind(), shrunk[1].unbind())
        else:
            gradients.write(None if limits is None else limits.unbind())

    def _limit(
        self, gradients: Gradients, products: Tensor | None, kl_clip: float | None
    ) -> Tensor | None:
        """Return the factor of each layer: its trust ratio, times the KL clip of the whole model.

        ``products`` are those of :meth:`WholeGradients.products`, None if backward reached no
        layer. The result is None then.
        """
        others, limits = self._others, None
        if products is not None:
            rates = self.learning_rates()
            dots, squares = linalg.times_rates_squared(
                products[:, :2].T, [rates[name] for name in gradients.names]
            )
            limits = torch.ones_like(squares)
            if self._trust_ratio is not None:
                weights = gradients.weight_squares().to(squares.dtype)
                size = torch.maximum(weights, self._rows(gradients.names, squares))
                limits = linalg.trust_scale(squares, size, self._trust_ratio)
            sums = torch.stack([(limits * dots).abs(), limits.square() * squares, squares]).sum(1)
        elif others is None:
            return None
        else:
            # Other stages of the pipeline wait for this stage's part of the sums, even for 0.
            sums = torch.zeros(3, device=self._layers[0].weight.device)
        if others is not None and others.world_size > 1:
            ranks = tuple(range(others.world_size))
            others.all_reduce(sums, ranks, "model_parallel/limit").wait()
        change, shrunk, square = sums.unbind()
        # Nothing shrinks a step of 0. If gradients are not finite, neither is nu.
        self._nu = torch.where(square == 0, 1.0, (shrunk / square).sqrt())
        if kl_clip is not None:
            clip = linalg.kl_clip_scale(change, kl_clip)
            self._nu = self._nu * clip
            limits = None if limits is None else limits * clip
        return limits

    def _rows(self, names: Sequence[str], like: Tensor) -> Tensor:
        """Return the rows of each layer's weights, [names], on the device of ``like``.

        The tensor is kept: to make it in each step would copy numbers to the device.
        """
        if self._rows_of is None or self._rows_of[0] != names:
            specs = [layer.spec for layer in self._layers]
            rows = {spec.name: spec.groups * spec.g_dim for spec in specs}
            self._rows_of = [*names], like.new_tensor([rows[name] for name in names])
        return self._rows_of[1]

    def statistics(self) -> dict[str, Any]:
        """Return ``nu`` and ``cosine`` of :meth:`KFAC.statistics`, on the host."""
        cosine = [] if not self._cosine_of or self._cosine is None else self._cosine.tolist()
        return {
            "nu": None if self._nu is None else self._nu.item(),
            "cosine": dict(zip(self._cosine_of, cosine, strict=True)),
        }


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer divides each element of a gradient by its size.

    Its options say so: those of the averages of squares (Adam, RMSprop, Adadelta, Adagrad,
    Adafactor) or signs (Lion, Rprop). ASGD has another alpha, SAM before SGD another rho.
    """
    either = {"betas", "lr_decay", "beta2_decay", "etas", "clip_threshold"}

    def says_so(options: Collection[str]) -> bool:
        is_rmsprop = "alpha" in options and "lambd" not in options
        is_adadelta = "rho" in options and "eps" in options
        return is_rmsprop or is_adadelta or not either.isdisjoint(options)

    return any(says_so(group) for group in optimizer.param_groups)


def _find_param_groups(layers: Sequence[Layer], optimizer: Optimizer) -> dict[str, int]:
    """Return each layer's index in the optimizer's groups, which have the learning rates."""
    index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for kind in ("weight", "bias"):
        parameters = {layer.name: getattr(layer, kind) for layer in layers}
        missing = [n for n, p in parameters.items() if p is not None and id(p) not in index]
        if missing:
            raise ValueError(
                f"the optimizer does not hold the {kind} of {', '.join(missing[:3])}"
                f"{' and other layers' if len(missing) > 3 else ''}, but K-FAC changes its "
                f"gradient: pass each {kind} to this optimizer, freeze it, or name the layers in "
                "skip"
            )
    return {layer.name: index[id(layer.weight)] for layer in layers}
