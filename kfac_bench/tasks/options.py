"""The tasks: the options of each, and how it is made for a dataset.

This file imports no torch: ``kfac-train --help`` and the completion read it. The losses and metrics
are in the other files of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kfac_bench.config import problem_file
from kfac_bench.config.groups import TaskConfig
from kfac_bench.config.options import PLACE, RESULT, option
from kfac_bench.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from kfac_bench.config.train import TrainConfig
    from kfac_bench.data.base.dataset import Data
    from kfac_bench.data.images.coco_dataset import COCO
    from kfac_bench.data.images.lgg import LGG
    from kfac_bench.data.language.masked_text import Text
    from kfac_bench.data.language.squad_windows import Squad
    from kfac_bench.data.problem_data import ProblemData
    from kfac_bench.tasks.task import Task


@dataclass
class ClassificationConfig(TaskConfig):
    """Classification: one class for each image; metric: accuracy."""

    likelihood: ClassVar[str] = "categorical"
    share: ClassVar[str] = "accuracy"

    def build(self, data: Data) -> Task:
        from kfac_bench.tasks.image_tasks import Classification

        if data.num_classes < 2:
            raise UsageError(
                f"data={data.name} has only one class, so there is nothing to learn. Set data.root "
                "to a dataset with several classes"
            )
        return Classification(self.label_smoothing, data.looks)


@dataclass
class DenoisingConfig(TaskConfig):
    """Denoising: the clean image from a noisy image; metric: PSNR."""

    likelihood: ClassVar[str] = "gaussian"

    def build(self, data: Data) -> Task:
        from kfac_bench.tasks.image_tasks import Denoising

        return Denoising(math.prod(data.shape), data.looks)


@dataclass
class DetectionConfig(TaskConfig):
    """Detection: boxes and masks of objects, with Mask R-CNN's losses; metric: COCO's precision.

    With a goal the metric is goals_met, the least share of a goal that is reached: with
    trainer.target=1 the run stops when all goals are met.
    """

    likelihood: ClassVar[str] = "none"

    bbox_goal: float | None = option(
        None,
        "bbox_mAP to reach; the metric is then the least share of a goal",
        RESULT,
        above=0,
        at_most=1,
    )
    segm_goal: float | None = option(None, "segm_mAP to reach", RESULT, above=0, at_most=1)

    def build(self, data: COCO) -> Task:
        from kfac_bench.tasks.detection import Detection

        return Detection(data.truth, data.num_classes, self.bbox_goal, self.segm_goal, data.looks)

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.kfac.enabled and config.kfac.fisher != "empirical":
            raise UsageError(
                f"kfac.fisher={config.kfac.fisher} does not fit task=detection, whose losses have "
                "no common likelihood to draw labels from: use kfac.fisher=empirical"
            )


@dataclass
class LanguageModelConfig(TaskConfig):
    """Language modelling: the next symbol of a text; metric: loss."""

    likelihood: ClassVar[str] = "categorical"

    def build(self, data: Data) -> Task:
        from kfac_bench.tasks.language_tasks import LanguageModel

        return LanguageModel(getattr(data, "tokens", ()))

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        _check_damping(config)


@dataclass
class PretrainingConfig(TaskConfig):
    """BERT's pre-training: masked tokens and next sentences; metric: loss of masked tokens."""

    likelihood: ClassVar[str] = "categorical"

    def build(self, data: Text) -> Task:
        from kfac_bench.tasks.language_tasks import Pretraining

        return Pretraining(data.tokens)

    def check(self, config: TrainConfig) -> None:
        super().check(config)
        if config.kfac.enabled and config.kfac.fisher != "empirical":
            raise UsageError(
                f"kfac.fisher={config.kfac.fisher} draws labels from one likelihood, but "
                "task=pretraining has two (masked tokens and next sentences): use "
                "kfac.fisher=empirical"
            )
        _check_damping(config)


