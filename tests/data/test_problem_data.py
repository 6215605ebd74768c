"""A table of tensors gives the batches that reading its examples one by one gives."""

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, random_split

from kfac_bench.data.problem_data import as_table

X, Y = torch.randn(20, 3), torch.arange(20)
WHOLE = TensorDataset(X, Y)
PART = Subset(WHOLE, [7, 3, -1, 3, 12])


def test_batches_are_those_of_the_examples():
    for examples in (WHOLE, PART, Subset(PART, [4, 0, -3]), random_split(WHOLE, [12, 8])[1]):
        table = as_table(examples)
        assert table is not None
        for indices in ([0], [2, 1, 2]):
            expected = default_collate([examples[i] for i in indices])
            batch = table.batch(torch.tensor(indices))
            assert len(batch) == len(expected)
            for ours, theirs in zip(batch, expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)


def test_sets_that_may_read_in_another_way_are_no_tables():
    class Own(TensorDataset):
        def __getitem__(self, index):
            return tuple(2 * x for x in super().__getitem__(index))

    class OwnPart(Subset):
        pass

    learned = TensorDataset(torch.nn.Parameter(X), Y)
    for examples in (Own(X, Y), Subset(Own(X, Y), [1]), OwnPart(WHOLE, [1]), learned, [(1, 2)]):
        assert as_table(examples) is None
    assert as_table(Subset(WHOLE, [20])) is None
    assert as_table(Subset(WHOLE, [-21])) is None
