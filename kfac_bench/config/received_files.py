"""Configuration files that may come from somebody else: ``--config-dir`` and ``from=FILE``.

Hydra finds the files of ``--config-dir`` itself: a list of defaults can name any file of the
folder. So the checks are where Hydra reads a file.

Hydra only composes the configuration. Its own options (``hydra.run.dir``, ``hydra/launcher``) are
for programs that Hydra also starts. They are refused on the command line and in the files of
``--config-dir``; otherwise the user would believe that they have an effect.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from kfac_bench import plain_yaml
from kfac_bench.config import option_table, problem_file
from kfac_bench.config.groups import TABLES
from kfac_bench.config.options import RECORD
from kfac_bench.config.train import TrainConfig
from kfac_bench.errors import UsageError, first_line

FROM = "from="
NODE = "__from__"
"""Name of the experiment that holds the options of ``from=FILE``."""

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
"""The replacement of an option of Hydra, by the second part of the option's name."""
_HYDRA = re.compile(r"(?:^|[\s/@])hydra(?:[./@]|$)")


class ReceivedFiles(FileConfigSource):
    """A folder whose YAML files must have no aliases, of which OmegaConf would make copies."""

    @staticmethod
    def scheme() -> str:
        """Return the prefix of such folders in Hydra's search path."""
        return "received"

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file; raise :class:`UsageError` if it has aliases or options of Hydra itself."""
        path = Path(self.path, self._normalize_file_name(config_path))
        text = ""
        try:
            text = path.read_text(encoding="utf-8")
            plain_yaml.refuse_aliases(text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            pass  # Hydra itself reports a file that is missing or no YAML.
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
        found = super().load_config(config_path)
        content = OmegaConf.to_container(found.config, resolve=False)
        _refuse_in_file(path, text, content, found.header.get("package") or "")
        return found


def search_path(folder: Path) -> str:
    """Return the folder as an entry of Hydra's search path."""
    SourcesRegistry.instance().register(ReceivedFiles)
    return f"{ReceivedFiles.scheme()}://{folder.resolve()}"


def run_again(words: Sequence[str]) -> list[str]:
    """Replace ``from=FILE``, the config.yaml of a run, by words that choose the run's options.

    The other words win. A word that chooses a group, such as ``optimizer=adam``, replaces all
    options of the group.

    Raises:
        UsageError: The file cannot be read, has unknown options, or does not fit another word.
    """
    named = [word.removeprefix(FROM) for word in words if word.startswith(FROM)]
    if not named:
        return list(words)
    if len(set(named)) > 1:
        raise UsageError(f"from={named[0]} and from={named[1]}: name one file")
    rest = [word for word in words if not word.startswith(FROM)]
    chosen = {word.lstrip("+").partition("=")[0] for word in rest}
    if clash := chosen & {"experiment", "profile"}:
        raise UsageError(f"from={named[0]} and {clash.pop()}=: the file has all options. Use one")
    tree = _read(Path(named[0]))
    if (file := tree["data"].get("file")) is not None and f"problem={file}" in rest:
        rest.remove(f"problem={file}")  # the options of the problem are in the file
    elif "problem" in chosen:
        chosen |= set(problem_file.GROUPS)
    # Runs of older versions have one logger, and its name.
    old_logger = tree["logger"].pop("name", None)
    choices = [] if old_logger is None else [f"logger={old_logger}"]
    choices += [f"{group}={tree[group]['name']}" for group in TABLES if group not in chosen]
    if any(map(_makes_another_run, chosen)):
        tree["logger"]["id"] = None  # another run has its own page of W&B
    kept = {name: value for name, value in tree.items() if name not in chosen}
    ConfigStore.instance().store(NODE, kept, group="experiment", package="_global_")
    return [*choices, f"experiment={NODE}", *rest]


def _makes_another_run(name: str) -> bool:
    """Return whether a run with another value of this option does not continue the first run."""
    found = option_table.every_option().get(name)
    if name == "run_id" or found is None:  # also a group
        return True
    declared = found[0][1].declared
    return declared["role"] is not RECORD and not declared["resumable"]


def _read(path: Path) -> dict[str, Any]:
    """Return the options of a run's config.yaml; raise :class:`UsageError` if it is none."""
    if path.is_dir():
        path /= "config.yaml"
    try:
        tree = plain_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"from={path}: cannot be read ({error.strerror}). Give the config.yaml of a run"
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"from={path}: not valid YAML ({first_line(error)})") from None
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    groups = (*TABLES, "kfac", "logger")
    is_config = (
        isinstance(tree, dict)
        and tree.keys() <= known
        and all(isinstance(tree.get(group), dict) for group in groups)
        and all("name" in tree[group] for group in TABLES)
    )
    if not is_config:
        raise UsageError(f"from={path}: this is not the config.yaml of a run")
    return dict(tree)


def without_hydra(words: Sequence[str]) -> list[str]:
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


def _refuse_in_file(path: Path, text: str, content: Any, package: str) -> None:
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
