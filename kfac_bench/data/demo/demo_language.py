"""Demo texts from Python's documentation, on every machine without a download.

* The text for pre-training is the language reference of `pydoc` and the docstrings of the standard
  library (PSF licence), 2 MB of English.
* The questions in the layout of SQuAD v1.1 are about functions. A paragraph has one sentence about
  each of some functions of a module, from their docstrings: "textwrap.shorten(text, width,
  **kwargs): Collapse and truncate the given text ...". Questions ask what a function does, what its
  arguments are, and where it is defined.
"""

import ast
import hashlib
import inspect
import json
import pydoc_data.topics
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kfac_bench.data.language import prepare, squad, squad_windows, text_shards, wordpiece
from kfac_bench.data.language.documents import Document
from kfac_bench.errors import UsageError

SEQUENCE_LENGTHS = (64, 128)
VOCABULARY_SIZE = 4096
EVAL_SHARE = 0.05
_LEFT_OUT = {
    "dist-packages",
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
"""Folders whose modules are not read."""
_SHORT = 200
"""Modules whose docstrings have fewer characters are left out."""


def make_text(root: Path) -> None:
    """Write the text in the layout of `kfac-data prepare`, for two sequence lengths.

    The files depend only on the version of Python. Raise UsageError if `root` has such text.
    """
    if text_shards.lengths(root):
        raise UsageError(f"{root} has prepared text already. Choose another folder")
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
    """Return the vocabulary of the demo, without writing the demo."""
    return wordpiece.train((document.text for document in documents()), VOCABULARY_SIZE)


def documents() -> Iterator[Document]:
    """Yield a document for each topic of the reference, then one for each module."""
    for name, topic in sorted(pydoc_data.topics.topics.items()):
        yield Document(f"topic {name}", _unwrapped(topic))
    for name, found in modules().items():
        text = _unwrapped("\n\n".join(definition.doc for definition in found))
        if len(text) >= _SHORT:
            yield Document(f"module {name}", text)


@dataclass(frozen=True)
class Definition:
    """A module, class or function with a docstring. `arguments` is None unless it is a function."""

    name: str
    doc: str
    arguments: tuple[str, ...] | None


@cache
def modules() -> Mapping[str, Sequence[Definition]]:
    """Return the definitions in each Python module of the standard library, without imports."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(_sources(root)):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        try:
            found[name] = list(_definitions(name, ast.parse(path.read_bytes())))
        # Some files are templates and not valid Python.
        except (SyntaxError, ValueError, OSError):
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
            # Without this test the search would go through thousands of installed packages.
            continue
        if path.is_dir():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph, because their ends have no meaning."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


# ---- questions

IN_A_PARAGRAPH = 4
"""Functions of a paragraph."""
SQUAD_EVAL_SHARE = 0.06
_FIRST_SENTENCE = re.compile(r"(.{20,160}?[.!?])(?:\s|$)", re.DOTALL)


def make_squad(root: Path) -> None:
    """Write train-v1.1.json, dev-v1.1.json and vocab.txt, the vocabulary of the text demo.

    A hash of its name decides whether a module is held out. The files depend only on the version of
    Python. Raise UsageError if there are such files already.
    """
    if any((root / name).exists() for name in squad.FILES.values()):
        raise UsageError(f"{root} has questions already. Choose another folder")
    articles: dict[str, list[Any]] = {split: [] for split in squad.FILES}
    for name, definitions in modules().items():
        if paragraphs := list(_paragraphs(name, definitions)):
            digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            split = "eval" if digest < SQUAD_EVAL_SHARE * 2**64 else "train"
            articles[split].append({"title": name, "paragraphs": paragraphs})
    root.mkdir(parents=True, exist_ok=True)
    for split, file in squad.FILES.items():
        content = json.dumps({"version": "1.1", "data": articles[split]}, indent=1)
        (root / file).write_text(content + "\n")
    wordpiece.write(vocabulary(), root / squad_windows.VOCABULARY)


def _paragraphs(module: str, definitions: Sequence[Definition]) -> Iterator[dict[str, Any]]:
    described = list(_described(module, definitions))
    for start in range(0, len(described), IN_A_PARAGRAPH):
        context, questions = f"The module {module} defines these functions.", list[Any]()
        for name, arguments, sentence in described[start : start + IN_A_PARAGRAPH]:
            at = len(context) + 1
            context += f" {name}({arguments}): {sentence}"
            sentence_at = at + len(name) + len(arguments) + 4
            questions.append((f"What does {name} do?", sentence, sentence_at))
            if arguments:
                question = f"What are the arguments of {name}?"
                questions.append((question, arguments, at + len(name) + 1))
            short = name.rpartition(".")[2]
            questions.append((f"Which module defines {short}?", module, len("The module ")))
        identity = f"{module}-{start // IN_A_PARAGRAPH}"
        qas = [
            {"id": f"{identity}-{i}", "question": question,
             "answers": [{"text": answer, "answer_start": at}]}
            for i, (question, answer, at) in enumerate(questions)
        ]  # fmt: skip
        yield {"context": context, "qas": qas}


def _described(module: str, definitions: Sequence[Definition]) -> Iterator[tuple[str, str, str]]:
    """Yield (qualified name, arguments, first sentence of the docstring) of public functions."""
    for definition in definitions:
        parts = definition.name.removeprefix(f"{module}.").split(".")
        if definition.arguments is None or any(part.startswith("_") for part in parts):
            continue
        sentence = _FIRST_SENTENCE.match(" ".join(definition.doc.split()))
        if sentence and sentence[1].isascii():
            yield definition.name, ", ".join(definition.arguments), sentence[1]
