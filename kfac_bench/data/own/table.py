"""Tables of tensors: a `TensorDataset`, or parts of one, whose batches are read at once.

Reading 256 rows of a table one by one, with the generators seeded for each, takes longer than many
small models take for a step. The rows of a `TensorDataset` hold no random numbers, so the batch can
be taken from its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset


@dataclass(frozen=True)
class Table:
    """Rows of tensors.

    Args:
        columns: Tensors [N, ...].
        rows: Index of each example's row, int64, or None if example i has row i.
    """

    columns: tuple[Tensor, ...]
    rows: Tensor | None = None

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        """Return what `default_collate` makes of the examples at `indices`."""
        rows = indices if self.rows is None else self.rows[indices]
        return tuple(column[rows] for column in self.columns)


def as_table(examples: Any) -> Table | None:
    """Return a `TensorDataset`, or a `Subset` of one, as a table; None for all else.

    A class of the user's own that inherits from these may read in another way, and is no table.
    """
    if type(examples) is TensorDataset:
        return Table(examples.tensors) if all(_is_plain(x) for x in examples.tensors) else None
    if type(examples) is not Subset or (whole := as_table(examples.dataset)) is None:
        return None
    count = len(whole.columns[0]) if whole.rows is None else len(whole.rows)
    rows = torch.as_tensor(examples.indices, dtype=torch.int64, device="cpu")
    if len(rows) and not (-count <= int(rows.min()) and int(rows.max()) < count):
        return None  # reading the example says which one is missing
    return Table(whole.columns, rows if whole.rows is None else whole.rows[rows])


def _is_plain(x: Tensor) -> bool:
    plain = type(x) is Tensor and x.layout == torch.strided and x.device.type == "cpu"
    return plain and not x.requires_grad
