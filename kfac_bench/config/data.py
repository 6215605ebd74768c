"""The data sets."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import option


@dataclass
class DataConfig:
    """The data set."""

    name: str = option(
        MISSING, "data set", choices=("digits", "cifar10", "imagefolder", "lgg", "coco")
    )
    root: str | None = option(
        None,
        "its folder (digits ships in a package); demo: a small one, made when first used",
    )
    image_size: int = option(MISSING, "side of an input image in pixels", at_least=1)
    workers: int = option(0, "loader processes per rank (imagefolder, lgg, coco)", at_least=0)
    augment: bool = option(
        True, "random changes while training (cifar10: crops, flips; lgg: turns; coco: flips)"
    )


@dataclass
class LGGConfig(DataConfig):
    """Volumes of MRI slices with tumour masks."""

    eval_share: float = option(
        0.1, "of the patients, for evaluation; the same ones for all seeds", above=0, below=1
    )
    on_error: str = option(
        "fatal", "a slice that is damaged or lacks its mask", choices=("fatal", "skip")
    )


@dataclass
class COCOConfig(DataConfig):
    """Pictures with boxes and masks; ``image_size`` is the shorter side in evaluation."""

    max_size: int = option(1333, "longer side of an image in pixels, at most", at_least=1)
    min_sizes: list[int] = option(
        [], "shorter sides in training, of which one is drawn each time; []: image_size"
    )
    year: int | None = option(None, "2014, 2017: which one, where a folder has several")
    on_error: str = option(
        "fatal",
        "an annotation without a box, an area or a mask, an image that is not there",
        choices=("fatal", "skip"),
    )
