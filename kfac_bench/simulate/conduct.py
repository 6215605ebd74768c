"""The use of a machine by an implementation: its messages and its calls of the device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kfac_bench.core.planning.plan import METHODS

CONDUCTS = ("ours", "sc20", "paper")
"""Names in hardware files: this package, the paper's code for ResNets, the paper's later code."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """The habits of one implementation; the defaults are those of this package on torch 2.

    A call is a kernel launch, a message that is started or awaited, or a scalar that is read. The
    calls of this package are those of a step on one rank, with the method ``eigen`` and otherwise
    default options, which a test counts. Those of the paper are counted in its code. Their seconds
    are :attr:`.Rates.op_s`.
    """

    factor_traffic: float = 1.0
    """Bytes of a factor's message over those of its packed triangle. 2: full matrices are sent."""
    sums_shares: bool = False
    """True if decompositions and preconditioned gradients are summed over all ranks, with zeros
    from the ranks that did not make them. Otherwise the rank that made them sends them."""
    places_in_turn: bool = False
    """True if factors go to ranks in turn, regardless of their cost, and messages start only
    after all work of their stage. Otherwise the planner places them."""
    waits: bool = False
    """True if the host waits for the device in each layer, so that the time of calls adds to the
    time of the work. Otherwise calls run ahead, and the longer of both counts."""
    sends_in_backward: bool = True
    """True if gradients are sent during backward with K-FAC, as they are without it."""
    batches: bool = True
    """True if a GPU works on all layers of one shape at once."""
    tensor_calls: int = 0
    """Calls for each parameter tensor in a step, after its gradient has been reduced."""
    factor_calls: int = 14
    """Calls to compute one factor and to update its running average."""
    decomposition_calls: int = 23
    """Calls to decompose the factors of one batch."""
    precondition_calls: int = 13
    """Calls to precondition the gradients of one batch of layers."""
    write_calls: int = 5
    """Calls to clip and write the gradient of one layer, whichever rank preconditioned it."""
    share_calls: int = 0
    """Calls to send or receive one preconditioned gradient, if each is a message of its own."""


OURS: Mapping[str, Conduct] = {
    **dict.fromkeys(METHODS, Conduct()),
    "inverse": Conduct(decomposition_calls=27, precondition_calls=4),
}
"""This package, by method. The calls of `eigen` stand for those of all methods but `inverse`."""

PAPERS_CODE = Conduct(
    factor_traffic=2.0,
    waits=True,
    batches=False,
    factor_calls=10,
    decomposition_calls=10,
    precondition_calls=7,
    write_calls=6,
)
"""The code that Pauloski et al. released: four products, three elementwise operations, a KL clip
that reads a scalar in each layer (four calls), and two calls to write the gradient."""

SC20_CODE = replace(PAPERS_CODE, sums_shares=True, places_in_turn=True, tensor_calls=6)
"""The code of the ResNet experiments (branch kfac-opt) with Horovod, also for SGD. For each tensor
it waits for the all-reduce, and SGD and ``zero_grad`` launch five kernels."""

LW_CODE = replace(SC20_CODE, sends_in_backward=False, tensor_calls=7, share_calls=3)
"""The code of K-FAC-lw (branch kfac-lw). It starts the all-reduce of gradients in its own step. For
each layer it makes zeros, starts a message and awaits it."""

SC20_CALLS = replace(SC20_CODE, sums_shares=False, places_in_turn=False)
"""The calls of that code in a plan of this package, for what the released code cannot do."""


def conduct_of(name: str, strategy: str, method: str, *, is_whole: bool = True) -> Conduct:
    """Return one of :data:`CONDUCTS`; `is_whole` says that no factor is divided into blocks."""
    if name == "ours":
        return OURS[method]
    if name == "paper":
        return PAPERS_CODE
    if strategy in ("layer_wise", "comm_opt") and not (method == "eigen" and is_whole):
        return SC20_CALLS
    return {"sgd": SC20_CODE, "comm_opt": SC20_CODE, "layer_wise": LW_CODE}.get(
        strategy, SC20_CALLS
    )
