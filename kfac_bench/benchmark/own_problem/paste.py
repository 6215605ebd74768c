"""The lines for the user's script that build the winner of ``kfac-bench try``.

The lines follow from the checked configuration of a run, so they also have the user's own words.
They need a variable ``model``. Options at the defaults of the called function are left out.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pytorch_optimizer import SOAP
from torch import optim

from kfac_bench.config import TrainConfig
from kfac_bench.core import KFAC
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS, eigen_adam
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.planning.plan import EIGEN_ADAM
from kfac_bench.optimizers.adamw import AdamWConfig
from kfac_bench.optimizers.eigen_adam import EigenAdamConfig
from kfac_bench.optimizers.muon import MuonConfig
from kfac_bench.optimizers.sgd import SGDConfig
from kfac_bench.optimizers.soap import SOAPConfig
from kfac_bench.training.build import NOT_KEYWORDS_OF_KFAC

DTYPE_NAMES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def lines(config: TrainConfig, likelihood: str | None = None) -> str:
    """Return the lines, separated by line breaks.

    Args:
        config: The configuration of a run of the winner.
        likelihood: The likelihood of the problem, for labels that K-FAC draws.
    """
    optimizer = config.optimizer
    match optimizer:
        case EigenAdamConfig():
            return _eigen_adam(config, optimizer)
        case MuonConfig():
            made = _muon(optimizer)
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
        made += _kfac(config, likelihood)
    return "\n".join(made)


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


def _kfac(config: TrainConfig, likelihood: str | None) -> list[str]:
    words = ", ".join(["model", "optimizer", *_kfac_words(config)])
    built = f"KFAC({words}).attach()"
    if config.kfac.fisher == "empirical":
        return ["from kfac_bench import KFAC", built]
    return [
        "from kfac_bench import KFAC",
        f"preconditioner = {built}",
        "# In each step, between forward and loss.backward():",
        f'#   preconditioner.fisher_backward(output, "{likelihood}")',
    ]


def _eigen_adam(config: TrainConfig, optimizer: EigenAdamConfig) -> str:
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
    return "\n".join(["import torch", *made] if "torch." in made[1] else made)


def _muon(optimizer: MuonConfig) -> list[str]:
    """Return Muon as the harness builds it: vectors, embeddings and the last layer get Adam."""
    given = {k: v for k, v in asdict(optimizer).items() if k not in ("name", "no_decay")}
    words = [f"name={optimizer.name!r}", f"lr={_shown(given.pop('lr'))}"]
    words += _keywords(MuonConfig, given)
    groups = "[{'params': list(model.parameters())}]"
    return [
        "from kfac_bench.optimizers.muon import MuonConfig",
        f"optimizer = MuonConfig({', '.join(words)}).build({groups}, model)",
    ]
