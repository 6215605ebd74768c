"""A warning before measurements on a machine that is busy."""

import os

from kfac_bench.benchmark.machine_load import warn_if_busy


def test_only_a_busy_machine_gets_a_warning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said = []
    for load in (0.5, 2.9):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        warn_if_busy(said.append)
    assert said == [
        "the machine was busy in the last minute, so times may be too long: load 2.9, 2 cores"
    ]
