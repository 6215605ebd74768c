"""A layer as K-FAC sees it: a linear map y = W a, with its rows of a and g.

To cover a layer type of your own, derive from :class:`Layer` and define ``rows``. If ``weight`` is
not [outputs, inputs...], also define ``make_spec``, ``to_matrix`` and ``from_matrix``. Then pass
``layer_types={MyModule: MyLayer}`` to ``KFAC``. Override the other methods only for speed.

Shapes: N samples, s shared positions per sample, and ``groups`` independent maps of a grouped
convolution (1 elsewhere).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kfac_bench.core.distributed.dtensor import full, local
from kfac_bench.core.kernels.gram import Blocks, at_least_float32, gram, join_flat, times
from kfac_bench.core.planning.layer_spec import LayerSpec


class Call(NamedTuple):
    """One use of a layer in a forward."""

    x: Any
    """The input, detached. It is passed to the methods of the layer as ``x``."""
    edge: GradientEdge
    """The edge of the graph at which the gradient of the output can be read."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """Function from the tensor at ``edge`` to the gradient of the output, if they differ."""


SECOND_MOMENT_NUMEL = 1 << 22
"""Most elements of per-sample gradients in memory at once (16 MiB in float32)."""


class OtherForwardError(Exception):
    """The forward of a module is not what its layer class describes."""


class Layer(ABC):
    """A covered module: its shapes, its statistics, its gradient as one tensor of matrices.

    Args:
        name: The module's name in the model.
        module: The module, with a weight and perhaps a bias.
        max_dim: A factor with more rows is kept as a diagonal.
        weight: Name of the weight in the module.
        bias: Name of the bias in the module.
    """

    is_conv = False
    is_linear = False
    """True if the layer is a matrix that is applied to each sample and position."""
    may_be_orthogonalized = False
    """True if method eigen_adam may orthogonalize the update: the weight is a matrix of units."""
    may_be_time_first = False
    """True if samples may also be the second dimension of the input [time, N, ...]."""
    reads_saved_tensors = False
    """True if :meth:`calls` reads tensors that autograd saved."""
    forward_context: AbstractContextManager[Any] | None = None
    """A context for the forward of ``modules`` while statistics are collected."""
    part = slice(None)
    """Rows of weight and bias that belong to this layer, if several layers share a parameter."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        max_dim: int,
        weight: str = "weight",
        bias: str = "bias",
    ) -> None:
        self.name = name
        self.modules = [module]
        """Several modules if they share the weight. Their calls are further shared positions."""
        self.weight: Tensor = getattr(module, weight)
        own_bias = getattr(module, bias, None)
        has_bias = isinstance(own_bias, nn.Parameter) and own_bias.requires_grad
        self.bias: Tensor | None = own_bias if has_bias else None
        self.spec = self.make_spec(max_dim)

    @property
    def taps(self) -> int:
        """The columns of A that belong to one input channel; blocks of A keep them together."""
        return 1

    @classmethod
    def reason_to_skip(cls, module: nn.Module) -> str | None:
        """Return why this module cannot be covered, or None if it can."""
        return None

    @property
    def params(self) -> list[Tensor]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def is_same_map(self, other: "Layer") -> bool:
        """Return whether ``other`` multiplies by the same weight and bias in the same way.

        The two are one layer then.
        """
        same_parameters = self.weight is other.weight and self.bias is other.bias
        return type(self) is type(other) and same_parameters

    def make_spec(self, max_dim: int) -> LayerSpec:
        """Return the shapes. A factor with more than ``max_dim`` rows is kept as a diagonal."""
        a_dim = math.prod(self.weight.shape[1:]) + (self.bias is not None)
        g_dim = len(self.weight)
        return LayerSpec(
            self.name, a_dim, g_dim, a_diagonal=a_dim > max_dim, g_diagonal=g_dim > max_dim
        )

    def calls(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Iterator[Call]:
        """Yield the uses of the layer in the forward of ``module`` that has just ended.

        Raises:
            OtherForwardError: The layer cannot have made this output of this input.
        """
        if isinstance(output, Tensor) and output.requires_grad:
            # torch's modules call it input; it need not be the first keyword (output_size).
            x = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
            if not (isinstance(x, Tensor) and x.layout == torch.strided and self.fits(x, output)):
                raise OtherForwardError
            yield Call(self.computed_input(x, output), *_edge_of(output))

    def computed_input(self, x: Tensor, output: Tensor) -> Tensor:
        """Return the input as torch's function has used it, detached.

        If the function computes with a copy of the input, the result is a copy, too: a script may
        then change the input in place before backward.
        """
        return input_as_computed(x, output)

    def fits(self, x: Tensor, output: Tensor) -> bool:
        """Return whether :meth:`rows` and the moments can read this input and this output.

        A subclass that reads other shapes overrides it.
        """
        return True

    @abstractmethod
    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of a [groups, N, s, a_dim] and of g [groups, N, s, g_dim].

        With a bias, each row of a ends in a one.

        Args:
            x: The input, as the module got it.
            g: The gradient of the module's output, in the shape of that output.
        """

    def is_single(self, x: Any) -> bool:
        """Return whether the input is certainly one sample without a batch dimension."""
        return False

    def size(self, x: Tensor, g: Tensor) -> tuple[int, float]:
        """Return the number of samples N and of shared positions s of one call.

        If s differs between samples, it is the mean.
        """
        a_rows, _ = self.rows(x, g)
        return a_rows.shape[1], a_rows.shape[2]

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the sum of a a^T over samples and positions, in the shape of A.

        If A is divided, its blocks are enough: side by side, as :func:`.gram.flat_blocks`
        returns them.
        """
        return self.moment_of_a(self.rows(x, g)[0].flatten(1, 2))

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the sum of g g^T over samples and positions, as :meth:`moment_a`."""
        return self.moment_of_g(self.rows(x, g)[1].flatten(1, 2))

    def moment_of_a(self, rows: Tensor) -> Tensor:
        """Return the sum of a a^T of rows [groups, R, a_dim], as :meth:`moment_a`."""
        return moment(rows, diagonal=self.spec.a_diagonal, blocks=self.spec.a_blocks)

    def moment_of_g(self, rows: Tensor) -> Tensor:
        """Return the sum of g g^T of rows [groups, R, g_dim], as :meth:`moment_a`."""
        return moment(rows, diagonal=self.spec.g_diagonal, blocks=self.spec.g_blocks)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over positions: a [groups, N, a_dim] and g [groups, N, g_dim]."""
        a_rows, g_rows = self.rows(x, g)
        dtype = at_least_float32(x).dtype
        return a_rows.sum(2, dtype=dtype), g_rows.sum(2, dtype=dtype)

    def gradient(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of g a^T over samples and positions, and a bound of its norm.

        The sum [groups, g_dim, a_dim] is the gradient of weight and bias. The bound is the norm of
        all a times the norm of all g. A sum that is much smaller consists of rounding errors.
        """
        a, g = (at_least_float32(rows.flatten(1, 2)) for rows in self.rows(x, g))
        return g.mT @ a, a.norm() * g.norm()

    def _with_bias_sum(self, a: Tensor, positions: float) -> Tensor:
        """Append the column of the bias: a sum of ones over the positions."""
        if self.bias is None:
            return a
        return torch.cat([a, a.new_full((*a.shape[:-1], 1), positions)], dim=-1)

    def second_moment(
        self, calls: Sequence[tuple[Tensor, Tensor]], qa: Tensor | Blocks, qg: Tensor | Blocks
    ) -> Tensor:
        """Return the squared gradients in the eigenbasis, summed over samples.

        Of each sample: (Q_G^T (sum over positions of g a^T) Q_A)^2, EKFAC (George et al. 2018).

        Args:
            calls: All (x, g) of one forward. The gradient of a sample is the sum over them.
            qa: Eigenvectors of A, [groups, a_dim, a_dim], or those of its blocks.
            qg: Eigenvectors of G, [groups, g_dim, g_dim], or those of its blocks.

        Returns:
            [groups, g_dim, a_dim].
        """
        rows = [self.rows(x, g) for x, g in calls]
        a_rows = _rotated(torch.cat([a for a, _ in rows], 2), qa)
        g_rows = _rotated(torch.cat([g for _, g in rows], 2), qg)
        if a_rows.shape[2] == 1:
            # With one position, the square of g a^T is the product of the squares: no loop needed.
            return g_rows.squeeze(2).square().mT @ a_rows.squeeze(2).square()
        out = a_rows.new_zeros(self.spec.grad_shape)
        # Per-sample gradients are large, so only some samples are in memory at once.
        step = max(1, SECOND_MOMENT_NUMEL // self.spec.grad_numel)
        for some_a, some_g in zip(
            torch.split(a_rows, step, 1), torch.split(g_rows, step, 1), strict=True
        ):
            out += (some_g.mT @ some_a).square_().sum(1)
        return out

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Join tensors in the shapes of weight and bias to [groups, g_dim, a_dim].

        The result is at least float32. ``bias`` is None if the layer has none.
        """
        groups, g_dim, _ = self.spec.grad_shape
        matrix = at_least_float32(weight.flatten(1)).view(groups, g_dim, -1)
        if bias is None:
            return matrix
        column = bias.to(matrix.dtype).view(groups, g_dim, 1)
        return torch.cat([matrix, column], dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Invert :meth:`to_matrix`; the results are views if ``matrix`` is contiguous."""
        shape = (-1, *self.weight.shape[1:])
        if self.bias is None:
            return matrix.reshape(shape), None
        return matrix[..., :-1].reshape(shape), matrix[..., -1].reshape(-1)

    def get_grad(self) -> Tensor | None:
        """Return the gradient of weight and bias, [groups, g_dim, a_dim], at least float32.

        None if backward did not reach the layer, or if the weight is frozen by now. If ranks hold
        parts of the gradient, all ranks must call this method.
        """
        if self.weight.grad is None or not self.weight.requires_grad:
            return None
        weight = full(self.weight.grad)[self.part]
        if self.bias is None:
            return self.to_matrix(weight, None)
        # The bias may have no gradient although the weight has one. Its column is zero then.
        if self.bias.grad is None or not self.bias.requires_grad:
            return self.to_matrix(weight, weight.new_zeros(self.bias.shape)[self.part])
        return self.to_matrix(weight, full(self.bias.grad)[self.part])

    def set_grad(
        self, grad: Tensor, scale: Tensor | None = None, of_old: Tensor | None = None
    ) -> None:
        """Write ``grad`` [groups, g_dim, a_dim] into ``.grad`` of the parameters, in place.

        Args:
            grad: The new gradient.
            scale: What multiplies it, if anything does.
            of_old: What multiplies the old gradient, which is then added. It needs a ``scale``.
        """
        for parameter, new in zip((self.weight, self.bias), self.from_matrix(grad), strict=True):
            # A parameter that was frozen later may keep zeros in .grad, from
            # zero_grad(set_to_none=False). If K-FAC wrote there, the optimizer would move it.
            if parameter is not None and parameter.grad is not None and parameter.requires_grad:
                assert new is not None
                old = local(parameter.grad)[self.part]
                if scale is None:
                    old.copy_(new)
                elif of_old is None:
                    torch.mul(new, scale, out=old)
                elif old.dtype == new.dtype:
                    old.mul_(of_old).addcmul_(new, scale)
                else:
                    old.mul_(of_old).add_(new * scale)


def input_as_computed(x: Tensor, output: Tensor) -> Tensor:
    """Return the input of a layer as the layer has used it, detached.

    Under autocast a layer computes with a copy of its input in half precision. A script may change
    the input itself in place before backward, and autograd does not complain. So K-FAC has a copy,
    too.
    """
    is_cast = output.dtype.itemsize < x.dtype.itemsize and x.is_floating_point()
    return x.detach().to(output.dtype) if is_cast else x.detach()


def _edge_of(output: Tensor) -> tuple[GradientEdge, Callable[[Tensor], Tensor] | None]:
    """Return the edge at which the gradient of ``output`` can be read, and :attr:`Call.prepare`.

    The edge is right even after in-place operations on ``output``.

    Linear returns a view for a 3-d input. An in-place operation gives the view a new history, which
    begins at the node of its base. So the gradient is read at the base.
    """
    base, shape = output._base, output.shape
    if base is None or base.numel() != output.numel():
        return get_gradient_edge(output), None
    if not (base.requires_grad and base.is_contiguous() and output.is_contiguous()):
        return get_gradient_edge(output), None
    return get_gradient_edge(base), lambda g: g.reshape(shape)


def moment(rows: Tensor, *, diagonal: bool = False, blocks: Sequence[int] = ()) -> Tensor:
    """Return rows^T rows of [groups, R, d], or only its diagonal [groups, d], or its ``blocks``.

    The blocks are side by side, as :func:`.gram.flat_blocks` returns them.
    """
    if diagonal:
        return at_least_float32(rows).square().sum(1)
    if blocks:
        return join_flat([gram(part) for part in torch.split(rows, list(blocks), -1)])
    return gram(rows)


def _rotated(rows: Tensor, basis: Tensor | Blocks) -> Tensor:
    """Return rows [groups, N, s, d] in an eigenbasis."""
    rows = at_least_float32(rows)
    if isinstance(basis, Tensor):
        return rows @ basis.unsqueeze(1)
    return times(rows, tuple(block.unsqueeze(1) for block in basis))


def with_ones(a_rows: Tensor) -> Tensor:
    """Append a column of ones, the input of the bias."""
    return torch.cat([a_rows, a_rows.new_ones(*a_rows.shape[:-1], 1)], dim=-1)
