"""The HTML page as text: its content, and that it escapes everything from event files."""

import base64
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from kfac_bench import report
from kfac_bench.record.event_log import JsonlSink
from kfac_bench.record.events import Predicted
from kfac_bench.report import figure_style, page_parts
from kfac_bench.report.page_parts import TimeBar, VerdictPage
from kfac_bench.report.tables import Link, Table
from kfac_bench.tasks.task import Prediction
from kfac_bench.training import predictions
from tests.support.written_runs import EVIL, two_optimizers, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_optimizers(tmp_path / "runs")


class Tags(HTMLParser):
    """All tags, attributes and text of a page, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    def links(self) -> list[str | None]:
        return [value for name, value in self.attributes if name in ("src", "href", "srcset")]


def charts_of(page: str) -> Any:
    """Return the data of the page's curves."""
    return json.loads(Tags(page).scripts[0])


def test_the_page_escapes_all_texts_of_event_files(tmp_path: Path) -> None:
    write_run(tmp_path / "a", text=EVIL, optimizer=EVIL, environment={EVIL: {EVIL: EVIL}})
    write_run(
        tmp_path / "b",
        text=EVIL,
        optimizer=EVIL,
        kfac=True,
        environment={"x": [EVIL], "x_bytes": "9" * 400},
    )
    table = Table(EVIL, [EVIL], [[EVIL], [Link(EVIL, EVIL)]], [EVIL])
    bars = [TimeBar(EVIL, EVIL, [1.0, 1.0, math.inf]), TimeBar(EVIL, EVIL)]
    verdict = VerdictPage(EVIL, EVIL, bars, [EVIL], EVIL, EVIL)
    page = report.html(report.compare([tmp_path]), EVIL, [table], verdict=verdict)
    seen = Tags(page)
    assert seen.tags.count("script") == 2
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "<script>alert('x')</script> $\\frac{1}{0}$" in seen.text
    assert "alert('x')" in charts_of(page)[0]["settings"][0]["label"]
    assert "alert" not in seen.scripts[1]
    assert "\x1b" not in page
    page.encode("utf-8")  # no lone surrogate got through


def test_data_in_the_page_cannot_end_a_script_or_a_line() -> None:
    data = {"</script><!--": ["<script>", "]]>", "\u2028\u2029", "&lt;", 1.5, None, math.pi]}
    text = page_parts.embed(data)
    assert json.loads(text) == data
    assert not re.search("[<>&\u2028\u2029]", text)
    with pytest.raises(ValueError, match="JSON"):
        page_parts.embed(math.nan)


def test_the_page_needs_nothing_from_outside(folder: Path) -> None:
    page = report.html(report.compare([folder]))
    urls = re.findall(r"""[^\s"'(]*//[^\s"')]+""", re.sub(r"/\*.*?\*/", "", page))
    assert set(urls) == {"http://www.w3.org/2000/svg"}
    seen = Tags(page)
    assert not {"link", "img", "iframe", "object"} & set(seen.tags)
    assert not seen.links()
    assert "@import" not in page


def test_the_policy_allows_only_the_pages_own_script_and_style(folder: Path) -> None:
    page = report.html(report.compare([folder]))
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
    assert rules["default-src"] == "'none'"
    script, style = Tags(page).scripts[1], page.partition("<style>")[2].partition("</style>")[0]
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert not re.search(r"\sstyle=", page)  # would not be allowed


def test_the_page_shows_results_options_runs_and_machines(folder: Path) -> None:
    machine = {"git": {"commit": "abc"}, "torch": "2.11", "memory_bytes": 25_276_502_016}
    write_run(folder / "other", seed=7, environment=machine)
    text = " ".join(Tags(report.html(report.compare([folder]))).text.split())
    for expected in (
        "digits resnet8, accuracy ≥ 0.9",
        "3 of 4 seeds",
        "kfac.damping",
        "optimizer.lr",
        "torch 2.11",
        "git.commit",
        "SGD7abc25.3 GB",
        "environments differ in git.commit",
        str(folder / "kfac1" / "events.jsonl"),
    ):
        assert expected in text
    assert "Environments that differ" not in report.html(report.compare([folder / "sgd0"]))


def test_each_run_links_to_its_events_relative_to_the_page(folder: Path) -> None:
    odd = write_run(folder / "a b#c?d%e:f&g", seed=8)
    page = folder.parent / "pages" / "out.html"
    page.parent.mkdir()
    report.compare([folder], page)
    links = [unquote(str(link)) for link in Tags(page.read_text()).links()]
    found = sorted((page.parent / link).resolve() for link in links)
    assert found == sorted(folder.resolve().glob("*/events.jsonl"))
    assert odd / "events.jsonl" in found
    assert '"../runs/a%20b%23c%3Fd%25e%3Af%26g/events.jsonl"' in page.read_text()


def test_given_tables_come_first_with_their_sort_keys(folder: Path) -> None:
    numbers = [1.23456, math.inf, None, 7]
    links = [
        "https://example.org/paper",
        "runs/a/events.jsonl",
        "javascript:alert(1)",
        " javascript:alert(1)",
        "data:text/html,x",
        "//example.org/x",
        "java\nscript:alert(1)",
    ]
    rows = [[value, "a"] for value in numbers] + [[3.0, Link("b", link)] for link in links]
    table = Table("Given", ["ratio", "where"], rows, ["see there"])
    page = report.html(report.compare([folder]), tables=[table])
    assert page.index("Given") < page.index("digits resnet8")
    assert "see there" in page
    assert Tags(page).links() == links[:2]
    cells = re.findall(r'<td data-key="([^"]*)" class="num">\s*([^<]*)</td>', page)
    assert cells[:4] == [("1.23456", "1.235"), ("inf", "inf"), ("none", "\u2013"), ("7.0", "7")]


