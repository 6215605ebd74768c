"""How raw moments are scaled to become the factors A and G."""

from collections.abc import Callable

from torch import Tensor

Number = float | Tensor
"""A number, or a 0-d tensor on the device that the host does not know."""

Scale = Callable[[Number, Number, bool], tuple[Number, Number]]
"""From (samples N, positions s per sample, is a convolution) to the scales of raw A and raw G."""


def _kfc(n: Number, s: Number, conv: bool) -> tuple[Number, Number]:
    return 1 / (n * s), n


def _sc20(n: Number, s: Number, conv: bool) -> tuple[Number, Number]:
    return (1 / (n * s**2), n * s) if conv else (1 / (n * s), n * s)


def _kaisa(n: Number, s: Number, conv: bool) -> tuple[Number, Number]:
    return (1 / (n * s**3), 1 / (n * s**3)) if conv else (1 / (n * s), 1 / (n * s))


CONVENTIONS: dict[str, Scale] = {"kfc": _kfc, "sc20": _sc20, "kaisa": _kaisa}
"""How raw moments become the factors A and G, by name of the convention.

Raw moments are sum a a^T and sum g g^T, where g is the gradient of a loss that is a mean over N
samples with s shared positions each. The same damping means another algorithm under each
convention.

* ``kfc``: A is the mean over samples and positions; G = N sum g g^T. So G is the mean over samples
  of the moments of per-sample gradients, summed over positions. It does not depend on the batch
  size. The product is that of Grosse & Martens 2016 (eq. 31 ff.) and of K-FAC-expand (Eschenhagen
  et al. 2023). If the loss is a mean over s terms of each sample (tokens, pixels), it is 1 / s of
  the Gauss-Newton matrix.
* ``sc20``: as in the code behind the paper's ResNet tables. Patches of convolutions are divided by
  s, and g is multiplied by N s.
* ``kaisa``: as in the code of KAISA (SC 2021). Both are divided by s, and g is not multiplied by N.
  So G shrinks with the batch size. The G of a rank belongs to its own part of the batch, so results
  depend on the number of ranks, as in that code.

In ``kfc`` the N of G counts the examples of the model (:class:`.examples.Examples`). In ``sc20``
and ``kaisa`` the input of each layer counts, and positions of a Linear layer count as samples.
"""
