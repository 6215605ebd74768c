"""The map-style datasets of a user's problem, as :class:`Data`.

Datasets and transforms of users draw from the global generators of Python, NumPy and torch. So
these generators are seeded for each example by (seed, epoch, index), and are restored afterwards.
The examples then do not depend on the number of workers or ranks, and a resumed run gets the same.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from kfac_bench import randomness
from kfac_bench.config.problem_file import ProblemFile, described, place
from kfac_bench.data.base.batch import Batch, split
from kfac_bench.data.base.dataset import Data, of_tensors
from kfac_bench.data.base.files import Faults, Unreadable
from kfac_bench.data.base.loader import load_batches
from kfac_bench.data.base.order import Shard, eval_indices, mixed_seed
from kfac_bench.errors import UsageError

TRIED = 8
"""Examples of the batch that is tried before a run begins."""

EVALUATION, COLLATION = -2, -3
"""Marks of seeds: of evaluation examples, and of the collate function."""


class ProblemData(Data):
    """The two datasets of a problem. Reading the first examples checks them.

    Args:
        file: The file of the problem.
        workers: Number of processes that read ahead; 0 reads in this process.
        on_error: Whether an example that cannot be read is ``fatal`` or is left out (``skip``).

    Raises:
        UsageError: The first examples cannot be read, or have other shapes in the other set.
    """

    def __init__(self, file: ProblemFile, workers: int = 0, on_error: str = "fatal") -> None:
        problem = file.problem
        self.file, self.name, self._workers = file, "problem", workers
        self.train_size, self.eval_size = len(problem.train), len(problem.validation)
        self.num_classes = 0
        self.faults = Faults(skip=on_error == "skip")
        with torch.device("cpu"):  # a dry run makes tensors without values elsewhere
            self._check()

    def _check(self) -> None:
        file = self.file
        first = self.first("train", TRIED)
        self.has_parts = isinstance(first, tuple)
        self._empty: Batch = split(_wrapped(first), TRIED + 1)[0]
        if len(leading := [x.shape[1:] for x in _tensors(first)]):
            self.shape = tuple(leading[0])
        self._check_alike(first, self.first("validation", TRIED))
        if not _are_equal(first, self.first("train", TRIED)):
            self.notes = (
                f"{file.path}: an example of `train` changes when it is read again, so this run "
                "cannot be reproduced. Draw random numbers from Python's, NumPy's or torch's "
                "global generator, or from one that depends on the index",
            )

    def first(self, name: str, count: int, copies: int = 1) -> Any:
        """Return the batch of the first examples of a set, as the user's code sees it.

        Args:
            name: ``train`` or ``validation``.
            count: Number of examples, or fewer if the set has fewer.
            copies: How often the batch holds each example.

        Raises:
            UsageError: The examples cannot be read or do not make a batch.
        """
        examples = getattr(self.file.problem, name)
        indices = list(range(min(count, len(examples))))
        samples = _Samples(self.file, name, (0, 0)).__getitems__(indices)
        for sample in samples:
            if isinstance(sample, Unreadable):
                raise UsageError(f"{sample.path}: {sample.reason}")
        samples = samples * copies
        batch = self.file.call(
            f"the first {len(indices)} examples of `{name}` do not make a batch",
            lambda: _collate(self.file.problem.collate, (0, 0), samples),
        )
        whole = _plain(batch, self.file.problem.collate is None)
        leaves = list(_leaves(whole))
        shapes = [list(x.shape) if isinstance(x, Tensor) else [len(x)] for x in leaves]
        if not list(_tensors(whole)) or any(shape[:1] != [len(samples)] for shape in shapes):
            listed = ", ".join(map(str, shapes)) or "no tensor"
            raise UsageError(
                f"{self.file.path}: a batch of {len(samples)} examples of `{name}` has {listed}. "
                "The first dimension of each tensor and list must count the examples"
            )
        return whole

    def example_batch(self, n: int) -> Any:
        """Return a batch of ``n`` examples without values, on torch's default device."""
        with torch.device("cpu"):
            first = self.first("train", TRIED)
        return _map_tensors(first, lambda x: torch.empty(n, *x.shape[1:], dtype=x.dtype))

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield batches of training examples; see `Data.training_batches`."""
        return self._load("train", indices, key)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches; see `Data.evaluate`."""
        indices = eval_indices(self.eval_size, batch_size, shard)
        return self._load("validation", indices, (EVALUATION,))

    def fingerprint_parts(self, split: str) -> Iterable[bytes]:
        """Yield the integers of a table, such as labels; see `Data.fingerprint_parts`.

        Of other datasets only the number of examples is compared: reading all examples may take
        long, and examples may be random.
        """
        problem = self.file.problem
        table = as_table(problem.train if split == "train" else problem.validation)
        if table is None:
            return ()
        rows = () if table.rows is None else (table.rows,)
        return of_tensors((*table.columns, *rows))

    def _load(self, name: str, indices: Iterator[Tensor], key: tuple[int, ...]) -> Iterator[Batch]:
        collate = self.file.problem.collate
        table = as_table(getattr(self.file.problem, name)) if collate is None else None
        if table is not None:
            return (table.batch(chosen) for chosen in indices)
        batches = load_batches(
            _Samples(self.file, name, key),
            indices,
            self._workers,
            self._empty,
            self.faults,
            partial(_stack, self.file, name, key),
        )
        # Workers and the pinning of memory turn tuples into lists.
        return (_plain(batch, collate is None) for batch in batches)

    def _check_alike(self, train: Any, validation: Any) -> None:
        """Refuse sets whose examples differ; with an own collate function sizes may differ."""
        exact = self.file.problem.collate is None
        ours, theirs = ([_about(x, exact) for x in _tensors(b)] for b in (train, validation))
        if ours != theirs:
            raise UsageError(
                f"{self.file.path}: an example of `train` has {'; '.join(ours)}, but one of "
                f"`validation` has {'; '.join(theirs)}. Both sets must have the same shapes"
            )


