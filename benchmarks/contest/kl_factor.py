"""One Kronecker factor of KL-Shampoo and KL-SOAP, in the coordinates of its own eigenbasis.

A weight of shape [m, n] has two factors: S_a [m, m] on the left, S_b [n, n] on the right.
:mod:`benchmarks.contest.kl_optimizers` updates both.

The paper stores S and a separate running average of its eigenvalues in a basis Q that is some steps
old. This file stores T = Q^T S Q instead. The diagonal of T is that running average, because both
have the same recursion, and a gradient that was already rotated into the basis updates T with one
product. A factor whose side is larger than ``max_dim`` keeps its diagonal alone, in the standard
basis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KLFactor:
    """A factor S = Q T Q^T of one side of a weight.

    Attributes:
        matrix: T [d, d], or the diagonal of S [d] where the basis is None.
        basis: Q [d, d], orthonormal; None means the identity.
    """

    matrix: Tensor
    basis: Tensor | None

    @classmethod
    def start(cls, size: int, like: Tensor, max_dim: int) -> KLFactor:
        """Return a factor of zeros; :meth:`fill` gives it its first value."""
        if size > max_dim:
            return cls(like.new_zeros(size), None)
        return cls(
            like.new_zeros(size, size), torch.eye(size, dtype=like.dtype, device=like.device)
        )

    def eigenvalues(self, floor: float) -> Tensor:
        """Return the diagonal of T [d], each value at least ``floor`` times the mean."""
        values = self.matrix if self.basis is None else self.matrix.diagonal()
        smallest = torch.finfo(values.dtype).tiny
        return values.maximum((floor * values.mean()).clamp_min(smallest))

    def fill(self, scale: Tensor) -> None:
        """Add ``scale`` times the identity if the factor is zero, without a wait for the device."""
        values = self.matrix if self.basis is None else self.matrix.diagonal()
        values.add_(torch.where(values.sum() > 0, 0.0, scale))

    def update(self, whitened: Tensor, decay: float) -> None:
        """Update the running average: S <- decay S + (1 - decay) / k X X^T.

        Args:
            whitened: X [d, k], the gradient in this factor's basis times S^(-1/2) of the other
                side.
            decay: The weight of the old factor.
        """
        share = (1 - decay) / whitened.shape[1]
        if self.basis is None:
            self.matrix.mul_(decay).add_(whitened.square().sum(1), alpha=share)
        else:
            self.matrix.addmm_(whitened, whitened.mT, beta=decay, alpha=share)

    def refresh(self, *, exact: bool) -> tuple[Tensor, Tensor] | None:
        """Move to a better eigenbasis.

        Args:
            exact: Whether to decompose S; otherwise one QR step of orthogonal iteration
                (Q <- qr(S Q)) starts from the last basis.

        Returns:
            The rotation Q_old^T Q_new [d, d] and, for what is stored per eigenvector, the old
            position of each new eigenvector [d]; None without a basis.
        """
        if self.basis is None:
            return None
        order = self.matrix.diagonal().argsort(descending=True)
        if exact:
            # Ascending eigenvalues; the largest comes first, as in the QR step.
            rotation = torch.linalg.eigh(self.matrix).eigenvectors.flip(1)
            basis = self.basis @ rotation
        else:
            # S Q = Q T, with the columns in the order of their eigenvalues.
            basis = torch.linalg.qr(self.basis @ self.matrix[:, order]).Q
            rotation = self.basis.mT @ basis
        self.matrix.copy_(rotation.mT @ self.matrix @ rotation)
        self.basis.copy_(basis)
        return rotation, order
