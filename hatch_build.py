"""The README as package indexes show it: its links lead to the project's public address."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#)([^)]+\))")


class PublicAddress(MetadataHookInterface):
    """Sets the README and the address of the project in the package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the fields that pyproject.toml declares as dynamic."""
        address = self.config["public_address"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_address(text, address),
        }
        metadata["urls"] = {"Source": address} if address else {}


def with_address(text: str, address: str) -> str:
    """Return a README whose relative links begin with `address`; as it is if that is empty.

    Pages are below `blob/main`, images below `raw/main`, as on GitHub and GitLab.
    """
    if not address:
        return text

    def absolute(link: re.Match[str]) -> str:
        folder = "raw/main" if link[1].startswith("!") else "blob/main"
        return f"{link[1]}{address}/{folder}/{link[2]}"

    return _LINK.sub(absolute, text)
