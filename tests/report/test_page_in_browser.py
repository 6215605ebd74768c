"""The HTML page in a real browser: drawing, input, no requests, and no foreign script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kfac_bench import report
from kfac_bench.record import runs
from kfac_bench.record.events import Evaluated, RunStarted, TargetReached, Trained
from kfac_bench.record.score import notes, row
from kfac_bench.report.page_parts import TimeBar, VerdictPage
from kfac_bench.report.tables import Link, Table
from tests.support.browser import Browser, Page, browser
from tests.support.written_runs import two_optimizers, write_run

LOAD_S = 2.0
X_AXIS, Y_AXIS = "text('.axis.x')[0]", "text('.axis.y')[0]"
HELPERS = """
  const all = (selector) => [...document.querySelectorAll(selector)];
  const text = (selector) => all(selector).map(element => element.textContent);
  const paths = () => all('path.line').map(line => line.getAttribute('d'));
  const click = (selector) => document.querySelector(selector).click();
  const button = (words) => all('.chart button').find(b => b.textContent.trim() === words);
  const ends = () => paths().map(d => d.split('L').at(-1).split(' ').map(Number));
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_optimizers(tmp_path / "runs")


def show(chromium: Browser, paths: Path, tables: tuple[Table, ...] = ()) -> Page:
    """Open the page of the runs at ``paths`` in a window 1200 pixels wide."""
    file = paths.parent / "page.html"
    report.compare([paths], file, tables)
    return opened(chromium, file)


def opened(chromium: Browser, file: Path) -> Page:
    page = chromium.page()
    page.look(1200, 1600)
    page.open(file)
    page.run(f"{HELPERS} 0")
    return page


def on_screen(page: Page, x: float, y: float) -> tuple[float, float]:
    """Return the offset of the first plot in the window."""
    script = "(({left, top}) => [left, top])(all('.plot')[0].getBoundingClientRect())"
    left, top = page.run(script)
    return left + x, top + y


