"""LSTM, GRU and RNN in explicit steps, because fused kernels hide the gradients of the gates.

:class:`UnrolledForward` is a context for the forward of a recurrent module. Inside it, torch's
fused functions are replaced by the same computation in elementary operations. The module's own
forward still does all the rest: checks, the order of packed sequences, inputs without a batch.

Each linear map is noted as a :class:`~kfac_bench.core.layers.base.Call`. Its input is a
PackedSequence: the rows of all samples at the first time step, then those at the second, and so on.
So a map has one call, however long the sequences are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from kfac_bench.core.layers.base import Call, input_as_computed

State = tuple[Tensor, ...]
"""The hidden state h [N, d], and for an LSTM the cell state c."""

Gates = Callable[[Tensor, Tensor, State], State]
"""A function from W_ih x + b_ih, W_hh h + b_hh and the state to the next state."""


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, 1), h.chunk(3, 1)
    r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
    n = (x_n + r * h_n).tanh()
    return (n + z * (state[0] - n),)


def _rnn_tanh(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).tanh(),)


def _rnn_relu(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).relu(),)


GATES: dict[str, Gates] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn_tanh,
    "rnn_relu": _rnn_relu,
}
"""The gates by name of torch's function; the function of a cell has the suffix ``_cell``."""


class Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None
    """The projection of an LSTM with ``proj_size``."""


class UnrolledForward(TorchFunctionMode):
    """A context in which recurrent modules run step by step.

    Attributes:
        calls: What was noted, by name of the linear map: ``ih_l0``, ``hh_l0_reverse``, ``hr_l0``
            and so on; ``ih`` and ``hh`` of a cell. The end of the context forgets all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = defaultdict(list)

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace torch's functions of recurrent modules, and call all others."""
        name = getattr(func, "__name__", "")
        if name in GATES:
            return self._sequences(func, GATES[name], args)
        if name.removesuffix("_cell") in GATES:
            return self._cell(func, GATES[name.removesuffix("_cell")], args)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        """Forget the calls, which hold activations."""
        self.calls.clear()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _cell(self, func: Any, gates: Gates, args: tuple[Any, ...]) -> Any:
        """Replace ``torch.lstm_cell`` and the like; ``args`` are its arguments."""
        x, hx, *parameters = args
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        unrolled = _Unrolled(gates, x, [len(x)], Weights(*parameters), partial(self._note, ""))
        _, state = unrolled.run(state, is_reverse=False)
        state = _in_dtypes_of(func, args, state)
        return state[0] if isinstance(hx, Tensor) else state

    def _sequences(self, func: Any, gates: Gates, args: tuple[Any, ...]) -> State:
        """Replace ``torch.lstm`` and the like; ``args`` are its arguments."""
        call = _Arguments.read(*args)
        states = (
            zip(call.hx, strict=True) if isinstance(call.hx, Tensor) else zip(*call.hx, strict=True)
        )
        rows, ends = call.rows, []
        for layer, directions in enumerate(call.weights_by_layer()):
            if layer:
                # The same random numbers as the fused function on a CPU. cuDNN draws others.
                rows = F.dropout(rows, call.dropout, call.is_training)
            outputs = []
            for suffix, weights in zip(("", "_reverse"), directions, strict=False):
                note = partial(self._note, f"_l{layer}{suffix}")
                unrolled = _Unrolled(gates, rows, call.sizes, weights, note)
                output, end = unrolled.run(next(states), is_reverse=bool(suffix))
                outputs.append(output)
                ends.append(end)
            rows = torch.cat(outputs, dim=1)
        lasts = (torch.stack(last) for last in zip(*ends, strict=True))
        return _in_dtypes_of(func, call.shortest(args), (call.shaped(rows), *lasts))

    def _note(self, suffix: str, name: str, x: Tensor, sizes: list[int], output: Tensor) -> None:
        calls = self.calls[name + suffix]
        if output.requires_grad:
            batch_sizes = torch.tensor(sizes, device="cpu")
            packed = PackedSequence(input_as_computed(x, output), batch_sizes)
            calls.append(Call(packed, get_gradient_edge(output)))


