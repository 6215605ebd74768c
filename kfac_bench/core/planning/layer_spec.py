"""The shapes of one layer: all that planning knows about it."""

from dataclasses import dataclass
from typing import Literal

Factor = Literal["A", "G"]
FACTORS: tuple[Factor, ...] = ("A", "G")


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
    """Newton-Schulz steps by which eigen_adam orthogonalizes the update of hidden linear layers."""
    is_lookup: bool = False
    """Whether the inputs are one-hot, as the tokens of an embedding are."""

    def dim(self, factor: Factor) -> int:
        """Return the number of rows of one block of A or G."""
        return self.a_dim if factor == "A" else self.g_dim

    def is_diagonal(self, factor: Factor) -> bool:
        """Return whether only the diagonal of the factor is kept."""
        return self.a_diagonal if factor == "A" else self.g_diagonal

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
        """Whether method eigen_adam orthogonalizes the update."""
        return self.orthogonal_steps > 0

    @property
    def grad_numel(self) -> int:
        """The number of elements of the gradient."""
        return self.groups * self.g_dim * self.a_dim
