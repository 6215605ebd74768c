"""The preconditioner's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_bench.config.options import RESULT, Section, check_patterns, option
from kfac_bench.core.planning.plan import BALANCES, IDENTITY, METHODS, STRATEGIES
from kfac_bench.errors import UsageError

# The core's own, which need torch; tests/config/test_config_schema.py holds them against it.
CONVENTIONS = ("kfc", "sc20", "kaisa")
FISHERS = ("empirical", "mc", "type2")
WEIGHT_SHARING = ("expand", "reduce")
STATE_DTYPES = ("fp32", "bf16", "fp16")


@dataclass
class KFACConfig(Section):
    """K-FAC preconditioning; kfac=none turns it off."""

    enabled: bool = option(True, "precondition gradients", RESULT)
    strategy: str = option(
        "comm_opt", "who computes what on several ranks", RESULT, resumable=True, choices=STRATEGIES
    )
    grad_worker_fraction: float | None = option(
        None,
        "share of ranks that precondition a layer (hybrid_opt, null: 0.5; owner_reduce and "
        "local_factors, null: one rank)",
        RESULT,
        resumable=True,
        above=0,
        at_most=1,
    )
    colocate_factors: bool | None = option(
        None,
        "one rank decomposes both factors of a layer; null: not in comm_opt",
        RESULT,
        resumable=True,
    )
    balance: str = option(
        "compute",
        "what ranks get about equal shares of: time or bytes",
        RESULT,
        resumable=True,
        choices=BALANCES,
    )
    overlap: bool = option(
        False,
        "send statistics while backward runs; the results are the same",
        RESULT,
        resumable=True,
    )
    method: str = option(
        "eigen",
        "eigendecomposition, Cholesky inverse, George et al.'s EKFAC; identity: the KL clip alone",
        RESULT,
        choices=(*METHODS, IDENTITY),
    )
    update_freq: int = option(100, "steps between decompositions", RESULT, at_least=1)
    factor_update_freq: int = option(10, "steps between factor updates", RESULT, at_least=1)
    spread: bool | None = option(
        None,
        "decompose in slices at different steps, so that none is long; null: on one rank",
        RESULT,
    )
    damping: float = option(
        1e-3, "Tikhonov damping gamma; where it adapts, the first", RESULT, above=0
    )
    factored_damping: bool = option(
        False, "split gamma between A and G by their mean eigenvalues", RESULT
    )
    adaptive_damping: bool = option(
        False, "let Levenberg and Marquardt's rule change gamma", RESULT
    )
    damping_freq: int = option(5, "steps between changes of an adaptive gamma", RESULT, at_least=1)
    kl_clip: float | None = option(1e-3, "kappa of eq. 16; null: no clip", RESULT, above=0)
    factor_decay: float = option(
        0.95, "weight of the old factor in the running average", RESULT, at_least=0, below=1
    )
    factor_convention: str = option("kfc", "how factors are scaled", RESULT, choices=CONVENTIONS)
    fisher: str = option(
        "empirical",
        "G of the loss' gradients, or of labels from the model: a sample, all",
        RESULT,
        choices=FISHERS,
    )
    weight_sharing: str = option(
        "expand",
        "positions that share a weight: samples, or reduced first",
        RESULT,
        choices=WEIGHT_SHARING,
    )
    state_dtype: str = option(
        "fp32", "what factors and decompositions are kept and sent in", RESULT, choices=STATE_DTYPES
    )
    skip: list[str] = option(
        ["Norm", "Embedding"],
        "regular expressions of layers, by name or class, left to the optimizer; []: none",
        RESULT,
    )
    max_dim: int = option(8192, "a factor of more rows is kept as a diagonal", RESULT, at_least=1)

    def check(self, config: Any) -> None:
        """See :meth:`Section.check`."""
        check_patterns("kfac.skip", self.skip)
        if self.enabled and self.update_freq % self.factor_update_freq:
            raise UsageError(
                f"kfac.update_freq={self.update_freq} must be a multiple of "
                f"kfac.factor_update_freq={self.factor_update_freq}: a decomposition follows a "
                "factor update"
            )
        if self.enabled and self.factored_damping and self.method == "ekfac":
            raise UsageError(
                "kfac.factored_damping=true does not fit kfac.method=ekfac, whose eigenvalues are "
                "not products of A's and G's"
            )
