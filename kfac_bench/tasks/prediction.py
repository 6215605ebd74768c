"""What a model makes of one example, for people to look at."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Picture = np.ndarray[Any, np.dtype[np.uint8]]
"""RGB, uint8 [H, W, 3]."""


@dataclass(frozen=True)
class Prediction:
    """One example: a line that says what is seen, a picture, and text of any number of lines.

    Pictures have boxes, masks and the like drawn in; `text` is for examples that are text
    (question, true answer, predicted answer). Either may be missing.
    """

    caption: str
    image: Picture | None = None
    text: str | None = None
