"""curves.py and score.py: the points of a run, how they are thinned, and the SVG figures."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfac_bench import report
from kfac_bench.record import runs, score
from kfac_bench.report import curves
from kfac_bench.report.comparison import finding
from tests.support.figures import texts
from tests.support.quick import slow
from tests.support.written_runs import EVIL, two_optimizers, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_optimizers(tmp_path / "runs")


def drawn(path: Path) -> set[str]:
    """Return the texts of the figure of the runs at the path."""
    return set(texts(report.figure_svg(report.compare([path]).settings)))


def test_svg_escapes_and_is_well_formed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", text=EVIL, optimizer=EVIL)
    settings = report.compare([tmp_path]).settings
    for svg in (report.curves_svg(settings), report.figure_svg(settings)):
        root = ET.fromstring(svg)
        names = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert "script" not in names
        assert any("$\\frac{1}{0}$" in (element.text or "") for element in root.iter())


def test_equal_events_give_equal_bytes_in_any_order(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    one, other = report.compare(paths), report.compare(paths[::-1])
    assert report.curves_svg(one.settings) == report.curves_svg(other.settings)
    assert report.figure_svg(one.settings) == report.figure_svg(other.settings)
    slower = report.compare([*paths, write_run(folder / "new", seed=9, seconds=3.5)])
    assert report.figure_svg(one.settings) != report.figure_svg(slower.settings)


def test_the_figure_follows_dark_mode_and_has_one_panel_per_task(tmp_path: Path) -> None:
    for i, text in enumerate(("digits", "faces", "moons", "stars")):
        write_run(tmp_path / str(i), text=text)
    svg = report.figure_svg(report.compare([tmp_path]).settings)
    assert "fill: #ffffff" not in svg, "transparent"
    dark = svg.partition("@media (prefers-color-scheme: dark){")[2].partition("</style>")[0]
    for colour in set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svg.partition("</style>")[2])):
        assert f'[style*="stroke: {colour}"]{{stroke: #' in dark, colour
    assert svg.count("training time (seconds)</text>") == 4
    assert svg.count("target 0.9</text>") == 4


def test_curves_have_labels_with_units_and_a_legend(folder: Path) -> None:
    svg = report.curves_svg(report.compare([folder]).settings)
    words = "".join(ET.fromstring(svg).itertext())
    assert "K-FAC is 3.0x faster than SGD to" in words
    for expected in ("training time (seconds)", "training steps", "training loss"):
        assert words.count(expected) == 2
    assert words.count("validation accuracy") == 2
    assert words.count("K-FAC + SGD") == 1


@pytest.mark.parametrize(
    "losses",
    [
        (),
        slow((0.0, -1.0, 0.0)),
        (float("nan"), float("inf"), 1e300),
        slow((1e-9, 1e9, 1.0)),
        slow((1.0, 1.0, 1.0)),
        slow((-5.0, 3.0, -10.0)),
        slow((1.0, 0.5, 1e25)),
    ],
)
def test_diverged_and_empty_curves_are_drawn(tmp_path: Path, losses: tuple[float, ...]) -> None:
    write_run(tmp_path / "a", seconds=None, losses=losses)
    settings = report.compare([tmp_path]).settings
    ET.fromstring(report.curves_svg(settings))


def test_points_that_cannot_be_drawn_are_left_out(tmp_path: Path) -> None:
    bad = (float("nan"), float("inf"), -float("inf"), 1e300)
    run = write_run(tmp_path / "a", seconds=None, losses=(2.0, *bad, -1.0))
    loaded = report.compare([run]).settings[0].runs[0]
    found = score.points(loaded, metric=False)
    assert [(step, loss) for step, _, loss in found] == [(10.0, 2.0), (60.0, -1.0)]
    assert not any(score.drawable((x, 1.0, 1.0)) or score.drawable((1.0, x, 1.0)) for x in bad)


def test_the_axis_of_a_share_shows_values_near_the_target(tmp_path: Path) -> None:
    def ticks(name: str, shares: tuple[float, ...], goal: float | None) -> set[str]:
        return drawn(write_run(tmp_path / name, shares=shares, seconds=None, target=goal))

    near = ticks("near", (0.1, 0.9, 0.975), 0.97)
    assert {"0.90", "0.96", "0.98"} <= near
    assert not near & {"0.2", "0.4", "0.6"}
    assert "axis from 0.893" in near
    assert {"0.2", "0.8"} <= ticks("low", (0.1, 0.15, 0.2), 0.97), "the run stays on the panel"
    without = ticks("without", (0.1, 0.9, 0.975), None)
    assert {"0.2", "0.8"} <= without
    assert not any(text.startswith("axis from") for text in without)
    assert {"2", "4"} <= ticks("no_share", (0.1, 5.0, 0.975), 0.97)


@pytest.mark.parametrize(
    ("kfac_s", "sgd_s", "words"),
    [
        (1.0, 3.4, "K-FAC is 3.4x faster than SGD to accuracy 0.9"),
        slow(3.0, 1.5, "SGD is 2.0x faster than K-FAC to accuracy 0.9"),
        (1.0, 1.04, "No difference is shown between K-FAC and SGD to accuracy 0.9"),
        (1.0, None, "Only K-FAC reaches accuracy 0.9"),
        slow(None, 1.0, "SGD reaches accuracy 0.9, K-FAC does not"),
        slow(None, None, "No optimizer reaches accuracy 0.9"),
    ],
)
def test_the_finding(tmp_path: Path, kfac_s: float | None, sgd_s: float | None, words: str) -> None:
    write_run(tmp_path / "kfac", kfac=True, seconds=kfac_s)
    write_run(tmp_path / "sgd", seconds=sgd_s)
    write_run(tmp_path / "slow", optimizer="adam", seconds=None if sgd_s is None else 9.0)
    settings = report.compare([tmp_path]).settings
    assert finding(settings) == words
    assert f"digits resnet8: {words}" in " ".join(
        " ".join(ET.fromstring(report.figure_svg(settings)).itertext()).split()
    )
    assert f'<p class="finding">{words}</p>' in report.html(report.compare([tmp_path]))


@pytest.mark.parametrize(("target", "words"), [
    (0.9, "EigenAdam is 2.0x faster than SGD to accuracy 0.9"),
    (None, "After 2 s of training EigenAdam has accuracy 0.93, SGD 0.31; after 30 steps"),
])  # fmt: skip
def test_the_finding_names_eigen_adam(tmp_path: Path, target: float | None, words: str) -> None:
    """EigenAdam contains K-FAC, but is no K-FAC before another optimizer."""
    write_run(tmp_path / "eigen_adam", optimizer="eigen_adam", kfac=True, target=target)
    write_run(tmp_path / "sgd", target=target, seconds=4.0)
    assert finding(report.compare([tmp_path]).settings).startswith(words)


def test_without_a_target_the_finding_compares_equal_work(tmp_path: Path) -> None:
    """K-FAC takes 2 s for a step of 10, the others 1 s; SGD is worse than Adam."""
    free = {"target": None, "seconds": None}
    write_run(tmp_path / "kfac", kfac=True, target=None, seconds=6.0, shares=(0.5, 0.7, 0.9))
    write_run(tmp_path / "adam", optimizer="adam", target=None, seconds=3.0, shares=(0.4, 0.6, 0.8))
    write_run(tmp_path / "sgd", target=None, seconds=3.0, shares=(0.1, 0.2, 0.3))
    assert finding(report.compare([tmp_path]).settings) == (
        "After 3 s of training K-FAC has accuracy 0.5, Adam 0.8; "
        "after 30 steps K-FAC has accuracy 0.9, Adam 0.8"
    )
    write_run(tmp_path / "short", optimizer="lamb", **free, losses=())
    assert finding(report.compare([tmp_path]).settings) == ""


def test_equal_work_with_a_run_that_diverged_is_not_compared(tmp_path: Path) -> None:
    """The comparison would end just before, where K-FAC still was the best."""
    write_run(tmp_path / "kfac", kfac=True, target=None, shares=(0.5, 0.9, math.nan))
    write_run(tmp_path / "sgd", target=None, shares=(0.1, 0.2, 0.95))
    assert finding(report.compare([tmp_path]).settings) == ""


def test_the_finding_needs_a_rival_and_seeds_that_agree(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "kfac", kfac=True)
    assert finding(report.compare([tmp_path / "a"]).settings) == ""
    for seed, (ours, theirs) in enumerate(((1.0, 1.1), (2.0, 2.6), (2.7, 2.8))):
        write_run(tmp_path / "c" / f"kfac{seed}", kfac=True, seed=seed, seconds=ours)
        write_run(tmp_path / "c" / f"sgd{seed}", seed=seed, seconds=theirs)
    assert "No difference is shown" in finding(report.compare([tmp_path / "c"]).settings)


def test_the_finding_never_compares_the_seconds_of_two_clocks(tmp_path: Path) -> None:
    write_run(tmp_path / "kfac", kfac=True, seconds=1.0, clock="cpu")
    write_run(tmp_path / "sgd", seconds=3.0)
    settings = report.compare([tmp_path]).settings
    assert finding(settings) == ""
    assert "SGD" in report.figure_svg(settings)


def test_the_finding_counts_the_seeds_where_half_of_them_missed(tmp_path: Path) -> None:
    """Three of five seeds against two of five: more than one optimizer reaches the target."""
    for seed in range(5):
        ours, theirs = (1.0 if seed < reached else None for reached in (3, 2))
        write_run(tmp_path / f"kfac{seed}", kfac=True, seed=seed, seconds=ours)
        write_run(tmp_path / f"sgd{seed}", seed=seed, seconds=theirs)
        write_run(tmp_path / f"adam{seed}", optimizer="adam", seed=seed, seconds=None)
    settings = report.compare([tmp_path]).settings
    assert finding(settings) == "K-FAC reaches accuracy 0.9 on 3 of 5 seeds, SGD on 2 of 5 seeds"


def test_an_error_has_a_log_axis_unless_it_falls_below_zero(tmp_path: Path) -> None:
    def ticks(name: str, *errors: float) -> set[str]:
        return drawn(write_run(tmp_path / name, errors=errors, seconds=None, target=None))

    assert {"1", "10", "100"} <= ticks("positive", 100.0, 10.0, 1.0)
    assert {"0", "50", "100"} <= ticks("negative", 100.0, 50.0, -1.0)


@pytest.mark.parametrize(
    ("curves", "up", "goal", "worst"),
    [
        ([[16.0, 4.0, 1e23], [10.0, 1.0]], False, None, 32.0),
        ([[2.0, -10.0, 1e9]], False, None, 8.0),
        ([[0.1, 0.9], [0.2, -1e9]], True, 0.97, -0.3),
        ([[8.0, 24.0, -1e9]], True, 20.0, 0.0),
        ([[2.0, 3.0, 9.0]], False, None, math.inf),
        ([[0.9, 0.5]], True, None, -math.inf),
        ([[], []], False, 0.5, math.inf),
        ([[], []], True, 0.5, -math.inf),
        ([[0.1, 0.9, 0.975]], True, 0.97, 0.88),
        ([[0.1, 0.9, 0.975], [0.1, 0.2]], True, 0.97, 0.2),
        ([[0.9, 0.1]], False, 0.2, 1.8),
    ],
)
def test_the_worst_value_that_the_axis_shows(
    curves: list[list[float]], up: bool, goal: float | None, worst: float
) -> None:
    found = score.worst_shown(curves, higher_is_better=up, goal=goal)
    assert found == pytest.approx(worst)


def test_a_diverged_run_does_not_flatten_other_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "a", errors=(16.0, 4.0, 1.0), seconds=None, target=None)
    write_run(tmp_path / "b", errors=(16.0, 4.0, 1e23), seconds=None, target=None, seed=1)
    words = drawn(tmp_path)
    assert {"1", "2", "5", "10"} <= words
    assert not words & {"100", "1e+20", "1e+23"}


def test_a_thinned_curve_keeps_its_ends_and_every_peak() -> None:
    def wave(i: int) -> float:
        return math.sin(i / 50) + {3333: 9.0, 4444: -9.0}.get(i, 0.0)

    points = [(float(i), i / 10, wave(i)) for i in range(5000)]
    thinned = score.thin(points, 100)
    assert 90 <= len(thinned) <= 100
    assert thinned == sorted(set(thinned) & set(points))
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]
    for start in range(1, 4999, 102):  # 4998 points in 49 stretches
        stretch = points[start : start + 102]
        for extreme in (min, max):
            assert extreme(stretch, key=lambda p: p[2]) in thinned
    for few in (0, 1, 2, 100):
        assert score.thin(points[:few], 100) == points[:few]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(4, 60), st.randoms(use_true_random=False))
def test_thinning_keeps_at_most_the_requested_points(count: int, most: int, random: Random) -> None:
    points = [(float(i), 0.0, random.choice((0.0, 1.0, random.random()))) for i in range(count)]
    thinned = score.thin(points, most)
    assert len(thinned) <= max(most, 0)
    assert thinned == sorted(set(thinned))
    for extreme in (min, max):
        assert extreme((p[2] for p in thinned), default=0) == extreme(
            (p[2] for p in points), default=0
        )


def test_no_style_repeats_before_all_styles_are_used(folder: Path) -> None:
    (setting, _) = report.compare([folder]).settings
    many = [runs.Setting("t", f"o{i}", {}, setting.runs) for i in range(24)]
    looks = set(curves.styles(many).values())
    assert len(looks) == 24


def test_a_run_whose_only_shown_value_is_the_target_is_drawn(tmp_path: Path) -> None:
    """The axis of a share leaves out 0.1 here, so that its two ends would be equal."""
    write_run(tmp_path / "a", target=0.9, shares=(0.1, 0.9, 0.9))
    svg = report.figure_svg(report.compare([tmp_path]).settings)
    assert "target 0.9</text>" in svg
