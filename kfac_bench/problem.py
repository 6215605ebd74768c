"""A user's own problem: what ``kfac-train problem=FILE`` finds in the Python file.

docs/tutorials/your_problem.md shows how to write such a file.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

LIKELIHOODS = ("categorical", "gaussian", "bernoulli")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its data, its loss and its metric.

    A batch is what ``collate`` returns. By default the batch has one part for each part of an
    example, such as images and labels.

    Raises:
        ValueError: A field has a value that cannot work.
    """

    model: Callable[[], nn.Module]
    """Function (or class) without arguments that builds the model with new weights."""
    train: Any
    """Training set: a map-style dataset, so that ``len(train)`` and ``train[0]`` work."""
    validation: Any
    """Validation set: a map-style dataset with examples of the same kind."""
    loss: Callable[..., Any]
    """Training loss, a scalar tensor that is the mean over the examples of a batch.

    There are two forms. ``loss(output, target)`` gets the output of the model and the last part of
    the batch; the model gets all other parts. A function whose first parameter is called ``model``
    gets the model and the batch: ``loss(model, batch)``. Such a function may also return a pair of
    the loss and the model's output, with classes in the last dimension."""
    metric: Callable[[nn.Module, Any], Tensor | float]
    """Function of the model and a batch: the mean of the validation metric over the batch, or one
    number for each example. The harness averages over all examples of the validation set."""
    higher_is_better: bool
    """True if a larger metric is better."""
    batch_size: int = 128
    """Examples of a step over all ranks, unless the command line sets ``trainer.batch_size``."""
    target: float | None = None
    """Metric at which a run stops, unless the command line sets ``trainer.target``."""
    metric_name: str | None = None
    """Name of the metric in tables and curves; None: the name of the function."""
    collate: Callable[[list[Any]], Any] | None = None
    """Function from a list of examples to a batch; None: torch's ``default_collate``.

    The first dimension of every tensor of the batch counts the examples."""
    likelihood: str | None = None
    """Distribution whose negative logarithm is the loss, for ``kfac.fisher=mc`` and ``type2``:
    ``categorical``, ``gaussian`` or ``bernoulli``; see ``KFAC.fisher_backward``."""
    curvature: float = 1.0
    """Second derivative of the loss of a ``gaussian`` likelihood with respect to one output: 1 for
    half the squared error, 2 / d for ``nn.MSELoss`` with d outputs of an example."""

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise ValueError(
                "Problem: model must be a function that builds the model, not "
                f"{_kind(self.model)}. Write model=Net, or model=lambda: Net(...)"
            )
        for name in ("train", "validation"):
            _check_dataset(name, getattr(self, name))
        for name in ("loss", "metric", *(["collate"] if self.collate is not None else [])):
            if not callable(getattr(self, name)):
                raise ValueError(
                    f"Problem: {name} must be a function, not {_kind(getattr(self, name))}"
                )
        if not isinstance(self.higher_is_better, bool):
            raise ValueError(
                f"Problem: higher_is_better={self.higher_is_better!r} must be True or False"
            )
        if type(self.batch_size) is not int or self.batch_size < 1:
            raise ValueError(
                f"Problem: batch_size={self.batch_size!r} must be a whole number of at least 1"
            )
        if self.target is not None and not _is_finite(self.target):
            raise ValueError(f"Problem: target={self.target!r} must be a finite number or None")
        if self.metric_name is not None and not _is_name(self.metric_name):
            raise ValueError(
                f"Problem: metric_name={self.metric_name!r} must be a text of 1 to 60 characters "
                "on one line"
            )
        if self.likelihood not in (None, *LIKELIHOODS):
            raise ValueError(
                f"Problem: likelihood={self.likelihood!r} must be one of {', '.join(LIKELIHOODS)}"
            )
        if not _is_finite(self.curvature) or self.curvature <= 0:
            raise ValueError(f"Problem: curvature={self.curvature!r} must be a number above 0")

    @property
    def metric_title(self) -> str:
        """The name of the metric in tables."""
        if self.metric_name is not None:
            return self.metric_name
        name = str(getattr(self.metric, "__name__", "metric"))
        return name if _is_name(name) and name != "<lambda>" else "metric"

    @property
    def loss_takes_model(self) -> bool:
        """True if the loss is a function of model and batch, not of output and target."""
        return self._loss_parameters[:1] == ["model"]

    def name_of_model(self, error: str) -> str | None:
        """Return the loss's first parameter if the loss seems to use this parameter as the model.

        Args:
            error: What happened when the loss got the output of the model instead.
        """
        parameters = self._loss_parameters
        is_called = re.search("object is not callable|object has no attribute", error)
        if len(parameters) != 2 or not (is_called or parameters[1] == "batch"):
            return None
        return None if parameters[0] == "model" else parameters[0]

    @property
    def _loss_parameters(self) -> list[str]:
        """The names of the parameters of a loss that is a function."""
        if isinstance(self.loss, nn.Module):
            return []
        try:
            return list(inspect.signature(self.loss).parameters)
        except (TypeError, ValueError):  # a builtin without a signature
            return []


def _check_dataset(name: str, examples: Any) -> None:
    if not hasattr(examples, "__getitem__") or not hasattr(examples, "__len__"):
        raise ValueError(
            f"Problem: {name} must be a map-style dataset, with len({name}) and {name}[0], not "
            f"{_kind(examples)}. An iterable dataset cannot be resumed exactly"
        )
    if len(examples) < 1:
        raise ValueError(f"Problem: {name} has no example")


def _kind(value: Any) -> str:
    return f"an object of class {type(value).__name__}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 60 and value.isprintable()
