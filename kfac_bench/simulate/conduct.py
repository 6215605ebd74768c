"""How an implementation uses a machine: what it sends, and how often it calls the device."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Conduct:
    """The habits of one implementation; the defaults are those of this package on torch 2.

    Calls are counted in the code: each kernel launch, each message that is started or awaited, and
    each scalar that is read. Their seconds are :attr:`.Rates.op_s`.
    """

    factor_traffic: float = 1.0
    """Bytes of a factor's message over those of its packed triangle. 2: full matrices are sent."""
    sums_shares: bool = False
    """Whether decompositions and preconditioned gradients are summed over all ranks, with zeros
    from the ranks that did not make them. Otherwise the rank that made them sends them."""
    places_in_turn: bool = False
    """Whether factors go to ranks in turn, whatever they weigh, and whether messages start only
    after all work of their stage. Otherwise the planner places them."""
    waits: bool = False
    """Whether the host waits for the device in each layer, so that the time of calls adds to the
    time of the work. Otherwise calls run ahead, and the longer of both counts."""
    tensor_calls: int = 0
    """Calls for each parameter tensor in a step, after its gradient has been reduced."""
    factor_calls: int = 6
    """Calls to compute one factor and to update its running average."""
    decomposition_calls: int = 6
    """Calls to decompose one factor."""
    precondition_calls: int = 12
    """Calls to precondition, clip and write the gradient of one layer."""


OURS = Conduct()

PAPERS_CODE = Conduct(
    factor_traffic=2.0,
    waits=True,
    factor_calls=10,
    decomposition_calls=10,
    precondition_calls=13,
)
"""The code that Pauloski et al. released: four products, three elementwise operations, a KL clip
that reads a scalar in each layer (four calls), and two calls to write the gradient."""

SC20_CODE = replace(PAPERS_CODE, sums_shares=True, places_in_turn=True, tensor_calls=6)
"""The code of the ResNet experiments (branches kfac-opt and kfac-lw), with Horovod. For each tensor
it waits for the all-reduce, and SGD and ``zero_grad`` launch five kernels."""
