"""The title of a benchmark's figure: one sentence from the numbers that are drawn."""

import math
import re
from dataclasses import replace

from matplotlib.figure import Figure

from kfac_bench.benchmark import figure
from kfac_bench.benchmark.figure_finding import figure_finding
from kfac_bench.benchmark.result import Line, Measured
from kfac_bench.benchmark.schema import Benchmark, Computed, FigureSpec, Quantity
from kfac_bench.report.figure_style import PALETTE
from tests.support.figures import texts

ROW = Benchmark(
    "A row",
    {"optimizer": ["SGD", "K-FAC"], "gpus": ["1", "8"]},
    [],
    computed=[Computed("simulate", {}, [])],
    quantities={"accuracy": Quantity(unit="%", higher=True), "minutes": Quantity(unit="min")},
    figure=FigureSpec(["accuracy"], "gpus", "optimizer"),
)


def line(optimizer, gpus, value, quantity="accuracy", unit="%", wide=0.0):
    """Return a measured line of three seeds; its interval is ``value`` plus and minus ``wide``."""
    measured = Measured(value, value - wide, value + wide, 3, 0)
    return Line({"optimizer": optimizer, "gpus": gpus}, quantity, unit, measured)


SGD, KFAC = line("SGD", "8", 90.0), line("K-FAC", "8", 92.0)
BOTH = [line("SGD", "1", 91.0), line("K-FAC", "1", 89.0)]


def test_the_best_is_named_with_the_second_best():
    said = "has the highest accuracy: 92 %, SGD 90 %"
    assert figure_finding(ROW, [SGD, KFAC]) == f"Measured: K-FAC {said}"
    assert figure_finding(ROW, [SGD, KFAC], "a toy") == f"Measured with a toy: K-FAC {said}"
    assert figure_finding(ROW, [KFAC]) == "", "nothing to compare with"


def test_fewer_can_be_better_and_a_missed_target_is_the_worst():
    lines = [line(name, "8", t, "minutes", "min") for name, t in (("SGD", 7.0), ("K-FAC", 5.0))]
    said = "Measured: K-FAC has the fewest minutes: 5 min, SGD "
    assert figure_finding(ROW, lines) == f"{said}7 min"
    missed = line("SGD", "8", math.inf, "minutes", "min")
    assert figure_finding(ROW, [missed, lines[1]]) == f"{said}misses the target"
    assert figure_finding(ROW, [missed, replace(missed, point=KFAC.point)]) == ""


def test_several_comparisons_are_counted_and_the_last_one_that_was_won_is_shown():
    won = "highest accuracy in 1 of 2 comparisons"
    assert figure_finding(ROW, [*BOTH, SGD, line("K-FAC", "8", 90.0)]) == (
        f"Measured: SGD has the {won} (1 gpu: 91 %, K-FAC 89 %)"
    )
    better = [BOTH[0], line("K-FAC", "1", 99.0), SGD, KFAC]
    assert figure_finding(ROW, better) == (
        "Measured: K-FAC has the highest accuracy in both comparisons (8 gpus: 92 %, SGD 90 %)"
    )
    equal = [replace(x, measured=SGD.measured) for x in better]
    assert figure_finding(ROW, equal) == "Measured: no difference in accuracy in both comparisons"


def test_intervals_that_overlap_are_named():
    wide = figure_finding(ROW, [SGD, line("K-FAC", "8", 92.0, wide=2.5)])
    assert wide.endswith("92 %, SGD 90 %; their 95 % intervals overlap")
    assert "overlap" not in figure_finding(ROW, [SGD, line("K-FAC", "8", 92.0, wide=1.5)])


def test_it_says_which_kind_of_numbers_it_uses():
    printed = [
        replace(x, measured=None, published=v, unit="") for x, v in ((SGD, 90.0), (KFAC, 91.5))
    ]
    best = "has the highest accuracy:"
    assert figure_finding(ROW, printed) == f"Published: K-FAC {best} 91.5 %, SGD 90 %"
    projected = [replace(x, is_projected=True) for x in (SGD, KFAC)]
    assert figure_finding(ROW, projected) == f"Projected: K-FAC {best} 92 %, SGD 90 %"
    assert "projected (95 %)" in texts(figure.svg(ROW, projected))
    fitted = [replace(x, computed=10 * x.published, known="fitted") for x in printed]
    printed_too = f"; published: K-FAC {best} 91.5 %, SGD 90 %"
    fit = f"Simulated, fitted: K-FAC {best} 915 %, SGD 900 %"
    assert figure_finding(ROW, fitted) == fit + printed_too
    partly = [replace(fitted[0], computed=123456.7, known=""), fitted[1]]
    assert (
        figure_finding(ROW, partly) == f"Simulated: SGD {best} 123,457 %, K-FAC 915 %" + printed_too
    )


def test_the_axis_of_a_figure_that_is_compared_need_not_be_the_one_of_the_colours():
    spec = FigureSpec(["accuracy"], "gpus", "optimizer", compared="gpus")
    row = Benchmark(**(vars(ROW) | {"figure": spec}))
    assert figure_finding(row, [*BOTH, SGD, KFAC]) == (
        "Measured: 1 gpu and 8 gpus each have the highest accuracy in 1 of 2 comparisons"
    )
    assert figure_finding(row, [*BOTH, SGD, line("K-FAC", "8", 89.0)]) == (
        "Measured: 1 gpu has the highest accuracy in 1 of 2 comparisons (SGD: 91 %, 8 gpus 90 %)"
    )


