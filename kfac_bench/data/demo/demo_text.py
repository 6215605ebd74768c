"""What Python says of itself, as text to pre-train on: real English on every install, no download.

The language reference of `pydoc` and the docstrings of the standard library (PSF licence). A demo:
2 MB are no Wikipedia.
"""

import ast
import inspect
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kfac_bench.data.language import prepare, text_shards, wordpiece
from kfac_bench.data.language.documents import Document
from kfac_bench.errors import UsageError

SEQUENCE_LENGTHS = (64, 128)
VOCABULARY_SIZE = 4096
EVAL_SHARE = 0.05
_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "distutils"),
    *("encodings", "ensurepip", "turtledemo", "pydoc_data"),
}
_SHORT = 200
"""Characters that a module's docstrings have at least."""


def make(root: Path) -> None:
    """Write the text in the layout of ``kfac-data prepare``, of two sequence lengths.

    The same files each time with one Python. Raises UsageError if `root` has such text already.
    """
    if text_shards.lengths(root):
        raise UsageError(f"{root} has prepared text already: choose another folder")
    read = list(documents())
    prepare.prepare(
        lambda: iter(read),
        root,
        vocabulary_size=VOCABULARY_SIZE,
        sequence_lengths=SEQUENCE_LENGTHS,
        eval_share=EVAL_SHARE,
        about="the documentation of Python: pydoc's topics, docstrings of the standard library",
    )


def vocabulary() -> wordpiece.Vocabulary:
    """That of :func:`make`."""
    return wordpiece.train((document.text for document in documents()), VOCABULARY_SIZE)


def documents() -> Iterator[Document]:
    """A topic of the reference each, then a module each."""
    for name, topic in sorted(pydoc_data.topics.topics.items()):
        yield Document(f"topic {name}", _unwrapped(topic))
    for name, found in modules().items():
        text = _unwrapped("\n\n".join(definition.doc for definition in found))
        if len(text) >= _SHORT:
            yield Document(f"module {name}", text)


@dataclass(frozen=True)
class Definition:
    """What has a docstring: a module, a class, or a function, whose arguments are known."""

    name: str
    doc: str
    arguments: tuple[str, ...] | None


@cache
def modules() -> Mapping[str, Sequence[Definition]]:
    """Modules of the standard library that are written in Python, by name; none is imported."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(_sources(root)):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        try:
            found[name] = list(_definitions(name, ast.parse(path.read_bytes())))
        except (SyntaxError, ValueError, OSError):  # a file of templates is no module
            continue
    return found


def _definitions(name: str, node: ast.AST) -> Iterator[Definition]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        if doc := ast.get_docstring(node):
            yield Definition(name, doc, _arguments(node))
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from _definitions(f"{name}.{child.name}", child)


def _arguments(node: ast.AST) -> tuple[str, ...] | None:
    if not isinstance(node, ast.FunctionDef):
        return None
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return tuple(a.arg for a in given if a.arg not in ("self", "cls"))


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in _LEFT_OUT or not path.stem.isidentifier():
            continue  # installed packages are below: thousands of folders not to look into
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def _unwrapped(text: str) -> str:
    """A line per paragraph: where a line of the original ends means nothing."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
