"""Small models that several ranks train, and what one process makes of them.

A test of a backend or a strategy takes its steps with :func:`train_step` or by hand, and holds
gradients and weights against :func:`one_process`, which saw the whole batches.
"""

import functools
import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.core import KFAC
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.distributed.collective import SingleProcess
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.kernels import linalg

OPTIONS = {
    "method": "eigen",
    "damping": 0.03,
    "trust_ratio": None,
    "kl_clip": 1e-4,
    "grafting": False,
    "update_freq": 2,
    "factor_update_freq": 1,
    "early_updates": False,
    "spread": True,
}
STEPS, LR = 5, 0.1
EIGEN_ADAM = {"method": "eigen_adam", "damping": None, "kl_clip": None}


def tiny_model():
    """Shapes at which BLAS gives other bits for a transposed layout are among them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 3, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.Tanh(),
        nn.Linear(4, 7),
        nn.ReLU(inplace=True),
        nn.Linear(7, 3, bias=False),
    )


def batch(step, n=32):
    """More samples than A has rows: EKFAC would depend on the basis of what they do not span."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.randint(3, (n,), generator=generator)


class Mixed(nn.Module):
    """All kinds of layers, some of one shape; a head of more outputs than max_dim."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(9, 4)
        self.convs = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1, groups=2) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 11)

    def forward(self, x):
        x = self.tokens(x).mT
        for conv in self.convs:
            x = conv(x).tanh()
        x = self.norm(x.mT)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


class DeadUnits(nn.Module):
    """Its factors have rows of zeros, other ones in layers of one shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(1, 4, 6)
        self.pixel = nn.Conv2d(4, 6, 3, padding=1)  # sees one pixel, and padding
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)
        with torch.no_grad():
            for i, block in enumerate(self.blocks):
                block.bias.copy_(torch.ones(6))
                block.bias[[i, i + 2, 5]] = -100.0

    def forward(self, x):
        x = self.pixel(self.image(x).tanh()).tanh().flatten(1)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def sentences(step):
    generator = torch.Generator().manual_seed(200 + step)
    return [torch.randint(n, (8, 5), generator=generator) for n in (9, 11)]


def my_part(*tensors, rank=None, world=None):
    """Of a batch, equal parts by rank."""
    rank = dist.get_rank() if rank is None else rank
    world = dist.get_world_size() if world is None else world
    return [t.chunk(world)[rank] for t in tensors]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def optimizer_of(model, options):
    """The optimizer of K-FAC's method: EigenAdam or SGD.

    Adam divides rounding errors by their own size where a gradient is 0, as along the classes'
    sum. The large eps and the small scale keep the updates of several ranks comparable with those
    of one process: longer steps amplify the rounding of the steps before.
    """
    if options.get("method") != "eigen_adam":
        return sgd(model)
    scales = {"scale": 1.0, "orthogonal_scale": 0.5}
    return EigenAdam(model.parameters(), lr=0.05, eps=1e-2, weight_decay=0.1, **scales)


def loss_of(model, x, y):
    output = model(x)
    return output, F.cross_entropy(output.flatten(0, -2), y.flatten())


def train_step(model, kfac, optimizer, x, y):
    """The preconditioned gradients of the step; the weights after it are the model's."""
    optimizer.zero_grad()
    output, loss = loss_of(model, x, y)
    kfac.fisher_backward(output)
    loss.backward()
    kfac.step()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    kfac.adapt_damping(loss.detach(), lambda: loss_of(model, x, y)[1])
    return grads


