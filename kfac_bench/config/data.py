"""The data sets."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from kfac_bench.config.options import PLACE, RESULT, option

DATA_SETS = (
    *("digits", "pydoc", "pictures", "cifar10", "imagefolder", "shards", "lgg", "coco"),
    *("text", "squad"),
)


@dataclass
class DataConfig:
    """The data set."""

    name: str = option(MISSING, "data set", RESULT, choices=DATA_SETS)
    root: str | None = option(
        None,
        "its folder (digits, pydoc, pictures ship in packages); demo: a small one, made when first "
        "used",
        PLACE,
    )
    image_size: int = option(MISSING, "side of an input image in pixels", RESULT, at_least=1)
    workers: int = option(
        0,
        "loader processes per rank (imagefolder, shards, lgg, coco)",
        RESULT,
        resumable=True,
        per_node=True,
        at_least=0,
    )
    augment: bool = option(
        True,
        "random changes while training (cifar10: crops, flips; lgg: turns; coco: flips)",
        RESULT,
    )
    on_error: str = option(
        "fatal",
        "an example whose file is damaged or missing (sets of files): left out and named, or not",
        RESULT,
        choices=("fatal", "skip"),
    )


@dataclass
class PydocConfig(DataConfig):
    """Python's language reference, by character."""

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(64, "characters of an example", RESULT, at_least=1)


@dataclass
class PicturesConfig(DataConfig):
    """Noisy patches of scikit-image's pictures; ``image_size`` is a patch's side."""

    noise: float = option(0.15, "its standard deviation, of pixels in [0, 1]", RESULT, above=0)


@dataclass
class LGGConfig(DataConfig):
    """Volumes of MRI slices with tumour masks."""

    eval_share: float = option(
        0.1,
        "of the patients, for evaluation; the same ones for all seeds",
        RESULT,
        above=0,
        below=1,
    )


@dataclass
class COCOConfig(DataConfig):
    """Pictures with boxes and masks; ``image_size`` is the shorter side in evaluation."""

    max_size: int = option(1333, "longer side of an image in pixels, at most", RESULT, at_least=1)
    min_sizes: list[int] = option(
        [], "shorter sides in training, of which one is drawn each time; []: image_size", RESULT
    )
    year: int | None = option(None, "2014, 2017: which one, where a folder has several", RESULT)


@dataclass
class TextConfig(DataConfig):
    """Prepared text with masked tokens."""

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(128, "tokens of an example", RESULT, at_least=8)
    masked: float = option(0.15, "share of the tokens that are predicted", RESULT, above=0, below=1)
    max_predictions: int = option(
        20, "tokens of an example that are predicted, at most", RESULT, at_least=1
    )


@dataclass
class SquadConfig(DataConfig):
    """Questions about paragraphs."""

    image_size: int = option(0, "text has no images", RESULT, at_least=0, at_most=0)
    sequence_length: int = option(
        384, "tokens of a question and a window of its paragraph", RESULT, at_least=8
    )
    stride: int = option(
        128, "tokens from one window of a paragraph to the next", RESULT, at_least=1
    )
    question_length: int = option(64, "tokens of a question, at most", RESULT, at_least=1)
    vocabulary_file: str | None = option(
        None, "the model's vocab.txt; null: the one in data.root", RESULT
    )
