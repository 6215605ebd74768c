"""The verdict of kfac-bench try, on results made by hand: all its branches."""

import math
from dataclasses import replace

import pytest

from kfac_bench.benchmark.own_problem.try_result import Finalist, SeedRun, TryResult
from kfac_bench.benchmark.own_problem.verdict import verdict, verdict_page

INF = math.inf


def finalist(name, times, steps_per_s=10, **options):
    """Return an optimizer whose metric rises evenly to 0.95 until its time, or until 100 s."""
    runs = [
        SeedRun(seed, t, t * steps_per_s, [(s, 0.95 * s / min(t, 100)) for s in (0, t / 2, t)])
        if t < INF
        else SeedRun(seed, INF, INF, [(0, 0.1), (40, 0.4), (100, 0.8)])
        for seed, t in enumerate(times)
    ]
    return Finalist(name, runs, 100, options.pop("paste", f"{name} = ..."), **options)


ADAMW = finalist("AdamW", [60, 62, 66, 70, 75], step_s=0.1, memory_bytes=500e6)
EIGEN = finalist(
    "EigenAdam",
    [35, 36, 38, 40, 44],
    steps_per_s=7,
    uses_kfac=True,
    step_s=0.138,
    memory_bytes=680e6,
    stages_s={"preconditioning": 61.0, "decompositions": 30.0, "statistics": 9.0},
    paste="from kfac_bench import eigen_adam\noptimizer = eigen_adam(model, lr=0.01)",
)
SOAP = finalist("SOAP", [51, 52, 58, 60, 66])
SOAP_FAST = finalist("SOAP", [35, 36, 38, 40, 44])


def text_of(*rivals, reference=ADAMW, **options):
    given = {"left_out": {}} | options
    return verdict(TryResult("my_problem", "accuracy", True, 0.95, reference, rivals, 5, **given))


def test_the_whole_text():
    assert text_of(EIGEN, SOAP, left_out={"SGD": "150 s in tuning"}) == (
        "my_problem: accuracy 0.95 is reached by\n"
        "  EigenAdam  38 s (35-44)   SOAP  58 s (51-66)   AdamW  66 s (60-75)\n"
        "EigenAdam is 1.7x faster than AdamW in 2.5x fewer steps, on 5 of 5 seeds.\n"
        "One step costs 1.38 steps of AdamW and 180 MB more; 61 % of the time of K-FAC's stages is "
        "preconditioning.\n"
        "After 38 s of training (median accuracy, range): EigenAdam has 0.9500 (0.4750 to 0.9500), "
        "AdamW has 0.4750 (0.4750 to 0.4750).\n"
        "Not run on fresh seeds: SGD: 150 s in tuning\n"
        "Paste this:\n"
        "  from kfac_bench import eigen_adam\n"
        "  optimizer = eigen_adam(model, lr=0.01)"
    )


def test_the_page_has_a_bar_for_each_optimizer():
    missed = finalist("SOAP", [60, INF, INF, INF, INF])
    left_out = {"SGD": "missed the target in tuning (diverged)"}
    result = TryResult("p", "accuracy", True, 0.95, ADAMW, [EIGEN, missed], 5, left_out=left_out)
    page = verdict_page(result)
    assert (
        page.headline == "EigenAdam is 1.7x faster than AdamW in 2.5x fewer steps, on 5 of 5 seeds."
    )
    assert page.goal == "Training time to accuracy 0.95"
    assert [(bar.name, bar.words) for bar in page.bars] == [
        ("EigenAdam", "38 s (35-44)"),
        ("AdamW", "66 s (60-75)"),
        (
            "SOAP",
            "not reached within 100 s (1 of 5 seeds did); best accuracy 0.8000 (0.8000 to 0.9500)",
        ),
        ("SGD", "not run on fresh seeds: missed the target in tuning (diverged)"),
    ]
    assert [len(bar.times_s) for bar in page.bars] == [3, 3, 3, 0]
    assert page.code == "from kfac_bench import eigen_adam\noptimizer = eigen_adam(model, lr=0.01)"
    assert page.code_head == "Paste this"
    text = verdict(result)
    assert all(line in text for line in (page.headline, *page.remarks))


def test_adamw_is_better_by_how_much():
    said = text_of(finalist("EigenAdam", [80, 82, 85, 90, 95]), SOAP, reference=replace(
        ADAMW, runs=finalist("AdamW", [20, 21, 22, 23, 24]).runs))  # fmt: skip
    assert "AdamW is better here: it is 2.6x faster than SOAP, the fastest of the others." in said
    assert "The best setting of AdamW that was found:\n  AdamW = ..." in said
    assert "Paste this" not in said


def test_intervals_that_overlap_show_nothing():
    said = text_of(finalist("EigenAdam", [40, 41, 50, 60, 61]))
    assert "Nothing is shown: the intervals of EigenAdam and AdamW overlap. Keep AdamW" in said
    assert "is 1." not in said
    assert "Paste this" not in said
    said = text_of(finalist("EigenAdam", [65, 66, 70, 71, 90]))
    assert "Nothing is shown: AdamW has the smaller median" in said