def test_the_browser_reports_errors_and_requests(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text("<img src='absent.png'><script>console.log('said'); absent()</script>")
    page = opened(chromium, file)
    assert any("said" in complaint for complaint in page.complaints())
    assert any("ReferenceError" in complaint for complaint in page.complaints())
    assert page.requests() == [file.as_uri(), (tmp_path / "absent.png").as_uri()]
    with pytest.raises(AssertionError, match="ReferenceError"):
        page.run("absent()")


def test_the_page_draws_in_both_modes_and_any_width_without_requests(
    chromium: Browser, folder: Path
) -> None:
    page = show(chromium, folder)
    assert len(page.run("paths()")) == 6
    assert page.run("all('.met').length") == 2  # the median run of both
    assert page.run("text('.goal')") == ["target 0.9"]
    light = page.run("getComputedStyle(all('path.line')[0]).stroke")
    page.look(400, 900, "dark")
    assert page.run("getComputedStyle(all('path.line')[0]).stroke") != light
    assert page.run("document.documentElement.scrollWidth") == 400
    assert page.run("Math.max(...ends().map(([x]) => x))") < 400
    assert page.complaints() == []
    assert page.requests() == [(folder.parent / "page.html").as_uri()]


def test_a_verdict_has_bars_and_code_to_copy_at_any_width(chromium: Browser, folder: Path) -> None:
    names = [setting.optimizer for setting in report.compare([folder]).settings]
    bars = [TimeBar(names[0], "2 s (1-4)", [2, 1, 4]), TimeBar(names[1], "x " * 99, [math.inf] * 3)]
    code = f"from a import b\noptimizer = b({'c=1, ' * 40})"
    verdict = VerdictPage("Yes.", "Time", bars, [], "Paste", code)
    tables = [Table("All trials", ["settings"], [["lr " * 99]])]
    file = folder.parent / "page.html"
    report.compare([folder], file, tables, "Does it help?", verdict)
    page = opened(chromium, file)
    for width in (1200, 400):
        page.look(width, 900)
        assert page.run("document.documentElement.scrollWidth") == width
        wide = page.run("all('.time-bar').map(svg => svg.getBoundingClientRect().width)")
        drawn = page.run("all('.time-bar rect').map(bar => bar.getBoundingClientRect().width)")
        assert drawn == pytest.approx([0.48 * wide[0], wide[1]], rel=0.02)
    assert page.run("text('h1')") == ["Yes."]
    assert page.run("all('details:not([open]) .long').length") == 1
    page.run("click('[data-copy]')")
    assert page.run("getSelection().toString().trim()") == code.strip()
    is_waiting = "text('[data-copy]')[0] === 'Copy'"
    page.run(f"new Promise(d => (function f() {{ {is_waiting} ? setTimeout(f, 10) : d(); }})())")
    assert page.complaints() == []


def test_the_x_axis_shows_seconds_or_steps(chromium: Browser, folder: Path) -> None:
    page = show(chromium, folder)
    assert page.run(X_AXIS) == "training time (seconds)"
    by_seconds = page.run("ends().map(([x]) => Math.round(x))")
    assert len(set(by_seconds)) == 4  # seeds end after 1, 2, 3 and 4 seconds
    page.run("button('steps').click()")
    assert page.run(X_AXIS) == "training steps"
    assert page.run("text('.tick')")[-1] == "30"
    assert len(set(page.run("ends().map(([x]) => Math.round(x))"))) == 1  # all after 30 steps
    assert page.run("button('steps').ariaPressed + button('seconds').ariaPressed") == "truefalse"
    page.run("button('seconds').click()")
    assert page.run("ends().map(([x]) => Math.round(x))") == by_seconds
    assert page.complaints() == []


def test_the_y_axis_shows_metric_or_loss_linear_or_log(chromium: Browser, folder: Path) -> None:
    page = show(chromium, folder)
    assert page.run(Y_AXIS) == "validation accuracy"
    assert page.run("button('linear').ariaPressed") == "true"
    page.run("button('training loss').click()")
    assert page.run(Y_AXIS) == "training loss"
    assert page.run("all('.goal').length") == 0
    assert page.run("button('log').ariaPressed") == "true"

    def steps_down() -> list[float]:
        heights = page.run("paths()[5].slice(1).split('L').map(at => Number(at.split(' ')[1]))")
        return [b - a for a, b in pairwise(heights)]

    first, second = steps_down()  # from 2 to 1 to 0.5
    assert first == pytest.approx(second, abs=0.2)
    page.run("button('linear').click()")
    first, second = steps_down()
    assert first == pytest.approx(2 * second, abs=0.4)


def test_the_legend_hides_a_setting_and_shows_it_again(chromium: Browser, folder: Path) -> None:
    write_run(folder / "slow", optimizer="adam", seconds=40.0)
    page = show(chromium, folder)
    before = page.run("paths()")
    page.run("button('Adam').click()")
    assert page.run("button('Adam').ariaPressed") == "false"
    assert len(page.run("paths()")) == 6
    assert page.run("text('.tick')")[-1] == "4"  # the axis is that of what is left
    page.run("button('SGD').click(); button('K-FAC + SGD').click()")
    assert page.run("paths()") == []
    assert page.run("text('.nothing')") == ["nothing to draw"]
    page.run("['Adam', 'SGD', 'K-FAC + SGD'].forEach(name => button(name).click())")
    assert page.run("paths()") == before


def test_small_panels_follow_the_axis_and_the_legend(chromium: Browser, tmp_path: Path) -> None:
    for name, kfac in (("sgd", False), ("kfac", True)):
        file = write_run(tmp_path / "runs" / name, kfac=kfac) / "events.jsonl"
        events = [json.loads(line) for line in file.read_text().splitlines()]
        for i, event in enumerate(e for e in events if e["event"] == "Trained"):
            event |= {"lr": 0.1 / (i + 1)}
            if kfac:
                layers = {f"a.long.name.of.a.layer.{n}": 1 / (n + 1) for n in range(20)}
                event |= {"nu": 0.5 + i / 10, "cosine": layers, "condition": layers}
                event |= {"stage_mean_s": {"Decompose": 0.01, "ShareGradients": 0.02}}
        file.write_text("".join(json.dumps(event) + "\n" for event in events))
    page = show(chromium, tmp_path / "runs")
    small = "all('.small .frame')"
    last = "[...f.querySelectorAll('.tick[text-anchor=middle]')].at(-1).textContent"
    ticks = f"{small}.map(f => {last})"
    assert page.run("text('.small .axis')") == ["learning rate", "nu"]  # others do not change
    assert page.run("all('.h5').length") > 0
    assert page.run(f"{small}.map(f => f.querySelectorAll('path.line[d]').length)") == [2, 1]
    assert page.run(ticks) == ["2", "2"]
    before = page.run("paths()")
    page.run("button('steps').click(); button('K-FAC + SGD').click()")
    assert page.run(ticks)[0] == "20"
    assert page.run(f"{small}.map(f => f.querySelectorAll('path.line[d]').length)") == [1, 0]
    page.run("button('seconds').click(); button('K-FAC + SGD').click()")
    page.run(f"button('training loss').click(); {small}[0].querySelector('.plot').focus()")
    page.press("+")
    assert page.run(f"{small}.map(f => f.querySelector('button').disabled)") == [False, True]
    page.run(f"{small}[0].querySelector('button').click(); button('validation accuracy').click()")
    assert page.run("paths()") == before
    page.look(400, 900, "dark")
    assert page.run("document.documentElement.scrollWidth") == 400
    assert page.complaints() == []


def test_the_pointer_shows_a_point_and_zooms_by_drag(chromium: Browser, folder: Path) -> None:
    page = show(chromium, folder)
    whole = page.run("paths()")
    x, y = page.run("ends().at(-1)")
    page.mouse("Moved", *on_screen(page, x + 3, y - 3))
    told = page.run("text('.tip span')")
    assert told[:3] == ["K-FAC + SGD", "validation accuracy 0.93", "step 30, 1 s"]
    page.mouse("Moved", *on_screen(page, x, y + 200))
    assert page.run("all('.tip')[0].hidden")

    page.mouse("Moved", *on_screen(page, 200, 100))
    page.mouse("Pressed", *on_screen(page, 200, 100))
    page.mouse("Moved", *on_screen(page, 400, 200))
    assert page.run("all('.drag').length") == 1
    page.mouse("Released", *on_screen(page, 400, 200))
    assert page.run("all('.drag').length") == 0
    zoomed = page.run("paths()")
    assert zoomed != whole
    frame = page.run("(({x, width}) => [x, width])(all('.plot svg svg')[0].getBBox())")
    assert frame[1] > 0
    assert not page.run("button('whole range').disabled")
    page.run("button('whole range').click()")
    assert page.run("paths()") == whole

    page.mouse("Pressed", *on_screen(page, 200, 100))  # a stripe: the x axis alone
    page.mouse("Moved", *on_screen(page, 400, 103))
    page.mouse("Released", *on_screen(page, 400, 103))
    heights = "map(d => d.split('L').map(at => at.split(' ')[1]))"
    assert page.run(f"paths().{heights}") == page.run(f"{json.dumps(whole)}.{heights}")
    assert page.run("paths()") != whole
    for clicks in (1, 2):
        page.mouse("Pressed", *on_screen(page, 300, 150), clicks=clicks)
        page.mouse("Released", *on_screen(page, 300, 150), clicks=clicks)
    assert page.run("paths()") == whole
    assert page.complaints() == []


def test_the_range_begins_where_an_accuracy_can_be_read(chromium: Browser, folder: Path) -> None:
    page = show(chromium, folder)
    lowest = "Number(text('.tick[text-anchor=end]')[0])"  # of the y axis
    near = page.run("paths()")
    assert page.run(lowest) >= 0.6
    page.run("button('whole range').click()")
    assert page.run(lowest) <= 0.4  # The first evaluation has an accuracy of 0.31.
    page.run("button('usual range').click()")
    assert page.run("paths()") == near
    page.run("button('training loss').click()")
    assert page.run("button('whole range').disabled")
    assert page.complaints() == []


def test_keys_do_what_the_pointer_does(chromium: Browser, folder: Path) -> None:
    page = show(chromium, folder)
    whole = page.run("paths()")
    page.run("all('.plot')[0].focus()")
    page.press("ArrowRight")
    told = [page.run("text('.tip span')")]
    assert told[0][0] == "SGD"
    for key in ("ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown", "ArrowDown"):
        page.press(key)
        told.append(page.run("text('.tip span')"))
    assert told[2] == told[0] != told[1]
    assert told[5][0] == "K-FAC + SGD"
    page.press("+")
    assert page.run("paths()") != whole
    assert page.run("all('.mark').length") == 1
    page.press("Escape")
    assert page.run("paths()") == whole
    reached = page.run("all('.chart button, .sortable button, .plot').every(e => e.tabIndex === 0)")
    assert reached
    assert page.complaints() == []


def test_tables_sort_numbers_as_numbers_and_missing_values_last(
    chromium: Browser, folder: Path
) -> None:
    values: list[Any] = [10.0, None, 0.5, math.inf, 0.25, math.nan, -2, -10]
    names = ["ten 10", "ten 9", "none", "inf", Link("a", "a"), "nan", "Minus", "zebra"]
    rows = list(zip(values, names, strict=True))
    page = show(chromium, folder, (Table("Given", ["value", "name"], rows),))
    head, column = "all('.sortable')[0].tHead.rows[0].cells", "td:nth-child({})"

    def sorted_by(number: int) -> list[str]:
        page.run(f"{head}[{number - 1}].querySelector('button').click()")
        shown: list[str] = page.run(f"text('.sortable:first-of-type {column.format(number)}')")
        return shown[: len(rows)]

    before = ["10", "\u2013", "0.5", "inf", "0.25", "\u2013", "-2", "-10"]
    assert sorted_by(1) == ["-10", "-2", "0.25", "0.5", "10", "inf", "\u2013", "\u2013"]
    assert page.run(f"{head}[0].ariaSort") == "ascending"
    assert sorted_by(1) == ["10", "0.5", "0.25", "-2", "-10", "inf", "\u2013", "\u2013"]
    assert page.run(f"{head}[0].ariaSort") == "descending"
    assert sorted_by(1) == before
    assert page.run(f"{head}[0].ariaSort") == "none"
    assert sorted_by(2) == ["a", "inf", "Minus", "nan", "none", "ten 9", "ten 10", "zebra"]
    assert page.run(f"[{head}[0].ariaSort, {head}[1].ariaSort]") == ["none", "ascending"]

    page.run("all('.stack.sortable th button')[1 + 1].click()")  # seconds to target
    assert page.run("text('.stack.sortable td.name')")[:2] == ["K-FAC + SGD", "SGD"]
    assert page.complaints() == []


def test_curves_of_any_shape_are_drawn_without_an_error(chromium: Browser, tmp_path: Path) -> None:
    shapes: tuple[tuple[float, ...], ...] = (
        (),
        (0.0, -1.0, 0.0),
        (math.nan, math.inf, 1e300),
        (1e-9, 1e9, 1.0),
        (1.0, 1.0, 1.0),
        (1e-320, 1e-310),
        (1e-280, 1e29),
        (-1e29, 1e29),
        (0.0,),
        (5.0,),
    )
    for i, losses in enumerate(shapes):  # each a task of its own
        for metric in ("shares", "errors"):
            errors = losses if metric == "errors" else ()
            name = f"{metric} {i}"
            write_run(tmp_path / "runs" / name, text=name, losses=losses[:3], errors=errors)
    page = show(chromium, tmp_path / "runs")
    assert page.run("all('.plot > svg').length") == 2 * len(shapes)
    for number in range(6):
        page.run(
            f"all('.bar').forEach(bar => [...bar.querySelectorAll('button')][{number}].click())"
        )
        for key in ("ArrowDown", "+", "+", "ArrowRight", "Escape"):
            event = f"new KeyboardEvent('keydown', {{ key: '{key}' }})"
            page.run(f"all('.plot').forEach(plot => plot.dispatchEvent({event}))")
        wrong = "/NaN|Infinity|undefined/.test(c.querySelector('svg').innerHTML)"
        assert page.run(f"all('.chart').filter(c => {wrong}).map(c => c.textContent)") == []
    assert page.complaints() == []


@pytest.mark.slow
def test_fifty_runs_of_five_thousand_points_are_drawn_in_two_seconds(
    chromium: Browser, tmp_path: Path
) -> None:
    settings = runs.group(long_run(i // 5, i % 5) for i in range(50))
    found = report.Comparison(settings, [row(s) for s in settings], notes(settings))
    file = tmp_path / "long.html"
    file.write_text(report.html(found), encoding="utf-8")
    page = opened(chromium, file)
    assert len(page.run("paths()")) == 50
    assert page.run("Math.min(...paths().map(d => d.split('L').length))") > 900
    assert page.cpu_s() < LOAD_S
    page.run("button('training loss').click(); button('steps').click()")
    assert page.cpu_s() < LOAD_S
    assert page.complaints() == []


def long_run(setting: int, seed: int) -> runs.Run:
    """Write a run with 5,000 points of the loss and 1,250 points of the metric."""
    names = {
        "data": {"name": "long"},
        "model": {"name": "run"},
        "optimizer": {"name": f"o{setting}"},
    }
    config = names | {"trainer": {"target": 0.9}, "seed": seed}
    events: list[Any] = [RunStarted(0, 0.0, "x", "accuracy", True, config, {"torch": "2.11"})]
    for i in range(1, 5001):
        time_s, noise = i * (1 + 0.1 * setting + 0.01 * seed), (i * 7919 % 1000) / 1e4
        fall = math.exp(-i / (900 + 100 * setting))
        events.append(Trained(10 * i, time_s, 0.1 * i, 2.3 * fall + noise + 0.01, 0.1, 100.0))
        if i % 4 == 0:
            metric = {"accuracy": 0.95 * (1 - fall) - noise}
            events.append(Evaluated(10 * i, time_s, 0.1 * i, metric))
    events.append(TargetReached(40_000, time_s, "accuracy", 0.9, 0.9))
    return runs.Run(Path(f"/runs/{setting}-{seed}/events.jsonl"), events[0], tuple(events))


HACK = "window.hacked = true"
HOSTILE = (
    f"</script><script>{HACK}</script>",
    f"<img src=x onerror='{HACK}'>",
    f"\"'><svg onload='{HACK}'><a href='javascript:{HACK}'>",
    f"--></style><script>{HACK}</script>${{{HACK}}}{{{{ 7 * 7 }}}}",
    "\u2028\u2029</title></textarea></noscript><link rel=stylesheet href=//example.org/x.css>",
)


def test_hostile_strings_are_shown_as_text(chromium: Browser, tmp_path: Path) -> None:
    for i, text in enumerate(HOSTILE):
        folder = write_run(tmp_path / "runs" / str(i), text="one task", optimizer=text)
        file = folder / "events.jsonl"
        events = [poisoned(json.loads(line), text) for line in file.read_text().splitlines()]
        items = [{"caption": text, "file": text, "text": text}]
        events += [{"event": "Predicted", "step": 30, "train_s": 2.0, "path": text, "items": items}]
        file.write_text("".join(json.dumps(event) + "\n" for event in events))
    table = Table(HOSTILE[0], HOSTILE, [[Link(h, f"javascript:{HACK}") for h in HOSTILE]], HOSTILE)
    page = show(chromium, tmp_path / "runs", (table,))
    drawn = page.run("paths().length")
    assert drawn == len(HOSTILE)
    page.run("all('details').forEach(d => d.open = true); all('.plot')[0].focus()")
    for _ in HOSTILE:
        page.press("ArrowDown")
        assert any(HACK in said or "//example" in said for said in page.run("text('.tip span')"))
    page.run("all('button').forEach(button => button.click())")
    addresses = page.run("all('a').map(a => a.getAttribute('href'))")
    assert sorted(addresses) == [f"runs/{i}/events.jsonl" for i in range(len(HOSTILE))]
    assert page.run("typeof window.hacked") == "undefined"
    assert page.run("document.scripts.length") == 2
    assert page.complaints() == []
    assert page.requests() == [(tmp_path / "page.html").as_uri()]


def poisoned(event: Any, text: str, path: tuple[str, ...] = ()) -> Any:
    """Return ``event`` with every string, and a key of every object, replaced."""
    if isinstance(event, dict):
        new = {k: poisoned(v, text, (*path, k)) for k, v in event.items()}
        return new | ({text: text} if path else {})
    # but for what makes it an event, and one task of all
    kept = path[-1:] == ("event",) or path[-2:-1] in (("data",), ("model",))
    return text if isinstance(event, str) and not kept and path != ("metric",) else event


def test_the_policy_blocks_scripts_that_get_into_the_page(chromium: Browser, folder: Path) -> None:
    page = show(chromium, folder)
    page.run(
        "const script = document.createElement('script');"
        f"script.textContent = '{HACK}'; document.body.append(script);"
        f"document.body.insertAdjacentHTML('beforeend', \"<img src=x onerror='{HACK}'>\");"
        "fetch('https://example.org/').catch(() => 'refused')"
    )
    assert page.run("typeof window.hacked") == "undefined"
    refused = {e["requestId"] for e in page.events("Network.loadingFailed")}
    asked = {e["requestId"]: e["request"]["url"] for e in page.events("Network.requestWillBeSent")}
    loaded = [url for request, url in asked.items() if request not in refused]
    assert loaded == [(folder.parent / "page.html").as_uri()]
    assert any("Content Security Policy" in complaint for complaint in page.complaints())
