"""Train a competitor of benchmarks/peers.py that is built on torch.

peers.py starts this file as a process; people start peers.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peers_loop
from benchmarks.peers_loop import Job, Work
from kfac_bench.benchmark.trials import overrides_of
from kfac_bench.config import compose
from kfac_bench.core import KFAC
from kfac_bench.core.kernels import linalg
from kfac_bench.models.image_networks import Autoencoder
from kfac_bench.tasks.image_tasks import Reconstruction
from kfac_bench.training import environment
from kfac_bench.training.build import build_kfac, build_optimizer

Settings = dict[str, Any]


def autoencoder(work: Work) -> Autoencoder:
    """Return the model with the initial weights."""
    widths = [weight.shape[0] for weight, _ in work.layers]
    model = Autoencoder(work.train.shape[1], widths[: len(widths) // 2])
    with torch.no_grad():
        for layer, (weight, bias) in zip(linear_layers(model), work.layers, strict=True):
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))
    return model


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers in the order in which data passes them."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def adam(model: nn.Module, settings: Settings) -> Sequence[Optimizer]:
    """Build torch's Adam."""
    return [Adam(model.parameters(), settings["lr"], (settings["beta1"], settings["beta2"]))]


def muon(model: nn.Module, settings: Settings) -> Sequence[Optimizer]:
    """Build torch's Muon for hidden weights, and AdamW for biases and the last weight.

    Muon's authors recommend this division. torch orthogonalizes in bfloat16, in which a step takes
    many times as long where the processor has no instructions for it. There float32 is used.
    """
    if not linalg.has_fast_bfloat16(torch.device("cpu")):
        torch.optim._muon._zeropower_via_newtonschulz = _orthogonalize_float32
    hidden = [layer.weight for layer in linear_layers(model)[:-1]]
    rest = [p for p in model.parameters() if all(p is not weight for weight in hidden)]
    betas = tuple(settings["adam_betas"])
    return [
        torch.optim.Muon(hidden, settings["lr"], weight_decay=0.0, momentum=settings["momentum"]),
        AdamW(rest, settings["adam_lr"], betas, weight_decay=0.0),
    ]


def _orthogonalize_float32(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """Return what torch's function returns, without rounding to bfloat16."""
    assert ns_coefficients == linalg.QUINTIC
    return linalg.orthogonalize(grad[None], ns_steps, torch.float32)[0]


def soap(model: nn.Module, settings: Settings) -> Sequence[Optimizer]:
    """Build SOAP of pytorch_optimizer."""
    from pytorch_optimizer import SOAP

    betas = (settings.pop("beta1"), settings.pop("beta2"))
    return [SOAP(model.parameters(), betas=betas, weight_decay=0.0, **settings)]


def shampoo(model: nn.Module, settings: Settings) -> Sequence[Optimizer]:
    """Build Shampoo of pytorch_optimizer, which preconditions from the first roots on."""
    from pytorch_optimizer import ScalableShampoo
    from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

    betas = (settings.pop("beta1"), settings.pop("beta2"))
    graft_type = LayerWiseGrafting[settings.pop("graft_type")]
    start = settings["preconditioning_compute_steps"]
    optimizer = ScalableShampoo(
        model.parameters(),
        betas=betas,
        weight_decay=0.0,
        graft_type=graft_type,
        start_preconditioning_step=start,
        **settings,
    )
    return [optimizer]


PEERS: dict[str, Callable[[nn.Module, Settings], Sequence[Optimizer]]] = {
    "adam": adam,
    "muon": muon,
    "soap": soap,
    "shampoo": shampoo,
}
"""By the competitor's name, what builds its optimizers of a model."""


class TorchLearner:
    """The autoencoder with a competitor's optimizer; see :class:`peers_loop.Learner`."""

    def __init__(self, job: Job, work: Work) -> None:
        torch.set_num_threads(1)
        environment.keep_freed_memory()  # as kfac-train on a CPU
        self._job, self._work = job, work
        self._task = Reconstruction()
        # Options of kfac-train, for the competitors of this repository.
        overrides = [f"experiment={job['experiment']}", *overrides_of(job["settings"])]
        self._config = compose.load(overrides) if job["runs"] == "options" else None

    def restart(self) -> None:
        """See :class:`peers_loop.Learner`."""
        torch.manual_seed(self._job["seed"])
        self._model = autoencoder(self._work)
        self._optimizers, self._kfac = self._build(self._model)

    def _build(self, model: nn.Module) -> tuple[Sequence[Optimizer], KFAC | None]:
        """Return optimizers of parts of the model, and the preconditioner if there is one."""
        if self._config is None:
            name, settings = self._job["competitor"], dict(self._job["settings"])
            return PEERS[name](model, settings), None
        optimizer = build_optimizer(self._config.optimizer, model)
        return [optimizer], build_kfac(self._config.kfac, model, optimizer)

    def place(self, images: NDArray[np.float32]) -> Tensor:
        """See :class:`peers_loop.Learner`."""
        return torch.from_numpy(images)

    def step(self, batch: Tensor) -> None:
        """See :class:`peers_loop.Learner`."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss, output = self._task.forward(self._model, (batch, batch))
        if self._kfac is not None:
            self._kfac.fisher_backward(output, self._task.likelihood)
        torch.autograd.backward(loss)
        if self._kfac is not None:
            self._kfac.step()
        for optimizer in self._optimizers:
            optimizer.step()

    def error(self, batch: Tensor) -> float:
        """See :class:`peers_loop.Learner`."""
        totals = self._task.totals(self._model, (batch, batch))
        return self._task.metrics(totals)["squared_error"]


def losses(work: Work) -> list[float]:
    """Return the loss of the first batch before and after one step of SGD."""
    model, task = autoencoder(work), Reconstruction()
    batch = torch.from_numpy(work.batch(0))
    optimizer = SGD(model.parameters(), peers_loop.CHECK_RATE)
    before, _ = task.forward(model, (batch, batch))
    torch.autograd.backward(before)
    optimizer.step()
    after, _ = task.forward(model, (batch, batch))
    return [before.item(), after.item()]


if __name__ == "__main__":
    peers_loop.serve(sys.argv[1:], TorchLearner, losses, ("torch", "pytorch_optimizer"))
