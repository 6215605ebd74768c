"""What all backends have in common: the base class of a backend's options."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from kfac_bench.config.options import RECORD, RESULT, Section, option
from kfac_bench.config.registry import BACKENDS


@dataclass
class BackendConfig(Section):
    """Who connects the ranks of a run and averages their gradients."""

    cuts_weights: ClassVar[bool] = False
    """Whether ranks hold parts of weights in the usual order of their entries."""

    name: str = option(MISSING, "backend", RESULT, resumable=True, choices=BACKENDS)
    timeout_s: float = option(
        600.0,
        "seconds that a rank waits for the others before it gives up; horovod: only at the start",
        RECORD,
        above=0,
        at_most=1e9,  # Python's timers take no more than some 9e9 s.
    )

    def join(self, device: str) -> AbstractContextManager[Any]:
        """Join the other ranks of the run, and leave them at exit.

        Args:
            device: ``auto``, ``cpu`` or ``cuda``.

        Returns:
            A context manager whose value is the :class:`kfac_bench.distributed.backend.Backend`.
        """
        raise NotImplementedError
