"""The shapes of one layer: all that planning knows about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Factor = Literal["A", "G"]
FACTORS: tuple[Factor, ...] = ("A", "G")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shapes of one layer seen as ``groups`` independent maps y = W a.

    The gradient is [groups, g_dim, a_dim]. A is [groups, a_dim, a_dim], or [groups, a_dim] where
    only its diagonal is kept (an embedding's tokens); G likewise (a head's vocabulary).
    """

    name: str
    a_dim: int  # inputs of the linear map, plus one if it has a bias
    g_dim: int  # outputs
    groups: int = 1
    a_diagonal: bool = False
    g_diagonal: bool = False

    def dim(self, factor: Factor) -> int:
        """Side of one block of A or G."""
        return self.a_dim if factor == "A" else self.g_dim

    def diagonal(self, factor: Factor) -> bool:
        """Whether only the factor's diagonal is kept."""
        return self.a_diagonal if factor == "A" else self.g_diagonal

    def factor_shape(self, factor: Factor) -> tuple[int, ...]:
        """Shape of the factor as it is stored."""
        n = self.dim(factor)
        return (self.groups, n) if self.diagonal(factor) else (self.groups, n, n)

    @property
    def grad_shape(self) -> tuple[int, int, int]:
        """Shape of the gradient as K-FAC sees it: weight and bias side by side."""
        return self.groups, self.g_dim, self.a_dim

    @property
    def grad_numel(self) -> int:
        """Elements of the gradient."""
        return self.groups * self.g_dim * self.a_dim