def test_all_best_values_are_named():
    lines = [SGD, line("Adam", "8", 92.0), KFAC]
    assert figure_finding(ROW, lines) == (
        "Measured: Adam and K-FAC each have the highest accuracy: 92 %, SGD 90 %"
    )
    lines += [*BOTH, line("Adam", "1", 90.0), line("SGD", "2", 80.0), line("Adam", "2", 81.0)]
    assert figure_finding(ROW, lines) == (
        "Measured: Adam has the highest accuracy in 2 of 3 comparisons (2 gpus: 81 %, SGD 80 %)"
    )


def test_of_several_quantities_the_largest_is_named():
    spec = FigureSpec(["send", "compute"], "quantity", "optimizer")
    row = Benchmark(**(vars(ROW) | {"figure": spec}))
    lines = [
        line(name, "8", value, quantity, "ms")
        for quantity, values in (("send", (3.0, 4.0)), ("compute", (9.0, 8.0)))
        for name, value in zip(("SGD", "K-FAC"), values, strict=True)
    ]
    assert figure_finding(row, lines) == (
        "Measured: the largest of 2 quantities is compute, 8 gpus (SGD 9 ms, K-FAC 8 ms)"
    )


def test_panels_that_share_an_axis_show_all_their_bars():
    """The bars of all panels decide the range, not those of the last panel alone."""
    row = Benchmark(**(vars(ROW) | {"axes": ROW.axes | {"task": ["easy", "hard"]}}))
    spread = {"easy": (10.0, 11.0), "hard": (100.0, 110.0)}
    lines = [
        replace(each, point=each.point | {"task": task}, measured=Measured(v, v, v, 3, 0))
        for task, values in spread.items()
        for each, v in zip((SGD, KFAC), values, strict=True)
    ]
    shown = texts(figure.svg(row, lines))
    assert "axis from" not in " ".join(shown)
    assert {"0", "100"} <= {*shown}
    assert "axis from 8.8" in texts(figure.svg(row, lines[:2]))


def test_misses_are_drawn_in_lines_and_open_intervals_on_bars():
    lines = Benchmark(
        **(vars(ROW) | {"figure": FigureSpec(["accuracy"], "gpus", "optimizer", True)})
    )
    missed = line("K-FAC", "8", -math.inf)
    some = replace(KFAC, measured=Measured(92.0, -math.inf, 93.0, 3, 1))
    cross, arrow = r"M -3 3", r"M -?0 2\.5"
    for row, each, sign, is_drawn in (
        (lines, [*BOTH, SGD, missed], cross, True),
        (lines, [*BOTH, SGD, KFAC], cross, False),
        (ROW, [SGD, missed], cross, True),
        (ROW, [SGD, some], arrow, True),
        (ROW, [SGD, KFAC], arrow, False),
    ):
        assert bool(re.search(sign, figure.svg(row, each))) is is_drawn, (sign, is_drawn)


def test_a_cut_axis_shows_whole_intervals():
    axes = Figure().subplots()
    figure._scale(axes, [88.4, 88.0], [80.0, 91.0])
    low, high = axes.get_ylim()
    assert 0 < low < 80 < 91 < high


def test_the_figure_has_the_finding_and_the_subject():
    drawn = " ".join(texts(figure.svg(ROW, [*BOTH, SGD, KFAC], "a <toy>")))
    assert figure_finding(ROW, [*BOTH, SGD, KFAC], "a <toy>") in drawn
    assert "A row" in drawn


def test_a_figure_of_lines_has_labels_and_one_sentence():
    spec = FigureSpec(["accuracy"], "gpus", "optimizer", True)
    row = Benchmark(**(vars(ROW) | {"figure": spec}))
    lines = [replace(x, computed=x.measured.value, measured=None) for x in (*BOTH, SGD, KFAC)]
    lines[-1] = replace(lines[-1], published=91.5, computed=89.0)
    lines[-2] = replace(lines[-2], published=90.5)
    title = (
        "Simulated: SGD has the highest accuracy in both comparisons; published: K-FAC has the "
        "highest accuracy: 91.5 %, SGD 90.5 %"
    )
    assert figure_finding(row, lines) == title
    svg = figure.svg(row, lines)
    assert "A row" not in " ".join(texts(svg))
    assert {"SGD", "K-FAC", "axis from 88.8"} <= set(texts(svg))
    # The line from a label to the end of its curve has the colour of the curve.
    assert svg.partition("</style>")[2].count(f"stroke: {PALETTE[1]}") == 2


def test_numbers_of_another_model_have_panels_with_a_scale_of_their_own():
    lines = [replace(SGD, published=9000.0), replace(KFAC, published=4000.0)]
    drawn = texts(figure.svg(ROW, lines, "a toy"))
    assert {"the paper's model", "a toy"} <= set(drawn)
    assert {"8000", "91"} <= set(drawn), "each row has labels of its own scale"
    assert "91" not in texts(figure.svg(ROW, lines))
