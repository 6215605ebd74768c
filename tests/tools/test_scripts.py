"""The scripts that measure this machine: their files can be read, and their times are real."""

import functools
import math
import os
import re
import sys
from pathlib import Path

import pytest

from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware
from scripts import measure_hardware, validate_local, version_tests
from tests.support import forks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_simulation_reads_a_measured_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure_hardware, "LEAST_S", 0.02)
    monkeypatch.setattr(measure_hardware, "NETWORK_STEPS", 4)
    monkeypatch.setattr(measure_hardware, "SIZES", (16, 256))
    forks.server()
    spawn = functools.partial(measure_hardware.mp.start_processes, start_method="forkserver")
    monkeypatch.setattr(measure_hardware.mp, "spawn", spawn)
    out = tmp_path / "here.yaml"
    monkeypatch.setattr(sys, "argv", ["measure_hardware.py", "here", "--out", str(out)])
    assert measure_hardware.main() == 0
    assert capsys.readouterr().out == f"{out}: written\n"
    found = hardware.load(out)
    link, rates = found.network.intra, found.rates
    cores = len(os.sched_getaffinity(0))
    most = measure_hardware.MOST_RANKS
    expected = {cores, 2 * cores} - {1} if cores <= most else {most, cores}
    assert list(found.crowding) == sorted(expected)
    assert all(factor > 0.5 for factor in found.crowding.values())
    assert 1e-7 <= link.latency_s < 1
    assert 1e5 < link.bandwidth_bytes_per_s < math.inf
    assert link == found.network.inter
    assert list(rates.eigen_s) == list(rates.inverse_s) == list(rates.qr_s) == [16, 256]
    for seconds in (rates.eigen_s, rates.inverse_s, rates.qr_s):
        assert 0 < seconds[16] < seconds[256] < 10, "more work took less time"
    for rate in (rates.factor_flops_per_s, rates.step_flops_per_s["default"]):
        assert 1e6 < rate < 1e16


def test_an_unwritable_file_fails_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_hardware.py", "x", "--out", "/nowhere/x.yaml"])
    with pytest.raises(SystemExit) as caught:
        measure_hardware.main()
    assert caught.value.code == 2
    assert "/nowhere: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["toaster", "meta:x", "cuda:77"])
def test_a_device_that_is_not_here_is_one_line(device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_hardware.py", "x", "--device", device])
    with pytest.raises(SystemExit) as caught:
        measure_hardware.main()
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument --device: '{device}' cannot be used" in last


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["moon"], "moon.yaml: cannot be read"), (["two_cores", "resnet7"], "model=resnet7")],
)
def test_a_wrong_name_is_refused_before_ranks_start(arguments, line, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["validate_local.py", *arguments])
    monkeypatch.setattr(validate_local.mp, "spawn", None)
    with pytest.raises(UsageError, match=line):
        validate_local.main()


def test_an_unknown_row_of_versions_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["version_tests.py", "3.12", "3.7"])
    with pytest.raises(SystemExit):
        version_tests.main()
    assert "error: 3.7: no such row; choose light, oldest, " in capsys.readouterr().err


def test_steps_are_predicted_and_measured_by_kind(monkeypatch, capsys):
    """One rank in this process suffices: its steps are real, and it starts quickly."""
    calls = []

    def here(rank, args, nprocs):
        calls.append(nprocs)
        rank(0, *args)

    monkeypatch.setattr(validate_local.mp, "spawn", here)
    monkeypatch.setattr(validate_local, "RANKS", (1,))
    monkeypatch.setattr(validate_local, "STEPS", 11)
    monkeypatch.setattr(validate_local, "BATCH", 4)
    monkeypatch.setattr(sys, "argv", ["validate_local.py", "two_cores", "resnet8"])
    assert validate_local.main() == 0
    assert calls == [1]
    lines = [line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0].strip() for line in lines] == [*validate_local.SORTS, "mean"]
    values = [[float(re.match(r" ([\d.]+) ms", line[i])[1]) for i in (1, 2)] for line in lines]
    for plain, factors, decompositions, mean in zip(*values, strict=True):
        assert 0 < plain < decompositions
        expected = (6 * plain + 2 * factors + decompositions) / 9
        assert mean == pytest.approx(expected, rel=0.02, abs=0.2)
    predicted, wall = values[0]
    error = float(lines[0][3].removesuffix("% "))
    assert error == pytest.approx(100 * (predicted / wall - 1), rel=0.1, abs=6)


def test_the_validation_fails_before_it_computes_what_it_cannot_write(monkeypatch):
    # Run as a script, its folder is on the path.
    monkeypatch.syspath_prepend(Path(validate_local.__file__).parent)
    from scripts import validate_simulation

    monkeypatch.setattr(sys, "argv", ["validate_simulation.py", "/nowhere/table.md"])
    with pytest.raises(UsageError, match="/nowhere: no such folder"):
        validate_simulation.main()
