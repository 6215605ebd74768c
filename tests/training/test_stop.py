"""Signals that stop a run."""

import os
import signal

import pytest

from kfac_bench.record.events import Checkpointed
from kfac_bench.training import trainer
from kfac_bench.training.stop import SIGNALS, Stop
from tests.support import forks
from tests.support.runs import before_step, end, steps_of, train

STEPS = ("kfac=none", "run_id=r", "trainer.max_steps=10")


@pytest.fixture(autouse=True)
def usual_handlers():
    """Signals as in a terminal: a shell that starts the tests with & lets them ignore SIGINT."""
    before = {s: signal.signal(s, signal.SIG_DFL) for s in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_ctrl_c_does_not_wait_for_the_step_to_end():
    stop = Stop()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", [s for s in SIGNALS if s != signal.SIGINT])
def test_other_signals_may_come_twice_and_before_ctrl_c(first):
    stop = Stop()
    with stop.listening():
        for number in (first, first, signal.SIGINT):
            signal.raise_signal(number)
            assert stop.signal == number


def test_afterwards_signals_do_what_they_did_before():
    before = {s: signal.getsignal(s) for s in SIGNALS}
    with Stop().listening():
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop = Stop()
        with stop.listening():
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def _stopped(folder, number):
    signal.signal(number, signal.SIG_DFL)  # nohup lets its children ignore SIGHUP
    with before_step(4, lambda _: os.kill(os.getpid(), number)):
        return train(folder, *STEPS)[0]


@pytest.mark.parametrize("number", [s for s in SIGNALS if s != signal.SIGINT])
def test_a_process_that_gets_a_signal_saves_and_the_same_command_continues(tmp_path, number):
    straight = train(tmp_path / "straight", *STEPS)[1]
    assert forks.call(_stopped, tmp_path, number) == "interrupted"
    assert steps_of(tmp_path / "r", Checkpointed) == [4]
    status, path = train(tmp_path, *STEPS)
    assert (status, end(path).step) == ("finished", 10)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def test_a_signal_while_the_weights_are_hashed_loses_no_event(tmp_path, monkeypatch):
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the signal would end the process"))
    weights_sha256 = trainer.weights_sha256

    def hashed(model):
        os.kill(os.getpid(), signal.SIGTERM)
        return weights_sha256(model)

    monkeypatch.setattr(trainer, "weights_sha256", hashed)
    status, path = train(tmp_path, "trainer.max_steps=1", "kfac=none")
    assert status == end(path).status == "finished"
