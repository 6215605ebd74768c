"""Words of Hydra that have no effect here, and the words for loggers.

Hydra only composes the configuration. Its own options (``hydra.run.dir``, ``hydra/launcher``) are
for programs that Hydra also starts. They are refused on the command line and in the files of
``--config-dir``; otherwise the user would believe that they have an effect.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kfac_bench.errors import UsageError

_REPLACEMENTS = {
    "run": "Use runs_dir=FOLDER and run_id=NAME",
    "sweep": "Use runs_dir=FOLDER",
    "output_subdir": "config.yaml is in the run directory; use runs_dir=FOLDER to move it",
    "mode": "Use --multirun",
    "verbose": "Use trainer.log_freq=1 to see each step",
    "launcher": "Use Slurm for several runs at once, see docs/how-to/slurm.md",
    "sweeper": "Use --multirun, or a search as in docs/how-to/tune.md",
    "job": "Use run_id=NAME",
    "job_logging": "Use logger=[wandb,tensorboard,csv] to choose views of the run",
    "hydra_logging": "Use logger=[wandb,tensorboard,csv] to choose views of the run",
    "searchpath": "Use --config-dir DIR",
}
"""What a user of Hydra's option would write here, by the second part of the option's name."""
_HYDRA = re.compile(r"(?:^|[\s/@])hydra(?:[./@]|$)")


def read(words: Sequence[str]) -> list[str]:
    """Return the words of the command line; ``logger=null`` becomes a word that Hydra accepts.

    Raises:
        UsageError: A word is an option of Hydra itself, or loggers do not fit together.
    """
    kept = []
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if _HYDRA.search(key):
            raise UsageError(f"{word}: {_no_effect(key)}")
        if key == "logger" and word.startswith("+"):
            raise UsageError(f"{word}: loggers are a list. Use logger.{value}=true to add a logger")
        if key == "logger.name":
            raise UsageError(f"{word}: no such option. Use logger={value or 'NAME'}")
        if key == "logger" and value.startswith("["):
            _check_loggers(word, [name.strip(" '\"") for name in value.strip("[]").split(",")])
        kept.append("logger=[]" if word == "logger=null" else word)
    return kept


def refuse_in_file(path: Path, text: str, content: Any, package: str) -> None:
    """Raise :class:`UsageError` if a configuration file has options of Hydra itself.

    Args:
        path: The path of the file.
        text: The text of the file.
        content: The data of the file.
        package: The package of the file's header.
    """
    if not isinstance(content, dict):
        return
    block = content.get("hydra", {})
    own = [f"hydra.{next(iter(block))}" if isinstance(block, dict) and block else "hydra"]
    names = own if "hydra" in content else []
    names += [package] if _HYDRA.search(package) else []
    for name, value in _defaults(content.get("defaults")):
        names += [name] if _HYDRA.search(name) else []
        if name.endswith("logger") and isinstance(value, list):
            _check_loggers(f"{path}: {name}: {value}", value)
    if names:
        lines = enumerate(text.splitlines(), start=1)
        number = next((number for number, line in lines if "hydra" in line), 1)
        raise UsageError(f"{path}:{number}: {names[0]}: {_no_effect(names[0])}")


def _defaults(entries: Any) -> Iterable[tuple[str, Any]]:
    for entry in entries if isinstance(entries, list) else []:
        pairs = entry.items() if isinstance(entry, dict) else [(entry, None)]
        yield from ((str(name), value) for name, value in pairs)


def _no_effect(name: str) -> str:
    part = re.search(r"hydra[./@](\w+)", name)
    replacement = _REPLACEMENTS.get(part[1] if part else "", "Remove it")
    return f"options of Hydra itself have no effect. {replacement}"


def _check_loggers(where: str, names: Sequence[Any]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where}: names {twice} twice. Name each logger once")
    if "none" in names and len(names) > 1:
        raise UsageError(f"{where}: none means no logger. Remove none, or the other names")
