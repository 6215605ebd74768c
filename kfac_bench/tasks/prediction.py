"""A prediction for one example, for people to look at."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Picture = np.ndarray[Any, np.dtype[np.uint8]]
"""An RGB picture, uint8 [H, W, 3]."""


@dataclass(frozen=True)
class Prediction:
    """One example: a caption of one line, a picture, and a text of any number of lines.

    Boxes and masks are drawn into the picture. `text` is for examples that are text (question,
    true answer, predicted answer). The picture or the text may be missing.
    """

    caption: str
    image: Picture | None = None
    text: str | None = None
