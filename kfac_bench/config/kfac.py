"""The options of the preconditioner."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kfac_bench.config.options import RESULT, Section, check_patterns, option
from kfac_bench.core.planning.plan import BALANCES, EIGEN_ADAM, IDENTITY, METHODS, STRATEGIES
from kfac_bench.errors import UsageError

# The core defines these names in files that need torch, so they are repeated here.
# tests/config/test_config_schema.py compares them with the core.
CONVENTIONS = ("kfc", "sc20", "kaisa")
FISHERS = ("empirical", "mc", "type2")
FACTOR_INITS = ("debiased", "identity")
WEIGHT_SHARING = ("expand", "reduce")
STATE_DTYPES = ("fp32", "bf16", "fp16")


def _epochs(epochs: Sequence[float]) -> str:
    word = "epoch" if len(epochs) == 1 else "each of the epochs"
    return f"{word} {', '.join(f'{epoch:g}' for epoch in epochs)}"


@dataclass
class KFACConfig(Section):
    """K-FAC preconditioning; kfac=none turns it off."""

    enabled: bool = option(True, "precondition gradients", RESULT)
    strategy: str = option(
        "comm_opt",
        "who computes what on several ranks: comm_opt sends least in ordinary steps, mem_opt keeps "
        "fewer decompositions, owner_reduce needs least memory, hybrid_opt lies between comm_opt "
        "and mem_opt",
        RESULT,
        resumable=True,
        choices=STRATEGIES,
    )
    grad_worker_fraction: float | None = option(
        None,
        "share of the ranks that precondition a layer; null: 0.5 in hybrid_opt, one rank in "
        "owner_reduce and local_factors",
        RESULT,
        resumable=True,
        above=0,
        at_most=1,
    )
    colocate_factors: bool | None = option(
        None,
        "let one rank decompose both factors of a layer; null: yes, except in comm_opt and for "
        "factors that block_size divides",
        RESULT,
        resumable=True,
    )
    balance: str = option(
        "compute",
        "what ranks get about equal shares of: compute (time) or memory (bytes)",
        RESULT,
        resumable=True,
        choices=BALANCES,
    )
    overlap: bool = option(
        False,
        "send statistics while backward runs; this does not change the results",
        RESULT,
        resumable=True,
    )
    method: str = option(
        "inverse",
        "inverse: damped Cholesky inverses; eigen: eigendecompositions, as in the paper; ekfac: "
        "eigen with second moments of gradients (George et al.); eigen_adam: Adam in the "
        "eigenbasis, for optimizer=eigen_adam; identity: only the KL clip",
        RESULT,
        original="eigen",
        choices=(*METHODS, IDENTITY),
    )
    update_freq: int = option(100, "steps between decompositions", RESULT, at_least=1)
    factor_update_freq: int = option(10, "steps between factor updates", RESULT, at_least=1)
    interval_growth_epochs: list[float] = option(
        [],
        "epochs after which update_freq and factor_update_freq are multiplied by interval_growth; "
        "[]: they stay",
        RESULT,
    )
    interval_growth: int = option(
        10, "factor of both intervals at each of interval_growth_epochs", RESULT, at_least=1
    )
    early_updates: bool = option(
        True,
        "before step update_freq, also decompose at a tenth of it, and at 2, 4 and 8 times this "
        "step",
        RESULT,
        original=False,
    )
    spread: bool | None = option(
        None,
        "decompose in slices at different steps, so that no step is long; null: only if there is "
        "one rank, or with background",
        RESULT,
    )
    background: bool = option(
        False,
        "compute statistics and decompositions on a second core during training; K-FAC uses the "
        "decompositions some steps later",
        RESULT,
    )
    damping: float | None = option(
        None,
        "Tikhonov damping gamma, usually 1e-4 to 1e-1; with adaptive_damping: the first gamma; "
        "null: for each layer the mean eigenvalue of its curvature",
        RESULT,
        original=1e-3,
        above=0,
    )
    factored_damping: bool = option(
        False, "split gamma between A and G in the ratio of their mean eigenvalues", RESULT
    )
    adaptive_damping: bool = option(
        False,
        "adapt gamma by the rule of Levenberg and Marquardt; damping=null starts at 0.01",
        RESULT,
    )
    damping_freq: int = option(5, "steps between changes of an adaptive gamma", RESULT, at_least=1)
    damping_decay_epochs: list[float] = option(
        [], "epochs after which damping is multiplied by damping_decay; []: it stays", RESULT
    )
    damping_decay: float = option(
        0.5, "factor of damping at each of damping_decay_epochs", RESULT, above=0
    )
    kl_clip: float | None = option(
        None,
        "KL clip, kappa of eq. 16 of the paper, where 0.001 is usual; null: no clip",
        RESULT,
        original=1e-3,
        above=0,
    )
    trust_ratio: float | None = option(
        0.005,
        "largest step of the layers with K-FAC, as a share of the norm of their weights; null: no "
        "limit",
        RESULT,
        original=None,
        above=0,
    )
    grafting: bool = option(
        True,
        "scale each layer's preconditioned gradient so that its part along the gradient is the "
        "gradient, and limit the length of the rest",
        RESULT,
        original=False,
    )
    factor_decay: float = option(
        0.95, "weight of the old factor in the running average", RESULT, at_least=0, below=1
    )
    factor_init: str = option(
        "debiased",
        "start of the running averages: the first statistic (debiased), or the identity as in the "
        "released code of the paper",
        RESULT,
        choices=FACTOR_INITS,
    )
    factor_convention: str = option(
        "kfc",
        "how factors are scaled; if you copy a damping from a paper, set the paper's convention",
        RESULT,
        choices=CONVENTIONS,
    )
    fisher: str = option(
        "empirical",
        "what G is made of: gradients of the loss (empirical), or gradients for labels from the "
        "model: one sample (mc) or all labels (type2)",
        RESULT,
        choices=FISHERS,
    )
    weight_sharing: str = option(
        "expand",
        "how positions that share a weight count: as samples (expand), or combined first (reduce)",
        RESULT,
        choices=WEIGHT_SHARING,
    )
    state_dtype: str = option(
        "fp32",
        "dtype in which factors and decompositions are kept and sent",
        RESULT,
        choices=STATE_DTYPES,
    )
    skip: list[str] = option(
        ["Norm", "Embedding"],
        "regular expressions of layers that K-FAC leaves out, by name or class; []: none",
        RESULT,
    )
    max_dim: int = option(
        8192,
        "largest factor, in rows; K-FAC keeps only the diagonal of a larger one",
        RESULT,
        at_least=1,
    )
    block_size: int | None = option(
        None,
        "divide larger factors into diagonal blocks of at most this number of rows, which ranks "
        "decompose in parallel; null: never",
        RESULT,
        at_least=1,
    )
    max_overhead: float | None = option(
        None,
        "most time per step that K-FAC may take, as a share of a step without it (0.25: a quarter "
        "more); K-FAC measures the first steps, then makes max_dim and block_size smaller and "
        "intervals longer if it must; null: no limit",
        RESULT,
        above=0,
    )

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
            epochs = getattr(self, name)
            if not all(0 < a < b for a, b in pairwise([*epochs, math.inf])):
                raise UsageError(f"kfac.{name}={epochs}: must be epochs above 0 in rising order")
        if self.damping_decay_epochs and (self.damping is None or self.adaptive_damping):
            why = "adapts itself" if self.adaptive_damping else "follows the mean eigenvalues"
            raise UsageError(
                f"kfac.damping_decay_epochs={self.damping_decay_epochs} with a damping that {why}: "
                "set kfac.damping to a number and kfac.adaptive_damping=false"
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
        unused = [
            name
            for name in (
                "damping",
                "kl_clip",
                "trust_ratio",
                "grafting",
                "factored_damping",
                "adaptive_damping",
            )
            if getattr(self, name)
        ]
        if unused:
            raise UsageError(
                f"kfac.{unused[0]}={getattr(self, unused[0])} does not fit kfac.method=eigen_adam: "
                "Adam's second moment sets the size of each step; write kfac.damping=null "
                "kfac.kl_clip=null kfac.trust_ratio=null kfac.grafting=false"
            )
