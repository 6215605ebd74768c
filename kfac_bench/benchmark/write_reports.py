"""The report of a benchmark: Markdown, a figure and one page; and all rows in one document."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfac_bench import report
from kfac_bench.benchmark import figure, result_tables, schema, suite
from kfac_bench.benchmark.result import Line
from kfac_bench.benchmark.suite import Attempt, BenchmarkRow
from kfac_bench.benchmark.verdicts import verdict_tables
from kfac_bench.errors import UsageError
from kfac_bench.record.runs import group
from kfac_bench.report import curves
from kfac_bench.report.page_parts import link_from
from kfac_bench.report.tables import Link, Table, Value, escape_markdown
from kfac_bench.whole_files import around_marks, write_text

_MOST_LINES = 20
END = "<!-- end of what kfac-bench report made -->"


@dataclass(frozen=True)
class RowReport:
    """The results of a row, and the files that hold the results."""

    row: BenchmarkRow
    lines: Sequence[Line]
    tables: Sequence[Table]
    verdicts: Sequence[Table]
    """The verdicts on the row's claims, with their numbers; empty: it has no claims."""
    runs: Sequence[Path]
    """The event files of the runs that trained."""
    files: Sequence[Path]


def write(row: BenchmarkRow) -> RowReport:
    """Write ``FOLDER/PROFILE.md``, ``.svg`` and ``.html`` of one row, from the files of its cells.

    Raises :class:`UsageError` if no cell was run yet, or a file cannot be written.
    """
    found = suite.attempts(row)
    suite.refuse_new(row, found)
    lines = suite.results(row, found)
    verdicts = verdict_tables([row])
    tables = _tables(row, lines, found, verdicts)
    stem = row.folder / (row.profile or "report")
    drawn = figure.svg(row.benchmark, lines, row.sized.ran)
    trained = suite.runs_of(found)
    files = []
    pictures = {} if drawn is None else {".svg": drawn}
    if row.benchmark.curves and trained:
        pictures["-curves.svg"] = curves.curves_svg(group(trained))
    texts = {".md": _markdown(row, tables, pictures, stem.name), **pictures}
    for ending, text in texts.items():
        path = stem.with_name(stem.name + ending)
        write_text(path, text, make_folder=True)
        files.append(path)
    page = stem.with_name(stem.name + ".html")
    runs = [run.path for run in trained]
    _page(page, runs, tables, row.full_name)
    return RowReport(row, lines, tables, verdicts, runs, [*files, page])


def _page(path: Path, runs: Sequence[Path], tables: Sequence[Table], title: str) -> None:
    """Write a page with the tables, and below them the results of the runs, if there are any."""
    if runs:
        report.compare(runs, path, tables, title)
        return
    folder = path.absolute().parent.resolve()
    write_text(path, report.html(report.Comparison([], [], []), title, tables, folder))


def _tables(
    row: BenchmarkRow, lines: Sequence[Line], found: Sequence[Attempt], verdicts: Sequence[Table]
) -> list[Table]:
    parts = [note for part in row.benchmark.computed for note in part.notes]
    notes = [*row.sized.notes, *parts, *row.benchmark.notes]
    tables = [result_tables.compared(row.benchmark, lines, notes, row.sized.ran)]
    in_shape = result_tables.matrix(row.benchmark, lines)
    meant = result_tables.stands_for(row.benchmark, row.sized, row.overrides)
    more = [table for table in (in_shape, meant) if table is not None]
    return [*tables, *verdicts, *more, result_tables.attempts_table(found, row.folder)]


def _markdown(
    row: BenchmarkRow, tables: Sequence[Table], pictures: Collection[str], stem: str
) -> str:
    """Return the Markdown file; ``pictures`` has the endings of the figures beside the file."""
    head = f"# {row.full_name}\n\n{escape_markdown(row.benchmark.source)}\n"
    picture = (
        f"\n![{escape_markdown(row.benchmark.title)}]({stem}.svg)\n" if ".svg" in pictures else ""
    )
    if "-curves.svg" in pictures:
        picture += f"\n![Curves]({stem}-curves.svg)\n"
    first, *rest = (table.markdown() for table in tables)
    return "\n".join([head, first + picture, *rest])