def test_intervals_that_only_touch_overlap():
    at_the_end = finalist("EigenAdam", [35, 36, 38, 40, 60])
    assert "overlap" in text_of(at_the_end)
    assert "overlap" not in text_of(finalist("EigenAdam", [35, 36, 38, 40, 59.9]))


def test_nobody_reaches_the_target():
    missed = finalist("EigenAdam", [INF] * 5)
    said = text_of(missed, reference=replace(ADAMW, runs=missed.runs))
    best = "within 100 s; best accuracy 0.8000 (0.8000 to 0.8000)."
    assert said.startswith(f"my_problem: accuracy 0.95: EigenAdam does not reach it {best}")
    assert f"AdamW does not reach it {best}" in said
    assert "Nothing is shown about the time to the target" in said
    assert "After 100 s of training (median accuracy, range): " in said
    assert "is reached by" not in said


def test_the_metric_at_equal_time_names_the_better_one_of_two_that_miss():
    missed = finalist("EigenAdam", [INF] * 5)
    worse = [replace(run, curve=[(0, 0.1), (100, 0.3)]) for run in missed.runs]
    said = text_of(missed, reference=replace(ADAMW, runs=worse))
    assert "EigenAdam has 0.8000 (0.8000 to 0.8000), AdamW has 0.3000" in said
    lower = verdict(TryResult("p", "loss", False, 0.0, replace(ADAMW, runs=worse), [missed], 5))
    assert "AdamW has 0.3000 (0.3000 to 0.3000), EigenAdam has 0.8000" in lower


@pytest.mark.parametrize(("rival", "line"), [
    (EIGEN, "it reaches the target, and AdamW does not reach it in 2.6x the time."),
    (finalist("SOAP", [95, 96, 97, 98, 99]), "AdamW does not reach it in 1.03x the time."),
])  # fmt: skip
def test_only_a_rival_reaches_the_target(rival, line):
    said = text_of(rival, reference=replace(ADAMW, runs=finalist("AdamW", [INF] * 5).runs))
    assert line in said
    assert f"{rival.name} is faster than AdamW on 5 of 5 seeds: " in said
    assert "AdamW does not reach it within 100 s; best accuracy " in said
    assert "Paste this" in said


def test_the_metric_at_equal_time_is_not_after_the_limit_of_adamw():
    missed = replace(ADAMW, runs=finalist("AdamW", [INF] * 5).runs)
    said = text_of(finalist("SOAP", [110, 120, 130, 140, 150]), reference=missed)
    assert "After 100 s of training" in said


def test_the_metric_at_equal_time_is_not_after_the_limit_of_a_rival_that_misses():
    """A run that was stopped at its limit keeps its last metric, which is not one of later."""
    stopped = replace(finalist("EigenAdam", [INF] * 5), limit_s=40.0)
    missed = replace(ADAMW, runs=finalist("AdamW", [INF] * 5).runs)
    assert "After 40 s of training" in text_of(stopped, reference=missed)


def test_a_miss_is_slower_only_than_its_limit():
    """AdamW had 100 s. Nobody knows whether it would have been slower than 120 s."""
    missed = replace(ADAMW, runs=finalist("AdamW", [INF] * 5).runs)
    said = text_of(finalist("SOAP", [96, 97, 98, 99, 120]), reference=missed)
    assert (
        "Nothing is shown: SOAP may need more than the 100 s that AdamW had. Use more --minutes."
    ) in said
    assert "overlap" not in said
    assert "Paste this" not in said


def test_a_run_without_a_number_counts_as_the_worst_at_equal_time():
    """The median over the runs that did not diverge would hide that most runs did."""
    diverged = [replace(run, curve=[(0, 0.1), (10, math.nan)], time_s=INF) for run in EIGEN.runs]
    some = replace(EIGEN, runs=[*EIGEN.runs[:2], *diverged[2:]])
    said = text_of(some)
    assert "EigenAdam has no number (no number to 0.9500)." in said
    lower = verdict(TryResult("p", "loss", False, 0.0, ADAMW, [some], 5))
    assert "EigenAdam has no number (0.9500 to no number)" in lower
    dead = replace(ADAMW, runs=[SeedRun(s, INF, INF, []) for s in range(5)])
    assert "training (median" not in text_of(EIGEN, reference=dead)


def test_only_adamw_reaches_the_target():
    said = text_of(finalist("EigenAdam", [INF] * 5))
    assert "only AdamW reaches the target. Keep AdamW." in said
    assert "EigenAdam does not reach it within 100 s; best accuracy 0.8000" in said


def test_who_reaches_the_target_on_some_seeds_is_not_said_to_miss_it():
    some = finalist("AdamW", [90, 95, INF, INF, INF])
    said = text_of(EIGEN, reference=replace(ADAMW, runs=some.runs))
    assert "AdamW reaches it in 2.6x the time on 2 of 5 seeds only." in said
    near = finalist("SOAP", [85, 86, 87, 88, 94])
    said = text_of(near, reference=replace(ADAMW, runs=some.runs))
    assert "Nothing is shown: the intervals of SOAP and AdamW overlap." in said
    fast = replace(ADAMW, runs=finalist("AdamW", [20, 21, 22, 23, 24]).runs)
    said = text_of(replace(EIGEN, runs=some.runs), reference=fast)
    assert "only AdamW reaches the target on most seeds. Keep AdamW." in said


