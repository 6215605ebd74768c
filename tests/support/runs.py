"""Runs for tests: small, on real digits, stopped and spoilt at will; alone or on ranks."""

import contextlib
import hashlib
import io
import math
import os
import signal

import numpy as np
import torch
from PIL import Image

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.backends.ddp import DDP
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.record.events import RunEnded, Trained, read
from kfac_bench.tasks.image_tasks import Reconstruction
from kfac_bench.training import run
from kfac_bench.training.run_directory import RunDirectory
from kfac_bench.training.trainer import Trainer
from tests.support.configs import quick_load

CPU = torch.device("cpu")
ALONE = Backend(Ranks(CPU))
EPOCH = 5
"""Steps: 1347 digits in batches of 256."""

SMALL = (
    "model=autoencoder",
    "model.hidden=[16,6]",
    "logger=none",
    "trainer.threads=1",
    "trainer.checkpoint_freq=5",
    "trainer.predictions=2",
)
KFAC = ("optimizer.lr=0.05", "kfac.update_freq=4", "kfac.factor_update_freq=2")
RESNET = (
    "model=resnet8",
    "trainer.batch_size=64",
    "logger=none",
    "trainer.threads=1",
    "trainer.predictions=2",
)
METHODS = {
    "kfac eigen": (*KFAC, "kfac.method=eigen"),
    "kfac inverse": (*KFAC, "kfac.method=inverse", "kfac.damping=0.03"),
    "adam": ("optimizer=adam", "kfac=none"),
    "eigen_adam": ("optimizer=eigen_adam", "optimizer.lr=0.01", *KFAC[1:]),
}


def config_of(folder, *overrides, base=SMALL):
    return quick_load([*base, f"runs_dir={folder}", *overrides])


def train(folder, *overrides, base=SMALL, backend=ALONE):
    """Run; the status and the run directory."""
    config = config_of(folder, *overrides, base=base)
    status, _ = run.train(config, backend)
    return status, RunDirectory(config).path


def write_pictures(root, name="{:02}.png", **counts):
    """Write small pictures of two classes as `data=imagefolder` reads them; return the folder.

    A keyword such as train=33 gives the number of pictures of a split.
    """
    generator = np.random.default_rng(0)
    for split, count in counts.items():
        for i in range(count):
            path = root / split / f"class{i % 2}" / name.format(i)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(path)
    return root


def of_kind(path, kind):
    return [e for e in read(path) if isinstance(e, kind)]


def steps_of(path, kind):
    return [e.step for e in of_kind(path, kind)]


def losses_of(path):
    return [e.loss for e in of_kind(path, Trained)]


def end(path):
    return of_kind(path, RunEnded)[-1]


@contextlib.contextmanager
def before_step(number, action):
    """Call ``action(trainer)`` before the update with that number, in this process."""
    original = Trainer._train_step

    def step(self, batch):
        if self.step + 1 == number:
            action(self)
        return original(self, batch)

    Trainer._train_step = step
    try:
        yield
    finally:
        Trainer._train_step = original


def terminate(_):
    os.kill(os.getpid(), signal.SIGTERM)


def kill(_):
    raise RuntimeError("killed")  # nothing is written any more, as after SIGKILL


@contextlib.contextmanager
def loss_is(value, number):
    """The training loss of step ``number`` is ``value``, in this process."""
    original, calls = Reconstruction.forward, [0]

    def forward(self, model, batch):
        calls[0] += 1
        loss, output = original(self, model, batch)
        return loss * (value if calls[0] == number else 1.0), output

    Reconstruction.forward = forward
    try:
        yield
    finally:
        Reconstruction.forward = original


def trainer_of(folder, *overrides, base=SMALL, backend=ALONE):
    """A trainer that writes no events."""
    config = config_of(folder, *overrides, base=base)
    return run.build_trainer(config, backend, RunDirectory(config))


def evaluated(trainer):
    """Return the metrics of the weights that the trainer has now."""
    events = []
    trainer.log.emit = events.append
    trainer._evaluate()
    return events[0].metrics


def here():
    """This rank's backend in a pool of :mod:`tests.support.distributed`."""
    return DDP(Ranks(CPU, TorchCollective()))


def train_here(folder, overrides, base=SMALL, stop=None, nan=None):
    """On every rank: train; SIGTERM or a NaN loss on one of them.

    Status, what was printed, and the hash of this rank's parameters.
    """
    backend = here()
    config = config_of(folder, *overrides, base=base)
    printed, trainers, build = io.StringIO(), [], run.build_trainer

    def keep(*arguments):
        trainers.append(build(*arguments))
        return trainers[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        if stop is not None and stop[0] == backend.ranks.rank:
            stack.enter_context(before_step(stop[1], terminate))
        if nan is not None and nan[0] == backend.ranks.rank:
            stack.enter_context(loss_is(math.nan, nan[1]))
        run.build_trainer = keep
        stack.callback(setattr, run, "build_trainer", build)
        status, _ = run.train(config, backend)
    parameters = torch.cat([p.detach().flatten() for p in trainers[0].model.parameters()])
    return status, printed.getvalue(), hashlib.sha256(parameters.numpy()).hexdigest()