def _check_damping(config: TrainConfig) -> None:
    """Refuse an adaptive damping if the loss is a mean over tokens, whose number it would need."""
    if config.kfac.enabled and config.kfac.adaptive_damping:
        raise UsageError(
            f"kfac.adaptive_damping=true does not fit task={config.task.name}, whose loss is a "
            "mean over the tokens of each example: use kfac.damping. In your own script, "
            "KFAC takes damping=LevenbergMarquardt(terms=TOKENS)"
        )


@dataclass
class ProblemTaskConfig(TaskConfig):
    """The loss and the metric of a user's own problem; choose them with problem=FILE."""

    file: str | None = option(None, "Python file of the problem; problem=FILE sets it", PLACE)
    arguments: str = option(
        "", "arguments of the file's function; problem.NAME=VALUE sets them", PLACE
    )

    @property
    def likelihood(self) -> str:  # type: ignore[override]
        """The likelihood that the problem names; ``none`` if it names none."""
        return self._named().problem.likelihood or "none"

    def build(self, data: ProblemData) -> Task:
        from kfac_bench.tasks.problem_task import ProblemTask

        return ProblemTask(data.file, data.has_parts)

    def output(self, model: nn.Module, inputs: Any) -> Any:
        """See :meth:`TaskConfig.output`; here the inputs are a batch."""
        from kfac_bench.tasks.problem_task import ProblemTask

        file = self._named()
        task = ProblemTask(file, isinstance(inputs, tuple))
        return file.call(
            "the model or the loss fails on a batch without values (torch's meta device)",
            lambda: task.forward(model, inputs if isinstance(inputs, tuple) else (inputs,))[1],
        )

    def try_out(self, model: nn.Module, data: ProblemData) -> None:
        from kfac_bench.tasks.problem_task import try_out

        try_out(model, data)

    def check(self, config: TrainConfig) -> None:
        problem = self._named().problem
        fisher = config.kfac.fisher
        if config.kfac.enabled and fisher != "empirical" and problem.likelihood is None:
            raise UsageError(
                f"kfac.fisher={fisher} draws labels from a likelihood, but the problem in "
                f"{self.file} names none. Set likelihood= in Problem(...), or use "
                "kfac.fisher=empirical"
            )
        if self.label_smoothing:
            raise UsageError(
                f"task.label_smoothing={self.label_smoothing} has no effect on {self.file}: smooth "
                "the labels in the loss of the problem"
            )

    def _named(self) -> problem_file.ProblemFile:
        return problem_file.named(self.file, "task.file", self.arguments)


@dataclass
class QuestionAnsweringConfig(TaskConfig):
    """Question answering: the place of the answer in a paragraph; metric: F1 in percent."""

    likelihood: ClassVar[str] = "categorical"

    def build(self, data: Squad) -> Task:
        from kfac_bench.tasks.language_tasks import QuestionAnswering

        return QuestionAnswering(data.eval_questions)


@dataclass
class ReconstructionConfig(TaskConfig):
    """Reconstruction: the input is its own target; metric: squared error of an image."""

    likelihood: ClassVar[str] = "gaussian"

    def build(self, data: Data) -> Task:
        from kfac_bench.tasks.image_tasks import Reconstruction

        return Reconstruction(data.looks)


@dataclass
class SegmentationConfig(TaskConfig):
    """Segmentation: one mask for each image, with a Dice loss; metric: Dice of a volume."""

    likelihood: ClassVar[str] = "bernoulli"
    share: ClassVar[str] = "dice"

    bce: float = option(
        1.0,
        "weight of the binary cross entropy (mean over pixels) beside the Dice loss",
        RESULT,
        at_least=0,
    )

    def build(self, data: LGG) -> Task:
        from kfac_bench.tasks.image_tasks import Segmentation

        return Segmentation(data.eval_volumes, self.bce)


CHOICES: Mapping[str, type[TaskConfig]] = {
    "classification": ClassificationConfig,
    "denoising": DenoisingConfig,
    "detection": DetectionConfig,
    "language_model": LanguageModelConfig,
    "pretraining": PretrainingConfig,
    "problem": ProblemTaskConfig,
    "question_answering": QuestionAnsweringConfig,
    "reconstruction": ReconstructionConfig,
    "segmentation": SegmentationConfig,
}
