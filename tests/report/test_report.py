"""report/: how runs are read and shown as tables of text."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kfac_bench import report
from kfac_bench.errors import UsageError
from kfac_bench.record import runs, score
from kfac_bench.report.comparison import UNLIKE
from tests.support.written_runs import two_optimizers, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_optimizers(tmp_path / "runs")


def test_the_markdown_table_equals_the_expected_text(folder: Path) -> None:
    assert report.markdown_table(report.compare([folder]).rows) == (
        "| task | optimizer | steps to target | seconds to target (median, range) "
        "| final metric |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| digits resnet8, accuracy ≥ 0.9 | SGD | 30 "
        "| 3.00 (2.00 \u2013 not reached), 2 of 3 seeds | 0.9300 |\n"
        "| digits resnet8, accuracy ≥ 0.9 | K-FAC + SGD | 30 | 1.00 | 0.9300 |\n"
    )


def test_rows_without_a_target_and_with_missed_targets(tmp_path: Path) -> None:
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
def test_seconds_as_text(value: float, text: str) -> None:
    assert report.seconds(value) == text


def test_steps_keep_all_their_digits() -> None:
    assert report.count(1_234_567) == "1234567"
    assert report.count(60.5) == "60.5"


def test_metrics_have_four_digits_and_a_missing_metric_is_a_dash() -> None:
    assert [report.metric(x) for x in (0.97, 0.98765, 12345.6)] == ["0.9700", "0.9877", "12345.6"]
    assert report.metric(float("nan")) == "\u2013"


def terminal_text(path: Path, width: int) -> str:
    """Return what the terminal shows of the runs at the path."""
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(report.terminal_table(report.compare([path]).rows))
    return console.export_text()


def test_the_terminal_table_prints_markup_as_text(tmp_path: Path) -> None:
    text = terminal_text(write_run(tmp_path / "a", text="[red]x[/red]"), 200)
    assert "[red]x[/red] resnet8" in text
    assert all(column.partition(" (")[0] in text for column in report.COLUMNS)


def test_the_head_of_the_terminal_table_has_two_lines_at_80_columns(tmp_path: Path) -> None:
    lines = terminal_text(write_run(tmp_path / "a"), 80).splitlines()
    assert [line[0] for line in lines[:4]] == ["┏", "┃", "┃", "┡"]


def test_the_terminal_table_names_a_task_once(folder: Path) -> None:
    for seed in (0, 1):  # another task, of two optimizers
        write_run(folder / f"other{seed}", text="other", kfac=bool(seed))
    shown = terminal_text(folder, 200)
    assert [shown.count(f"{name} resnet8") for name in ("digits", "other")] == [1, 1]
    assert [shown.count(name) for name in (" SGD ", " K-FAC + SGD ")] == [2 + 2, 2]


@given(st.text(max_size=30))
def test_a_markdown_cell_stays_one_cell(text: str) -> None:
    spread = score.Spread(1.0, 1.0, 1.0)
    label = runs.plain(text)
    row = score.Row(label, "SGD", 1, 1, True, spread, spread, 0.5)
    line = report.markdown_table([row]).splitlines()[2]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 6
    assert "<" not in line


def test_compare_replaces_the_page_as_a_whole(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    found = report.compare([folder, folder / "sgd0"], page)
    assert sum(row.seeds for row in found.rows) == 6
    assert page.read_text(encoding="utf-8") == report.html(found, folder=tmp_path.resolve())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


def test_compare_raises_one_line_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no runs to compare"):
        report.compare([])
    with pytest.raises(UsageError, match="does not exist"):
        report.compare([folder], tmp_path / "absent" / "report.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        report.compare([folder], tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "taken"]


def test_unreadable_paths_are_left_out_with_a_note_if_runs_remain(folder: Path) -> None:
    """``compare runs/*`` finds folders without a run, and runs that failed at the start."""
    broken, empty = folder / "broken", folder.parent / "all"
    broken.mkdir()
    empty.mkdir()
    (empty / "smoke.md").write_text("a table")
    (broken / "events.jsonl").write_text("")
    for paths in ([folder], [empty, broken, folder], [broken / "events.jsonl", folder]):
        found = report.compare(paths)
        assert sum(row.seeds for row in found.rows) == 6
        noted = [note for note in found.notes if "left out" in note]
        assert len(noted) == (2 if empty in paths else 1)
        assert any(str(broken) in note for note in noted)
    for path in (broken, broken / "events.jsonl"):
        with pytest.raises(UsageError, match="no RunStarted"):
            report.compare([path, empty])
    with pytest.raises(UsageError, match="no such run"):
        report.compare([folder, folder / "typo"])


def test_computed_cells_are_not_compared(folder: Path) -> None:
    file = write_run(folder / "computed") / "events.jsonl"
    file.write_text(file.read_text().replace('"seed": 0', '"computed": "simulate"'))
    found = report.compare([folder])
    assert sum(row.seeds for row in found.rows) == 6
    assert not any("left out" in note for note in found.notes)
    with pytest.raises(UsageError, match="no runs to compare"):
        report.compare([folder / "computed"])


def test_settings_of_different_tasks_are_not_compared_with_a_note(folder: Path) -> None:
    assert UNLIKE not in report.compare([folder]).notes
    write_run(folder / "other", text="letters")
    assert UNLIKE not in report.compare([folder]).notes
    assert UNLIKE not in report.compare([folder / "other"]).notes
    assert UNLIKE in report.compare([folder / "other", folder / "sgd0"]).notes


def test_the_terminal_table_has_no_columns_without_values(tmp_path: Path) -> None:
    write_run(tmp_path / "a", target=None, optimizer="no target")
    assert terminal_text(tmp_path, 80).count("target") == 1, "the name of the optimizer"
    write_run(tmp_path / "b")
    assert "no target" in terminal_text(tmp_path, 80)
