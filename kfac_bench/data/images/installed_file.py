"""Data files of installed packages, found without importing the packages."""

from importlib.util import find_spec
from pathlib import Path

from kfac_bench.errors import UsageError


def installed_file(package: str, path: str, install: str) -> Path:
    """Return a file of a package. Importing the package would take seconds.

    Args:
        package: Name of the package as it is imported.
        path: The file inside the package.
        install: What the user installs to get the package, for the error message.

    Raises:
        UsageError: The package is not installed, or does not have the file.
    """
    spec = find_spec(package)
    file = Path(spec.origin).parent / path if spec and spec.origin else None
    if file is None or not file.is_file():
        raise UsageError(f"there is no file {path} of {package}: pip install '{install}'")
    return file
