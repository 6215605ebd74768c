"""Hooks of MkDocs for the documentation site: pages from code, the notebook, links to the code.

`mkdocs.yml` names this file, and `make docs` builds the site. The pages of commands, options and
configuration groups are made from the code at each build, so they are not stored in docs/.
"""

from __future__ import annotations

import argparse
import inspect
import json
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kfac_bench.cli import bench_command, data_command, plan_command, train_command
from kfac_bench.config import compose, option_table
from kfac_bench.config.conf_files import CONF_DIR, first_sentence
from kfac_bench.config.groups import TABLES
from kfac_bench.config.option_table import HelpedOption, Owners

ROOT = Path(__file__).parents[1]
NOTEBOOK = "tutorials/hello_kfac"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")
_EQUATION = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([^<]*)</code>")
_OPTIONS_HEAD = "| option | default | allowed | role | meaning |\n| --- | --- | --- | --- | --- |"


# ---- the hooks, which MkDocs calls by their names ----


def on_config(config: Any) -> Any:
    """Link the repository, once pyproject.toml has its public address."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    config.repo_url = hatch["metadata"]["hooks"]["custom"]["public_address"] or None
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the code and from the notebook."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Show links to files outside docs/ as paths, and equations as MathML, which browsers draw.

    The site does not contain the files outside docs/.
    """
    here = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def path_of(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[2]))
        if path.startswith("docs/"):
            return link[0]
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: the link {link[2]} leads nowhere")
        text = link[1].strip("`")
        return f"`{path}`" if path.endswith(text) else f"{link[1]} (`{path}`)"

    return _EQUATION.sub(lambda block: mathml(block[1]), _LINK.sub(path_of, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Show Sphinx's markup of a docstring: ``:meth:`step``` as code, and ``::`` as a colon."""
    html = html.replace("::</p>", ":</p>")
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)


def mathml(latex: str) -> str:
    """Return an equation in LaTeX as HTML that browsers draw without a script."""
    mathml = latex2mathml.converter.convert(latex, display="block")
    return f'<div class="equation">{mathml}</div>'


# ---- the pages ----


def generated_pages() -> dict[str, str]:
    """Return the Markdown of each generated page, by its path below docs/."""
    pages = {
        "index.md": _readme(),
        "reference/commands/kfac_train.md": _page(
            "kfac-train",
            "`kfac-train` trains a model, with K-FAC or without. "
            "[The options of a run](../options/run.md), [the options of K-FAC](../options/kfac.md) "
            "and the configuration groups have pages of their own.",
            _text(train_command.TRAIN_USAGE),
        ),
        "reference/commands/kfac_plan.md": _page(
            "kfac-plan",
            "`kfac-plan` prints what K-FAC costs each rank. It trains nothing. "
            "[Read the plan](../../how-to/read_the_plan.md) explains the output.",
            _help(plan_command.plan_parser()),
            "## kfac-plan simulate",
            _help(plan_command.simulate_parser()),
        ),
        "reference/commands/kfac_bench.md": _page(
            "kfac-bench",
            "`kfac-bench` runs benchmarks, tunes optimizers and compares runs.",
            *_subcommands(bench_command.build_parser()),
        ),
        "reference/commands/kfac_bench_records.md": _page(
            "kfac-bench: records of runs",
            "These commands of `kfac-bench` work with the records of runs, and with W&B.",
            *(
                part
                for command in _commands(bench_command.build_parser()).values()
                for part in _subcommands(command)
            ),
        ),
        "reference/commands/kfac_data.md": _page(
            "kfac-data",
            "`kfac-data` makes demo datasets; it fetches, verifies and prepares published ones.",
            *_subcommands(data_command.build_parser()),
        ),
        "reference/options/run.md": _run_options(),
        "reference/options/kfac.md": _kfac_options(),
        f"{NOTEBOOK}.md": _notebook(ROOT / "docs" / f"{NOTEBOOK}.ipynb"),
    }
    pages |= {f"reference/groups/{group}.md": _group(group) for group in TABLES}
    return pages | {
        "reference/groups/logger.md": _logger_group(),
        "reference/groups/recipe.md": _recipes(),
        "reference/groups/experiment.md": _experiments(),
    }


def _readme() -> str:
    """Return README as the first page: its links lead to pages, or to files outside docs/."""
    text = re.sub(r"\]\((?!docs/)(?!https?:)", "](../", (ROOT / "README.md").read_text())
    return text.replace("](docs/", "](").replace(f"{NOTEBOOK}.ipynb", f"{NOTEBOOK}.md")


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def _text(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the commands of a command, by name; none if it has options alone."""
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next((a.choices for a in actions), {})


def _help(parser: argparse.ArgumentParser) -> str:
    # The width of the text beside both menus; argparse would use that of the terminal.
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=78)
    return _text(parser.format_help())


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a heading and the help of each subcommand."""
    for command in _commands(parser).values():
        yield f"## {command.prog}"
        yield _help(command)


def _run_options() -> str:
    intro = (
        "These options belong to every run. [The role](../options.md#roles) of an option decides "
        "whether another value is another run."
    )
    sections: dict[str, list[str]] = {}
    for name, [(_, option), *_] in option_table.every_option().items():
        section = name.rpartition(".")[0]
        if section not in {*TABLES, "kfac"}:
            sections.setdefault(section, []).append(_option_row(option))
    parts = [intro]
    for section, rows in sections.items():
        parts += [f"## {section or 'the run'}", "\n".join([_OPTIONS_HEAD, *rows])]
    return _page("Options of a run", *parts)


def _kfac_options() -> str:
    intro = (
        "`kfac=NAME` chooses a strategy, `kfac=none` trains without K-FAC. A script passes the "
        "same options to [`KFAC`](../api.md) as keywords."
    )
    every = option_table.every_option()
    rows = [_option_row(found[0][1]) for name, found in every.items() if name.startswith("kfac.")]
    choices = ", ".join(f"`{name}`" for name in compose.options_of("kfac"))
    return _page(
        "Options of K-FAC",
        intro,
        f"Choices of `kfac=`: {choices}.",
        "\n".join([_OPTIONS_HEAD, *rows]),
    )


def _group(group: str) -> str:
    """Return the page of one configuration group: its choices, and the options of each."""
    choices = ["| choice | what it is |", "| --- | --- |"]
    for choice, options in TABLES[group].items():
        about = (inspect.getdoc(options) or "").partition("\n\n")[0]
        choices.append(f"| `{group}={choice}` | {_cell(' '.join(about.splitlines()))} |")
    # Options with the same owners share a table; the options of all choices come first.
    tables: dict[str, list[str]] = {"all choices": []}
    for name, found in option_table.every_option().items():
        if name.startswith(f"{group}."):
            for same in option_table.meanings(found):
                owners = sorted(choice for choice, _ in same)
                title = "all choices" if len(same) == len(TABLES[group]) else ", ".join(owners)
                tables.setdefault(title, []).append(_group_row(same))
    return _page(
        f"Configuration group {group}",
        f"`{group}=NAME` on the command line makes a choice. `kfac-train {group}=NAME --cfg job` "
        "prints the values that the choice sets.",
        "\n".join(choices),
        *(
            f"## Options of {title}\n\n" + "\n".join([_OPTIONS_HEAD, *shown])
            for title, shown in tables.items()
            if shown
        ),
    )


def _logger_group() -> str:
    rows = [
        f"| `logger={choice}` | {_about(CONF_DIR / 'logger' / f'{choice}.yaml')} |"
        for choice in compose.options_of("logger")
    ]
    every = option_table.every_option()
    options = [_option_row(found[0][1]) for name, found in every.items() if name[:7] == "logger."]
    return _page(
        "Configuration group logger",
        "`logger=NAME` or `logger=[NAME,NAME]` chooses where a run is also shown. `logger=[]` and "
        "`logger=null` are `logger=none`. `logger.csv=true` adds a logger.",
        "\n".join(["| choice | what it is |", "| --- | --- |", *rows]),
        "## Options of all choices",
        "\n".join([_OPTIONS_HEAD, *options]),
    )


def _recipes() -> str:
    rows = [
        f"| `{name}` | {_about(CONF_DIR / 'recipe' / f'{name}.yaml')} |"
        for name in compose.options_of("recipe")
    ]
    return _page(
        "Configuration group recipe",
        "A recipe sets options of all groups. `kfac-train` and `kfac-plan` choose the recipe of "
        "data and model. `recipe=NAME` chooses another recipe, and `recipe=none` turns it off.",
        "\n".join(["| recipe | the first sentence of its file |", "| --- | --- |", *rows]),
    )


def _experiments() -> str:
    """Return the page of the experiments, without a row for each one that a tuning wrote."""
    folder = CONF_DIR / "experiment"
    papers, others, endings = [], dict[str, str](), dict[str, list[str]]()
    for choice in sorted(compose.options_of("experiment")):
        file = folder / f"{choice}.yaml"
        if not file.is_file():
            papers.append(f"| `{choice}` | {_about(folder / choice / 'paper.yaml')} |")
        elif (text := _about(file)).startswith("Written by kfac-bench tune"):
            # A tuning names its experiments after the one that it tunes, which sorts before them.
            base = max((name for name in others if choice.startswith(f"{name}_")), key=len)
            endings.setdefault(base, []).append(f"`{choice.removeprefix(base)}`")
        else:
            others[choice] = text
    rows = [
        f"| `{name}` | {text} | {', '.join(endings.get(name, []))} |"
        for name, text in others.items()
    ]
    return _page(
        "Configuration group experiment",
        "An experiment sets options of all groups: model, data, optimizer, K-FAC. `kfac-train "
        "experiment=NAME` trains it. `kfac-train experiment=NAME --cfg job` prints all options.",
        "## Of the papers",
        "Each has three profiles: `profile=smoke`, `one_gpu` or `paper`.",
        "\n".join(["| experiment | its file begins with |", "| --- | --- |", *papers]),
        "## Other experiments",
        "Where the last column has endings, `kfac-bench tune` has written an experiment for each "
        "optimizer, such as `digits/resnet_kfac`.",
        "\n".join(
            [
                "| experiment | the first sentence of its file | tuned |",
                "| --- | --- | --- |",
                *rows,
            ]
        ),
    )


def _about(file: Path) -> str:
    return _cell(first_sentence(file))


def _group_row(found: Owners) -> str:
    """Return the row of an option that means the same in several choices of its group."""
    option = found[0][1]
    defaults = option_table.defaults(found)
    texts = [
        f"`{value}`" + (f" with {', '.join(sorted(choices))}" if len(defaults) > 1 else "")
        for value, choices in defaults
    ]
    if option.name.endswith(".name"):
        texts = ["the choice"]
    return _option_row(option, "; ".join(texts))


def _option_row(option: HelpedOption, default: str = "") -> str:
    allowed = option_table.allowed(option).replace("|", ", ")
    role = option.declared["role"].value
    if option.declared["resumable"]:
        role += ", resumable"
    cells = (
        f"`{option.name}`",
        default or f"`{option_table.shown(option.default)}`",
        _cell(allowed),
        role,
        _cell(option.declared["help"]),
    )
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _notebook(path: Path) -> str:
    """Return a notebook as a page: its texts, and its code and what the code prints in blocks."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_text("".join(output["text"])) for output in cell.get("outputs", ())]
    return "\n\n".join([*parts, f"[Download this page as a notebook]({path.name})."]) + "\n"
