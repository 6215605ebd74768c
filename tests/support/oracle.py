"""Dense K-FAC in float64, written for clarity; what the fast code is held against."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def per_call_rows(module, x, g):
    """(a rows [N*s, a_dim], g rows [N*s, g_dim], N, s) of one call, by unfold, in float64."""
    x, g = x.double(), g.double()
    if isinstance(module, nn.Conv2d):
        if isinstance(module.padding, str):
            pads = module._reversed_padding_repeated_twice
        else:
            pads = [p for p in reversed(module.padding) for _ in range(2)]
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, pads, mode=mode)
        x = F.unfold(x, module.kernel_size, module.dilation, 0, module.stride).mT  # [N, s, d]
        g = g.flatten(2).mT
    else:
        x, g = x.reshape(len(x), -1, x.shape[-1]), g.reshape(len(g), -1, g.shape[-1])
    n, s, _ = x.shape
    a = x.reshape(n * s, -1)
    if module.bias is not None:
        a = torch.cat([a, torch.ones(n * s, 1, dtype=a.dtype)], dim=1)
    return a, g.reshape(n * s, -1), n, s


def factors(module, x, g, convention="kfc"):
    """A and G of one call, from the definitions in the sources of each convention."""
    a, g, n, s = per_call_rows(module, x, g)
    conv = isinstance(module, nn.Conv2d)
    if convention == "kfc":  # mean over samples and positions; per-sample gradients are N g
        return a.T @ a / (n * s), (n * g).T @ (n * g) / n
    if convention == "sc20" and conv:  # a / s; g N s, averaged over N s rows
        return (a / s).T @ (a / s) / n, (g * n * s).T @ (g * n * s) / (n * s)
    if convention == "sc20":
        return a.T @ a / len(a), (g * len(a)).T @ (g * len(a)) / len(a)
    if conv:  # kaisa: both divided by s, averaged over N s rows
        return (a / s).T @ (a / s) / (n * s), (g / s).T @ (g / s) / (n * s)
    return a.T @ a / len(a), g.T @ g / len(g)


def curvature(a, g, damping, method, factored=False):
    """Damped G kron A, dense (row-major vec), of [n, n] or diagonal [n]; from the definitions."""
    a, g = (torch.diag(x) if x.ndim == 1 else x for x in (a, g))
    eye_a, eye_g = (torch.eye(len(x), dtype=x.dtype) for x in (a, g))
    if method == "eigen" and not factored:
        return torch.kron(g, a) + damping * torch.kron(eye_g, eye_a)
    da = dg = damping
    if factored:
        mean_a, mean_g = a.trace() / len(a), g.trace() / len(g)
        pi = (mean_a / mean_g).sqrt() if mean_a > 0 and mean_g > 0 else 1.0
        da, dg = pi * math.sqrt(damping), math.sqrt(damping) / pi
    return torch.kron(g + dg * eye_g, a + da * eye_a)


def precondition(grad, a, g, damping, method="eigen", factored=False):
    """Solve with the full [g_dim a_dim] square matrix, in float64."""
    matrix = curvature(a.double(), g.double(), damping, method, factored)
    return torch.linalg.solve(matrix, grad.double().reshape(-1)).view_as(grad)


def solve(grad, a, g, damping, method, factored=False):
    """:func:`precondition`, group by group."""
    each = zip(grad, a, g, strict=True)
    return torch.stack([precondition(*one, damping, method, factored) for one in each])


class Calls:
    """Inputs and output gradients of modules during one forward and backward."""

    def __init__(self, modules):
        self.calls = {m: [] for m in modules}
        self.handles = [m.register_forward_hook(self._hook, with_kwargs=True) for m in self.calls]

    def _hook(self, module, args, kwargs, output):
        given = [kwargs["input"]] if "input" in kwargs else kwargs.values()
        x = [*args, *given][0].detach().clone()
        output.register_hook(lambda g: self.calls[module].append((x, g.detach().clone())))


def layer_rows(module, x, g):
    """By group, sample and position: a [groups, N, s, a_dim] and g [groups, N, s, g_dim], float64.

    A convolution's a is what the module itself makes of x with one-hot kernels.
    """
    x, g = x if isinstance(module, nn.Embedding) else x.double(), g.double()
    if isinstance(module, TRANSPOSED):
        return _transposed_rows(module, x, g)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if x.ndim < module.weight.ndim:
            x, g = x[None], g[None]
        groups, a_dim = module.groups, module.weight[0].numel()
        one_hot = torch.eye(a_dim, dtype=x.dtype).view(a_dim, *module.weight.shape[1:])
        module.groups = 1
        parts = [module._conv_forward(c, one_hot, None) for c in x.chunk(groups, 1)]
        module.groups = groups
        a = torch.stack(parts).flatten(3).mT
        g = torch.stack([c.flatten(2).mT for c in g.chunk(groups, 1)])
    else:
        if isinstance(module, nn.Embedding):
            x = F.one_hot(x, len(module.weight)).double()
            if module.padding_idx is not None:  # the weight's row is a constant
                g = g * (1 - x[..., module.padding_idx]).unsqueeze(-1)
        samples = len(x) if x.ndim > 1 else 1
        a, g = (t.reshape(1, samples, -1, t.shape[-1]) for t in (x, g))
    if getattr(module, "bias", None) is not None and module.bias.requires_grad:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    return a, g


TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def _transposed_rows(module, x, g):
    """:func:`layer_rows` of a transposed convolution, from torch's own and one-hot kernels."""
    dims = module.weight.ndim - 2
    if x.ndim < dims + 2:
        x, g = x[None], g[None]
    channels, kernel = len(module.weight) // module.groups, module.weight.shape[2:]
    a_dim = channels * math.prod(kernel)
    one_hot = torch.eye(a_dim, dtype=x.dtype).view(channels, *kernel, a_dim).movedim(-1, 1)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    # The largest output padding, then cut: what the output padding was, the output tells.
    largest = [max(s, d) - 1 for s, d in zip(module.stride, module.dilation, strict=True)]
    parts = [
        function(
            c,
            one_hot,
            stride=module.stride,
            padding=module.padding,
            output_padding=largest,
            dilation=module.dilation,
        )
        for c in x.chunk(module.groups, 1)
    ]
    a = torch.stack(parts)[..., *(slice(0, size) for size in g.shape[2:])].flatten(3).mT
    g = torch.stack([c.flatten(2).mT for c in g.chunk(module.groups, 1)])
    if module.bias is not None and module.bias.requires_grad:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    return a, g


def layer_factors(calls, reduce=False):
    """A, G of kfc, [groups, ...], from the :func:`layer_rows` of calls in one forward.

    The loss is a mean over samples. reduce: eq. 17 of Eschenhagen et al. 2023.
    """
    a, g = (torch.cat(parts, 2) for parts in zip(*calls, strict=True))
    samples = a.shape[1]
    g = g * samples  # each sample's own loss
    if reduce:
        a, g = a.mean(2, keepdim=True), g.sum(2, keepdim=True)
    return (
        torch.einsum("knsi,knsj->kij", a, a) / (samples * a.shape[2]),
        torch.einsum("knsi,knsj->kij", g, g) / samples,
    )


def layer_gradient(module):
    """[groups, g_dim, a_dim], a copy in float64."""
    grad = module.weight.grad.double()
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":
        grad = grad.mT
    groups = getattr(module, "groups", 1)
    if isinstance(module, TRANSPOSED):
        grad = grad.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    grad = grad.flatten(1).unflatten(0, (groups, -1))
    if getattr(module, "bias", None) is not None and module.bias.requires_grad:
        grad = torch.cat([grad, module.bias.grad.double().view(groups, -1, 1)], -1)
    return grad.clone()
