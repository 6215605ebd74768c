"""Ranks whose weights drift apart end the run, with a line; what may differ does not."""

import pytest
import torch
from torch import nn

from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.core.distributed.dtensor import local
from kfac_bench.distributed.backends.fsdp2 import FSDP2
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.record.events import Evaluated
from kfac_bench.training import state
from kfac_bench.training.state import CHUNK, checksum
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import (
    ALONE,
    CPU,
    KFAC,
    RESNET,
    SMALL,
    before_step,
    end,
    here,
    of_kind,
    train,
)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2 * CHUNK + 3,)], ids=str)
def test_any_bit_of_any_element_counts(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    raw = x.clone().reshape(-1)
    as_bytes = raw.view(torch.uint8)
    bits = 1 if dtype == torch.bool else 8
    for place in {0, len(as_bytes) // 2, len(as_bytes) - 1}:
        for bit in range(bits):
            as_bytes[place] ^= 1 << bit
            assert checksum(raw.view(shape)) != checksum(x), (place, bit)
            as_bytes[place] ^= 1 << bit
    assert checksum(raw.view(shape)) == checksum(x)


def test_two_elements_that_change_together_count():
    """Two signs, two that are swapped, at any distance: what plain sums do not see."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3 * CHUNK, dtype=dtype)
        for distance in (1, 2, CHUNK // 2, CHUNK, 2 * CHUNK):
            flipped, swapped = x.clone(), x.clone()
            flipped[[0, distance]] *= -1
            swapped[[0, distance]] = x[[distance, 0]]
            assert len({int(checksum(t)) for t in (x, flipped, swapped)}) == 3


def test_the_layout_in_memory_does_not_count():
    x = torch.randn(2, 3, 4, 5)
    assert checksum(x) == checksum(x.to(memory_format=torch.channels_last))
    assert checksum(x) != checksum(x.mT.contiguous())


def test_one_rank_agrees_with_itself():
    assert state.model_difference(nn.Linear(2, 2), None, ALONE.ranks) is None


def spoil(what):
    """In step 3, on rank 1: the least significant bit of one weight, or another damping."""

    def action(trainer):
        if trainer.ranks.rank != 1:
            return
        if what == "damping":
            trainer.kfac._schedules.damping = 0.5
            return
        weights = [p for p in trainer._bare.parameters() if local(p).numel()]
        with torch.no_grad():
            local(weights[2]).view(torch.int32).view(-1)[-1] ^= 1

    return action


def train_here(folder, what, make, overrides, base=SMALL):
    backend = here() if make is None else make(Ranks(CPU, TorchCollective()))
    with before_step(3, spoil(what) if what else lambda trainer: None):
        return train(folder, *overrides, "trainer.eval_freq=3", base=base, backend=backend)


STEPS = (*KFAC, "trainer.max_steps=6", "trainer.checkpoint_freq=1", "run_id=r")


@pytest.mark.ranks
def test_a_bit_of_one_weight_on_one_rank_ends_the_run(tmp_path):
    done = run_ranks(2, train_here, tmp_path, "weight", None, STEPS)
    assert [status for status, _ in done] == ["failed", "failed"]
    assert end(tmp_path / "r").message.startswith(
        "after step 3 ranks do not agree: rank 1 has another encoder.2.weight than rank 0: "
    )
    assert [e.step for e in of_kind(tmp_path / "r", Evaluated)] == [0]
    assert not (tmp_path / "r" / "checkpoints" / "step-00000003").exists()


@pytest.mark.ranks
def test_another_damping_on_one_rank_ends_the_run(tmp_path):
    run_ranks(2, train_here, tmp_path, "damping", None, STEPS)
    assert "rank 1 has another damping" in end(tmp_path / "r").message


@pytest.mark.ranks
def test_the_check_can_be_turned_off(tmp_path):
    off = (*STEPS, "trainer.check_ranks=false")
    run_ranks(2, train_here, tmp_path, "weight", None, off)
    assert end(tmp_path / "r").status == "finished"


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["comm_opt", slow("local_factors")])
def test_ranks_that_work_agree(tmp_path, strategy):
    """Batch norm's statistics drift apart between evaluations: that is no fault."""
    options = (*STEPS, f"kfac={strategy}", "optimizer=adam", "optimizer.lr=0.001")
    run_ranks(2, train_here, tmp_path, None, None, options, RESNET)
    assert end(tmp_path / "r").status == "finished", end(tmp_path / "r").message


@pytest.mark.ranks
def test_parts_that_no_other_rank_holds_are_not_compared(tmp_path):
    """FSDP2: what rank 1 changes in its part all ranks then compute with."""
    run_ranks(2, train_here, tmp_path, "weight", FSDP2, (*STEPS, "backend=fsdp2"))
    assert end(tmp_path / "r").status == "finished", end(tmp_path / "r").message
