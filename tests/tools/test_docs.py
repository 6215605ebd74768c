"""The documentation: its code runs or parses, its pages are short, and its links lead somewhere."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import tomllib

import griffe
import markdown
import pytest
import torch
import yaml

from kfac_bench import KFAC
from kfac_bench.benchmark import schema, suite, write_reports
from kfac_bench.cli.bench_command import build_parser as bench_parser
from kfac_bench.cli.data_command import build_parser as data_parser
from kfac_bench.cli.plan_command import plan_parser
from kfac_bench.config import compose, option_help
from kfac_bench.core.build_eigen_adam import KFAC_DEFAULTS
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.record import events
from scripts import docs_site
from tests.support import ROOT
from tests.support.configs import quick_load

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
MADE = docs_site.generated_pages()
FRONT = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
}
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e[-+]\d+)?)")
"""A number that a program prints. Its last digits differ between machines."""

LAB = "lab/"
"""Raw tables and experiments, which may be long. They are not in the menu."""
MOST_WORDS = 1500

RUNS = {
    "how-to/preconditioner.md": 6,
    "how-to/backward_passes.md": 1,
    "how-to/fine_tune.md": 3,
    "how-to/schedulers_ema_checkpoints.md": 2,
    "tutorials/physics_informed.md": 2,
    "tutorials/your_script.md": 3,
}
"""Pages whose Python blocks run, block after block, with the number of blocks."""


def blocks(text, language):
    """Return the code blocks of a language."""
    return [code for name, code in BLOCK.findall(text) if name == language]


@pytest.mark.parametrize(("page", "count"), RUNS.items())
def test_the_code_of_a_guide_runs(page, count):
    found = blocks(PAGES[page], "python")
    assert len(found) == count
    torch.manual_seed(0)
    namespace = {}
    for block in found:
        before = namespace.get("preconditioner")
        exec(compile(block, f"docs/{page}", "exec"), namespace)
        after = namespace.get("preconditioner")
        assert after is None or after is not before or after.steps > 0
    assert namespace["preconditioner"].report().layers
    if page == "tutorials/your_script.md":
        assert namespace["loss_of_kfac"] < namespace["loss_of_sgd"]


def test_the_notebook_has_the_outputs_of_a_run(capsys):
    notebook = json.loads((DOCS / f"{docs_site.NOTEBOOK}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = ["".join(cell["source"]) for cell in code]
    outputs = ["".join(line for out in cell["outputs"] for line in out["text"]) for cell in code]
    assert len(cells) == 5
    namespace = {}
    for cell, stored in zip(cells, outputs, strict=True):
        capsys.readouterr()
        exec(compile(cell, docs_site.NOTEBOOK, "exec"), namespace)
        printed = capsys.readouterr().out
        now, then = (NUMBER.split(text) for text in (printed, stored))
        hint = "run the notebook again and save it"
        assert now[::2] == then[::2], hint
        assert [*map(float, now[1::2])] == pytest.approx([*map(float, then[1::2])], 0.02), hint
    assert namespace["is_equal"]
    assert namespace["loss_of_kfac"] < 1e-2 * namespace["loss_of_sgd"]


@pytest.mark.slow
def test_the_api_page_shows_the_options_of_a_table():
    extensions = griffe.load_extensions(str(ROOT / "scripts" / "api_options.py"))
    package = griffe.load("kfac_bench", search_paths=[ROOT], extensions=extensions)
    for name, kind in (("KFAC", KFAC), ("core.eigen_adam_optimizer.EigenAdam", EigenAdam)):
        shown = {p.name: p for p in package[name].parameters}
        known = inspect.signature(kind.__init__).parameters
        assert [*shown] == [*known]
        assert all(p.annotation for name, p in shown.items() if name != "self")
        assert package[name].docstring.value == inspect.cleandoc(kind.__doc__)
    assert str(package["KFAC"].parameters["update_freq"].default) == "100"


@pytest.mark.parametrize("page", PAGES | FRONT | MADE)
def test_each_block_parses(page):
    for language, code in BLOCK.findall((PAGES | FRONT | MADE)[page]):
        if language == "python":
            # Indented lines are rows of a table, as those of CHOICES in CONTRIBUTING.md.
            ast.parse(f"{{{code}}}" if code.startswith(" ") else code, page)
        elif language == "yaml":
            assert yaml.safe_load(code), code
        elif language == "bash":
            done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr
        elif language == "math":
            assert "<math" in docs_site.mathml(code)
        else:
            assert language in ("", "text"), f"{page}: a test must know how to parse {language}"


def commands(name):
    """Return (page, arguments) of each line of a bash block that runs a command."""
    for page, text in PAGES.items():
        for code in blocks(text, "bash"):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if name in words[:1]:
                    end = words.index(">>") if ">>" in words else None
                    yield page, words[1:end]


@pytest.mark.slow
def test_commands_have_options_that_exist():
    """A command that trains or plans composes; a command with subcommands is understood."""
    seen = {}
    found = [(name, *each) for name in ("kfac-train", "kfac-plan") for each in commands(name)]
    for page_command, page, words in found:
        named = {word.partition("=")[0] for word in words}
        if named & {"problem", "from"} or "--help" in words:
            continue  # a file of the user; the usage
        if "--multirun" in words:
            words = [word.partition(",")[0] for word in words]  # the first of several values
        if page_command == "kfac-plan" and words[:1] != ["simulate"]:
            words = plan_parser().parse_args(words).overrides
        overrides = tuple(w for w in words if not w.startswith("--"))
        folders = [ROOT / w.partition("=")[2] for w in words if w.startswith("--config-dir=")]
        folder = folders[0] if folders else None
        if words[:1] != ["simulate"] and overrides not in seen:
            seen[overrides] = page
            quick_load(compose.expanded(list(overrides), folder), folder)
    assert len(seen) > 30
    for name, parser in (("kfac-bench", bench_parser()), ("kfac-data", data_parser())):
        found = list(commands(name))
        assert len(found) > 3
        for page, words in found:
            assert parser.parse_args(words).command, page


def test_the_pages_of_groups_say_the_defaults_of_each_choice():
    page = MADE["reference/groups/optimizer.md"]
    (lr,) = re.findall(r"^\| `optimizer\.lr` \|.*$", page, re.MULTILINE)
    assert "`0.1` with sgd, shampoo; `0.001` with adam, adamw," in lr
    assert not any("???" in text for text in MADE.values())
    assert "--older-than" in MADE["reference/commands/kfac_bench_records.md"]


def test_words_of_messages_are_those_of_the_code():
    """A reader searches the page for the message that a program printed."""
    text = (DOCS / "how-to" / "troubleshoot.md").read_text()
    code = "".join(p.read_text() for p in sorted((ROOT / "kfac_bench").rglob("*.py")))
    # A message may be several literals on several lines.
    code = re.sub(r'"\n\s*f?"', "", code)
    tables = re.findall(r"\| words of the message \|.*\n\|.*\n((?:\|.*\n)+)", text)
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    words = [each for cell in cells for each in re.findall(r"`([^`]+)`", cell)]
    assert len(words) >= 6
    assert [each for each in words if each not in code] == []


def test_the_page_of_events_has_every_kind():
    listed = re.findall(r"^        - (\w+)$", PAGES["reference/events.md"], re.MULTILINE)
    assert {kind.__name__ for kind in events.Event.__subclasses__()} <= {*listed}


@pytest.mark.parametrize("kind", events.EVENTS.values())
def test_an_event_explains_each_of_its_fields(kind):
    shared = {field.name for field in dataclasses.fields(events.Event)}
    own = {field.name for field in dataclasses.fields(kind)} - shared
    missing = {name for name in own if f"``{name}``" not in kind.__doc__}
    assert own
    assert not missing


def test_pages_are_short():
    words = {page: len(text.split()) for page, text in (PAGES | MADE).items()}
    long = {page for page, n in words.items() if n > MOST_WORDS and not page.startswith(LAB)}
    assert not long, "split these pages"


def menu():
    """Return the files of the menu, by the title of the section."""

    def files(entry):
        if isinstance(entry, str):
            yield entry
        for part in entry.values() if isinstance(entry, dict) else entry * isinstance(entry, list):
            yield from files(part)

    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {title: list(files(part)) for each in sections for title, part in each.items()}


LINK = re.compile(r"\]\(<?([^)#:\s>]+\.md)>?(?:#[^)]*)?\)")
INDEXES = ("lab/index.md", "lab/papers.md", "reference/commands.md", "reference/options.md")


def test_the_menu_has_every_page_or_an_index_of_it():
    """The lab has an index, kfac-bench report --into writes one, and two list made pages."""
    sections = menu()
    assert all(len(section) <= 10 for section in sections.values()), "ten pages are enough"
    pages = [page for section in sections.values() for page in section]
    assert len(pages) == len(set(pages))
    listed = set()
    for index in INDEXES:
        folder = index.rpartition("/")[0]
        listed |= {f"{folder}/{link}" for link in LINK.findall(PAGES[index])}
    hidden = {page for page in PAGES if page.startswith(LAB)}
    hidden |= {page for page in MADE if page.count("/") == 2 and page.startswith("reference/")}
    assert set(pages) == (set(PAGES) | set(MADE)) - (hidden - {"lab/index.md"})
    assert hidden - {"lab/index.md"} <= listed


MOST_WORDS_OF_THE_MENU = 34_000
"""The pages of the menu that are written by hand. A new page makes others shorter."""


def hand_written():
    """Return the texts of the menu, without the pages that are made from code."""
    pages = (page for section in menu().values() for page in section)
    return {page: PAGES[page] for page in pages if page in PAGES}


def test_the_menu_is_short():
    words = sum(len(text.split()) for text in hand_written().values())
    assert words <= MOST_WORDS_OF_THE_MENU
    assert words > MOST_WORDS_OF_THE_MENU - 4000, "lower the limit"


def test_the_site_shows_the_numbers_of_the_lists():
    """A list that begins with step 5 of the page must not begin with 1 on the site."""
    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["markdown_extensions"]
    extensions = [each if isinstance(each, str) else next(iter(each)) for each in listed]
    page = PAGES["explanation/architecture.md"]
    starts = [int(n) for n in re.findall(r"\n\n(\d+)\. ", page)]
    assert max(starts) > 1
    html = markdown.markdown(page, extensions=extensions)
    assert [int(n or 1) for n in re.findall(r'<ol(?: start="(\d+)")?>', html)] == starts


RESULT = re.compile(
    r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?) ?(%|x|s|ms|h|min|MB|GB|MiB|GFLOP|steps)(?!\w)"
)


def test_a_result_is_on_one_page():
    """A number with three digits and a unit that is on two pages becomes wrong on one of them."""
    found = {}
    for page, text in hand_written().items():
        for number, unit in RESULT.findall(BLOCK.sub("", text)):
            if len(re.sub("[.,]", "", number).strip("0")) >= 3:
                found.setdefault((number, unit), set()).add(page)
    twice = {result: pages for result, pages in found.items() if len(pages) > 1}
    assert not twice


def test_the_verdicts_are_those_of_their_checks():
    """The page has each claim once. A line without one has more checks of the claim above."""
    told = []
    for line in PAGES["reference/benchmarks.md"].splitlines():
        if line.startswith("|"):
            claim, *_, needed, verdict = (cell.strip() for cell in line.strip("|").split("|"))
            if claim:
                told.append((claim, verdict.partition(":")[0], set()))
            told[-1][2].update(re.findall(r"\((holds|fails|open)", needed))
    told = [each for each in told if each[0] not in ("claim", "goal", "---")]
    claims = [claim for name in sorted(suite.CLAIMS) for claim in schema.load(name).claims]
    assert len(claims) == 16
    for claim, (text, verdict, states) in zip(
        sorted(claims, key=lambda claim: claim.goal), told, strict=True
    ):
        if claim.not_testable:
            expected = "not testable here"
        elif "fails" in states:
            expected = "not supported"
        else:
            expected = "supported" if states == {"holds"} else "not decided"
        assert (text, verdict) == (claim.text, expected)


def test_the_prose_below_the_verdicts_repeats_no_measured_number():
    """Another run would make the number wrong. The tables follow from the runs."""
    _, _, prose = PAGES["reference/benchmarks.md"].partition(write_reports.END)
    assert prose
    assert re.findall(r"\d(?:x| ?%| ?s| points| of \d+)(?!\w)", prose) == []
    assert f"only {4 * (15_000 // 1024)} steps" in prose, "4 epochs without the last, small batch"


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(<?([^)#:\s>]+)>?(?:#[^)]*)?\)", text):
            path = ((DOCS / page).parent / target).resolve()
            made = path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in MADE
            assert made or path.exists(), f"{page}: {target}"


def test_words_that_are_hard_to_understand():
    """These are no words for readers with another first language."""
    hard = re.compile(r"\b(anew|mends?|told of|is none|stands? to)\b", re.IGNORECASE)
    texts = PAGES | FRONT | MADE | {"make help": (ROOT / "Makefile").read_text()}
    texts["kfac-train --help"] = option_help.describe([])
    for page, text in texts.items():
        found = hard.search(text)
        assert not found, f"{page}: {text[max(0, found.start() - 40) : found.end() + 40]}"


def test_the_page_of_versions_has_every_requirement():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = PAGES["reference/supported_versions.md"]
    extras = project["optional-dependencies"]
    for name in extras.keys() - {"dev"}:
        (row,) = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
        listed = (each for each in extras[name] if not each.startswith("kfac-bench["))
        assert all(f"`{requirement}`" in row for requirement in listed)
    assert all(f"`{requirement}`" in page for requirement in project["dependencies"])
    named = [x.rpartition(" ")[2] for x in project["classifiers"] if "Python :: 3." in x]
    assert project["requires-python"] == f">={named[0]}"
    assert f"| Python | {named[0]} to {named[-1]} |" in page


def defaults_of(*functions):
    """Return the keywords of functions with their defaults, as text."""
    found = {}
    for function in functions:
        for name, each in inspect.signature(function).parameters.items():
            found[name] = str(each.default).removeprefix("torch.")
    return found


def test_the_page_of_other_optimizers_has_our_options_and_defaults():
    tables = re.findall(
        r"\| `(KFAC|eigen_adam)` \| default \|\n.*\n((?:\|.*\n)+)", PAGES["how-to/coming_from.md"]
    )
    with_eigen_adam = {name: str(value) for name, value in KFAC_DEFAULTS.items()}
    options = {
        "KFAC": defaults_of(KFAC),
        "eigen_adam": defaults_of(KFAC, EigenAdam) | with_eigen_adam,
    }
    assert [name for name, _ in tables] == ["KFAC", "KFAC", "eigen_adam"]
    for function, rows in tables:
        for row in rows.splitlines():
            *_, ours, default = row.strip("|").split(" | ")
            names = re.findall(r"`(\w+)(?:=[^`]*)?`", ours)
            assert names or ours.startswith("none"), row
            assert set(names) <= options[function].keys(), row
            told = re.match(r"[^:|]*", default)[0].strip().replace('"', "'")
            real = options[function][names[0]] if told else ""
            assert told.strip("'") == real, row


def test_the_page_about_problems_shows_the_example():
    (block,) = blocks(PAGES["tutorials/your_problem.md"], "python")
    assert block == (ROOT / "examples/problems/digits.py").read_text()
