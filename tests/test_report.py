"""report.py and curves.py: tables, SVG and the HTML page, computed from event files."""

import base64
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kfac_bench import album, curves, predictions, report, score
from kfac_bench.errors import UsageError
from kfac_bench.events import (
    Evaluated,
    EventLog,
    JsonlSink,
    Predicted,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
)
from kfac_bench.tasks.prediction import Prediction

EVIL = "<script>alert('x')</script> $\\frac{1}{0}$ |]] --> [red]\x1b[31m\ud800 & _"


def write_run(
    folder: Path,
    *,
    optimizer: str = "sgd",
    kfac: bool = False,
    seed: int = 0,
    seconds: float | None = 2.0,
    target: float | None = 0.9,
    losses: tuple[float, ...] = (2.0, 1.0, 0.5),
    errors: tuple[float, ...] = (),
    text: str = "digits",
    environment: dict[str, Any] | None = None,
) -> Path:
    """A run of 30 steps; it reaches its target at step 30 after ``seconds``, if given.

    Its metric is an accuracy of 0.31, 0.62, 0.93, or what ``errors`` says (less is better).
    """
    folder.mkdir(parents=True)
    log = EventLog([JsonlSink(folder / "events.jsonl")])
    config = {
        "data": {"name": text},
        "model": {"name": "resnet8"},
        "optimizer": {"name": optimizer, "lr": 0.1},
        "kfac": {"enabled": kfac, "damping": 0.003},
        "trainer": {"target": target},
        "seed": seed,
    }
    started = RunStarted(
        0, 0.0, text, "accuracy", not errors, config, environment or {"torch": "2.11"}
    )
    log.emit(started)
    last_s = 4.0 if seconds is None else seconds
    for i, loss in enumerate(losses, start=1):
        log.emit(Trained(10 * i, last_s * i / 3, 0.1 * i, loss, 0.1, 100.0))
        log.emit(
            Evaluated(
                10 * i, last_s * i / 3, 0.1 * i, {"accuracy": errors[i - 1] if errors else 0.31 * i}
            )
        )
    if seconds is not None:
        log.emit(TargetReached(30, seconds, "accuracy", 0.93, 0.9))
    log.emit(RunEnded(30, last_s, "finished" if seconds is None else "reached"))
    log.close()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two optimizers with three seeds; one seed of SGD misses the target."""
    for seed in range(3):
        missed = None if seed == 2 else 2.0 + seed
        write_run(tmp_path / "runs" / f"sgd{seed}", seed=seed, seconds=missed)
        write_run(tmp_path / "runs" / f"kfac{seed}", kfac=True, seed=seed, seconds=1.0)
    return tmp_path / "runs"


def test_markdown_table_says_exactly_this(folder: Path) -> None:
    assert report.markdown_table(report.compare([folder]).rows) == (
        "| task | optimizer | steps to target | seconds to target (median, range) "
        "| final metric |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| digits resnet8, accuracy ≥ 0.9 | SGD | 30 "
        "| 3.00 (2.00 \u2013 not reached), 2 of 3 seeds | 0.9300 |\n"
        "| digits resnet8, accuracy ≥ 0.9 | K-FAC + SGD | 30 | 1.00 | 0.9300 |\n"
    )


def test_no_target_and_nobody_there(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", seconds=None)
    b = write_run(tmp_path / "b", seconds=None, target=None)
    rows = report.compare([a, b]).rows
    assert [report.cells(row)[2:] for row in rows] == [
        ("no target", "no target", "0.9300"),
        ("not reached", "not reached, 0 of 1 seeds", "0.9300"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "0.0123"),
        (1.4, "1.40"),
        (99.96, "100"),
        (1234.5, "1234"),
        (float("inf"), "not reached"),
    ],
)
def test_seconds_in_words(value: float, text: str) -> None:
    assert report.seconds(value) == text


def test_steps_keep_all_their_digits() -> None:
    assert report.count(1_234_567) == "1234567"
    assert report.count(60.5) == "60.5"


def test_metrics_have_four_digits_and_none_is_a_dash() -> None:
    assert [report.metric(x) for x in (0.97, 0.98765, 12345.6)] == ["0.9700", "0.9877", "12345.6"]
    assert report.metric(float("nan")) == "\u2013"


def test_terminal_table_prints_markup_as_text(tmp_path: Path) -> None:
    found = report.compare([write_run(tmp_path / "a", text="[red]x[/red]")])
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(report.terminal_table(found.rows))
    console.file.close()
    text = console.export_text()
    assert "[red]x[/red] resnet8" in text
    assert all(column in text for column in report.COLUMNS)


@given(st.text(max_size=30))
def test_a_markdown_cell_stays_one_cell(text: str) -> None:
    spread = score.Spread(1.0, 1.0, 1.0)
    label = score.plain(text)
    row = score.Row(label, "SGD", 1, 1, True, spread, spread, 0.5)
    line = report.markdown_table([row]).splitlines()[2]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 6
    assert "<" not in line


def test_compare_writes_the_page_whole(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    found = report.compare([folder, folder / "sgd0"], page)
    assert sum(row.seeds for row in found.rows) == 6
    assert page.read_text(encoding="utf-8") == report.html(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


def test_compare_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runs to compare"):
        report.compare([])
    with pytest.raises(UsageError, match="does not exist"):
        report.compare([folder], tmp_path / "absent" / "report.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="cannot write the report"):
        report.compare([folder], tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "taken"]


def test_a_broken_run_in_a_folder_is_named_but_by_name_refused(folder: Path) -> None:
    broken = folder / "broken"
    broken.mkdir()
    (broken / "events.jsonl").write_text("")
    found = report.compare([folder])
    assert sum(row.seeds for row in found.rows) == 6
    assert any("left out" in note and str(broken) in note for note in found.notes)
    for path in (broken, broken / "events.jsonl"):
        with pytest.raises(UsageError, match="no RunStarted"):
            report.compare([folder, path])


class Tags(HTMLParser):
    """All tags, attributes and text of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_escapes_whatever_event_files_say(tmp_path: Path) -> None:
    write_run(tmp_path / "a", text=EVIL, optimizer=EVIL, environment={EVIL: {EVIL: EVIL}})
    write_run(tmp_path / "b", text=EVIL, optimizer=EVIL, kfac=True, environment={"x": [EVIL]})
    page = report.html(report.compare([tmp_path]))
    seen = Tags(page)
    assert "script" not in seen.tags
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "<script>alert('x')</script> $\\frac{1}{0}$" in seen.text
    assert "\x1b" not in page
    page.encode("utf-8")  # no lone surrogate got through


