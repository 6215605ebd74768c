"""How kfac-bench try divides its minutes."""

import re

import pytest

from kfac_bench.benchmark.own_problem.study_plan import MeasuredSeconds, budget_of
from kfac_bench.errors import UsageError

QUICK_STEPS = MeasuredSeconds(step_s=0.01, eval_s=0.05, start_s=2, spent_s=20)


@pytest.mark.parametrize("optimizers", [2, 7])
@pytest.mark.parametrize("minutes", [5, 30, 300])
def test_all_runs_of_full_length_fit_into_the_minutes(optimizers, minutes):
    made = budget_of(minutes, QUICK_STEPS, optimizers, 5)
    trained_s = optimizers * made.tune_s + made.confirm_s
    runs = trained_s / made.limit_s
    wall_s = trained_s * made.wall_per_s + runs * made.start_s + QUICK_STEPS.spent_s
    assert 0.85 * 60 * minutes < wall_s <= 60 * minutes


def test_thirty_minutes():
    made = budget_of(30, QUICK_STEPS, 7, 5)
    assert made.tune_s == 2 * made.limit_s
    assert made.confirm_s == 10 * made.limit_s
    # Evaluations of 0.05 s take a tenth of the training seconds, and there are more than 50.
    assert made.eval_freq == 50
    assert made.limit_s > 50 * 0.5
    assert made.max_steps > made.limit_s / 0.01


def test_cheap_evaluations_are_frequent():
    cheap = MeasuredSeconds(step_s=0.01, eval_s=0.001, start_s=2, spent_s=20)
    made = budget_of(30, cheap, 7, 5)
    assert made.limit_s / (made.eval_freq * 0.01) == pytest.approx(500, rel=0.05)


def test_slow_evaluations_become_rare():
    slow = MeasuredSeconds(step_s=0.01, eval_s=2, start_s=2, spent_s=20)
    made = budget_of(60, slow, 7, 5)
    assert made.eval_freq * 0.01 == pytest.approx(4)
    assert made.wall_per_s == pytest.approx(1.5)


@pytest.mark.parametrize("step_s", [0.01, 0.2, 3])
@pytest.mark.parametrize("eval_s", [0.0, 0.5, 20])
def test_the_minutes_that_would_be_enough_are_enough(step_s, eval_s):
    measured = MeasuredSeconds(step_s, eval_s, start_s=3, spent_s=30)
    with pytest.raises(UsageError, match=r"0\.1 minutes are too few to mean anything") as caught:
        budget_of(0.1, measured, 7, 5)
    enough = float(re.search(r"--minutes (\d+) is enough", str(caught.value))[1])
    assert budget_of(enough, measured, 7, 5).limit_s >= 50 * step_s
    with pytest.raises(UsageError):
        budget_of(enough / 3, measured, 7, 5)


def test_the_line_says_that_evaluations_are_slow():
    slow = MeasuredSeconds(step_s=0.01, eval_s=2, start_s=2, spent_s=20)
    with pytest.raises(UsageError, match=r"have \d{4} steps of AdamW and 7 evaluations, and it"):
        budget_of(20, slow, 7, 5)


def test_starts_that_eat_the_minutes_are_named():
    """On a busy machine a start takes seconds. The steps are fast, so they are not the cause."""
    busy = MeasuredSeconds(step_s=0.003, eval_s=0.01, start_s=6, spent_s=40)
    with pytest.raises(UsageError, match="are too few to mean anything") as caught:
        budget_of(2, busy, 7, 3)
    said = str(caught.value)
    assert "the first runs took 40 s, and the starts of 21 runs take 126 s (6 s each)" in said
    assert "Give more minutes, or end other programs, which slow down the starts" in said
    assert "steps of AdamW" not in said


def test_a_trial_is_not_shorter_than_the_run_that_fixes_the_target():
    measured = MeasuredSeconds(step_s=0.3, eval_s=0.01, start_s=2, spent_s=20)
    assert budget_of(10, measured, 7, 5).limit_s > 50 * 0.3
    with pytest.raises(UsageError, match=r"needs 100 and 10 .* With target= in Problem") as caught:
        budget_of(10, measured, 7, 5, has_target=False)
    enough = float(re.search(r"--minutes (\d+) is enough", str(caught.value))[1])
    assert budget_of(enough, measured, 7, 5, has_target=False).limit_s >= 100 * 0.3


@pytest.mark.parametrize(("step_s", "steps"), [(0.001, 1000), (0.05, 1000), (0.1, 300), (0.5, 100)])
def test_the_steps_that_fix_a_target_do_not_follow_the_speed_of_the_machine(step_s, steps):
    for slower in (1, 1.3):
        measured = MeasuredSeconds(slower * step_s, eval_s=0.01, start_s=1, spent_s=20)
        assert budget_of(30, measured, 7, 5, has_target=False).reference_steps == steps
