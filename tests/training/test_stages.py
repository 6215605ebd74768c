"""Seconds of K-FAC's stages, memory and cores: what events say of them."""

import os

import pytest
import torch

from kfac_bench.core import stepper
from kfac_bench.record.events import Trained
from kfac_bench.training import environment
from kfac_bench.training.step_results import StageTimes
from tests.support import forks
from tests.support.distributed import run_ranks
from tests.support.runs import KFAC as EVERY
from tests.support.runs import here, of_kind, train, trainer_of


def test_means_include_stages_of_steps_without_event(tmp_path, monkeypatch):
    """Decompositions are due at steps 1, 5, 9: never at the steps that events tell of."""
    every_step = []
    add = StageTimes.add

    def note(self):
        every_step.append(self._kfac.stage_s)
        add(self)

    monkeypatch.setattr(StageTimes, "add", note)
    _, path = train(
        tmp_path, *EVERY, "kfac.spread=false", "trainer.max_steps=12", "trainer.log_freq=4"
    )
    events = of_kind(path, Trained)
    assert [("Decompose" in e.stage_s, "Decompose" in e.stage_mean_s) for e in events] == [
        (False, True)
    ] * 3
    assert len(every_step) == 12
    for number, event in enumerate(events):
        steps = every_step[4 * number : 4 * number + 4]
        assert event.stage_mean_s.keys() == set().union(*steps)
        for kind, mean in event.stage_mean_s.items():
            assert mean == pytest.approx(sum(s.get(kind, 0.0) for s in steps) / 4)


def stages_here(folder):
    trainer = trainer_of(folder, *EVERY, "kfac=layer_wise", backend=here())
    seconds = trainer.ranks.rank + 1.0
    trainer.kfac._executor.stage_s = {"Precondition": seconds, "Decompose": 2.0}
    times = StageTimes(trainer.kfac, trainer.ranks)
    times.add()
    trainer.kfac._executor.stage_s = {"Precondition": seconds}
    times.add()
    found = times.mean_s()
    times.add()
    return found, times.mean_s()


@pytest.mark.ranks
def test_means_are_over_all_ranks_and_start_again(tmp_path):
    results = run_ranks(2, stages_here, tmp_path)
    assert results[0] == results[1]
    first, second = results[0]
    assert {k: v for k, v in first.items() if v} == {"Precondition": 1.5, "Decompose": 1.0}
    assert {k: v for k, v in second.items() if v} == {"Precondition": 1.5}
    assert {"ComputeFactor", "ReduceFactors", "ShareGradients", "WriteBack"} <= first.keys()


def test_time_stages_waits_before_and_after_each_stage(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(stepper, "_synchronize", waits.append)
    once = (*EVERY, "trainer.max_steps=1", "trainer.predictions=0")
    train(tmp_path / "a", *once)
    assert waits == []
    _, path = train(tmp_path / "b", *once, "trainer.time_stages=true")
    [event] = of_kind(path, Trained)
    assert len(waits) >= 2 * len(event.stage_s) >= 6
    assert len(waits) % 2 == 0


def two_runs_and_much_memory(folder):
    once = ("kfac=none", "trainer.max_steps=1")
    _, path = train(folder / "a", *once)
    [before] = of_kind(path, Trained)
    ballast = torch.ones(int(before.peak_memory_bytes) // 4 + 2**24)  # more than ever before
    _, path = train(folder / "b", *once)
    [event] = of_kind(path, Trained)
    return ballast.nbytes, event


def test_memory_is_that_of_the_process(tmp_path):
    # In a fork: this process may have had gigabytes, and would need still more here.
    ballast, event = forks.call(two_runs_and_much_memory, tmp_path)
    assert ballast < event.peak_memory_bytes < 2 * ballast + 2**28
    assert event.stage_mean_s == {}


@pytest.fixture
def cores():
    """Those that this process may use, at its end too."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def test_a_rank_is_pinned_to_its_own_cores(cores, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(cores)))
    monkeypatch.setenv("LOCAL_RANK", str(len(cores) - 1))
    assert environment.pin(1)
    assert os.sched_getaffinity(0) == {cores[-1]}


def test_without_enough_cores_nothing_is_pinned(cores, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(cores)))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not environment.pin(2)
    assert sorted(os.sched_getaffinity(0)) == cores


def test_pinned_cores_are_recorded(tmp_path, cores):
    from kfac_bench.record.events import RunStarted

    for pin in (True, False):
        _, path = train(tmp_path / str(pin), "trainer.max_steps=1", f"trainer.pin={pin}")
        [started] = of_kind(path, RunStarted)
        assert started.environment["pinned"] is pin
    assert len(os.sched_getaffinity(0)) == 1
    assert torch.get_num_threads() == 1
