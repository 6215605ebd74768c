"""The packages that the code imports are the ones that pyproject.toml declares."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILT_BY_SCRIPT = {"horovod", "apex"}
"""Installed by `make install-horovod`, or by the user on a GPU machine."""


def imported(folder="kfac_bench"):
    """Return the top-level packages that a file of the folder imports, with one of the files."""
    packages = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            packages |= {name.partition(".")[0]: path for name in names}
    return packages


def declared(*, extras=True):
    """Return the names of all dependencies, with those of extras if wanted, normalized."""
    requirements = [*PROJECT["dependencies"]]
    if extras:
        optional = PROJECT["optional-dependencies"]
        requirements += [r for extra, listed in optional.items() if extra != "dev" for r in listed]
    return {re.match(r"[\w.-]+", r)[0].lower().replace("_", "-") for r in requirements}


def test_every_imported_package_is_declared():
    distributions = packages_distributions()
    for package, path in imported().items():
        if package in sys.stdlib_module_names or package in {"kfac_bench", *BUILT_BY_SCRIPT}:
            continue
        names = {name.lower().replace("_", "-") for name in distributions[package]}
        assert names & declared(), f"{path.relative_to(ROOT)} imports {package}: declare {names}"


def test_training_and_export_need_only_the_base_install():
    distributions, base = packages_distributions(), declared(extras=False)
    packages = imported("kfac_bench/training")
    assert "safetensors" in packages
    for package in packages.keys() - sys.stdlib_module_names - {"kfac_bench"}:
        names = {name.lower().replace("_", "-") for name in distributions[package]}
        assert names & base, f"{packages[package].relative_to(ROOT)} imports {package}"


def test_the_development_extra_repeats_no_other_extra():
    extras = PROJECT["optional-dependencies"]
    others = {r for extra, listed in extras.items() if extra != "dev" for r in listed}
    assert not others & {*extras["dev"], *PROJECT["dependencies"]}
