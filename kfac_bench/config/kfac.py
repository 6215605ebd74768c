"""The options of the preconditioner."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from kfac_bench.config.options import MOST, RESULT, Section, check_patterns, check_rising, option
from kfac_bench.core.kfac_options import OPTIONS, unused_by_eigen_adam
from kfac_bench.core.options import Option
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.errors import UsageError
from kfac_bench.output import counted

LARGEST_EXPONENT = 37
"""A float32 number, such as the damping, is at most 3.4e38."""


def option_of_core(
    name: str,
    *,
    table: Mapping[str, Option] = OPTIONS,
    original: Any = MISSING,
    resumable: bool = False,
) -> Any:
    """Return the field of an option in a table of the core, with its default, meaning and range."""
    core = table[name]
    return option(
        [*core.default] if isinstance(core.default, tuple) else core.default,
        re.sub(r"\bNone\b", "null", core.meaning),
        RESULT,
        original=original,
        resumable=resumable,
        at_least=core.at_least,
        above=core.above,
        at_most=core.at_most,
        below=core.below,
        choices=core.choices,
    )


def _epochs(epochs: Sequence[float]) -> str:
    word = "epoch" if len(epochs) == 1 else "each of the epochs"
    return f"{word} {', '.join(f'{epoch:g}' for epoch in epochs)}"


@dataclass
class KFACConfig(Section):
    """K-FAC preconditioning; kfac=none turns it off."""

    enabled: bool = option(True, "precondition gradients", RESULT)
    strategy: str = option_of_core("strategy", resumable=True)
    grad_worker_fraction: float | None = option_of_core("grad_worker_fraction", resumable=True)
    colocate_factors: bool | None = option_of_core("colocate_factors", resumable=True)
    balance: str = option_of_core("balance", resumable=True)
    overlap: bool = option_of_core("overlap", resumable=True)
    method: str = option_of_core("method", original="eigen")
    update_freq: int = option_of_core("update_freq")
    factor_update_freq: int = option_of_core("factor_update_freq")
    interval_growth_epochs: list[float] = option(
        [],
        "epochs after which update_freq and factor_update_freq are multiplied by interval_growth; "
        "[]: they stay",
        RESULT,
    )
    interval_growth: int = option(
        10, "factor of both intervals at each of interval_growth_epochs", RESULT, at_least=1
    )
    early_updates: bool = option_of_core("early_updates", original=False)
    spread: bool | None = option_of_core("spread")
    background: bool = option_of_core("background")
    damping: float | None = option_of_core("damping", original=0.001)
    factored_damping: bool = option_of_core("factored_damping")
    adaptive_damping: bool = option(
        False,
        "adapt gamma by the rule of Levenberg and Marquardt; damping is the first gamma, null: "
        "0.01",
        RESULT,
    )
    damping_freq: int = option(5, "steps between changes of an adaptive gamma", RESULT, at_least=1)
    damping_decay_epochs: list[float] = option(
        [], "epochs after which damping is multiplied by damping_decay; []: it stays", RESULT
    )
    damping_decay: float = option(
        0.5, "factor of damping at each of damping_decay_epochs", RESULT, above=0
    )
    kl_clip: float | None = option_of_core("kl_clip", original=0.001)
    trust_ratio: float | None = option_of_core("trust_ratio", original=None)
    grafting: bool = option_of_core("grafting", original=False)
    factor_decay: float = option_of_core("factor_decay")
    factor_init: str = option_of_core("factor_init")
    factor_convention: str = option_of_core("factor_convention")
    fisher: str = option_of_core("fisher")
    weight_sharing: str = option_of_core("weight_sharing")
    state_dtype: str = option_of_core("state_dtype")
    skip: list[str] = option_of_core("skip")
    max_dim: int = option_of_core("max_dim")
    block_size: int | None = option_of_core("block_size")
    max_overhead: float | None = option_of_core("max_overhead")

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
        check_patterns("kfac.skip", self.skip)
        if self.enabled and self.update_freq % self.factor_update_freq:
            raise UsageError(
                f"kfac.update_freq={self.update_freq} must be a multiple of "
                f"kfac.factor_update_freq={self.factor_update_freq}: a decomposition follows a "
                "factor update"
            )
        if self.enabled:
            self._check_changes()
        if self.enabled and self.method == EIGEN_ADAM:
            self._check_eigen_adam(config)
        if self.enabled and self.factored_damping and self.method == "ekfac":
            raise UsageError(
                "kfac.factored_damping=true does not fit kfac.method=ekfac, whose eigenvalues are "
                "not products of A's and G's"
            )

    def _check_changes(self) -> None:
        for name in ("damping_decay_epochs", "interval_growth_epochs"):
            check_rising(f"kfac.{name}", getattr(self, name))
        for name, needs in (
            ("damping_decay", "damping_decay_epochs"),
            ("interval_growth", "interval_growth_epochs"),
            ("damping_freq", "adaptive_damping"),
        ):
            value = getattr(self, name)
            if not getattr(self, needs) and value != getattr(type(self), name):
                raise UsageError(
                    f"kfac.{name}={value} has no effect without kfac.{needs}: set both"
                )
        if self.damping_decay_epochs and (self.damping is None or self.adaptive_damping):
            why = "adapts itself" if self.adaptive_damping else "follows the mean eigenvalues"
            raise UsageError(
                f"kfac.damping_decay_epochs={self.damping_decay_epochs} with a damping that {why}: "
                "set kfac.damping to a number and kfac.adaptive_damping=false"
            )
        self._check_last_values()

    def _check_last_values(self) -> None:
        """Check that damping and intervals stay numbers after the last epoch that changes them."""
        count = len(self.damping_decay_epochs)
        if count and self.damping is not None:
            exponent = math.log10(self.damping) + count * math.log10(self.damping_decay)
            if abs(exponent) > LARGEST_EXPONENT:
                raise UsageError(
                    f"kfac.damping_decay={self.damping_decay:g} takes kfac.damping="
                    f"{self.damping:g} to 1e{exponent:.0f} in {counted(count, 'epoch')}: choose a "
                    "factor nearer to 1"
                )
        growth = self.interval_growth ** len(self.interval_growth_epochs)
        if growth > MOST // max(self.update_freq, self.factor_update_freq):
            raise UsageError(
                f"kfac.interval_growth={self.interval_growth} makes intervals of more than {MOST} "
                f"steps from kfac.update_freq={self.update_freq}: choose a smaller factor"
            )

    def changes(self) -> list[str]:
        """Return, in words, how damping and intervals change at given epochs; [] if they stay."""
        said = []
        if self.damping_decay_epochs:
            said.append(
                f"damping {self.damping:g}, times {self.damping_decay:g} after "
                f"{_epochs(self.damping_decay_epochs)}"
            )
        if self.interval_growth_epochs:
            said.append(
                f"intervals {self.factor_update_freq} and {self.update_freq} steps, times "
                f"{self.interval_growth} after {_epochs(self.interval_growth_epochs)}"
            )
        return said

    def _check_eigen_adam(self, config: Any) -> None:
        if config.optimizer.name != EIGEN_ADAM:
            raise UsageError(
                f"kfac.method=eigen_adam with optimizer={config.optimizer.name}: another optimizer "
                "would apply a second momentum or a second scale; write optimizer=eigen_adam"
            )
        if self.block_size is not None:
            raise UsageError(
                f"kfac.block_size={self.block_size} does not fit kfac.method=eigen_adam, which "
                "needs whole eigenvectors; write kfac.block_size=null, and limit factors by "
                "kfac.max_dim"
            )
        unused = unused_by_eigen_adam(vars(self))
        unused += ["adaptive_damping"] if self.adaptive_damping else []
        if unused:
            switched_off = {True: "false", False: "null"}
            words = [f"kfac.{n}={switched_off[getattr(self, n) is True]}" for n in unused]
            raise UsageError(
                f"kfac.method=eigen_adam has no use for {' and '.join(unused)}, because Adam's "
                f"second moment sets the size of each step; write {' '.join(words)}"
            )
