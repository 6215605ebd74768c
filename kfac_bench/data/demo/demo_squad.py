"""Demo: questions about Python's documentation in the layout of SQuAD v1.1.

A paragraph has one sentence about each of some functions of a module, from their docstrings:
"textwrap.shorten(text, width, **kwargs): Collapse and truncate the given text ...". Questions ask
what a function does, what its arguments are, and where it is defined.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kfac_bench.data.demo import demo_text
from kfac_bench.data.demo.demo_text import Definition
from kfac_bench.data.language import squad, squad_windows, wordpiece
from kfac_bench.errors import UsageError

IN_A_PARAGRAPH = 4
"""Functions of a paragraph."""
EVAL_SHARE = 0.06
_FIRST_SENTENCE = re.compile(r"(.{20,160}?[.!?])(?:\s|$)", re.DOTALL)


def make(root: Path) -> None:
    """Write train-v1.1.json, dev-v1.1.json and vocab.txt, the vocabulary of the text demo.

    A hash of its name decides whether a module is held out. The files depend only on the version of
    Python. Raise UsageError if there are such files already.
    """
    if any((root / name).exists() for name in squad.FILES.values()):
        raise UsageError(f"{root} has questions already. Choose another folder")
    articles: dict[str, list[Any]] = {split: [] for split in squad.FILES}
    for name, definitions in demo_text.modules().items():
        if paragraphs := list(_paragraphs(name, definitions)):
            digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
            split = "eval" if digest < EVAL_SHARE * 2**64 else "train"
            articles[split].append({"title": name, "paragraphs": paragraphs})
    root.mkdir(parents=True, exist_ok=True)
    for split, file in squad.FILES.items():
        content = json.dumps({"version": "1.1", "data": articles[split]}, indent=1)
        (root / file).write_text(content + "\n")
    wordpiece.write(demo_text.vocabulary(), root / squad_windows.VOCABULARY)


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
