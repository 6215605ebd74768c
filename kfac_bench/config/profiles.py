"""``experiment=ROW profile=smoke``: one experiment at several sizes, a file for each.

``conf/experiment/ROW/{smoke,one_gpu,paper}.yaml``: minutes on two CPU cores, an honest smaller
version for one GPU, and what the paper did. Without ``profile`` it is the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kfac_bench.errors import UsageError

PROFILES = ("smoke", "one_gpu", "paper")


def apply(overrides: Sequence[str], folders: Iterable[Path]) -> list[str]:
    """``experiment=ROW profile=P`` as Hydra knows it: ``experiment=ROW/P``.

    ``folders`` are searched for ``experiment/``. Raises :class:`UsageError` for a profile that is
    not there.
    """
    profile = next((o.removeprefix("profile=") for o in overrides if _sets(o, "profile")), None)
    if profile is not None and profile not in PROFILES:
        raise UsageError(f"profile={profile}: choose one of {', '.join(PROFILES)}")
    rest = [o for o in overrides if not _sets(o, "profile")]
    if profile is not None and not any(_sets(o, "experiment") for o in rest):
        raise UsageError(f"profile={profile}: it is an experiment's: set experiment=NAME too")
    places = [folder / "experiment" for folder in folders]
    return [_with_profile(o, profile, places) if _sets(o, "experiment") else o for o in rest]


def _sets(override: str, name: str) -> bool:
    return override.partition("=")[0] == name


def _with_profile(override: str, profile: str | None, places: Sequence[Path]) -> str:
    names = override.removeprefix("experiment=").split(",")  # of --multirun, several
    return "experiment=" + ",".join(_file_of(name, profile, places) for name in names)


def _file_of(name: str, profile: str | None, places: Sequence[Path]) -> str:
    found = {p.stem for place in places for p in (place / name).glob("*.yaml")}
    if profile is None:
        return f"{name}/paper" if "paper" in found else name
    if not found and not any((place / f"{name}.yaml").exists() for place in places):
        return name  # Hydra says what there is
    if not found:
        raise UsageError(f"profile={profile}: experiment={name} has no profiles; leave it out")
    if profile not in found:
        said = ", ".join(p for p in PROFILES if p in found)
        raise UsageError(f"profile={profile}: experiment={name} has no such profile; it has {said}")
    return f"{name}/{profile}"