def test_svg_escapes_and_is_well_formed(tmp_path: Path) -> None:
    write_run(tmp_path / "a", text=EVIL, optimizer=EVIL)
    settings = report.compare([tmp_path]).settings
    for svg in (report.curves_svg(settings), report.figure_svg(settings)):
        root = ET.fromstring(svg)
        names = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert "script" not in names
        assert any("$\\frac{1}{0}$" in (element.text or "") for element in root.iter())


def test_the_page_needs_nothing_from_outside(folder: Path) -> None:
    page = report.html(report.compare([folder]))
    urls = re.findall(r"""[^\s"'(]*//[^\s"')]+""", re.sub(r"/\*.*?\*/", "", page))
    assert set(urls) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    seen = Tags(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(seen.tags)
    assert not [value for name, value in seen.attributes if name in ("src", "href")]
    assert "@import" not in page


def test_the_page_tells_results_options_runs_and_machines(folder: Path) -> None:
    write_run(folder / "other", seed=7, environment={"git": {"commit": "abc"}, "torch": "2.11"})
    text = " ".join(Tags(report.html(report.compare([folder]))).text.split())
    for expected in (
        "digits resnet8, accuracy ≥ 0.9",
        "3 of 4 seeds",
        "kfac.damping",
        "optimizer.lr",
        "torch 2.11",
        "git.commit abc",
        "environments differ in git.commit",
        str(folder / "kfac1" / "events.jsonl"),
    ):
        assert expected in text


def test_the_best_median_is_emphasised_and_a_miss_never(folder: Path) -> None:
    def best(found: report.Comparison) -> list[str]:
        return re.findall(r'<span class="best">([^<]*)</span>', report.html(found))

    # equal in steps: both; faster in seconds: K-FAC alone
    assert best(report.compare([folder])) == ["30", "30", "1.00"]
    assert best(report.compare([folder / "sgd2"])) == []


def show(run: Path, *items: Any, step: int = 30) -> Path:
    """Add predictions to a run's event file."""
    sink = JsonlSink(run / "events.jsonl")
    sink.write(Predicted(step, 2.0, "elsewhere", list(items)))
    sink.close()
    return run


def picture(run: Path, step: int = 30, number: int = 0) -> str:
    shown = Prediction("", np.full((4, 4, 3), 60 * number + step, np.uint8))
    items, _ = predictions.write(run, step, [shown] * (number + 1))
    return str(items[number]["file"])


def pictures_of(found: report.Comparison) -> list[bytes]:
    """What the page's images are, all of which it must bring along."""
    sources = [value for name, value in Tags(report.html(found)).attributes if name == "src"]
    start = "data:image/png;base64,"
    assert all(source is not None and source.startswith(start) for source in sources)
    return [base64.b64decode(str(source).removeprefix(start)) for source in sources]


def test_the_page_brings_the_pictures_of_each_settings_first_seed(folder: Path) -> None:
    files = []
    for name, number in (("kfac0", 0), ("kfac1", 1), ("sgd1", 2)):  # sgd0 has none
        file = picture(folder / name, number=number)
        files.append((folder / name / file).read_bytes())
        show(folder / name, {"caption": f"of {name}", "file": file, "text": f"asked {name}\nyes"})
    found = report.compare([folder])
    assert pictures_of(found) == [files[2], files[0]]
    text = Tags(report.html(found)).text
    for said in ("of sgd1", "seed 1, step 30", "of kfac0", "seed 0, step 30", "asked kfac0\nyes"):
        assert said in text
    assert "kfac1\nyes" not in text
    assert "not there" not in text
    assert "Predictions" not in report.html(report.compare([folder / "sgd0"]))


def test_a_runs_last_predictions_count(folder: Path) -> None:
    run = folder / "sgd0"
    for step in (10, 20):
        show(run, {"caption": f"at {step}", "file": picture(run, step), "text": None}, step=step)
    text = Tags(report.html(report.compare([run]))).text
    assert "at 20" in text
    assert "at 10" not in text


def test_the_page_takes_no_more_pictures_than_it_can_bear(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "sgd0"
    file = picture(run)
    show(run, *({"caption": f"nr {n};", "file": file, "text": "y" * 9000} for n in range(40)))
    found = report.compare([run])
    assert len(pictures_of(found)) == album.MOST_PREDICTIONS
    text = Tags(report.html(found)).text
    assert "nr 11;" in text
    assert "nr 12;" not in text
    assert text.count("y" * 10) <= album.MOST_PREDICTIONS * album.MOST_TEXT / 10
    bytes_of_one = len((run / file).read_bytes())
    monkeypatch.setattr(album, "MOST_PICTURE_BYTES", 3 * bytes_of_one)
    assert len(pictures_of(found)) == 3
    assert Tags(report.html(found)).text.count("picture not there") == album.MOST_PREDICTIONS - 3


def test_predictions_of_somebody_else_are_escaped_and_read_no_other_file(folder: Path) -> None:
    run = folder / "sgd0"
    (folder / "secret.png").write_bytes((run / picture(run)).read_bytes())
    (run / "predictions/step-30/07.png").symlink_to(folder / "secret.png")
    (run / "predictions/step-30/08.png").write_text("no picture")
    names = ("../../etc/passwd", "/etc/passwd", "../secret.png", str(folder / "secret.png"))
    more = ("predictions/step-30/07.png", "predictions/step-30/08.png", EVIL, 7, [], None)
    items = [{"caption": EVIL, "file": name, "text": EVIL} for name in (*names, *more)]
    show(run, *items)
    found = report.compare([run])
    assert pictures_of(found) == []
    page = report.html(found)
    seen = Tags(page)
    assert "script" not in seen.tags
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert seen.text.count("picture not there") == len(items) - 1
    assert "\x1b" not in page
    page.encode("utf-8")


def test_predictions_of_any_shape_make_a_page(tmp_path: Path) -> None:
    shapes = ('"x"', "7", "null", '{"a": 1}', "[]", '[7, null, [], "x", {}]')
    for items in (*shapes, '[{"caption": {}, "text": 3}]'):
        run = write_run(tmp_path / str(hash(items)), optimizer=items)
        with (run / "events.jsonl").open("a") as file:
            line = f'"event": "Predicted", "step": 1, "train_s": 1, "path": 3, "items": {items}'
            file.write(f"{{{line}}}\n")
    found = report.compare([tmp_path])
    assert len(found.settings) == 7
    assert pictures_of(found) == []


def test_equal_events_give_equal_bytes_in_any_order(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    one, other = report.compare(paths), report.compare(paths[::-1])
    assert report.html(one) == report.html(other)
    assert report.curves_svg(one.settings) == report.curves_svg(other.settings)
    assert report.figure_svg(one.settings) == report.figure_svg(other.settings)
    slower = report.compare([*paths, write_run(folder / "new", seed=9, seconds=3.5)])
    assert report.figure_svg(one.settings) != report.figure_svg(slower.settings)


def test_the_figure_has_a_white_ground_and_one_panel_per_task(tmp_path: Path) -> None:
    for i, text in enumerate(("digits", "faces", "moons", "stars")):
        write_run(tmp_path / str(i), text=text)
    svg = report.figure_svg(report.compare([tmp_path]).settings)
    assert "fill: #ffffff" in svg
    assert svg.count("training time (seconds)</text>") == 4
    assert svg.count("target 0.9</text>") == 4


def test_curves_have_labels_with_units_and_a_legend(folder: Path) -> None:
    svg = report.curves_svg(report.compare([folder]).settings)
    words = "".join(ET.fromstring(svg).itertext())
    for expected in ("training time (seconds)", "training steps", "training loss"):
        assert words.count(expected) == 2
    assert words.count("validation accuracy") == 2
    assert words.count("K-FAC + SGD") == 1


@pytest.mark.parametrize(
    "losses",
    [(), (0.0, -1.0, 0.0), (float("nan"), float("inf"), 1e300), (1e-9, 1e9, 1.0), (1.0, 1.0, 1.0)],
)
def test_diverged_and_empty_curves_still_draw(tmp_path: Path, losses: tuple[float, ...]) -> None:
    write_run(tmp_path / "a", seconds=None, losses=losses)
    settings = report.compare([tmp_path]).settings
    ET.fromstring(report.curves_svg(settings))


def test_points_that_cannot_be_drawn_are_left_out() -> None:
    bad = (float("nan"), float("inf"), -float("inf"), 1e300)
    points = [(1.0, 2.0, 3.0), *((1.0, 2.0, y) for y in bad), *((x, x, 3.0) for x in bad)]
    assert curves._finite(points, curves.Panel(metric=True, seconds=True)) == [(2.0, 3.0)]
    assert curves._finite(points, curves.Panel(metric=True, seconds=False)) == [(1.0, 3.0)]


def test_an_error_is_drawn_by_factors_unless_it_goes_below_zero(tmp_path: Path) -> None:
    def ticks(name: str, *errors: float) -> set[str]:
        path = write_run(tmp_path / name, errors=errors, seconds=None, target=None)
        svg = report.figure_svg(report.compare([path]).settings)
        return {text.strip() for text in ET.fromstring(svg).itertext()}

    assert {"1", "10", "100"} <= ticks("positive", 100.0, 10.0, 1.0)
    assert {"0", "20", "40"} <= ticks("negative", 100.0, 50.0, -1.0)


def test_long_curves_are_thinned_to_means_of_neighbours() -> None:
    points = [(float(i), float(i % 2)) for i in range(4 * curves.MAX_POINTS)]
    xs, ys = curves._thin(points)
    assert len(xs) == len(ys) == curves.MAX_POINTS
    assert (xs[0], set(ys)) == (1.5, {0.5})
    assert curves._thin(points[:3]) == ([0.0, 1.0, 2.0], [0.0, 1.0, 0.0])


def test_styles_repeat_no_look_before_all_are_used(folder: Path) -> None:
    (setting, _) = report.compare([folder]).settings
    many = [score.Setting("t", f"o{i}", {}, setting.runs) for i in range(24)]
    looks = set(curves.styles(many).values())
    assert len(looks) == 24


def test_the_page_has_a_variable_for_each_colour_in_both_modes(folder: Path) -> None:
    page = report.html(report.compare([folder]))
    for index in range(len(curves.PALETTE)):
        assert len(re.findall(rf"--c{index}: #", page)) == 2
    assert not any(colour in page.partition("</style>")[2] for colour in curves.PALETTE)
