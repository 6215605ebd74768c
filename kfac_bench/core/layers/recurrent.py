"""The linear maps of nn.LSTM, nn.GRU, nn.RNN and their cells, whose weights time steps share.

W_ih multiplies the input x_t, W_hh the hidden state h_(t-1), and W_hr of an LSTM with ``proj_size``
the output of the gates. Each is a layer. All gates are one map: g is the gradient of their sums
before the nonlinearity, of size 4 H (LSTM), 3 H (GRU) or H (RNN). Time steps are shared positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from kfac_bench.core.kernels.gram import at_least_float32, gram
from kfac_bench.core.layers.base import Call, Layer, OtherForwardError, with_ones
from kfac_bench.core.layers.unrolled import UnrolledForward

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


class RecurrentLayer(Layer):
    """One weight matrix of a recurrent module, with its bias.

    ``x`` is a PackedSequence, also for inputs that were not packed. The rows of ``g`` have the same
    order.

    Args:
        name: Name of the layer.
        module: The recurrent module.
        map_name: Name of the matrix without ``weight_``, for example ``ih_l0``.
        unrolled: The context for the forward of ``module``, shared by its layers.
        max_dim: A factor with more rows is kept as a diagonal.
    """

    def __init__(
        self, name: str, module: nn.Module, map_name: str, unrolled: UnrolledForward, max_dim: int
    ) -> None:
        self._map, self._unrolled = map_name, unrolled
        self.forward_context = unrolled
        super().__init__(name, module, max_dim, f"weight_{map_name}", f"bias_{map_name}")

    def is_same_map(self, other: Layer) -> bool:
        """See :meth:`Layer.is_same_map`. Time steps of two modules cannot be told apart."""
        return False

    def calls(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Iterator[Call]:
        """See :meth:`Layer.calls`. The forward must call torch's own function of the module."""
        if self._map not in self._unrolled.calls:
            raise OtherForwardError
        yield from self._unrolled.calls[self._map]

    def size(self, x: Any, g: Tensor) -> tuple[int, float]:
        """See :meth:`Layer.size`. Sequences may differ in length; positions are their mean."""
        samples = int(x.batch_sizes[0])
        return samples, len(g) / samples

    def rows(self, x: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`. Rows after the end of a sequence are zero."""
        a = with_ones(x.data) if self.bias is not None else x.data
        return self._by_sample(a, x), self._by_sample(g, x)

    def moment_a(self, x: Any, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`."""
        if self.spec.a_diagonal or self.spec.a_blocks:
            return super().moment_a(x, g)
        return gram(x.data.unsqueeze(0), bias=self.bias is not None)

    def moment_g(self, x: Any, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        return self.moment_of_g(g.unsqueeze(0))

    def sums(self, x: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.sums`. Each sample's sum of a is its own mean times the positions."""
        a_rows, g_rows = self.rows(x, g)
        dtype = at_least_float32(g).dtype
        a, summed_g = a_rows.sum(2, dtype=dtype), g_rows.sum(2, dtype=dtype)
        samples, positions = self.size(x, g)
        if samples * a_rows.shape[2] == len(g):
            return a, summed_g
        lengths = pad_packed_sequence(x)[1].to(a.device, non_blocking=True)
        return a * (positions / lengths).to(dtype).view(1, -1, 1), summed_g

    @staticmethod
    def _by_sample(rows: Tensor, x: PackedSequence) -> Tensor:
        """Reshape rows in the order of ``x`` to [1, N, time steps, d]."""
        samples, steps = int(x.batch_sizes[0]), len(x.batch_sizes)
        if samples * steps == len(rows):
            return rows.view(1, steps, samples, -1).transpose(1, 2)
        padded, _ = pad_packed_sequence(PackedSequence(rows, x.batch_sizes), batch_first=True)
        return padded.unsqueeze(0)


def map_names(module: nn.Module) -> list[str]:
    """Return the names of the weight matrices of a recurrent module, without ``weight_``."""
    names = getattr(module, "_flat_weights_names", ("weight_ih", "weight_hh"))
    return [name.removeprefix("weight_") for name in names if name.startswith("weight_")]
