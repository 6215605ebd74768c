"""The released code's plan, the fit of a machine's constants, its folds and its validation."""

import shutil
import sys
from dataclasses import replace

import pytest

from benchmarks import simulation_folds
from benchmarks.simulation_folds import BEGIN, END, folds, main, time_errors
from kfac_bench.config import compose
from kfac_bench.core.planning.plan import Message, Stage
from kfac_bench.errors import UsageError
from kfac_bench.simulate.calibration import Constants, Observation, fit, predict, split_epoch_s
from kfac_bench.simulate.conduct import SC20_CODE
from kfac_bench.simulate.step import Workload, step_time
from kfac_bench.simulate.sweep import SGD, Intervals, Variant, released_plan, sweep
from scripts import calibrate
from scripts.calibrate import RANKS, minutes_of
from tests.support.made_up_machine import BETA, MACHINE, work_of

TRUE = Constants(step_s=0.02, op_s=5e-5, eigen_scale=0.7)


def observe(work: Workload, ranks: int = 8) -> list[Observation]:
    """Return what a paper would publish of a run with the constants TRUE."""
    sgd = Observation(work, ranks, Variant(SGD), Intervals(1, 1), 0.0)
    kfac = [
        Observation(work, ranks, Variant("comm_opt"), Intervals(k / 10, k), 0.0)
        for k in (10, 50, 100)
    ]
    unknown = [sgd, *kfac]
    seconds = predict(TRUE.of(MACHINE), unknown, SC20_CODE)
    return [replace(each, step_s=s) for each, s in zip(unknown, seconds, strict=True)]


# ---- the released code ----


@pytest.mark.parametrize(
    ("ranks", "workers"), [(8, [(0, 1), (2, 3), (4, 5)]), (2, [(0, 0), (1, 1)])]
)
def test_the_released_code_gives_factors_to_ranks_in_turn(ranks, workers):
    """A and G go to two ranks if there are more ranks than layers."""
    plan = released_plan(work_of(3).layers, ranks, "comm_opt")
    assert [p.workers for p in plan.placements][: len(workers)] == workers
    assert all(len(p.grad_workers) == ranks for p in plan.placements)
    for stage in Stage:
        sends = [isinstance(op, Message) for op in plan.ops(stage)]
        assert sends == sorted(sends), "a message starts before the work of its stage ends"
    with pytest.raises(UsageError, match="choose one of them"):
        released_plan(work_of(3).layers, ranks, "hybrid_opt")


def test_the_released_codes_stage_is_its_slowest_rank_and_one_sum():
    """Decompositions of four layers on 2 ranks: all ranks wait for the slower one."""
    work = work_of(3)
    plan = released_plan(work.layers, 2, "comm_opt")
    time = step_time(work, 2, MACHINE, plan, SC20_CODE)
    decompose = MACHINE.rates.decompose
    # Rank 1 has the second narrow layer and the wide one.
    slowest = sum(decompose(n, "eigen") for n in (64, 256, 512, 64))
    elements = sum(n * n + n for spec in work.layers for n in (spec.a_dim, spec.g_dim))
    summed = 2 * 1 / 2 * 4 * elements / BETA
    assert time.stages_s[Stage.DECOMPOSE] == pytest.approx(slowest + summed, abs=2e-5)


# ---- the fit ----


def test_the_fit_finds_the_constants_of_made_up_times():
    """Whatever constants the known machine has, the fit finds those behind the times."""
    observations = [each for depth in (4, 20) for each in observe(work_of(depth))]
    for start in (Constants(0.0, 0.0, 1.0), Constants(0.5, 1e-3, 1.0)):
        found = fit(start.of(MACHINE), observations, SC20_CODE)
        assert found.step_s == pytest.approx(TRUE.step_s, rel=1e-6)
        assert found.op_s == pytest.approx(TRUE.op_s, rel=1e-6)
        assert found.eigen_scale == pytest.approx(TRUE.eigen_scale, rel=1e-6)


def test_no_constant_is_negative():
    """Steps that are shorter than their work leave nothing for the constants."""
    observations = [replace(each, step_s=1e-3) for each in observe(work_of(4))]
    found = fit(MACHINE, observations, SC20_CODE)
    assert min(found.step_s, found.op_s, found.eigen_scale) >= 0


def test_too_few_observations_are_refused():
    with pytest.raises(ValueError, match="2 observations do not determine 3 constants"):
        fit(MACHINE, observe(work_of(4))[:2], SC20_CODE)


