"""The packages that the code imports are the ones that pyproject.toml declares."""

import ast
import functools
import re
import sys
import tomllib
from importlib import metadata

from kfac_bench import errors
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
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


packages_distributions = functools.cache(metadata.packages_distributions)
"""The function reads the files of all installed packages, which takes seconds."""


def declared(*extras):
    """Return the names of the dependencies and of the packages of extras, normalized."""
    requirements = [*PROJECT["dependencies"], *(each for extra in extras for each in EXTRAS[extra])]
    return {normalized(re.match(r"[\w.-]+", each)[0]) for each in requirements} - {"kfac-bench"}


def normalized(name):
    return name.lower().replace("_", "-")


def test_every_imported_package_is_declared():
    distributions, names = packages_distributions(), declared(*EXTRAS)
    for package, path in imported().items():
        if package in sys.stdlib_module_names or package in {"kfac_bench", *BUILT_BY_SCRIPT}:
            continue
        owners = {normalized(name) for name in distributions[package]}
        assert owners & names, f"{path.relative_to(ROOT)} imports {package}: declare {owners}"


def test_the_library_needs_torch_and_training_and_export_the_extra_train():
    assert declared() == {"torch"}
    distributions, names = packages_distributions(), declared("train")
    packages = imported("kfac_bench/training")
    assert "safetensors" in packages
    for package in packages.keys() - sys.stdlib_module_names - {"kfac_bench"}:
        owners = {normalized(name) for name in distributions[package]}
        assert owners & names, f"{packages[package].relative_to(ROOT)} imports {package}"


def test_the_errors_know_the_packages_of_each_extra():
    distributions = packages_distributions()
    assert errors.EXTRAS.keys() == EXTRAS.keys() - {"all", "dev"}
    for extra, packages in errors.EXTRAS.items():
        names = {normalized(distributions[package][0]) for package in packages}
        assert names == declared(extra) - {"torch"}
    (everything,) = EXTRAS["all"]
    assert all(extra in everything for extra in errors.EXTRAS.keys() - {"train"})


def test_the_development_extra_repeats_no_other_extra():
    others = {each for extra, listed in EXTRAS.items() if extra != "dev" for each in listed}
    assert not others & {*EXTRAS["dev"], *PROJECT["dependencies"]}
