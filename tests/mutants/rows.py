"""The list of changes, as mutants.yaml has it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from kfac_bench.errors import UsageError

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.yaml")


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests that should notice the change."""

    file: Path
    """The file, relative to the repository."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Folders, files, or FILE::TEST."""

    def __str__(self) -> str:
        if not self.old:
            return f"{self.file}: no change"
        return f"{self.file}: {_short(self.old)} -> {_short(self.new)}"

    def apply(self, text: str) -> str:
        """Return the changed text of the file. An empty old text changes nothing.

        Raises:
            UsageError: The old text does not occur exactly once.
        """
        if not self.old:
            return text
        count = text.count(self.old)
        if count != 1:
            raise UsageError(
                f"{self.file} has the old text of a change {count} times instead of once: "
                f"{self.old!r}. Correct the row in {LIST.relative_to(ROOT)}"
            )
        return text.replace(self.old, self.new)

    def key(self, root: Path) -> str:
        """Return a hash of the change, of the file, and of the tests: a result is valid for it."""
        row = [str(self.file), self.old, self.new, self.tests]
        digest = hashlib.sha256(json.dumps(row).encode())
        for path in (self.file, *map(file_of, self.tests)):
            files = sorted((root / path).rglob("*.py")) or [root / path]
            for each in files:
                digest.update(each.read_bytes())
        return digest.hexdigest()[:16]


def file_of(test: str) -> Path:
    """Return the folder or the file that a test is in."""
    return Path(test.partition("::")[0])


def load() -> list[Mutant]:
    """Return all changes in the order of the list."""
    return [
        Mutant(
            Path("kfac_bench") / group["file"],
            change["old"],
            change["new"],
            tuple(change.get("tests", group["tests"]).split()),
        )
        for group in yaml.safe_load(LIST.read_text())
        for change in group["changes"]
    ]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return f"`{line}`" if len(line) <= 60 else f"`{line[:57]}...`"
