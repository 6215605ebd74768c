"""The files of conf/, and of a folder of the user's own that has the same groups.

A profile is one experiment at one of several sizes, as in ``experiment=ROW profile=smoke``. Its
file is ``conf/experiment/ROW/{smoke,one_gpu,paper}.yaml``: minutes on two CPU cores, a smaller
version for one GPU, and the experiment of the paper. The default is ``paper``.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from kfac_bench.errors import UsageError

_PACKAGE = Path(__file__).parents[1]
CONF_DIR = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())
"""The folder conf/ of the wheel, or of the checkout."""

PROFILES = ("smoke", "one_gpu", "paper")


ADDED: list[Path] = []
"""Folders with the same groups that a program beside this package has added, as the contest in
benchmarks/ does."""


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the choices of a config group, such as ``options_of("model")``.

    A folder of profiles is one choice; the files of any other folder are one choice each.
    """
    names = set()
    for place in (d / group for d in folders(config_dir)):
        names |= {p.stem for p in place.glob("*.yaml")}
        for path in place.glob("*/*.yaml"):
            is_profile = path.stem in PROFILES
            names.add(path.parent.name if is_profile else f"{path.parent.name}/{path.stem}")
    return sorted(names)


def first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the top of a file, or nothing."""
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = text.removeprefix("# @package _global_\n").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    joined = " ".join(line.removeprefix("#").strip() for line in comment)
    # "Fig. 8" does not end a sentence.
    first = re.match(r".*?\.(?= [A-Z*\"]|$)", joined)
    return first[0] if first else joined


def folders(config_dir: Path | None) -> list[Path]:
    """Return the folders of configuration files.

    The user's folder comes first, because Hydra's errors are about the user's files.
    """
    return [d for d in (config_dir, *ADDED, CONF_DIR) if d is not None]


def file_of(group: str, name: str) -> Path:
    """Return the file of a choice of a group, as :func:`options_of` lists it."""
    return next(path for d in folders(None) if (path := d / group / f"{name}.yaml").is_file())


def with_profiles(overrides: Sequence[str], folders: Iterable[Path]) -> list[str]:
    """Turn ``experiment=ROW profile=P`` into ``experiment=ROW/P``, which Hydra understands.

    Args:
        overrides: Words of the command line.
        folders: Folders that have a folder ``experiment``.

    Raises:
        UsageError: The experiment has no such profile, or there are two profiles.
    """
    every = (o.removeprefix("profile=") for o in overrides if _sets(o, "profile"))
    named = list(dict.fromkeys(every))
    if len(named) > 1:
        raise UsageError(f"profile={named[0]} and profile={named[1]}: name one profile")
    profile = named[0] if named else None
    if profile is not None and profile not in PROFILES:
        raise UsageError(f"profile={profile}: choose one of {', '.join(PROFILES)}")
    rest = [o for o in overrides if not _sets(o, "profile")]
    if profile is not None and not any(_sets(o, "experiment") for o in rest):
        raise UsageError(
            f"profile={profile}: only an experiment has profiles; set experiment=NAME too"
        )
    places = [folder / "experiment" for folder in folders]
    return [_with_profile(o, profile, places) if _sets(o, "experiment") else o for o in rest]


def _sets(override: str, name: str) -> bool:
    return override.partition("=")[0] == name


def _with_profile(override: str, profile: str | None, places: Sequence[Path]) -> str:
    names = override.removeprefix("experiment=").split(",")  # --multirun takes several
    return "experiment=" + ",".join(_file_of(name, profile, places) for name in names)


def _file_of(name: str, profile: str | None, places: Sequence[Path]) -> str:
    found = {p.stem for place in places for p in (place / name).glob("*.yaml")}
    if profile is None:
        return f"{name}/paper" if "paper" in found else name
    if not found and not any((place / f"{name}.yaml").exists() for place in places):
        return name  # Hydra reports the unknown name
    if not found:
        raise UsageError(f"profile={profile}: experiment={name} has no profiles; leave it out")
    if profile not in found:
        said = ", ".join(p for p in PROFILES if p in found)
        raise UsageError(f"profile={profile}: experiment={name} has no such profile; it has {said}")
    return f"{name}/{profile}"
