"""Examples that fit in memory, of tensors of any kind."""

from collections.abc import Callable, Iterator

from torch import Tensor

from kfac_bench.data.base.batch import Batch
from kfac_bench.data.base.dataset import UNKNOWN, Data, Looks
from kfac_bench.data.base.order import Shard, eval_indices
from kfac_bench.data.base.unreadable import Faults


class InMemory(Data):
    """`train` and `evaluation` are tensors [N, ...] each; a batch is those of its examples.

    `shape` is that of one input as a model takes it: what `prepare` makes of a batch, on its
    device.
    """

    def __init__(
        self,
        name: str,
        train: tuple[Tensor, ...],
        evaluation: tuple[Tensor, ...],
        *,
        shape: tuple[int, ...],
        num_classes: int,
        prepare: Callable[[Batch], Batch],
        looks: Looks = UNKNOWN,
    ) -> None:
        self.name, self.shape, self.num_classes = name, shape, num_classes
        self.train_size, self.eval_size = len(train[0]), len(evaluation[0])
        self.faults = Faults()
        self.looks = looks
        self._train, self._evaluation, self._prepare = train, evaluation, prepare

    def training_batches(self, indices: Iterator[Tensor], key: tuple[int, int]) -> Iterator[Batch]:
        """Yield examples as they are stored."""
        return (tuple(x[i] for x in self._train) for i in indices)

    def evaluate(self, batch_size: int, shard: Shard) -> Iterator[Batch]:
        """Yield this rank's evaluation batches; see Data.evaluate."""
        batches = eval_indices(self.eval_size, batch_size, shard)
        return (tuple(x[indices] for x in self._evaluation) for indices in batches)

    def prepare(self, batch: Batch) -> Batch:
        """Make of a batch what a model and its task take."""
        return self._prepare(batch)