def update(backend, model, optimizer, kfac, x, y, parts=1):
    """By a backend, as the trainer does it; the preconditioned gradients."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for i, part in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        with backend.part(model, last=i == parts - 1):
            output, loss = loss_of(model, *part)
            kfac.fisher_backward(output)
            backend.backward(loss / parts)
            total += loss.detach() / parts
    backend.synchronize(optimizer)
    kfac.step()
    grads = [p.grad.clone() for p in model.parameters()]
    backend.step(optimizer, GradScaler("cpu", enabled=False))
    kfac.adapt_damping(total, lambda: loss_of(model, x, y)[1])
    return grads


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def raw_bytes(tensor):
    """Return the bytes of a tensor without NumPy, which the core does not need."""
    return bytes(tensor.flatten().view(torch.uint8).tolist())


def sha256(tensors):
    return hashlib.sha256(b"".join(map(raw_bytes, tensors))).hexdigest()


def assert_close(got, want, tolerance=2e-4):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def adaptive():
    """Changes after each step."""
    return LevenbergMarquardt(initial=0.03, interval=1, decay=0.8)


def make_kfac(model, optimizer, options, **more):
    options = OPTIONS | options | more
    if options.get("method") == "eigen_adam":
        options |= EIGEN_ADAM
    if options["damping"] is adaptive:
        options["damping"] = adaptive()
    return KFAC(model, optimizer, **options)


def held_bytes(kfac):
    """Of the factors, decompositions and moments of Adam that this rank keeps."""
    store = kfac._executor.store
    factors = [t for x in store.factors.values() for t in x.tensors]
    factors += store.second_moments.values()
    decompositions = (t for x in store.decompositions.values() for t in x.tensors)
    held = {
        "factors": sum(t.nbytes for t in factors),
        "decompositions": sum(t.nbytes for t in decompositions),
    }
    if kfac.plan.method == "eigen_adam":
        held["moments"] = sum(m.first.nbytes + m.second.nbytes for m in store.adam.values())
    return held


def after_step(kfac):
    """(nu, damping, reduction ratio), with nu 1 and damping 0 if there is none."""
    damping = kfac._schedules.damping
    rho = damping.rho if isinstance(damping, LevenbergMarquardt) else 0.0
    nu = kfac.statistics()["nu"]
    return 1.0 if nu is None else nu, kfac.damping or 0.0, rho


def is_clipped(method, after):
    """Whether the clip was at work in a step, or absent with eigen_adam, which has none."""
    return after[0] == 1 if method == "eigen_adam" else 0 < after[0] < 0.9


@functools.cache
def one_process(make_model, make_batch, options):
    """(preconditioned gradients, weights, :func:`after_step`) of steps on the whole batch."""
    model, out = make_model(), []
    optimizer = optimizer_of(model, dict(options))
    kfac = make_kfac(model, optimizer, dict(options), collective=SingleProcess())
    for step in range(STEPS):
        grads = train_step(model, kfac, optimizer, *make_batch(step))
        out.append((grads, weights_of(model), after_step(kfac)))
    return out


@functools.cache
def owners_alone(make_model, make_batch, options, owners):
    """As :func:`one_process`, but a layer's factors are of its owner's part of the batch alone.

    ``owners`` are (layer, rank); each rank is played by a process of its own, in turn.
    """
    options, owner = dict(options), dict(owners)
    world, kappa = options.pop("world"), options.pop("kl_clip", OPTIONS["kl_clip"])
    models = [make_model() for _ in range(world)]
    optimizers = [optimizer_of(model, options) for model in models]
    kfacs = [
        make_kfac(m, o, options, kl_clip=None, collective=SingleProcess())
        for m, o in zip(models, optimizers, strict=True)
    ]
    out = []
    for step in range(STEPS):
        x, y = make_batch(step)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, *my_part(x, y, rank=rank, world=world))[1].backward()
        params = [dict(model.named_parameters()) for model in models]
        raw = {n: sum(p[n].grad for p in params) / world for n in params[0]}
        for mine, kfac in zip(params, kfacs, strict=True):
            for name, p in mine.items():
                p.grad = raw[name].clone()
            kfac.step()
        new = {n: params[owner[n.rpartition(".")[0]]][n].grad.clone() for n in raw}
        flat = [
            [torch.cat([g[n].flatten() for n in raw if n.rpartition(".")[0] == layer])
             for layer in owner]
            for g in (new, raw)
        ]  # fmt: skip
        nu = 1.0
        if options.get("method") != "eigen_adam":
            dots = torch.stack([(p * g).sum().abs() for p, g in zip(*flat, strict=True)])
            nu = linalg.kl_clip_scale(dots.sum() * LR**2, kappa).item()
            new = {n: g * nu for n, g in new.items()}
        for mine, optimizer in zip(params, optimizers, strict=True):
            for name, p in mine.items():
                p.grad = new[name].clone()
            optimizer.step()
        out.append((list(new.values()), weights_of(models[0]), (nu, kfacs[0].damping or 0.0, 0.0)))
    return out


def expected(make_model, make_batch, strategy, options):
    """What steps on the ranks of the default group must give: what one process does.

    Local factors are of a rank's own examples: there it is what DistributedDataParallel gives.
    """
    if strategy != "local_factors":
        return one_process(make_model, make_batch, tuple(options.items()))
    model, out = DistributedDataParallel(make_model()), []
    optimizer = optimizer_of(model, options)
    kfac = make_kfac(model, optimizer, options, strategy=strategy)
    for step in range(STEPS):
        grads = train_step(model, kfac, optimizer, *my_part(*make_batch(step)))
        out.append((grads, weights_of(model), after_step(kfac)))
    return out