class _Samples(Dataset[Any]):
    """One of the datasets, with (index, example) for each index."""

    def __init__(self, file: ProblemFile, name: str, key: tuple[int, ...]) -> None:
        self._file, self._name, self._key = file, name, key
        self._examples = getattr(file.problem, name)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return several examples, which torch's loader asks for. Global random state is kept."""
        with randomness.preserve_rng():
            return [self._read(index) for index in indices]

    def _read(self, index: int) -> Any:
        randomness.seed_all(mixed_seed(*self._key, index))
        try:
            return index, self._examples[index]
        except Exception as error:
            # The error arrives as one line, also from a worker.
            return Unreadable(f"{place(self._file.path, error)}: {self._name}[{index}]",
                              described(error))  # fmt: skip


def _stack(file: ProblemFile, name: str, key: tuple[int, ...], samples: list[Any]) -> Batch:
    batch = file.call(
        f"the batch of `{name}` that begins with example {samples[0][0]} cannot be made",
        lambda: _collate(file.problem.collate, key, samples),
    )
    return _wrapped(batch)


def _collate(collate: Any, key: tuple[int, ...], samples: list[Any]) -> Any:
    """Call the collate function, whose random numbers depend on the first index of the batch."""
    with randomness.preserve_rng():
        randomness.seed_all(mixed_seed(*key, COLLATION, samples[0][0]))
        return (collate or default_collate)([sample for _, sample in samples])


def _wrapped(batch: Any) -> Batch:
    """Return a batch as a tuple of parts; a batch of another kind is the only part."""
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _plain(batch: Any, lists_are_parts: bool) -> Any:
    """Return a batch made of tensors, tuples, lists and dictionaries alone.

    Args:
        batch: What a collate function returned. A list at the top has the parts of the batch.
        lists_are_parts: Whether lists further down have parts too, as `default_collate` makes
            them. Otherwise such a list has one item for each example.
    """
    if isinstance(batch, Mapping):
        return {key: _plain_below(value, lists_are_parts) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_plain_below(value, lists_are_parts) for value in batch)
    return batch


def _plain_below(value: Any, lists_are_parts: bool) -> Any:
    is_parts = lists_are_parts and not (isinstance(value, list) and _is_text(value))
    return value if isinstance(value, list) and not is_parts else _plain(value, lists_are_parts)


def _is_text(values: list[Any]) -> bool:
    return all(isinstance(value, str | bytes) for value in values)


def _map_tensors(batch: Any, function: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_map_tensors(value, function) for value in batch)
    return batch


def _leaves(batch: Any) -> Iterator[Tensor | list[Any]]:
    """Yield the tensors and the lists of examples of a batch in order."""
    if isinstance(batch, Tensor | list):
        yield batch
    elif isinstance(batch, dict | tuple):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from _leaves(value)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch in order; those in a list of examples do not count."""
    return (leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor))


def _about(x: Tensor, exact: bool) -> str:
    shape = list(x.shape[1:]) if exact else f"{x.ndim - 1} dimensions"
    return f"{shape} {str(x.dtype).removeprefix('torch.')}"


def _are_equal(a: Any, b: Any) -> bool:
    pairs = list(zip(_tensors(a), _tensors(b), strict=True))
    # A missing value (NaN) is not equal to itself.
    return all(
        x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs
    )


# ---- tables of tensors

# Reading 256 rows of a table one by one, with the generators seeded for each, takes longer than
# many small models take for a step. The rows of a `TensorDataset` hold no random numbers, so the
# batch can be taken from its tensors.


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
        """Return the batch that `default_collate` makes of the examples at `indices`."""
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
