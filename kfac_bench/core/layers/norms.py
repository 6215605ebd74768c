"""Scale and shift of normalization layers: one small exact Fisher block per channel.

Each channel is a map y = W a of its own. Its input a is the constant 1, so A is [channels, 1, 1]
ones. Its outputs are the parameters: the scale, and the shift if there is one. So G is [channels,
2, 2] (or [channels, 1, 1]), the exact second moment of per-sample gradients. This is the
"unit-wise" Fisher of Osawa et al. 2020.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfac_bench.core.kernels.gram import at_least_float32
from kfac_bench.core.layers.base import Layer
from kfac_bench.core.planning.layer_spec import LayerSpec

NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class NormLayer(Layer):
    """Batch, layer, group and RMS normalization with a learned scale."""

    may_be_time_first = True

    @classmethod
    def reason_to_skip(cls, module: nn.Module) -> str | None:
        """See :meth:`Layer.reason_to_skip`."""
        return None if getattr(module, "weight", None) is not None else "no scale"

    def is_same_map(self, other: Layer) -> bool:
        """See :meth:`Layer.is_same_map`. Norms of one scale may normalize in different ways."""
        mine, theirs = self.modules[0], other.modules[0]
        return (
            super().is_same_map(other)
            and type(mine) is type(theirs)
            and all(
                getattr(mine, name, None) == getattr(theirs, name, None)
                for name in ("eps", "num_groups", "normalized_shape")
            )
        )

    def make_spec(self, max_dim: int) -> LayerSpec:
        """See :meth:`Layer.make_spec`."""
        return LayerSpec(self.name, 1, 1 + (self.bias is not None), self.weight.numel())

    def rows(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Layer.rows`. The rows are per-sample gradients, with one position."""
        per_sample = self._per_sample(x, g).permute(1, 0, 2).unsqueeze(2)
        return torch.ones_like(per_sample[..., :1]), per_sample

    def size(self, x: Tensor, g: Tensor) -> tuple[int, int]:
        """See :meth:`Layer.size`."""
        return self._samples(x), 1

    def moment_a(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_a`."""
        shape = self.spec.factor_shape("A")
        return torch.full(shape, self._samples(x), device=g.device, dtype=at_least_float32(g).dtype)

    def moment_g(self, x: Tensor, g: Tensor) -> Tensor:
        """See :meth:`Layer.moment_g`."""
        u = self._per_sample(x, g)
        return (u.unsqueeze(-1) * u.unsqueeze(-2)).sum(0)

    def is_single(self, x: Tensor) -> bool:
        """See :meth:`Layer.is_single`. An input that is normalized as a whole is one sample."""
        return x.ndim == len(getattr(self.modules[0], "normalized_shape", ()))

    def _samples(self, x: Tensor) -> int:
        return 1 if self.is_single(x) else len(x)

    def _per_sample(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradients of scale and shift for each sample, [N, channels, g_dim]."""
        if self._is_channels_first(x):
            x, g = x.movedim(1, -1), g.movedim(1, -1)
        normalized, g = self._normalize(at_least_float32(x)), at_least_float32(g)
        n, channels = self._samples(x), self.weight.numel()
        if isinstance(self.modules[0], _BatchNorm | nn.GroupNorm):
            # The input is [N, C, *positions].
            shape, over = (n, channels, -1), 2
        else:
            # The input is [N, *positions, channels...].
            shape, over = (n, -1, channels), 1
        parts = [(normalized * g).reshape(shape).sum(over)]
        if self.bias is not None:
            parts.append(g.reshape(shape).sum(over))
        return torch.stack(parts, dim=-1)

    def _is_channels_first(self, x: Tensor) -> bool:
        """Return whether a LayerNorm moves channels itself, as the LayerNorm2d of torchvision."""
        module = self.modules[0]
        if not isinstance(module, nn.LayerNorm) or x.ndim < 3:
            return False
        has_own_forward = type(module).forward is not nn.LayerNorm.forward
        is_last = x.shape[-1] == x.shape[1] and "2d" not in type(module).__name__
        return has_own_forward and module.normalized_shape == (x.shape[1],) and not is_last

    def _normalize(self, x: Tensor) -> Tensor:
        """Compute the input of the scale again: hooks see only the input of the module."""
        match self.modules[0]:
            case _BatchNorm(eps=eps):
                # In training mode batch norm uses the statistics of the batch, as the module did.
                return F.batch_norm(x, None, None, training=True, eps=eps)
            case nn.GroupNorm(num_groups=groups, eps=eps):
                return F.group_norm(x, groups, eps=eps)
            case nn.RMSNorm(normalized_shape=shape, eps=eps):
                return F.rms_norm(x, list(shape), eps=eps)
            case nn.LayerNorm(normalized_shape=shape, eps=eps):
                return F.layer_norm(x, list(shape), eps=eps)
            case module:
                raise TypeError(module)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Layer.to_matrix`."""
        parts = [at_least_float32(weight.flatten())]
        if bias is not None:
            parts.append(bias.flatten().to(parts[0].dtype))
        return torch.stack(parts, dim=-1).unsqueeze(-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Layer.from_matrix`."""
        shape = self.weight.shape
        bias = None if self.bias is None else matrix[:, 1].reshape(shape)
        return matrix[:, 0].reshape(shape), bias
