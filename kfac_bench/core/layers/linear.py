"""Linear layers: nn.Linear, and Conv1D of transformers."""

import torch
from torch import Tensor

from kfac_bench.core.kernels.gram import at_least_float32, gram
from kfac_bench.core.layers.base import Layer, with_ones
from kfac_bench.core.planning.layer_spec import LayerSpec


class LinearLayer(Layer):
    """nn.Linear on [N, ..., d]; the dimensions in between are shared positions."""

    is_linear = may_be_time_first = True

    def fits(self, x: Tensor, output: Tensor) -> bool:
        """See :meth:`Layer.fits`."""
        features = (*x.shape[-1:], *output.shape[-1:])
        is_known = features == (self.spec.a_dim - (self.bias is not None), self.spec.g_dim)
        return is_known and x.shape[:-1] == output.shape[:-1]

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