def write_all(
    written: Sequence[RowReport],
    into_document: Path | None,
    verdicts: Sequence[Table] = (),
    profile: str = "",
) -> list[Path]:
    """Write the results of all rows to ``runs/all/PROFILE.md`` and ``.html``; return the files.

    Args:
        written: The rows that have results.
        into_document: A document that gets a list of the rows between its two marks. The tables
            are pages in the folder ``results`` beside it.
        verdicts: The verdicts on claims, which come first. Claims that were not run have one, too.
        profile: The size of the rows.
    """
    if not written and not verdicts:
        raise UsageError("no row was run yet; start with kfac-bench run all")
    text = "\n".join([*(table.markdown() for table in verdicts), summary(written)])
    folder, stem = Path("runs/all"), profile or "report"
    files = [folder / f"{stem}.md"]
    write_text(files[0], text, make_folder=True)
    runs = [path for each in written for path in each.runs]
    files.append(folder / f"{stem}.html")
    tables = list(verdicts) + [each.tables[0] for each in written]
    _page(files[-1], runs, tables, f"Tables and figures of the papers, profile {stem}")
    if into_document is not None:
        files += into(into_document, written, profile)
    return files


def summary(written: Sequence[RowReport]) -> str:
    """Return all rows as one Markdown text."""
    return "\n".join(_short(each, f"### {each.row.name}") for each in written)


def _short(each: RowReport, title: str) -> str:
    """Return the row's most important lines as Markdown.

    These are the lines with a measured number, and the computed lines with a published number. A
    row with claims has few lines, and shows all: a claim may rest on a computed number. A row
    without such lines shows its first lines. The report of a row has all its lines.
    """
    notes = each.tables[0].notes
    benchmark, ran = each.row.benchmark, each.row.sized.ran
    ours = [line for line in each.lines if line.ours is not None]
    in_shape = result_tables.matrix(benchmark, each.lines)
    if in_shape is not None and benchmark.matrix is not None:
        # The matrix has these numbers; the lines keep seeds and intervals of measured ones.
        repeated = benchmark.matrix.quantities
        ours = [line for line in ours if line.measured or line.quantity not in repeated]
    shown = [
        line for line in ours if line.measured or line.published is not None or benchmark.claims
    ]
    table = result_tables.compared(benchmark, shown or ours[:_MOST_LINES], notes, ran)
    tables = [table] if in_shape is None else [in_shape, table]
    head = f"{title}\n\n{escape_markdown(benchmark.source)}\n"
    return "\n".join([head, *(table.markdown() for table in tables)])


def begin_mark(profile: str, option: str = "--into") -> str:
    """Return the line of a document after which the text of an option and a profile stands."""
    word = f" --profile {profile}" if profile else ""
    return f"<!-- made by kfac-bench report all{word} {option} -->"


def into(document: Path, written: Sequence[RowReport], profile: str) -> list[Path]:
    """List the rows between the document's two marks, and write a page of tables for each row.

    Args:
        document: A Markdown file with the lines of :func:`begin_mark` and :data:`END`.
        written: The rows. Their pages are ``results/PROFILE/ROW.md`` beside the document.
        profile: The size of the rows.

    Returns:
        The files that were written.

    Raises:
        UsageError: The document cannot be read, or it lacks a mark.
    """
    begin_line = begin_mark(profile)
    # Everything outside of the two marks is the user's own text.
    before, after = around_marks(document, begin_line, END, "--into")
    rows: list[list[Value]] = []
    pages = []
    for each in written:
        name = schema.stem(each.row.name)
        page = Path("results") / (each.row.profile or "report") / f"{name}.md"
        title = f"# {each.row.full_name}"
        write_text(document.parent / page, _short(each, title), make_folder=True)
        pages.append(document.parent / page)
        rows.append([Link(name, link_from(Path(), page)), each.row.benchmark.title])
    table = Table("Pages of tables", ["page", "table or figure"], rows).markdown() if rows else ""
    write_text(document, f"{before}{begin_line}\n\n{table}\n{END}{after}")
    return [*pages, document]


def verdicts_into(document: Path, verdicts: Sequence[Table], profile: str) -> None:
    """Write the tables of verdicts between the document's two marks.

    Raises:
        UsageError: There are no verdicts, the document cannot be read, or it lacks a mark.
    """
    option = "--verdicts-into"
    if not verdicts:
        raise UsageError(f"{option} {document}: no row has claims. Name a row with claims")
    begin_line = begin_mark(profile, option)
    before, after = around_marks(document, begin_line, END, option)
    text = "\n".join(table.markdown() for table in verdicts)
    write_text(document, f"{before}{begin_line}\n\n{text}\n{END}{after}")
