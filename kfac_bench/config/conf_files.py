"""The files of conf/, and of a folder of the user's own that has the same groups."""

import itertools
import re
from pathlib import Path

from kfac_bench.config import profiles

_PACKAGE = Path(__file__).parents[1]
CONF_DIR = next(p for p in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if p.is_dir())
"""The folder conf/ of the wheel, or of the checkout."""


ADDED: list[Path] = []
"""Folders with the same groups that a program beside this package has added, as the contest in
benchmarks/ does."""


IN_THE_CONTEST = {
    "benchmark": ("contest", "embedded", "one_rate"),
    "experiment": ("contest/", "contest_twice/", "embedded/"),
    "optimizer": ("kl_shampoo", "kl_soap"),
}
"""By group, the beginnings of the choices that have left the package."""


def options_of(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the choices of a config group, such as ``options_of("model")``.

    A folder of profiles is one choice; the files of any other folder are one choice each.
    """
    names = set()
    for place in (d / group for d in folders(config_dir)):
        names |= {p.stem for p in place.glob("*.yaml")}
        for path in place.glob("*/*.yaml"):
            is_profile = path.stem in profiles.PROFILES
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


def moved(group: str, word: str) -> str | None:
    """Return the line that says where a choice is that has left the package for the contest."""
    if group not in IN_THE_CONTEST or not word.startswith(IN_THE_CONTEST[group]):
        return None
    if group == "experiment":
        return (
            f"experiment={word}: is not in the package; in a clone add "
            "--config-dir benchmarks/contest/conf"
        )
    return (
        f"{group}={word}: is not in the package; in a clone run it with "
        "python -m benchmarks.contest"
    )


def file_of(group: str, name: str) -> Path:
    """Return the file of a choice of a group, as :func:`options_of` lists it."""
    return next(path for d in folders(None) if (path := d / group / f"{name}.yaml").is_file())