def test_a_seed_that_misses_counts():
    said = text_of(finalist("EigenAdam", [35, 36, 38, 40, INF]))
    assert "EigenAdam  38 s (35-not reached, 4 of 5 seeds)" in said
    assert "Nothing is shown" in said
    said = text_of(finalist("EigenAdam", [35, 36, INF, INF, INF]))
    assert (
        "EigenAdam does not reach it within 100 s (2 of 5 seeds did); best accuracy 0.8000 (0.8000 "
        "to 0.9500)."
    ) in said


def test_few_seeds():
    three = replace(EIGEN, runs=EIGEN.runs[:3])
    said = text_of(three, reference=replace(ADAMW, runs=ADAMW.runs[:3]))
    assert "on 3 of 3 seeds" in said
    assert "Only 3 of 5 seeds fit into the budget." in said
    two = replace(EIGEN, runs=EIGEN.runs[:2])
    said = text_of(two, reference=replace(ADAMW, runs=ADAMW.runs[:2]))
    assert "Nothing is shown: only 2 of 5 seeds finished. Use more --minutes." in said
    assert "Paste this" not in said


def test_two_fast_rivals_may_be_level():
    said = text_of(EIGEN, finalist("K-FAC + AdamW", [38, 39, 41, 45, 47], uses_kfac=True))
    assert "EigenAdam is 1.7x faster than AdamW" in said
    assert "The intervals of EigenAdam and K-FAC + AdamW overlap" in said


def test_the_smallest_median_may_belong_to_an_optimizer_that_is_unclear():
    unclear = finalist("EigenAdam", [20, 21, 30, 64, 65])
    said = text_of(unclear, SOAP_FAST, left_out={})
    assert "SOAP is 1.7x faster than AdamW" in said
    assert "The intervals of SOAP and EigenAdam overlap: which of the two is faster is not" in said
    assert "After 38 s of training" in said
    assert said.endswith("Paste this:\n  SOAP = ...")


def test_a_fastest_without_kfac():
    muon = finalist("Muon", [10, 11, 12, 13, 14], steps_per_s=100)
    said = text_of(muon, EIGEN)
    assert "Muon is 5.5x faster than AdamW in 1.8x more steps" in said
    assert (
        "K-FAC helps, too: EigenAdam is 1.7x faster than AdamW. Muon is 3.2x faster still." in said
    )
    assert "No optimizer with K-FAC was fast enough in tuning" in text_of(muon)
    assert "No optimizer with K-FAC was tried." in text_of(muon, has_tried_kfac=False)


@pytest.mark.parametrize(("soap", "kfac", "line"), [
    # K-FAC beats AdamW by far, although SOAP is faster.
    ([0.4, 0.5, 0.5, 0.6, 0.6], [0.8, 0.9, 0.9, 1.0, 1.1],
     "K-FAC helps, too: EigenAdam is 4.7x faster than AdamW. SOAP is 1.8x faster still."),
    ([0.4, 0.5, 0.8, 0.9, 1.0], [0.8, 0.9, 0.9, 1.0, 1.1],
     "K-FAC is among the fastest: EigenAdam is 4.7x faster than AdamW. It is not shown that SOAP"),
    ([0.4, 0.5, 0.5, 0.6, 0.6], [3.8, 3.9, 4.0, 4.4, 4.5],
     "It is not shown that K-FAC helps here: the intervals of EigenAdam, its fastest form, and"),
    ([0.4, 0.5, 0.5, 0.6, 0.6], [5.8, 5.9, 6.0, 6.4, 6.5],
     "K-FAC does not help here: EigenAdam, its fastest form, is slower than AdamW."),
])  # fmt: skip
def test_kfac_is_compared_with_adamw_also_where_another_optimizer_is_faster(soap, kfac, line):
    adamw = finalist("AdamW", [3.9, 4.1, 4.2, 4.3, 4.6])
    eigen_adam = finalist("EigenAdam", kfac, uses_kfac=True)
    said = text_of(finalist("SOAP", soap), eigen_adam, reference=adamw)
    assert "SOAP is " in said.split("\n")[2]
    assert line in said
    assert ("does not help" in said) == (min(kfac) > 4.6)


def test_kfac_helps_where_adamw_misses_the_target():
    missed = replace(ADAMW, runs=finalist("AdamW", [INF] * 5).runs)
    said = text_of(finalist("Muon", [10, 11, 12, 13, 14]), EIGEN, reference=missed)
    assert "K-FAC helps, too: EigenAdam is faster than AdamW. Muon is 3.2x faster still." in said


def test_cautions():
    said = text_of(EIGEN, is_own_target=True, minutes=2, is_quick=True)
    assert "The problem has no target. So this one was fixed before tuning" in said
    assert "This was a quick look of 2 minutes." in said
