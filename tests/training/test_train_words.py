"""`kfac_bench.train`: what a search calls. It trains, continues, and returns the metric."""

import math
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import kfac_bench
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated, Resumed, RunStarted
from tests.support import ROOT
from tests.support.runs import SMALL, before_step, loss_is, of_kind, terminate


@pytest.fixture
def words(tmp_path):
    return [*SMALL, f"runs_dir={tmp_path}", "run_id=a", "trainer.eval_freq=5"]


def test_it_returns_the_last_metric_and_continues_with_more_steps(words, tmp_path, capsys):
    first = kfac_bench.train([*words, "trainer.max_steps=5"])
    assert kfac_bench.train([*words, "trainer.max_steps=5"]) == first
    assert "is complete" in capsys.readouterr().out
    second = kfac_bench.train([*words, "trainer.max_steps=10"])
    assert [e.step for e in of_kind(tmp_path / "a", Resumed)] == [5]
    [started] = of_kind(tmp_path / "a", RunStarted)
    metrics = [e.metrics[started.metric] for e in of_kind(tmp_path / "a", Evaluated)]
    assert metrics[1:] == [first, second]


def test_a_failed_training_is_nan(words):
    with loss_is(math.nan, 2):
        assert math.isnan(kfac_bench.train([*words, "trainer.max_steps=5"]))


def test_a_signal_stops_the_search(words):
    with before_step(2, terminate), pytest.raises(KeyboardInterrupt):
        kfac_bench.train([*words, "trainer.max_steps=5"])


def test_a_wrong_word_is_a_usage_error(words):
    with pytest.raises(UsageError, match="did you mean optimizer"):
        kfac_bench.train([*words, "optimzer.lr=1"])


def test_another_thread_than_the_main_one_is_refused_before_anything_is_made(words, tmp_path):
    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(kfac_bench.train, [*words, "trainer.max_steps=5"])
    with pytest.raises(UsageError, match=r"^kfac_bench\.train: .* only in the main thread"):
        training.result()
    assert not any(tmp_path.iterdir())


def test_a_dry_run_has_no_result(words):
    with pytest.raises(UsageError, match="dry_run=true trains nothing: use kfac-train dry_run"):
        kfac_bench.train([*words, "dry_run=true"])


@pytest.mark.slow
def test_the_study_of_the_page_runs(tmp_path, monkeypatch):
    """With a stand-in for Optuna, which draws the same settings each time and stops one trial."""

    class Trial:
        def __init__(self, number):
            self.number, self.reports = number, {}

        def suggest_float(self, name, low, high, *, log):
            return math.sqrt(low * high) if log else (low + high) / 2

        def report(self, value, step):
            self.reports[step] = value

        def should_prune(self):
            return self.number == 1 and len(self.reports) == 2

    class Study:
        best_params = None

        def optimize(self, objective, n_trials):
            assert n_trials == 20
            self.trials, self.values = [Trial(0), Trial(1)], []
            for trial in self.trials:
                with suppress(optuna.TrialPruned):
                    self.values.append(objective(trial))

    optuna = types.ModuleType("optuna")
    optuna.TrialPruned = type("TrialPruned", (Exception,), {})
    optuna.pruners = types.SimpleNamespace(MedianPruner=int)
    optuna.create_study = lambda direction, pruner: Study()
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/how-to/tune.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [code] = [block for block in blocks if "optuna" in block]
    namespace = {}
    exec(compile(code, "docs/how-to/tune.md", "exec"), namespace)
    first, second = namespace["study"].trials
    assert [*first.reports] == [20, 40, 80]
    assert [*second.reports] == [20, 40]
    assert namespace["study"].values == [first.reports[80]]
    assert first.reports[80] > 0.9