def test_curves_equal_the_events(folder: Path) -> None:
    (chart,) = charts_of(report.html(report.compare([folder])))
    assert chart["names"] == {"metric": "validation accuracy", "loss": "training loss"}
    assert (chart["higherIsBetter"], chart["target"]) == (True, 0.9)
    assert [s["label"] for s in chart["settings"]] == ["SGD", "K-FAC + SGD"]
    sgd = chart["settings"][0]["runs"]
    assert [(run["seed"], run["median"]) for run in sgd] == [(0, False), (1, True), (2, False)]
    assert sgd[0]["metric"] == [[10, 20, 30], [0.666667, 1.33333, 2], [0.31, 0.62, 0.93]]
    assert sgd[0]["loss"] == [[10, 20, 30], [0.666667, 1.33333, 2], [2, 1, 0.5]]
    assert [run["met"] for run in sgd] == [[30, 2, 0.93], [30, 3, 0.93], None]


def test_many_runs_have_fewer_points_each(tmp_path: Path) -> None:
    losses = tuple(1.0 + i % 7 for i in range(1500))
    write_run(tmp_path / "a", losses=losses)
    page = report.html(report.compare([tmp_path]))
    (chart,) = charts_of(page)
    steps, _, values = chart["settings"][0]["runs"][0]["loss"]
    assert 900 < len(steps) <= 1000
    assert (steps[0], steps[-1], min(values), max(values)) == (10, 15000, 1, 7)
    assert "at most 1000 points" in Tags(page).text
    most = [page_parts.most_points(runs) for runs in (1, 50, 100, 200, 500, 10**6)]
    assert most == [1000, 1000, 1000, 500, 200, 100]


def test_the_best_median_is_highlighted_but_never_a_missed_target(folder: Path) -> None:
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
    """Return the page's images, all of which must be embedded."""
    sources = Tags(report.html(found)).links()
    start = "data:image/png;base64,"
    assert all(source is not None and source.startswith(start) for source in sources)
    return [base64.b64decode(str(source).removeprefix(start)) for source in sources]


def test_the_page_embeds_the_pictures_of_each_settings_first_seed(folder: Path) -> None:
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


def test_the_page_shows_the_last_predictions_of_a_run(folder: Path) -> None:
    run = folder / "sgd0"
    for step in (10, 20):
        show(run, {"caption": f"at {step}", "file": picture(run, step), "text": None}, step=step)
    text = Tags(report.html(report.compare([run]))).text
    assert "at 20" in text
    assert "at 10" not in text


def test_the_page_limits_the_bytes_of_pictures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "sgd0"
    file = picture(run)
    show(run, *({"caption": f"nr {n};", "file": file, "text": "y" * 9000} for n in range(40)))
    found = report.compare([run])
    assert len(pictures_of(found)) == page_parts.MOST_PREDICTIONS
    text = Tags(report.html(found)).text
    assert "nr 11;" in text
    assert "nr 12;" not in text
    assert text.count("y" * 10) <= page_parts.MOST_PREDICTIONS * page_parts.MOST_TEXT / 10
    bytes_of_one = len((run / file).read_bytes())
    monkeypatch.setattr(page_parts, "MOST_PICTURE_BYTES", 3 * bytes_of_one)
    assert len(pictures_of(found)) == 3
    assert Tags(report.html(found)).text.count("picture missing") == page_parts.MOST_PREDICTIONS - 3


def test_foreign_predictions_are_escaped_and_read_no_other_file(folder: Path) -> None:
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
    assert seen.tags.count("script") == 2
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert seen.text.count("picture missing") == len(items) - 1
    assert "\x1b" not in page
    page.encode("utf-8")


def test_malformed_predictions_do_not_break_the_page(tmp_path: Path) -> None:
    shapes = ('"x"', "7", "null", '{"a": 1}', "[]", '[7, null, [], "x", {}]')
    for items in (*shapes, '[{"caption": {}, "text": 3}]'):
        run = write_run(tmp_path / str(hash(items)), optimizer=items)
        with (run / "events.jsonl").open("a") as file:
            line = f'"event": "Predicted", "step": 1, "train_s": 1, "path": 3, "items": {items}'
            file.write(f"{{{line}}}\n")
    found = report.compare([tmp_path])
    assert len(found.settings) == 7
    assert pictures_of(found) == []


def test_the_page_has_a_variable_for_each_colour_in_both_modes(folder: Path) -> None:
    page = report.html(report.compare([folder]))
    for index in range(len(figure_style.PALETTE)):
        assert len(re.findall(rf"--c{index}: #", page)) == 2
    assert not any(colour in page.partition("</style>")[2] for colour in figure_style.PALETTE)


def test_equal_events_give_an_equal_page_in_any_order(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    assert report.html(report.compare(paths)) == report.html(report.compare(paths[::-1]))


def test_a_long_page_begins_with_a_table_of_contents(folder: Path) -> None:
    tables = [Table(f"{EVIL} {i}", ["x"], [[i]], []) for i in range(5)]
    page = report.html(report.compare([folder]), tables=tables)
    assert len(re.findall(r'<li><a href="#table-\d">', page)) == 5
    for name in re.findall(r'href="#([\w-]+)"', page):
        assert page.count(f'id="{name}"') == 1
    assert EVIL not in page
    assert 'class="card contents"' not in report.html(report.compare([folder]), tables=tables[:1])
