"""The figure of a sweep: its titles state what the cells show."""

from dataclasses import replace

import pytest

from kfac_bench.core.planning.plan import Stage
from kfac_bench.simulate import simulation_figure
from kfac_bench.simulate.hardware import PredictionErrors
from kfac_bench.simulate.simulation_figure import efficiency_finding, fraction_finding, step_finding
from kfac_bench.simulate.step import StepTime
from kfac_bench.simulate.sweep import SGD, SimulatedCell, Variant
from tests.support.figures import texts


def cell(name, ranks, kfac_ms=0.0, fraction=None):
    """Return a cell whose step without K-FAC takes 0.1 s."""
    time = StepTime(0.1, 0.0)
    time.stages_s[Stage.PRECONDITION] = kfac_ms / 1e3
    return SimulatedCell(Variant(name, fraction), ranks, 32 * ranks, (1, 1), time)


ERRORS = PredictionErrors(time=0.12, ratio=0.1)
WHOLE = [
    *(cell(SGD, ranks) for ranks in (1, 1024)),
    *(cell("comm_opt", 1, 25.0), cell("comm_opt", 1024, 400.0)),
    *(cell("mem_opt", 1, 100.0), cell("mem_opt", 1024, 700.0)),
]


def sweep_of(best):
    """Return the cells of three fractions, of which ``best`` names the fastest on some ranks."""
    return [
        cell("hybrid_opt", ranks, 50.0 if fraction == fastest else 60.0, fraction)
        for ranks, fastest in best.items()
        for fraction in (1 / 2, 1 / 4, 1 / 8)
    ]


SWEPT = sweep_of({1: 1 / 4, 64: 1 / 2})


def test_the_findings_hold_for_the_most_ranks():
    assert step_finding(WHOLE, 0.1) == (
        "At 1,024 ranks comm_opt is the fastest K-FAC strategy: 500 ms per step, SGD at least "
        "100 ms"
    )
    assert "strategy (1 more within the error): 500 ms" in step_finding(WHOLE, 0.7)
    said = "At 1,024 ranks K-FAC keeps 25 % of the speed per rank, SGD at most 100 %"
    assert efficiency_finding(WHOLE, None) == said
    slower = [*WHOLE, cell("layer_wise", 1, 0.0), cell("layer_wise", 1024, 900.0)]
    assert "K-FAC keeps 10 to 25 % of" in efficiency_finding(slower, None)
    assert fraction_finding(SWEPT) == "The fastest fraction is 1/4 at 1 rank, 1/2 at 64 ranks"
    wide = dict.fromkeys((1, 64, 1024), 1 / 4) | {4096: 1 / 2}
    found = fraction_finding(sweep_of(wide))
    assert found == "The fastest fraction is 1/4 at 1 to 1,024 ranks, 1/2 at 4,096 ranks"
    of_one = [c for c in SWEPT if c.world_size == 64]
    assert fraction_finding(of_one) == "The fraction 1/2 is the fastest at 64 ranks"


def test_sgd_is_a_bound_only_if_its_whole_exchange_is_hidden():
    assert "sgd, upper bound" in texts(simulation_figure.svg(WHOLE, "a model", ERRORS))
    shown = [
        replace(c, time=replace(c.time, gradients_s=0.1)) if c == WHOLE[1] else c for c in WHOLE
    ]
    assert step_finding(shown, 0.1).endswith("SGD 200 ms")
    assert efficiency_finding(shown, None).endswith("SGD 50 %")
    assert "sgd" in texts(simulation_figure.svg(shown, "a model", ERRORS))


@pytest.mark.parametrize("cells", [WHOLE[:2], []])
def test_without_kfac_there_is_no_finding(cells):
    assert step_finding(cells, 0.1) == efficiency_finding(cells, None) == ""


def test_one_number_of_ranks_has_no_efficiency():
    assert efficiency_finding([c for c in WHOLE if c.world_size == 1], None) == ""


def test_the_figure_has_its_findings_and_a_label_for_each_line():
    svg = simulation_figure.svg([*WHOLE, *SWEPT], "a <model>", ERRORS)
    title = "a &lt;model&gt;, simulated, error 12.0 %"
    for words in ("fastest K-FAC", title, "The fastest fraction is 1/4"):
        assert words in svg
    assert "100 % is the speed per rank at 1 rank" in svg


def test_the_titles_count_the_fractions_of_the_third_panel():
    svg = simulation_figure.svg([*WHOLE, *sweep_of({1: 1 / 4, 1024: 1 / 2})], "a model", ERRORS)
    said = " ".join(texts(svg))
    assert "At 1,024 ranks hybrid_opt@1/2 is the fastest K-FAC strategy" in said
    assert "150 ms per step" in said
    assert "At 1,024 ranks K-FAC keeps 25 to 107 % of the speed per rank" in said
    assert {"1 rank, 50 ms", "1,024 ranks, 50 ms"} <= {*texts(svg)}


def test_no_strategy_with_fractions_gets_lost():
    others = [replace(c, variant=Variant("owner_reduce", c.variant.fraction)) for c in SWEPT]
    assert "owner_reduce@1/8" in simulation_figure.svg([*SWEPT, *others], "a model", ERRORS)
    alone = simulation_figure.svg(SWEPT, "a model", ERRORS)
    assert alone.count("hybrid_opt@1/8") >= 2, "panels without a line"


def test_strategies_that_take_the_same_time_share_a_line():
    alike = [cell("layer_wise", 1, 100.0), cell("layer_wise", 1024, 690.0)]
    lines = [
        simulation_figure.svg(cells, "a model", ERRORS).count("stroke-width: 2;")
        for cells in (WHOLE, [*WHOLE, *alike])
    ]
    assert lines[0] == lines[1] > 0
    svg = simulation_figure.svg([*WHOLE, *alike], "a model", ERRORS)
    assert "layer_wise" in svg
    assert "strategies within 5 %" in svg
    for label in ("comm_opt", "mem_opt"):
        assert svg.count(f">{label}</text>") == 2
