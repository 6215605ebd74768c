"""An extension of Griffe for the page of the Python API: options that a table declares.

Griffe reads source text. The signature and the docstring of a class with ``@takes_options`` are
made from the table when the class is imported, so this extension imports the class.
"""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class TableOptions(griffe.Extension):
    """Show the keywords of a class with ``@takes_options`` as ``help`` shows them."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replace the docstring and the parameters of such a class."""
        if not any("takes_options" in str(decorator.value) for decorator in cls.decorators):
            return
        made = griffe.dynamic_import(cls.path)
        assert cls.docstring is not None
        cls.docstring.value = inspect.cleandoc(made.__doc__)
        init = cls.members["__init__"]
        assert isinstance(init, griffe.Function)
        written = {parameter.name: parameter.annotation for parameter in init.parameters}
        init.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    name,
                    annotation=written.get(name) or _annotation(parameter),
                    kind=griffe.ParameterKind(parameter.kind.description),
                    default=None
                    if parameter.default is parameter.empty
                    else repr(parameter.default),
                )
                for name, parameter in inspect.signature(made.__init__).parameters.items()
            )
        )


def _annotation(parameter: inspect.Parameter) -> str | None:
    if parameter.annotation is parameter.empty:
        return None
    return inspect.formatannotation(parameter.annotation).replace("collections.abc.", "")
