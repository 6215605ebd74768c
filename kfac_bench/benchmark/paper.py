"""What a benchmark leaves to read: Markdown, a figure, one page; all rows in one document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import figure, sheet, suite
from kfac_bench.benchmark.result import Line
from kfac_bench.benchmark.sheet import Attempt
from kfac_bench.benchmark.suite import BenchmarkRow
from kfac_bench.errors import UsageError
from kfac_bench.record.runs import group
from kfac_bench.report import curves
from kfac_bench.report.tables import Table, escape_markdown

_MOST = 20
BEGIN = "<!-- made by kfac-bench report all --into -->"
END = "<!-- end of what kfac-bench report made -->"


@dataclass(frozen=True)
class RowReport:
    """A row's results, and the files that hold them."""

    row: BenchmarkRow
    lines: Sequence[Line]
    tables: Sequence[Table]
    files: Sequence[Path]


def write(row: BenchmarkRow) -> RowReport:
    """``FOLDER/PROFILE.md``, ``.svg`` and ``.html`` of one row, from the files of its cells.

    Raises :class:`UsageError` where nothing was run yet, or nothing can be written.
    """
    found = suite.attempts(row)
    if all(attempt.reason == sheet.PENDING[0] for attempt in found):
        raise UsageError(
            f"{row.name}: nothing was run yet; kfac-bench run {row.name}{_profile(row)}"
        )
    lines = suite.results(row, found)
    tables = _tables(row, lines, found)
    stem = row.folder / (row.profile or "report")
    drawn = figure.svg(row.benchmark, lines)
    trained = suite.runs_of(found)
    files = []
    texts = {".md": _markdown(row, tables, drawn is not None, stem.name)}
    if drawn is not None:
        texts[".svg"] = drawn
    if row.benchmark.curves and trained:
        texts["-curves.svg"] = curves.curves_svg(group(trained))
    for ending, text in texts.items():
        path = stem.with_name(stem.name + ending)
        _save(path, text)
        files.append(path)
    page = stem.with_name(stem.name + ".html")
    _page(page, [run.path for run in trained], tables, f"{row.name}{_profile(row)}")
    return RowReport(row, lines, tables, [*files, page])


def _page(path: Path, runs: Sequence[Path], tables: Sequence[Table], title: str) -> None:
    """Tables above what is found in the runs; without runs the tables alone."""
    if runs:
        report.compare(runs, path, tables, title)
        return
    folder = path.absolute().parent.resolve()
    _save(path, report.html(report.Comparison([], [], []), title, tables, folder))


def _profile(row: BenchmarkRow) -> str:
    return f" profile={row.profile}" if row.profile else ""


def _tables(row: BenchmarkRow, lines: Sequence[Line], found: Sequence[Attempt]) -> list[Table]:
    parts = [note for part in row.benchmark.computed for note in part.notes]
    notes = [*row.sized.notes, *parts, *row.benchmark.notes]
    tables = [sheet.compared(row.benchmark, lines, notes)]
    meant = sheet.stands_for(row.benchmark, row.sized, row.overrides)
    return [*tables, *([meant] if meant else []), sheet.attempts(found, row.folder)]


def _markdown(row: BenchmarkRow, tables: Sequence[Table], drawn: bool, stem: str) -> str:
    head = f"# {row.name}{_profile(row)}\n\n{escape_markdown(row.benchmark.source)}\n"
    picture = f"\n![{escape_markdown(row.benchmark.title)}]({stem}.svg)\n" if drawn else ""
    if row.benchmark.curves:
        picture += f"\n![Curves]({stem}-curves.svg)\n"
    first, *rest = (table.markdown() for table in tables)
    return "\n".join([head, first + picture, *rest])


def write_all(written: Sequence[RowReport], into_document: Path | None) -> list[Path]:
    """``runs/all/PROFILE.md`` and ``.html``: what all rows came to; the files."""
    if not written:
        raise UsageError("no row was run yet; kfac-bench run all")
    text = summary(written)
    folder, stem = Path("runs/all"), written[0].row.profile or "report"
    files = [folder / f"{stem}.md"]
    _save(files[0], text)
    runs = [run.path for each in written for run in suite.runs_of(suite.attempts(each.row))]
    files.append(folder / f"{stem}.html")
    tables = [each.tables[0] for each in written]
    _page(files[-1], runs, tables, f"Tables and figures of the papers, profile={stem}")
    if into_document is not None:
        into(into_document, text)
        files.append(into_document)
    return files


def summary(written: Sequence[RowReport]) -> str:
    """All rows as one Markdown text: what was measured, and what was computed beside a paper's.

    Of a row without such lines its first ones; all of them are in the row's own report.
    """
    parts = []
    for each in written:
        ours = [line for line in each.lines if line.ours is not None]
        shown = [line for line in ours if line.measured or line.published is not None]
        table = sheet.compared(each.row.benchmark, shown or ours[:_MOST], each.tables[0].notes)
        title = f"### {each.row.name}\n\n{escape_markdown(each.row.benchmark.source)}\n"
        parts.append(f"{title}\n{table.markdown()}")
    return "\n".join(parts)


def into(document: Path, text: str) -> None:
    """Put the text between the document's two marks; raises :class:`UsageError` without them."""
    try:
        old = document.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--into {document}: cannot be read ({error.strerror})") from None
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"--into {document}: it lacks the lines {BEGIN} and {END}")
    _save(document, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def _save(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
