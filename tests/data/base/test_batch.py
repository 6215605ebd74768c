"""Batches of tensors, lists and dictionaries: their size, parts and device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfac_bench.data.base.batch import size, split, to_device


def examples(n):
    images = [torch.full((3, 4 + i, 5), float(i)) for i in range(n)]
    targets = [{"boxes": torch.full((i, 4), float(i)), "id": i} for i in range(n)]
    tokens = {"ids": torch.arange(n * 2).view(n, 2), "mask": torch.ones(n, 2)}
    return images, targets, (tokens, torch.arange(n))


@given(n=st.integers(0, 9), parts=st.integers(1, 6))
def test_parts_are_consecutive_and_of_equal_size(n, parts):
    made = split(examples(n), parts)
    sizes = [size(part) for part in made]
    assert len(made) == parts
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert [t["id"] for _, targets, _ in made for t in targets] == list(range(n))
    assert [len(x[0]) for x in made] == [len(x[2][1]) for x in made] == sizes
    assert torch.cat([x[2][0]["ids"] for x in made]).tolist() == examples(n)[2][0]["ids"].tolist()


@pytest.mark.parametrize("first", [torch.zeros(3, 2), [1, 2, 3], {"n": 7, "a": torch.zeros(3)}])
def test_the_first_element_determines_the_size(first):
    assert size((first, torch.zeros(3))) == 3


def test_all_tensors_move_to_the_device():
    images, targets, (tokens, labels) = to_device(examples(2), torch.device("meta"))
    moved = [*images, targets[1]["boxes"], *tokens.values(), labels]
    assert all(x.device.type == "meta" for x in moved)
    assert targets[1]["id"] == 1


@pytest.mark.parametrize("is_pinned", [False, True])
def test_copies_to_a_gpu_start_from_pinned_memory(monkeypatch, is_pinned):
    done = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: is_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: done.append("pin") or x)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, device, non_blocking: done.append(non_blocking) or x
    )
    to_device((torch.ones(2),), torch.device("cuda"))
    assert done == ([True] if is_pinned else ["pin", True])
