"""benchmarks/peers.py gives all competitors the same work and says what came of it."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import peers, peers_desk, peers_loop, peers_results, peers_torch
from benchmarks.peers import COMPETITORS, STUDY
from benchmarks.peers_loop import Work
from benchmarks.peers_results import Results, Row
from kfac_bench.benchmark import local_runs
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from tests.support import ROOT, forks
from tests.support.configs import quick_load
from tests.support.quick import quick_if

JAX = ROOT / "build" / "peers" / "bin" / "python"
TORCH = [name for name, competitor in COMPETITORS.items() if competitor.library == "torch"]
WORK = {"target": 13.0, "max_steps": 100}


@pytest.fixture(scope="module")
def work():
    """The autoencoder 16-8-4-8-16 on random images of three dimensions."""
    generator = np.random.default_rng(0)
    images = (generator.random((60, 3)) @ generator.random((3, 16))).astype(np.float32)
    order = np.stack([generator.permutation(40)[:20] for _ in range(40)]).astype(np.int32)
    torch.manual_seed(0)
    layers = [
        (layer.weight.detach().numpy(), layer.bias.detach().numpy())
        for layer in (torch.nn.Linear(i, o) for i, o in ((16, 8), (8, 4), (4, 8), (8, 16)))
    ]
    return Work(images[:40], images[40:], order, layers)


def job_of(name, **changes):
    competitor = COMPETITORS[name]
    settings = peers.draw(competitor, 1)[0]
    job = {"competitor": name, "runs": competitor.runs, "settings": settings, "seed": 3}
    limits = {"target": 0.0, "max_steps": 40, "eval_freq": 10, "limit_s": math.inf}
    return job | {"experiment": STUDY["experiment"]} | limits | changes


# ---- the loop ----


@pytest.mark.parametrize("name", quick_if(lambda name: name != "eigen_adam", TORCH))
def test_each_torch_competitor_learns_from_the_same_start(name, work, monkeypatch):
    monkeypatch.setattr(compose, "load", quick_load)
    # Without instructions for bfloat16, the competitor Muon replaces a function of torch.
    of_torch = torch.optim._muon._zeropower_via_newtonschulz
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", of_torch)
    job = job_of(name)
    learner = peers_torch.TorchLearner(job, work)
    learner.restart()
    start = learner.error(learner.place(work.evaluation))
    model = peers_torch.autoencoder(work)
    images = torch.from_numpy(work.evaluation)
    expected = (model(images) - images).square().sum(1).mean().item()
    assert start == pytest.approx(expected, rel=1e-5)
    result = peers_loop.train(learner, work, job)
    assert result["end"] == "limit"
    assert result["steps"] == 40
    assert [step for step, _, _ in result["curve"]] == [10, 20, 30, 40]
    assert result["best_error"] < 0.95 * start


def test_a_run_starts_again_after_the_steps_before_the_clock(work):
    job = job_of("adam", max_steps=10)
    result = peers_loop.train(peers_torch.TorchLearner(job, work), work, job)
    learner = peers_torch.TorchLearner(job, work)
    learner.restart()
    for step in range(10):
        learner.step(learner.place(work.batch(step)))
    assert result["curve"][-1][2] == learner.error(learner.place(work.evaluation))


def test_a_run_ends_at_the_target(work):
    job = job_of("adam", target=1e9)
    result = peers_loop.train(peers_torch.TorchLearner(job, work), work, job)
    assert (result["end"], result["steps"]) == ("target", 10)


def test_a_run_ends_at_its_limit_of_seconds(work):
    job = job_of("adam", limit_s=0.0)
    result = peers_loop.train(peers_torch.TorchLearner(job, work), work, job)
    assert (result["end"], result["steps"]) == ("limit", 1)


def test_a_run_that_diverges_ends(work):
    job = job_of("adam", settings={"lr": 1e30, "beta1": 0.9, "beta2": 0.999})
    result = peers_loop.train(peers_torch.TorchLearner(job, work), work, job)
    assert (result["end"], result["best_error"]) == ("diverged", None)


# ---- both libraries compute the same model ----


@pytest.mark.slow
@pytest.mark.skipif(not JAX.exists(), reason=f"needs {JAX}; see benchmarks/peers.py")
def test_the_jax_model_is_the_torch_model(work, tmp_path):
    layers = {f"weight_{i}": weight for i, (weight, _) in enumerate(work.layers)}
    layers |= {f"bias_{i}": bias for i, (_, bias) in enumerate(work.layers)}
    np.savez(tmp_path / "images.npz", train=work.train, evaluation=work.evaluation)
    np.savez(tmp_path / "start.npz", order=work.order, **layers)
    files = {"images": str(tmp_path / "images.npz"), "start": str(tmp_path / "start.npz")}
    (tmp_path / "job.json").write_text(json.dumps({"kind": "check"} | files))
    script = ROOT / "benchmarks" / "peers_jax.py"
    command = [JAX, script, tmp_path / "job.json", tmp_path / "result.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert not peers_desk._wrong_versions(result["versions"])
    before, after = peers_torch.losses(work)
    assert result["losses"] == pytest.approx([before, after], rel=1e-5)
    assert after < before


def test_models_that_differ_are_refused():
    peers_desk.check_agreement({"torch": [78.85, 74.42], "jax": [78.8501, 74.42]})
    with pytest.raises(UsageError, match=r"the models differ: .* \[78.85, 74.43\] with jax"):
        peers_desk.check_agreement({"torch": [78.85, 74.42], "jax": [78.85, 74.43]})


def test_other_versions_are_refused():
    assert peers_desk._wrong_versions({"kfac-jax": "0.0.8", "jax": "0.9.1", "torch": "3"}) == ""
    assert peers_desk._wrong_versions({"jax": "0.12.0"}) == "jax is 0.12.0, not 0.9.1"


def test_the_command_that_makes_the_environment_is_on_the_page():
    command = peers_desk.how_to_install().partition(": ")[2]
    assert "benchmarks/peers_requirements.txt" in command
    for path in ("docs/lab/peers.md", "benchmarks/peers.py"):
        assert command in (ROOT / path).read_text()


# ---- settings ----


@pytest.mark.parametrize("name", COMPETITORS)
def test_each_competitor_gets_the_same_number_of_different_trials(name):
    competitor = COMPETITORS[name]
    drawn = peers.draw(competitor, 6)
    assert len({json.dumps(settings) for settings in drawn}) == 6
    assert drawn[:2] == peers.draw(competitor, 2)
    assert len(competitor.ranges) >= 2
    for option, value in competitor.space.items():
        for settings in drawn:
            if option not in competitor.ranges:
                assert settings[option] == value
            elif "log" in value:
                low, high = value["log"]
                assert 0.999 * low <= settings[option] <= 1.001 * high
            else:
                assert settings[option] in value["choice"]


def test_the_ranges_of_kfac_are_those_of_the_classic_autoencoder():
    import yaml

    classic = yaml.safe_load((ROOT / "conf/benchmark/classic_autoencoder.yaml").read_text())
    assert COMPETITORS["kfac"].space == classic["tuning"]["space"]["kfac"]


# ---- results ----


CURVE = [[10, 2.0, 30.0], [20, 4.0, 17.0], [30, 6.0, None], [40, 8.0, 13.0]]


def run_of(name, kind="final", seed=0, end="target", seconds=10.0, steps=100, number=0):
    settings = peers.draw(COMPETITORS[name], number + 1)[number]
    what = {"competitor": name, "kind": kind, "seed": seed, "settings": settings}
    result = {"end": end, "seconds": seconds, "steps": steps, "best_error": 12.5, "curve": CURVE}
    machine = {"cpu_share": 0.99, "start_s": 1.5, "versions": {"torch": "2.14.1"}}
    return what | result | machine


def test_finished_runs_are_kept(tmp_path):
    path = tmp_path / "new" / "peers.json"
    run = run_of("soap")
    Results(path, WORK).add(run)
    again = Results(path, WORK)
    assert again.find("final", "soap", 0, run["settings"]) == run
    assert again.find("final", "soap", 1, run["settings"]) is None
    assert again.find("trial", "soap", 0, run["settings"]) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"runs": 3, "work": {}}', '{"runs": []}'])
def test_a_file_that_is_no_result_is_refused(text, tmp_path):
    path = tmp_path / "peers.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"peers.json: is no results of this command"):
        Results(path, WORK)
    assert path.read_text() == text


def test_results_of_other_work_are_refused(tmp_path):
    path = tmp_path / "peers.json"
    Results(path, WORK).add(run_of("soap"))
    with pytest.raises(UsageError, match=r"has runs with max_steps=100, not 5\."):
        Results(path, WORK | {"max_steps": 5})


def test_finished_runs_are_not_run_again(tmp_path):
    results = Results(tmp_path / "peers.json", WORK)
    run = run_of("soap")
    results.add(run)
    planned = peers.Planned("", COMPETITORS["soap"], "final", 0, run["settings"], 80)
    planned.finish(None, results)  # would fail if it needed the desk
    assert results.runs == [run]


def test_the_best_trial_is_run_on_all_seeds(tmp_path):
    results = Results(tmp_path / "peers.json", WORK)
    seed = STUDY["tuning_seed"]
    results.add(run_of("soap", "trial", seed, seconds=20))
    results.add(run_of("soap", "trial", seed, seconds=12, number=1))
    results.add(run_of("soap", "trial", seed, seconds=5, end="limit", number=2))
    assert peers.rows(results, 3, [0, 1]) == []
    for final_seed in (0, 1):
        results.add(run_of("soap", seed=final_seed, number=1))
    (row,) = peers.rows(results, 3, [0, 1])
    assert row.winner == results.runs[1]
    assert [run["seed"] for run in row.finals] == [0, 1]


def cells(text, label):
    (line, *_) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_medians_ranges_and_misses():
    kfac = [run_of("kfac", seed=s, seconds=x, steps=10 * x) for s, x in enumerate((8, 10, 9))]
    shampoo = [run_of("shampoo", end=x, seconds=80) for x in ("limit", "limit", "target")]
    soap = [run_of("soap", seconds=18, steps=90) for _ in range(3)]
    rows = [
        Row(COMPETITORS[name], [run_of(name, "trial")], finals)
        for name, finals in (("shampoo", shampoo), ("soap", soap), ("kfac", kfac))
    ]
    text = peers_results.render(rows, "The machine.")
    assert cells(text, "K-FAC inverse") == [
        "K-FAC inverse", "3 of 3", "9 (8 to 10)", "4 (4 to 4)", "1.00", "90 (80 to 100)", "100",
        "1.5",
    ]  # fmt: skip
    assert cells(text, "SOAP")[2:6] == ["18 (18 to 18)", "4 (4 to 4)", "2.00", "90 (90 to 90)"]
    missed = "missed (80 to missed)"
    assert cells(text, "Shampoo")[1:5] == ["1 of 3", missed, "4 (4 to 4)", ""]
    assert "Versions: torch 2.14.1." in text
    assert "Other programs" not in text


def test_a_shared_core_and_a_second_thread_are_reported():
    rows = [Row(COMPETITORS["soap"], [run_of("soap") | {"cpu_share": 0.5}], [run_of("soap")])]
    assert "one process had only 50 % of it" in peers_results.render(rows, "")
    rows = [Row(COMPETITORS["soap"], [run_of("soap") | {"cpu_share": 1.7}], [run_of("soap")])]
    assert "used 1.70 cores" in peers_results.render(rows, "")


def test_a_failed_run_is_a_miss():
    settings = run_of("soap")["settings"]
    failed = {"kind": "final", "competitor": "soap", "seed": 0, "settings": settings}
    row = Row(COMPETITORS["soap"], [run_of("soap")], [failed | {"end": "failed", "why": "no"}])
    text = peers_results.render([row], "")
    assert cells(text, "SOAP")[1:3] == ["0 of 1", "missed (missed to missed)"]
    assert "Failed: soap, seed 0: `no`" in text


# ---- the page and the options ----


def test_the_page_is_that_of_the_kept_runs():
    results, seeds = Results(ROOT / "benchmarks" / "results" / "peers.json", {}), [0, 1, 2]
    rows = peers.rows(results, 6, seeds)
    assert len(rows) == len(COMPETITORS)
    made = peers_results.render(rows, peers.head(results, rows, seeds))
    assert made in (ROOT / "docs" / "lab" / "peers.md").read_text()


def test_tables_stand_between_the_marks_of_the_page(tmp_path):
    page = tmp_path / "peers.md"
    page.write_text((ROOT / "docs/lab/peers.md").read_text())
    before, after = peers_results.parts_of(page)
    peers_results.into(page, "first")
    peers_results.into(page, "second\n")
    text = page.read_text()
    assert text == f"{before}{peers_results.BEGIN}\n\nsecond\n\n{peers_results.END}{after}"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--competitors", "lion"], "unknown competitor 'lion': choose from kfac, eigen_adam"),
        (["--seeds", "0,x"], "--seeds 0,x: name whole numbers from 0"),
        (["--seeds", ""], "--seeds : name whole numbers from 0"),
        (["--seeds", "100"], "--seeds: 100 is the seed of the trials. Leave it out"),
        (["--trials", "0"], "'0' is not a whole number from 1"),
        (["--into", "/nowhere/page.md"], "--into /nowhere/page.md: cannot be read"),
        (["--into", "README.md"], "--into README.md: add the lines <!-- made by"),
        (["--competitors", ""], "--competitors names nothing"),
    ],
)
def test_bad_input_is_one_line(arguments, reason, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert peers.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("peers.py: ")
    assert reason in error
    assert error.count("\n") == 1


def script_in_fork(words):
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").exists(), reason="needs Fashion-MNIST"
)
def test_a_short_run_without_jax(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    real, jobs = local_runs.run_command, []

    def run(command):
        """Run the first job in a process of its own, as a user does, and the others in forks."""
        jobs.append(command)
        return real(command) if len(jobs) == 1 else (forks.call(script_in_fork, command[1:]), "")

    monkeypatch.setattr(local_runs, "run_command", run)
    short = ["--steps", "1", "--trials", "1", "--seeds", "0", "--competitors", "adam,kfac_jax"]
    places = ["--environment", tmp_path / "nowhere", "--out", tmp_path / "peers.json"]
    assert peers.main([*short, *map(str, places)]) == 0
    printed, said = capsys.readouterr()
    assert f"kfac-jax is left out: {tmp_path}/nowhere/bin/python is missing. Make the" in said
    assert "**Short runs: the numbers mean nothing.**" in printed
    assert cells(printed, "Adam")[1] == "0 of 1"
    assert len(json.loads((tmp_path / "peers.json").read_text())["runs"]) == len(jobs) - 1 == 2
