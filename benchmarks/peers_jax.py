"""Train a competitor of benchmarks/peers.py with kfac-jax, in the environment of this library.

peers.py starts this file as a process; people start peers.py. The model, the loss and the clock are
those of benchmarks/peers_torch.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# jax reads these when it is imported: one thread, as the other competitors have.
os.environ["NPROC"] = os.environ["PJRT_NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peers_loop
from benchmarks.peers_loop import Job, Work

CALLED_WITH = ("learning_rate", "momentum", "damping")
"""Settings that kfac-jax takes at each step, unless it adapts them."""
Params = list[tuple[Any, Any]]


def parameters(work: Work) -> Params:
    """Return the initial weights [inputs, outputs] and biases, as new arrays."""
    return [(jnp.array(weight.T), jnp.array(bias)) for weight, bias in work.layers]


def reconstruct(params: Params, images: Any) -> Any:
    """Return the output of the autoencoder, whose code and output are linear."""
    linear = (len(params) // 2 - 1, len(params) - 1)
    x = images
    for i, (weight, bias) in enumerate(params):
        x = x @ weight + bias
        if i not in linear:
            x = jnp.tanh(x)
    return x


def half_error(params: Params, images: Any) -> Any:
    """Return half the squared error, mean over the images, and tell kfac-jax its Fisher."""
    output = reconstruct(params, images)
    kfac_jax.register_squared_error_loss(output, images, weight=0.5)
    return 0.5 * mean_of_sums((output - images) ** 2)


def squared_error(params: Params, images: Any) -> Any:
    """Return the squared error, mean over the images."""
    return mean_of_sums((reconstruct(params, images) - images) ** 2)


def mean_of_sums(values: Any) -> Any:
    """Return the sum over pixels, mean over images.

    One sum over both would lose digits: XLA adds the numbers one after the other on a CPU.
    """
    return jnp.mean(jnp.sum(values, axis=1))


class JaxLearner:
    """The autoencoder with the optimizer of kfac-jax; see :class:`peers_loop.Learner`."""

    def __init__(self, job: Job, work: Work) -> None:
        settings = dict(job["settings"])
        self._work = work
        self._called_with = {k: jnp.array(settings.pop(k)) for k in CALLED_WITH if k in settings}
        self._key = jax.random.PRNGKey(job["seed"])
        self._error = jax.jit(squared_error)
        self._optimizer = kfac_jax.Optimizer(
            jax.value_and_grad(half_error),
            l2_reg=0.0,
            num_burnin_steps=0,  # a burn-in would need more batches than the others get
            **settings,
        )

    def restart(self) -> None:
        """See :class:`peers_loop.Learner`."""
        self._steps, self._keys = 0, self._key
        self._params = parameters(self._work)
        batch = self.place(self._work.batch(0))
        self._state = self._optimizer.init(self._params, self._key, batch)
        jax.block_until_ready(self._state)

    def place(self, images: NDArray[np.float32]) -> Any:
        """See :class:`peers_loop.Learner`."""
        return jax.block_until_ready(jnp.array(images))

    def step(self, batch: Any) -> None:
        """See :class:`peers_loop.Learner`."""
        self._keys, key = jax.random.split(self._keys)
        self._params, self._state, _ = self._optimizer.step(
            self._params,
            self._state,
            key,
            batch=batch,
            global_step_int=self._steps,
            **self._called_with,
        )
        jax.block_until_ready((self._params, self._state))
        self._steps += 1

    def error(self, batch: Any) -> float:
        """See :class:`peers_loop.Learner`."""
        return float(self._error(self._params, batch))


def losses(work: Work) -> list[float]:
    """Return the loss of the first batch before and after one step of SGD."""
    params, batch = parameters(work), jnp.array(work.batch(0))
    gradients = jax.grad(half_error)(params, batch)
    rate = peers_loop.CHECK_RATE
    moved = jax.tree_util.tree_map(lambda p, g: p - rate * g, params, gradients)
    return [float(half_error(x, batch)) for x in (params, moved)]


if __name__ == "__main__":
    peers_loop.serve(sys.argv[1:], JaxLearner, losses, ("kfac-jax", "jax", "jaxlib"))
