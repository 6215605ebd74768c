"""The global random numbers of Python, NumPy and torch: seeded for a block, and then restored.

Code of users draws from these generators, such as the transforms of torchvision.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the global CPU generators. Generators of GPUs keep their state."""
    seed_python_and_numpy(seed)
    # Not torch.manual_seed: it would also seed the GPUs.
    torch.default_generator.manual_seed(seed)


def seed_python_and_numpy(seed: int) -> None:
    """Seed the global generators whose state no checkpoint has."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the state of the global CPU generators after the block."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)
