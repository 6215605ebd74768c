"""The lines for the user's script that build the winner of ``kfac-bench try``.

The lines follow from the checked configuration of a run, so they also have the user's own words.
They need a variable ``model``. Options at the defaults of the called function are left out.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pytorch_optimizer import SOAP
from torch import optim

from kfac_bench.config import TrainConfig
from kfac_bench.core import KFAC
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS, eigen_adam
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.optimizers.first_order_options import AdamWConfig, MuonConfig, SGDConfig
from kfac_bench.optimizers.muon import muon
from kfac_bench.optimizers.options import EigenAdamConfig, SOAPConfig
from kfac_bench.problem import Problem
from kfac_bench.training.build import NOT_KEYWORDS_OF_KFAC

DTYPE_NAMES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def lines(config: TrainConfig, problem: Problem | None = None, words: Sequence[str] = ()) -> str:
    """Return the lines, separated by line breaks.

    Args:
        config: The configuration of a run of the winner.
        problem: The problem, which says how K-FAC draws labels.
        words: The overrides of the study. A schedule among them is named in a comment.
    """
    made = _optimizer(config, problem)
    if schedule := [word for word in words if word.startswith("schedule")]:
        made.append(f"# The runs had {' '.join(schedule)}: give your script the same schedule.")
    return "\n".join(made)


def _optimizer(config: TrainConfig, problem: Problem | None) -> list[str]:
    """Return the lines that build the optimizer and K-FAC."""
    optimizer = config.optimizer
    match optimizer:
        case EigenAdamConfig():
            return _eigen_adam(config, optimizer)
        case MuonConfig():
            given = optimizer.settings()
            words = ["model", f"lr={_shown(given.pop('lr'))}", *_keywords(muon, given)]
            made = ["from kfac_bench import muon", f"optimizer = muon({', '.join(words)})"]
        case SOAPConfig():
            given = optimizer.settings() | {
                "precondition_frequency": optimizer.precondition_freq,
                "max_precondition_dim": optimizer.max_dim,
            }
            made = ["from pytorch_optimizer import SOAP", _built("SOAP", SOAP, given)]
        case AdamWConfig():
            made = ["import torch", _built("torch.optim.AdamW", optim.AdamW, optimizer.settings())]
        case SGDConfig():
            made = ["import torch", _built("torch.optim.SGD", optim.SGD, optimizer.settings())]
        case _:
            raise AssertionError(optimizer.name)
    if config.kfac.enabled:
        made += _kfac(config, problem)
    return made


def _built(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    words = ["model.parameters()", *_keywords(function, given)]
    return f"optimizer = {name}({', '.join(words)})"


def _keywords(
    function: Callable[..., Any], given: Mapping[str, Any], also: Mapping[str, Any] | None = None
) -> list[str]:
    """Return ``name=value`` of what differs from the function's defaults, or from ``also``."""
    defaults = {k: p.default for k, p in inspect.signature(function).parameters.items()}
    defaults |= also or {}
    return [
        f"{name}={_shown(value)}"
        for name, value in given.items()
        if name not in defaults or not _equal(value, defaults[name])
    ]


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, list) and isinstance(default, list | tuple):
        return value == list(default)
    return bool(value == default)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _kfac_options(config: TrainConfig) -> dict[str, Any]:
    # The study refuses words that set an option which the constructor does not have.
    return {k: v for k, v in asdict(config.kfac).items() if k not in NOT_KEYWORDS_OF_KFAC}


def _kfac_words(config: TrainConfig, also: Mapping[str, Any] | None = None) -> list[str]:
    """Return the keywords of KFAC; the dtype is the only one whose name is not its value."""
    options = _kfac_options(config)
    dtype = DTYPE_NAMES[options.pop("state_dtype")]
    words = _keywords(KFAC, options, also)
    return words if dtype == DTYPE_NAMES["fp32"] else [*words, f"state_dtype={dtype}"]


def _kfac(config: TrainConfig, problem: Problem | None) -> list[str]:
    words = ", ".join(["model", "optimizer", *_kfac_words(config)])
    built = f"KFAC({words}).attach()"
    if config.kfac.fisher == "empirical":
        return ["from kfac_bench import KFAC", built]
    assert problem is not None, "labels are drawn from the likelihood of a problem"
    drawn = ", ".join(["output", *_labels(problem)])
    return [
        "from kfac_bench import KFAC",
        f"preconditioner = {built}",
        "# In each step, between forward and loss.backward():",
        f"#   preconditioner.fisher_backward({drawn})",
    ]


def _labels(problem: Problem) -> list[str]:
    """Return how K-FAC draws labels, as the arguments of ``KFAC.fisher_backward``."""
    words = [f'"{problem.likelihood}"']
    if problem.likelihood == "gaussian" and problem.curvature != 1:
        words.append(f"curvature={_shown(problem.curvature)}")
    if problem.likelihood == "categorical" and not problem.loss_takes_model:
        # A loss(output, target) of torch has the classes in dimension 1, K-FAC in the last one.
        words.append("dim=1")
    return words


def _eigen_adam(config: TrainConfig, optimizer: EigenAdamConfig) -> list[str]:
    given = optimizer.settings() | {
        "orthogonalize": optimizer.orthogonalize,
        "scale": optimizer.scale,
        "orthogonal_scale": optimizer.orthogonal_scale,
        "orthogonal_steps": optimizer.orthogonal_steps,
        "update_clip": optimizer.update_clip,
        "decomposition": optimizer.decomposition,
    }
    own = inspect.signature(eigen_adam).parameters
    words = ["model", f"lr={_shown(given.pop('lr'))}"]
    words += _keywords(EigenAdam, given, {"betas": own["betas"].default})
    assert config.kfac.method == EIGEN_ADAM
    if kfac := _kfac_words(config, KFAC_DEFAULTS):
        words.append(f"kfac=dict({', '.join(kfac)})")
    made = ["from kfac_bench import eigen_adam", f"optimizer = eigen_adam({', '.join(words)})"]
    return ["import torch", *made] if "torch." in made[1] else made
