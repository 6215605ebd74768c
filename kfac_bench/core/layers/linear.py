"""Linear layers, embeddings and the scale and shift of normalization layers.

Of an embedding, a is one-hot, so A is diagonal and holds the frequency of each token.

Each channel of a normalization layer is a map y = W a of its own, with one small exact Fisher
block. Its input a is the constant 1, so A is [channels, 1, 1] ones. Its outputs are the parameters:
the scale, and the shift if there is one. So G is [channels, 2, 2] (or [channels, 1, 1]), the exact
second moment of per-sample gradients. This is the "unit-wise" Fisher of Osawa et al. 2020.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfac_bench.core.distributed.dtensor import is_sharded
from kfac_bench.core.kernels.gram import at_least_float32, gram
from kfac_bench.core.layers.base import Layer, with_ones
from kfac_bench.core.planning.layer_spec import LayerSpec


class LinearLayer(Layer):
    """nn.Linear on [N, ..., d]; the dimensions in between are shared positions."""

    is_linear = may_be_orthogonalized = may_be_time_first = True

    def fits(self, x: Tensor, output: Tensor) -> bool:
        """See :meth:`Layer.fits`."""
        features = (*x.shape[-1:], *output.shape[-1:])
        is_known = features == (self.spec.a_dim - (self.bias is not None), self.spec.g_dim)
        return is_known and x.shape[:-1] == output.shape[:-1]

    def computed_input(self, x: Tensor, output: Tensor) -> Tensor:
        """See :meth:`Layer.computed_input`. torch copies an input that is no matrix in memory."""
        x = super().computed_input(x, output)
        return x if is_sharded(x) else x.reshape(-1, x.shape[-1]).view(x.shape)

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`."""
        x, g = self._by_sample(x), self._by_sample(g)
        return with_ones(x) if self.bias is not None else x, g

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        samples = len(g) if g.ndim > 1 else 1
        return samples, g.numel() // (samples * g.shape[-1])

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`. The bias adds a sum, not a column of ones."""
        if self.spec.a_diagonal or self.spec.a_blocks:
            return super().moment_a(x, g)
        # Samples and positions count alike in "expand", so all leading dimensions become rows.
        return gram(x.reshape(1, -1, x.shape[-1]), bias=self.bias is not None)

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        return self.moment_of_g(g.reshape(1, -1, g.shape[-1]))

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`."""
        x, g = (at_least_float32(self._by_sample(t)) for t in (x, g))
        return self._with_bias_sum(x.sum(2), x.shape[2]), g.sum(2)

    @staticmethod
    def _by_sample(x: Tensor) -> Tensor:
        """Reshape [d] or [N, ..., d] to [1, N, s, d]."""
        return x.reshape(1, len(x) if x.ndim > 1 else 1, -1, x.shape[-1])


class Conv1DLayer(LinearLayer):
    """Conv1D of transformers: a Linear layer whose weight is [inputs, outputs]."""

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        a_dim, g_dim = len(self.weight) + (self.bias is not None), self.weight.shape[1]
        return LayerSpec(
            self.name, a_dim, g_dim, a_diagonal=a_dim > max_dim, g_diagonal=g_dim > max_dim
        )

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        matrix = at_least_float32(weight.mT.unsqueeze(0))
        if bias is None:
            return matrix
        return torch.cat([matrix, bias.to(matrix.dtype).view(1, -1, 1)], dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        bias = None if self.bias is None else matrix[0, :, -1]
        return matrix[0, :, : len(self.weight)].mT, bias


class EmbeddingLayer(Layer):
    """nn.Embedding on tokens [N, ...].

    A row of a is one-hot, so A is the diagonal of token frequencies.
    """

    may_be_time_first = True

    @classmethod
    def reason_to_skip(cls, module: nn.Module) -> str | None:
        """See :meth:`Layer.reason_to_skip`."""
        assert isinstance(module, nn.Embedding)
        if module.sparse:
            return "sparse gradients"
        return "scale_grad_by_freq" if module.scale_grad_by_freq else None

    def is_same_map(self, other: Layer) -> bool:
        """See :meth:`Layer.is_same_map`. Padding of one module may be a token of the other."""
        paddings = (layer.modules[0].padding_idx for layer in (self, other))
        return super().is_same_map(other) and len(set(paddings)) == 1

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        tokens, d = self.weight.shape
        return LayerSpec(
            self.name, tokens, d, a_diagonal=True, g_diagonal=d > max_dim, is_lookup=True
        )

    def fits(self, x: Tensor, output: Tensor) -> bool:
        """See :meth:`Layer.fits`."""
        return not x.is_floating_point() and output.shape == (*x.shape, self.spec.g_dim)

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Raise an error: one-hot rows would be as wide as the vocabulary. Nothing calls this."""
        raise NotImplementedError

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        samples = len(x) if x.ndim else 1
        return samples, x.numel() // samples

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`. It counts how often each token occurs."""
        tokens = x.flatten()
        counts = at_least_float32(g.new_zeros(1, self.spec.a_dim))
        # One-hot rows have no products off the diagonal: the sum of a a^T is a count of tokens.
        counts[0].index_add_(0, tokens, counts.new_ones(()).expand(len(tokens)))
        return counts

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        return self.moment_of_g(self._output_rows(x, g).flatten(1, 2))

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`. It counts how often each sample has each token."""
        g = self._output_rows(x, g)
        tokens = x.reshape(g.shape[1], -1)
        counts = g.new_zeros(len(tokens), self.spec.a_dim)
        counts.scatter_add_(1, tokens, counts.new_ones(()).expand_as(tokens))
        return counts.unsqueeze(0), g.sum(2)

    def gradient(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.gradient`."""
        rows = self._output_rows(x, g).flatten(0, 2)
        total = rows.new_zeros(self.weight.shape).index_add_(0, x.flatten(), rows)
        return self.to_matrix(total, None), rows.norm() * len(rows) ** 0.5

    def _output_rows(self, x: Tensor, g: Tensor) -> Tensor:
        """Reshape g to [1, N, s, d]. Padding tokens get zeros: they do not reach the weight."""
        padding: int | None = self.modules[0].padding_idx  # type: ignore[assignment]
        g = at_least_float32(g)
        if padding is not None:
            g = g * (x != padding).unsqueeze(-1)
        return g.reshape(1, len(x) if x.ndim else 1, -1, self.spec.g_dim)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        return at_least_float32(weight.mT.unsqueeze(0))

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        return matrix[0].mT, None


NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class NormLayer(Layer):
    """Batch, layer, group and RMS normalization with a learned scale."""

    may_be_time_first = True

    @classmethod
    def reason_to_skip(cls, module: nn.Module) -> str | None:
        """See :meth:`Layer.reason_to_skip`."""
        return None if getattr(module, "weight", None) is not None else "no scale"

    def is_same_map(self, other: Layer) -> bool:
        """See :meth:`Layer.is_same_map`. Norms of one scale may normalize in different ways."""
        mine, theirs = self.modules[0], other.modules[0]
        return (
            super().is_same_map(other)
            and type(mine) is type(theirs)
            and all(
                getattr(mine, name, None) == getattr(theirs, name, None)
                for name in ("eps", "num_groups", "normalized_shape")
            )
        )

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        return LayerSpec(self.name, 1, 1 + (self.bias is not None), self.weight.numel())

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`. The rows are per-sample gradients, with one position."""
        per_sample = self._per_sample(x, g).permute(1, 0, 2).unsqueeze(2)
        return torch.ones_like(per_sample[..., :1]), per_sample

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        return self._samples(x), 1

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`."""
        shape = self.spec.factor_shape("A")
        return torch.full(shape, self._samples(x), device=g.device, dtype=at_least_float32(g).dtype)

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        u = self._per_sample(x, g)
        if self.spec.g_diagonal:
            return u.square().sum(0)
        return (u.unsqueeze(-1) * u.unsqueeze(-2)).sum(0)

    def is_single(self, x: Tensor) -> bool:
        """See :meth:`Layer.is_single`. An input that is normalized as a whole is one sample."""
        return x.ndim == len(getattr(self.modules[0], "normalized_shape", ()))

    def _samples(self, x: Tensor) -> int:
        return 1 if self.is_single(x) else len(x)

    def _per_sample(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradients of scale and shift for each sample, [N, channels, g_dim]."""
        if self._is_channels_first(x):
            x, g = x.movedim(1, -1), g.movedim(1, -1)
        normalized, g = self._normalize(at_least_float32(x)), at_least_float32(g)
        n, channels = self._samples(x), self.weight.numel()
        if isinstance(self.modules[0], _BatchNorm | nn.GroupNorm):
            # The input is [N, C, *positions].
            shape, over = (n, channels, -1), 2
        else:
            # The input is [N, *positions, channels...].
            shape, over = (n, -1, channels), 1
        parts = [(normalized * g).reshape(shape).sum(over)]
        if self.bias is not None:
            parts.append(g.reshape(shape).sum(over))
        return torch.stack(parts, dim=-1)

    def _is_channels_first(self, x: Tensor) -> bool:
        """Return whether a LayerNorm moves channels itself, as the LayerNorm2d of torchvision."""
        module = self.modules[0]
        if not isinstance(module, nn.LayerNorm) or x.ndim < 3:
            return False
        has_own_forward = type(module).forward is not nn.LayerNorm.forward
        is_last = x.shape[-1] == x.shape[1] and "2d" not in type(module).__name__
        return has_own_forward and module.normalized_shape == (x.shape[1],) and not is_last

    def _normalize(self, x: Tensor) -> Tensor:
        """Compute the input of the scale again: hooks see only the input of the module."""
        match self.modules[0]:
            case _BatchNorm(eps=eps):
                # In training mode batch norm uses the statistics of the batch, as the module did.
                return F.batch_norm(x, None, None, training=True, eps=eps)
            case nn.GroupNorm(num_groups=groups, eps=eps):
                return F.group_norm(x, groups, eps=eps)
            case nn.RMSNorm(normalized_shape=shape, eps=eps):
                return F.rms_norm(x, list(shape), eps=eps)
            case nn.LayerNorm(normalized_shape=shape, eps=eps):
                return F.layer_norm(x, list(shape), eps=eps)
            case module:
                raise TypeError(module)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        parts = [at_least_float32(weight.flatten())]
        if bias is not None:
            parts.append(bias.flatten().to(parts[0].dtype))
        return torch.stack(parts, dim=-1).unsqueeze(-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        shape = self.weight.shape
        bias = None if self.bias is None else matrix[:, 1].reshape(shape)
        return matrix[:, 0].reshape(shape), bias