class _Arguments(NamedTuple):
    """The arguments of ``torch.lstm`` and the like, with the input as rows, time steps first."""

    rows: Tensor
    sizes: list[int]
    """Samples at each time step, which can only fall."""
    is_packed: bool
    batch_first: bool
    hx: Any
    parameters: Sequence[Tensor]
    has_biases: bool
    layers: int
    dropout: float
    is_training: bool
    bidirectional: bool

    @staticmethod
    def read(x: Tensor, *args: Any) -> "_Arguments":
        if isinstance(args[2], list | tuple):
            batch_sizes, *others = args
            return _Arguments(x, batch_sizes.tolist(), True, False, *others)
        *others, batch_first = args
        steps = x.transpose(0, 1) if batch_first else x
        sizes = [steps.shape[1]] * len(steps)
        return _Arguments(steps.flatten(0, 1), sizes, False, batch_first, *others)

    def weights_by_layer(self) -> Iterator[list[Weights]]:
        """Yield the weights of one layer, by direction."""
        directions = 1 + self.bidirectional
        count = len(self.parameters) // (self.layers * directions)
        runs = []
        for i in range(0, len(self.parameters), count):
            ih, hh, *others = self.parameters[i : i + count]
            biases = others[:2] if self.has_biases else [None, None]
            runs.append(Weights(ih, hh, *biases, *others[2 * self.has_biases :]))
        for i in range(0, len(runs), directions):
            yield runs[i : i + directions]

    def shaped(self, rows: Tensor) -> Tensor:
        """Bring rows of outputs to the shape of the fused function's output."""
        if self.is_packed:
            return rows
        output = rows.view(len(self.sizes), -1, rows.shape[1])
        return output.transpose(0, 1) if self.batch_first else output

    def shortest(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``args`` with one time step of one sample only, without dropout."""
        x, *others = args
        is_one = isinstance(self.hx, Tensor)
        # cuDNN refuses a state that is not contiguous.
        states = [h[:, :1].contiguous() for h in ([self.hx] if is_one else self.hx)]
        hx = states[0] if is_one else states
        settings = (self.parameters, self.has_biases, self.layers, 0.0, False, self.bidirectional)
        if self.is_packed:
            return x[:1], others[0].new_ones(1), hx, *settings
        return x[:1, :1], hx, *settings, self.batch_first


class _Unrolled:
    """One layer of a recurrent module in one direction.

    Args:
        gates: What makes the next state.
        rows: The inputs of all time steps.
        sizes: Samples at each time step.
        weights: The parameters.
        note: Called with each linear map: name, input, sizes, and where its gradient is read.
    """

    def __init__(
        self,
        gates: Gates,
        rows: Tensor,
        sizes: list[int],
        weights: Weights,
        note: Callable[[str, Tensor, list[int], Tensor], None],
    ) -> None:
        self._gates, self._sizes, self._note = gates, sizes, note
        x = F.linear(rows, weights.ih, weights.bias_ih)
        note("ih", rows, sizes, x)
        self._x = torch.split(x, sizes)
        self._hh = _Recurrent(weights.hh, weights.bias_hh, sizes, x.dtype)
        self._hr = None if weights.hr is None else _Recurrent(weights.hr, None, sizes, x.dtype)

    def run(self, first: State, *, is_reverse: bool) -> tuple[Tensor, State]:
        """Return the outputs of all time steps as rows, and the last state."""
        order = range(len(self._sizes))
        state: State = tuple(s[: self._sizes[-1 if is_reverse else 0]] for s in first)
        outputs: list[Tensor] = []
        ended: list[State] = []  # the last states of samples that are shorter than others
        for t in reversed(order) if is_reverse else order:
            size, previous = self._sizes[t], len(state[0])
            if size < previous:
                ended.append(tuple(s[size:] for s in state))
                state = tuple(s[:size] for s in state)
            elif size > previous:
                # In reverse, shorter samples begin later.
                pairs = zip(state, first, strict=True)
                state = tuple(torch.cat([s, begin[previous:size]]) for s, begin in pairs)
            state = self._gates(self._x[t], self._hh(t, state[0]), state)
            if self._hr is not None:
                state = self._hr(t, state[0]), *state[1:]
            outputs.append(state[0])
        ended.append(state)
        last = tuple(torch.cat(parts[::-1]) for parts in zip(*ended, strict=True))
        self._hh.note("hh", self._note)
        if self._hr is not None:
            self._hr.note("hr", self._note)
        return torch.cat(outputs[::-1] if is_reverse else outputs), last


class _Recurrent:
    """W h + b in the loop over time steps: one product per step, but one gradient for all."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, sizes: list[int], dtype: torch.dtype
    ) -> None:
        self._sizes = sizes
        self._anchor = _Anchor.apply(weight, sum(sizes), dtype)
        base = self._anchor if bias is None else self._anchor + bias
        self._base = torch.split(base, sizes)
        # autocast would cast the transposed weight in each step.
        self._transposed = weight.to(dtype).t()
        self._inputs: dict[int, Tensor] = {}

    def __call__(self, t: int, h: Tensor) -> Tensor:
        self._inputs[t] = h.detach()
        return torch.addmm(self._base[t], h, self._transposed)

    def note(self, name: str, note: Callable[[str, Tensor, list[int], Tensor], None]) -> None:
        inputs = torch.cat([self._inputs[t] for t in range(len(self._sizes))])
        note(name, inputs, self._sizes, self._anchor)


class _Anchor(torch.autograd.Function):
    """Zeros to add to the outputs W h of all time steps, where their gradient can be read.

    In the graph they depend on W, so a backward computes this gradient if it computes that of W.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        return weight.new_zeros(rows, len(weight), dtype=dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[None, None, None]:
        return None, None, None


def _in_dtypes_of(func: Any, args: tuple[Any, ...], results: State) -> State:
    """Return ``results`` in the dtypes that the fused function would return under autocast."""
    device = results[0].device.type
    # The meta device of dry runs has no autocast, and asking about it would raise.
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return results
    with torch.no_grad():
        fused = func(*args)
    fused = (fused,) if isinstance(fused, Tensor) else fused
    return tuple(x.to(other.dtype) for x, other in zip(results, fused, strict=True))
