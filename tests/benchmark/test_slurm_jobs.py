"""The jobs of a row: their names, their order, and the cells that are left out."""

import argparse
from functools import partial

import pytest

from kfac_bench import cli
from kfac_bench.benchmark import computed_numbers, grid, run_end, slurm_jobs, suite
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.config.command_options import sbatch_options
from kfac_bench.errors import UsageError
from kfac_bench.record.event_log import line_of
from kfac_bench.record.events import RunEnded

ROW = "table4a_bert_kfac_phase2"


class Sbatch:
    """Stands for sbatch and keeps what it was given."""

    def __init__(self):
        self.names, self.dependencies, self.commands = [], [], []

    def __call__(self, name, output, options, command):
        self.names.append(name)
        self.dependencies.append([word for word in options if word.startswith("--dependency")])
        self.commands.append([*command])
        return str(len(self.names))


@pytest.fixture
def sbatch(monkeypatch):
    stand_in = Sbatch()
    monkeypatch.setattr(slurm_jobs, "_sbatch", stand_in)
    return stand_in


def row_in(folder, name=ROW, seeds=(0, 1)):
    return suite.row(name, "smoke", (), str(folder / name), [*seeds])


def write_end(cell, status):
    cell.path().mkdir(parents=True, exist_ok=True)
    (cell.path() / "events.jsonl").write_text(line_of(RunEnded(5, 1.0, status)))


def run_ids(commands):
    words = [word for command in commands for word in command]
    named = [word.removeprefix("run_id=") for word in words if word.startswith("run_id=")]
    return list(dict.fromkeys(named))


def test_a_run_does_not_start_from_a_run_that_failed_or_has_not_ended(tmp_path, sbatch):
    row = row_in(tmp_path, seeds=(0, 1, 2, 3))
    [first_phase, second_phase, cells] = slurm_jobs.waves(row)
    good, bad, diverged, stopped = first_phase
    write_end(good, "finished")
    run_end.record_failure(bad.path(), bad.label, "out of memory")
    write_end(diverged, "failed")
    write_end(stopped, "interrupted")
    failed, lines = slurm_jobs.submit_wave(row, [], 1, [])
    assert run_ids(sbatch.commands) == [second_phase[0].path().name]
    assert failed == 2
    assert [line.rpartition(": not submitted: ")[2] for line in lines[:3]] == [
        f"{bad.path().name}, which it starts from, failed: out of memory",
        f"{diverged.path().name}, which it starts from, failed at step 5, 1.00 s",
        f"{stopped.path().name}, which it starts from, has not ended",
    ]
    assert lines[3].startswith(f"{ROW}: 1 of 4 cells submitted")
    assert not any(cell.path().exists() for cell in second_phase)

    write_end(second_phase[0], "finished")
    sbatch.commands.clear()
    assert slurm_jobs.submit_wave(row, [], 2, [])[0] == 4
    assert run_ids(sbatch.commands) == [cell.path().name for cell in cells if cell.seed == 0]
    states = {each.label: each.state for each in suite.attempts(row)}
    blocked = {each.label for each in cells if each.seed in (1, 2)}
    assert {x for x in states if states[x] is suite.AttemptState.BLOCKED} == blocked


def test_a_cell_on_this_machine_does_not_start_from_a_run_that_failed(tmp_path, monkeypatch):
    cell = row_in(tmp_path).cells[0]
    write_end(cell.before[0], "failed")
    monkeypatch.setattr(grid, "train", None)
    is_good, text = grid.run_cell(cell)
    assert (is_good, "which it starts from, failed at step 5" in text) == (False, True)
    assert not run_end.failure(cell.path()).has_run


def test_rows_that_share_a_run_give_its_jobs_one_name(tmp_path, sbatch):
    for name in ("table3_bert_lamb", ROW):
        slurm_jobs.submit_wave(row_in(tmp_path, name, seeds=[0]), [], 0, [])
    first, _, again, _ = sbatch.names
    assert first == again
    assert sbatch.dependencies[0] == sbatch.dependencies[2] == ["--dependency=singleton"]


def test_last_jobs_of_one_folder_wait_for_each_other_and_for_all_cells(tmp_path, sbatch):
    slurm_jobs.submit({"a": ["x"], "b": ["x"]}, ["report"], tmp_path)
    slurm_jobs.submit({"c": ["x"]}, ["report"], tmp_path, before=["1", "2"])
    slurm_jobs.submit({}, ["report"], tmp_path)
    assert sbatch.names[2] == sbatch.names[4] == sbatch.names[5]
    assert sbatch.dependencies[2] == ["--dependency=singleton,afterany:1:2"]
    assert sbatch.dependencies[4] == ["--dependency=singleton,afterany:1:2:4"]
    assert sbatch.dependencies[5] == ["--dependency=singleton"]


def given(text):
    return sbatch_options(argparse.Namespace(sbatch=text, launcher="slurm"))


def test_an_option_with_a_blank_reaches_the_next_wave(tmp_path, sbatch):
    words = given("--comment='my job' -C \"a100&nvlink\"")
    assert words == ["--comment=my job", "-C", "a100&nvlink"]
    slurm_jobs.submit_wave(row_in(tmp_path), [], 0, words)
    command = sbatch.commands[-1][1 + len(slurm_jobs.KFAC_BENCH) :]
    assert given(build_parser().parse_args(command).sbatch) == words


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("--comment='my job", "--sbatch --comment='my job: these are no words of a shell"),
        ("--gpus=1 --dependency=afterok:7", "--sbatch --dependency=afterok:7: kfac-bench sets"),
        ("-d singleton", "--sbatch -d: kfac-bench sets this option"),
        ("--job-name=mine", "--sbatch --job-name=mine: kfac-bench sets this option"),
    ],
)
def test_options_that_would_break_the_order_of_the_jobs_are_refused(text, line):
    with pytest.raises(UsageError, match=f"^{line}"):
        given(text)


def test_a_computed_cell_that_fails_is_named_and_is_exit_code_1(
    tmp_path, monkeypatch, sbatch, capsys
):
    def numbers(words):
        raise UsageError("no such machine")

    words = ["run", "fig7_step_profile", "--profile=smoke", "--launcher=slurm"]
    words += ["--runs-dir", str(tmp_path), "--seeds", "0"]
    monkeypatch.setattr(computed_numbers, "step_numbers", numbers)
    with pytest.raises(SystemExit) as ended:
        cli.bench(words)
    assert ended.value.code == 1
    label = suite.row("fig7_step_profile", "smoke").computed[0].label
    assert f"{label}: failed: no such machine\n" in capsys.readouterr().out


def test_the_report_after_a_part_of_the_cells_has_all_cells(tmp_path):
    row = suite.row("fig7_step_profile", "smoke", runs_dir=str(tmp_path))
    follow = partial(slurm_jobs._follow_up, row, ["--profile", "smoke"], options=[], retry=False)
    assert len(slurm_jobs.waves(row)) == 1
    command = follow(wave=0, only="SGD")
    assert command[-4:] == ["report", row.name, "--profile", "smoke"]
    several = suite.row("table4a_bert_kfac_phase2", "smoke", runs_dir=str(tmp_path))
    command = slurm_jobs._follow_up(several, [], 0, ["-p", "gpu"], only="K-FAC", retry=True)
    assert command[command.index("run") :] == [
        "run",
        several.name,
        "--only",
        "K-FAC",
        "--launcher",
        "slurm",
        "--wave",
        "1",
        "--sbatch=-p gpu",
        "--retry",
    ]