def test_an_efficiency_divides_the_overhead_between_steps_and_epochs():
    work, images = work_of(4), 8 * 8 * 1000
    machine = TRUE.of(MACHINE)
    times = {n: step_time(work, n, machine) for n in (2, 32)}
    steps = {n: images // (8 * n) for n in (2, 8, 32)}
    split = split_epoch_s(machine, times, steps, 8, 0.9)
    assert split.rates.step_s + split.epoch_s / steps[8] == pytest.approx(TRUE.step_s)
    cells = sweep(work, split, [Variant(SGD)], [2, 32], Intervals(1, 1))
    few, many = (cell.epoch_rate(images) / cell.world_size for cell in cells)
    assert many / few == pytest.approx(0.9)
    with pytest.raises(ValueError, match=r"an efficiency of 0\.1 needs"):
        split_epoch_s(machine, times, steps, 8, 0.1)


# ---- the folds ----

PAPER = {"images": RANKS * 8 * 100, "per_rank_batch": 8, "epochs": {"sgd": 90, "kfac": 55}}
WORKS = {f"net{depth}": work_of(depth) for depth in (4, 20, 60)}


def made_up_paper() -> dict:
    """Return Table 5 of three made-up models, with the constants TRUE."""
    rows = {}
    for name, work in WORKS.items():
        keys = [SGD, 10, 50, 100]
        seconds = [each.step_s for each in observe(work, RANKS)]
        rows[name] = {k: minutes_of(PAPER, k, s) for k, s in zip(keys, seconds, strict=True)}
    return PAPER | {"table5_minutes": rows}


def test_each_fold_predicts_its_model_and_never_sees_it():
    paper = made_up_paper()
    found = folds(paper, WORKS, MACHINE)
    assert [fold.held_out for fold in found] == list(WORKS)
    assert max(time_errors(found)) < 1e-4
    for i, name in enumerate(WORKS):
        # Other times of the held-out model must change no prediction of it, but those of others.
        rows = paper["table5_minutes"]
        other = {key: 3 * minutes for key, minutes in rows[name].items()}
        changed = folds(paper | {"table5_minutes": rows | {name: other}}, WORKS, MACHINE)
        assert changed[i].constants == found[i].constants
        assert changed[i].predicted == found[i].predicted
        assert changed[i - 1].constants != found[i - 1].constants


def test_a_page_without_marks_is_refused_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    for page, reason in ((tmp_path / "none.md", "cannot be read"), (tmp_path, "cannot be read")):
        monkeypatch.setattr(sys, "argv", ["simulation_folds.py", str(page)])
        assert main() == 2
        assert reason in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text("my own text")
    monkeypatch.setattr(sys, "argv", ["simulation_folds.py", str(page)])
    assert main() == 2
    assert f"add the lines {BEGIN} and {END}" in capsys.readouterr().err
    assert page.read_text() == "my own text"


@pytest.fixture(scope="module")
def resnets():
    """Return the work of the paper's ResNets, whose dry runs take most of the time."""
    return calibrate.resnets(calibrate.published())


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_command_prints(tmp_path, monkeypatch, resnets):
    monkeypatch.setattr(simulation_folds, "resnets", lambda paper: resnets)
    page = compose.CONF_DIR.parent / "docs" / "lab" / "simulation_folds.md"
    copy = tmp_path / "page.md"
    shutil.copy(page, copy)
    before, _, rest = copy.read_text().partition(BEGIN)
    copy.write_text(before + BEGIN + END + rest.partition(END)[2])
    monkeypatch.setattr(sys, "argv", ["simulation_folds.py", str(copy)])
    assert main() == 0
    assert copy.read_text() == page.read_text()


@pytest.mark.slow
def test_the_validation_script_reproduces_the_calibrated_hardware_file(
    tmp_path, monkeypatch, resnets
):
    """The script fails if conf/hardware/longhorn_v100.yaml differs from the result of its fit."""
    # Run as a script, its folder is on the path.
    monkeypatch.syspath_prepend(compose.CONF_DIR.parent / "scripts")
    from scripts import validate_simulation

    monkeypatch.setattr(validate_simulation, "resnets", lambda paper: resnets)
    out = tmp_path / "table.md"
    monkeypatch.setattr(sys, "argv", ["validate_simulation.py", str(out)])
    assert validate_simulation.main() == 0
    rows = {
        r[0].strip(): r[1:] for r in (x.split("|")[1:] for x in out.read_text().split("\n")) if r
    }
    fitted = [cells for name, cells in rows.items() if name.startswith("Table 5, resnet")]
    assert len(fitted) == 12
    assert all(cells[2].strip() == "used" for cells in fitted)
    pairs = [[float(text.split()[0]) for text in cells[:2]] for cells in fitted]
    assert sum(abs(a / b - 1) for a, b in pairs) / 12 < 0.06
    read_as_128 = f"Fig. 8, {validate_simulation.READ_AS_128}"
    efficiencies = [
        float(cells[2].split()[0])
        for name, cells in rows.items()
        if name.startswith(read_as_128) and cells[2].strip() != "used"
    ]
    assert len(efficiencies) == 2
    assert sum(map(abs, efficiencies)) / 2 < 6
    page = (compose.CONF_DIR.parent / "docs" / "lab" / "simulation.md").read_text()
    made = [line for line in out.read_text().splitlines() if not line.startswith("| Table 5, ")]
    assert all(line in page for line in made)
