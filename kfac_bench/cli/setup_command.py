"""The subcommands of ``kfac-bench`` that set up a machine: ``completion`` and ``slurm``.

``completion`` prints a function for the shell, which completes all commands. The function gives
the line up to the cursor to ``kfac-bench completion --line``, which prints one candidate per line.
Groups, choices and options come from the files and dataclasses themselves, so the function needs
no update. Only the words of kfac-train are written here. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kfac_bench.cli import data_command, plan_command
from kfac_bench.cli.entry import Parser, command_line
from kfac_bench.errors import UsageError
from kfac_bench.output import say

if TYPE_CHECKING:
    from kfac_bench.config.option_table import Owners

_BASH = """\
# Completion of kfac-train, kfac-plan, kfac-bench and kfac-data in bash.
_kfac_bench_complete() {
  local line=${COMP_LINE:0:COMP_POINT} word
  mapfile -t COMPREPLY < <(kfac-bench completion --line "$line" 2>/dev/null)
  word=${line##* }
  # bash takes "=" for the end of a word: drop what stands before it.
  if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
  fi
  # No blank after a part of a word.
  if [[ ${COMPREPLY[0]-} == *[=./] ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _kfac_bench_complete kfac-train kfac-plan kfac-bench kfac-data
"""
_ZSH = """\
# Completion of kfac-train, kfac-plan, kfac-bench and kfac-data in zsh.
_kfac_bench_complete() {
  local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
  local -a found parts
  found=(${(f)"$(kfac-bench completion --line "$line" 2>/dev/null)"})
  # No blank after a part of a word.
  parts=(${(M)found:#*[=./]})
  found=(${found:#*[=./]})
  (( $#parts )) && compadd -S '' -- $parts
  (( $#found )) && compadd -- $found
  (( $#parts + $#found )) || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _kfac_bench_complete kfac-train kfac-plan kfac-bench kfac-data
"""
_FISH = """\
# Completion of kfac-train, kfac-plan, kfac-bench and kfac-data in fish.
function _kfac_bench_complete
  kfac-bench completion --line (commandline -cp | string collect) 2>/dev/null
end
for name in kfac-train kfac-plan kfac-bench kfac-data
  complete -c $name -a '(_kfac_bench_complete)'
end
"""
SCRIPTS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""The function for each shell."""
TRAIN_OPTIONS = ("--cfg", "--config-dir", "--help", "--layers", "--multirun", "--version")
"""The options of kfac-train, whose parser prints no help of its own."""
WITH_OVERRIDES = ("run", "report", "scaling")
WITH_BENCHMARK = ("run", "report", "tune")


def add_completion(
    commands: argparse._SubParsersAction[Parser], bench_parser: Callable[[], Parser]
) -> None:
    """Add ``kfac-bench completion``; ``bench_parser`` returns the parser of ``kfac-bench``."""
    command = commands.add_parser(
        "completion",
        help="print the completion for bash, zsh or fish: kfac-bench completion bash >> ~/.bashrc",
        description="Complete commands, groups, choices and options in a shell. Install with: "
        "kfac-bench completion bash >> ~/.bashrc, kfac-bench completion zsh >> ~/.zshrc, or "
        "kfac-bench completion fish >> ~/.config/fish/config.fish",
    )
    command.add_argument("shell", nargs="?", choices=SCRIPTS, default="bash", help="default: bash")
    # The function of the shell passes --line; users do not need it.
    command.add_argument("--line", help=argparse.SUPPRESS)
    command.set_defaults(run_command=partial(_completion, bench_parser))


def _completion(bench_parser: Callable[[], Parser], options: argparse.Namespace) -> int:
    if options.line is None:
        say(SCRIPTS[options.shell], end="")
    else:
        for candidate in candidates(options.line, bench_parser):
            say(candidate)
    return 0


def candidates(line: str, bench_parser: Callable[[], Parser]) -> list[str]:
    """Return the words to which the last word of a command line may be completed."""
    *before, word = line.split(" ")
    before = [part for part in before if part]
    if not before:
        return []
    command = Path(before[0]).name
    if command == "kfac-train":
        words = [*TRAIN_OPTIONS, *_overrides(word)]
        words += ["job"] * (before[-1] in ("--cfg", "-c"))
    else:
        parser = _parser(command, before[1:], bench_parser)
        words = _of_parser(command, parser, before[1:], word)
    return sorted({found for found in words if found.startswith(word)})


def _parser(
    command: str, before: Sequence[str], bench_parser: Callable[[], Parser]
) -> argparse.ArgumentParser:
    """Return the parser of a command, or that of ``kfac-plan simulate``."""
    if command == "kfac-data":
        return data_command.build_parser()
    if command != "kfac-plan":
        return bench_parser()
    if before[:1] == ["simulate"]:
        return plan_command.simulate_parser()
    return plan_command.plan_parser()


def _of_parser(
    command: str, parser: argparse.ArgumentParser, before: Sequence[str], word: str
) -> list[str]:
    """Return the subcommands of a command, or the words that a subcommand takes."""
    path: list[str] = []
    for part in before:
        inner = _subparsers(parser)
        if part in inner:
            parser = inner[part]
            path.append(part)
    # The values of an option follow it.
    last = before[-1] if before else ""
    for action in parser._actions:
        if last in action.option_strings and action.nargs is None:
            return [*map(str, action.choices or ()), *_values_after(last, word)]
    words: list[str] = list(_subparsers(parser))
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            words += action.option_strings
            words += [] if action.option_strings else [str(c) for c in action.choices or ()]
    if command == "kfac-plan":
        words += ["simulate"] * (not before)
        words += _overrides(word)
    elif command == "kfac-bench" and path:
        words += _benchmarks() if path[0] in WITH_BENCHMARK and len(before) == 1 else []
        words += _overrides(word) if path[0] in WITH_OVERRIDES else []
    return words


def _values_after(option: str, word: str) -> Iterable[str]:
    """Return the machines of ``--hardware``, the strategies of a list, and the profiles."""
    if option == "--hardware":
        from kfac_bench.config.conf_files import options_of

        return options_of("hardware")
    if option == "--profile":
        from kfac_bench.config.conf_files import PROFILES

        return (*PROFILES, "cpu")
    if option in ("--strategies", "--strategy"):
        from kfac_bench.core.planning.plan import STRATEGIES
        from kfac_bench.simulate.sweep import SGD

        # kfac-bench scaling always measures sgd too.
        known = STRATEGIES if option == "--strategy" else (SGD, *STRATEGIES)
        *listed, _ = word.split(",")
        return [",".join([*listed, each]) for each in known if each not in listed]
    return []


def _subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _benchmarks() -> list[str]:
    from kfac_bench.config.conf_files import CONF_DIR

    return ["all", *(path.stem for path in (CONF_DIR / "benchmark").glob("*.yaml"))]


def _overrides(word: str) -> Iterable[str]:
    """Return groups and options; after "=" their values, after a dot the options of the group."""
    from kfac_bench.config import option_table
    from kfac_bench.config.conf_files import PROFILES, options_of

    groups = option_table.groups()
    name, equals, _ = word.partition("=")
    if equals and name in groups:
        none = [f"{name}=none"] if name == option_table.RECIPE else []
        return [*none, *(f"{name}={choice}" for choice in options_of(name))]
    if equals and name == "profile":
        return [f"profile={profile}" for profile in PROFILES]
    if not equals and "." not in word:
        single = [name for name in option_table.every_option() if "." not in name]
        return [
            *(f"{group}=" for group in (*groups, "from", "profile", "problem", *single)),
            *(f"{group}." for group in (*groups, "trainer") if group not in option_table.SET_ALL),
        ]
    known = option_table.every_option()
    if not equals:
        return [f"{name}=" for name in known]
    return [f"{name}={value}" for value in _values(known, name)]


def _values(known: Mapping[str, Owners], name: str) -> Iterable[str]:
    for _, option in known.get(name, ()):
        yield from option.declared["choices"]
        if isinstance(option.default, bool):
            yield from ("true", "false")
        if option.default is None:
            yield "null"


DEFAULT_FOLDER = Path("slurm")
"""Folder below the current one in which a batch script looks for common.sh."""


def add_slurm(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``kfac-bench slurm``."""
    command = commands.add_parser("slurm", help="copy the batch scripts for Slurm into a folder")
    command.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the scripts, such as slurm",
    )
    command.set_defaults(run_command=lambda o: copy_scripts(o.to))


def copy_scripts(folder: Path) -> int:
    """Copy the batch scripts and say how to submit one. Files that are there stay as they are.

    Raises:
        UsageError: A file of the folder differs from the script of its name, or the folder cannot
            be written. Nothing is copied if a file differs.
    """
    from kfac_bench.benchmark.slurm_jobs import SCRIPTS

    # Not site.sh, which has the settings of one cluster, nor the logs of jobs.
    paths = [SCRIPTS / "common.sh", *SCRIPTS.glob("*.sbatch")]
    scripts = {path.name: path.read_bytes() for path in paths}
    try:
        for name, content in scripts.items():
            path = folder / name
            if path.exists() and path.read_bytes() != content:
                raise UsageError(
                    f"{path} is there and differs: move it away, or name another folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in scripts.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise UsageError(f"--to {folder}: cannot be written ({error.strerror})") from None
    say(f"{len(scripts)} batch scripts are in {folder}")
    if folder.absolute() != DEFAULT_FOLDER.absolute():
        say(f"first: {command_line('export', [f'KFAC_SLURM={folder.absolute()}'])}")
    test = command_line("sbatch", [folder / "smoke.sbatch", "experiment=kaisa_unet_lgg"])
    say(f"test the cluster: {test}")
    return 0
