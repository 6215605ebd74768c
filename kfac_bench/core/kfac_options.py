"""The options of a :class:`KFAC` as one value, which the parts of its construction share."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.layers.coverage import LayerTypes
from kfac_bench.core.planning.budget import Choice
from kfac_bench.core.schedule import Doubling, Schedule, Schedules

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        "method": "eigen",
        "damping": 1e-3,
        "trust_ratio": None,
        "kl_clip": 1e-3,
        "grafting": False,
        "early_updates": False,
        "spread": False,
        "factor_init": "identity",
        "factor_convention": "sc20",
    }
}
"""The options that each preset sets."""


@dataclass(frozen=True)
class KFACOptions:
    """What the user chose. :class:`KFAC` documents each option and has the defaults."""

    strategy: str
    grad_worker_fraction: float | None
    colocate_factors: bool | None
    balance: str
    overlap: bool
    method: str
    damping: Schedule | None
    factored_damping: bool
    kl_clip: Schedule | None
    trust_ratio: float | None
    grafting: bool
    update_freq: Schedule
    factor_update_freq: Schedule
    early_updates: bool
    spread: bool | None
    background: bool
    factor_decay: Schedule
    factor_init: str
    factor_convention: str
    fisher: str
    weight_sharing: str
    state_dtype: torch.dtype
    skip: Sequence[str]
    max_dim: int
    block_size: int | None
    max_overhead: float | None
    layer_types: LayerTypes | None

    def with_preset(self, preset: str | None, given: Collection[str]) -> Self:
        """Return the options with those of a preset, except for what the user has given.

        Raises:
            ValueError: There is no such preset.
        """
        if preset is None:
            return self
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r}: choose one of {', '.join(PRESETS)}, or None")
        options = PRESETS[preset].items()
        return replace(self, **{name: value for name, value in options if name not in given})

    def within(self, choice: Choice) -> Self:
        """Return the options as ``max_overhead`` has changed them.

        Intervals that are functions of the step stay.
        """
        changed: dict[str, Any] = {"max_dim": choice.max_dim, "block_size": choice.block_size}
        for name in ("update_freq", "factor_update_freq"):
            if not callable(getattr(self, name)):
                changed[name] = getattr(choice, name)
        return replace(self, **changed)

    @property
    def adaptive_damping(self) -> LevenbergMarquardt | None:
        """The damping, if it adapts itself."""
        return self.damping if isinstance(self.damping, LevenbergMarquardt) else None

    def schedules(self, *, is_eigen_adam: bool) -> Schedules:
        """Return the schedules; with EigenAdam the first intervals may be shorter."""
        update_freq, factor_update_freq = self.update_freq, self.factor_update_freq
        if is_eigen_adam and self.early_updates:
            # The eigenbasis changes most in the first steps.
            update_freq, factor_update_freq = (
                every if callable(every) else Doubling(every)
                for every in (update_freq, factor_update_freq)
            )
        return Schedules(
            self.damping,
            self.kl_clip,
            self.factor_decay,
            update_freq,
            factor_update_freq,
            self.early_updates,
        )
