"""A learning rate that falls as half a cosine."""

import math
from dataclasses import dataclass

from kfac_bench.schedules.polynomial import PolynomialConfig


@dataclass
class CosineConfig(PolynomialConfig):
    """A rate that falls as half a cosine, with the options of ``schedule=polynomial``."""

    def curve(self, left: float) -> float:
        """See :meth:`PolynomialConfig.curve`."""
        return 0.5 - 0.5 * math.cos(math.pi * left)
