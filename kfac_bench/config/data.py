"""The data sets."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import option


@dataclass
class DataConfig:
    """The data set."""

    name: str = option(
        MISSING, "data set", choices=("digits", "cifar10", "imagefolder", "shards", "lgg")
    )
    root: str | None = option(
        None,
        "its folder (digits ships in a package); demo: a small one, made when first used",
    )
    image_size: int = option(MISSING, "side of an input image in pixels", at_least=1)
    workers: int = option(0, "loader processes per rank (imagefolder, shards, lgg)", at_least=0)
    augment: bool = option(
        True, "random changes while training (cifar10: crops, flips; lgg: turns)"
    )
    on_error: str = option(
        "fatal",
        "an example whose file is damaged or missing (sets of files): left out and named, or not",
        choices=("fatal", "skip"),
    )


@dataclass
class LGGConfig(DataConfig):
    """Volumes of MRI slices with tumour masks."""

    eval_share: float = option(
        0.1, "of the patients, for evaluation; the same ones for all seeds", above=0, below=1
    )
