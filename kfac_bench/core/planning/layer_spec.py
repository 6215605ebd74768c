"""The shapes of one layer, from which the planner makes its part of the plan."""

from dataclasses import dataclass, replace
from typing import Self

Factor = str
"""The name of a factor: "A", "G", or "A.2" for one diagonal block of a divided factor.

Each block of a divided factor is a factor of its own: it is computed, sent, decomposed and saved
under its own name. Only the damping and the product with a gradient need the blocks together.
"""
FACTORS: tuple[Factor, ...] = ("A", "G")


def side_of(factor: Factor) -> Factor:
    """Return "A" or "G": the factor that a block belongs to, or the factor itself."""
    return factor.partition(".")[0]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The shapes of one layer, seen as ``groups`` independent linear maps y = W a.

    The gradient is [groups, g_dim, a_dim]. A is [groups, a_dim, a_dim], or [groups, a_dim] if only
    its diagonal is kept, as for the tokens of an embedding. G is [groups, g_dim, g_dim], or
    [groups, g_dim] if only its diagonal is kept, as for the vocabulary of a large head.
    """

    name: str
    a_dim: int  # inputs of the linear map, plus one if it has a bias
    g_dim: int  # outputs
    groups: int = 1
    a_diagonal: bool = False
    g_diagonal: bool = False
    orthogonal_steps: int = 0
    """Newton-Schulz steps by which eigen_adam orthogonalizes the update of hidden layers."""
    is_lookup: bool = False
    """True if the inputs are one-hot, as the tokens of an embedding are."""
    a_blocks: tuple[int, ...] = ()
    """Rows of the diagonal blocks that A is divided into; () if A is not divided."""
    g_blocks: tuple[int, ...] = ()
    """Rows of the diagonal blocks that G is divided into; () if G is not divided."""

    def blocks(self, side: Factor) -> tuple[int, ...]:
        """Return the rows of the diagonal blocks of A or G, () if it is not divided."""
        return self.a_blocks if side == "A" else self.g_blocks

    def factors_of(self, side: Factor) -> tuple[Factor, ...]:
        """Return the names of the blocks of A or G, or its own name if it is not divided."""
        return tuple(f"{side}.{i}" for i in range(len(self.blocks(side)))) or (side,)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The names of all factors of the layer, those of A first."""
        return *self.factors_of("A"), *self.factors_of("G")

    @property
    def is_divided(self) -> bool:
        """True if A or G is divided into blocks."""
        return bool(self.a_blocks or self.g_blocks)

    def divided(self, block_size: int, taps: int = 1) -> Self:
        """Return the shapes with dense factors divided into blocks of at most ``block_size`` rows.

        Args:
            block_size: The largest number of rows of a block.
            taps: Columns of A that belong to one input channel: the kernel offsets of a
                convolution.
        """
        return replace(
            self,
            a_blocks=() if self.a_diagonal else _divide(self.a_dim, block_size, taps),
            g_blocks=() if self.g_diagonal else _divide(self.g_dim, block_size),
        )

    def dim(self, factor: Factor) -> int:
        """Return the number of rows of A, of G, or of one of their blocks."""
        side, _, index = factor.partition(".")
        if index:
            return self.blocks(side)[int(index)]
        return self.a_dim if side == "A" else self.g_dim

    def is_diagonal(self, factor: Factor) -> bool:
        """Return whether only the diagonal of the factor is kept."""
        return self.a_diagonal if side_of(factor) == "A" else self.g_diagonal

    def factor_shape(self, factor: Factor) -> tuple[int, ...]:
        """Return the shape of the factor as ranks keep it."""
        n = self.dim(factor)
        return (self.groups, n) if self.is_diagonal(factor) else (self.groups, n, n)

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """The shape of the gradient as K-FAC sees it: weight and bias side by side."""
        return self.groups, self.g_dim, self.a_dim

    @property
    def fan_in(self) -> int:
        """The number of inputs that contribute to an output, with the bias."""
        return 1 if self.is_lookup else self.a_dim

    @property
    def is_orthogonalized(self) -> bool:
        """True if method eigen_adam orthogonalizes the update."""
        return self.orthogonal_steps > 0

    @property
    def grad_numel(self) -> int:
        """The number of elements of the gradient."""
        return self.groups * self.g_dim * self.a_dim


def _divide(rows: int, most: int, taps: int = 1) -> tuple[int, ...]:
    """Return the sizes of the fewest and most equal blocks of at most ``most`` rows; () for one.

    A block has all ``taps`` of its channels if that is possible. Rows behind the last channel, that
    is the bias, belong to the last block.
    """
    if rows <= most:
        return ()
    channels, bias = divmod(rows, taps)
    if taps + bias > most:  # a block cannot hold a whole channel
        channels, bias, taps = rows, 0, 1
    count = -(-rows // most)
    while max(sizes := _equal(channels, bias, taps, count)) > most:
        count += 1
    return sizes


def _equal(channels: int, bias: int, taps: int, count: int) -> tuple[int, ...]:
    """Return the rows of ``count`` blocks that differ by at most one channel, the largest first."""
    each, more = divmod(channels, count)
    of_block = [each + (i < more) for i in range(count)]
    return *(taps * n for n in of_block[:-1]), taps * of_block[-1] + bias
