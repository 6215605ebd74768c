"""Embeddings: A is diagonal and holds the frequency of each token."""

from torch import Tensor, nn

from kfac_bench.core.kernels.gram import at_least_float32
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import LayerSpec


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
