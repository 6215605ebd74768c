"""YAML files that may come from somebody else: plain data, without aliases.

A few lines of nested aliases name gigabytes, which OmegaConf copies and error messages print.
"""

from typing import Any

import yaml


def load(text: str) -> Any:
    """Return the data of a YAML text.

    Raises:
        ValueError: The text has aliases, or dates or numbers that do not exist.
        RecursionError: The text is nested too deeply.
        yaml.YAMLError: The text is no YAML.
    """
    refuse_aliases(text)
    return yaml.safe_load(text)


def refuse_aliases(text: str) -> None:
    """Raise `ValueError` if a YAML text has aliases; see :func:`load` for other errors."""
    for token in yaml.scan(text, yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            line = token.start_mark.line + 1
            raise ValueError(f"line {line}: YAML aliases are not allowed. Write the value out")
