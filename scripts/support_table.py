"""Write the table of docs/reference/backends.md: what each backend can do, as shown by tests.

`pytest --support=build/support.json` writes the outcomes of tests with the marker `supports`. This
script puts them into the document. With `--check` it only compares the document with the outcomes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "backends.md"
BEGIN, END = "<!-- support: made by scripts/support_table.py -->", "<!-- end of support -->"

BACKENDS = {
    "ddp": "DDP",
    "horovod": "Horovod",
    "deepspeed zero 0": "ZeRO 0",
    "deepspeed zero 1": "ZeRO 1",
    "deepspeed zero 2": "ZeRO 2",
    "fsdp2": "FSDP2",
    "tensor parallel": "tensor parallel",
    "pipeline": "pipeline",
}
ROWS = (
    "comm_opt",
    "layer_wise",
    "mem_opt",
    "hybrid_opt",
    "owner_reduce",
    "local_factors",
    "gradient accumulation",
    "bf16 autocast",
    "fp16 with GradScaler",
    "resume on another world size",
    "kfac-train",
    "documented command",
)
_OTHER_STAGE = "same command as ZeRO 2, with another `backend.zero_stage`"
_SCRIPTS = "for scripts only: kfac-train does not offer it"
WHY: dict[tuple[str, str], str] = {
    ("deepspeed zero 0", "documented command"): _OTHER_STAGE,
    ("deepspeed zero 1", "documented command"): _OTHER_STAGE,
    ("tensor parallel", "kfac-train"): _SCRIPTS,
    ("pipeline", "kfac-train"): _SCRIPTS,
    ("tensor parallel", "local_factors"): (
        "refused, because no rank has a batch of its own: the ranks share the samples of one batch"
    ),
    ("tensor parallel", "fp16 with GradScaler"): (
        "if the first gradient is replicated, torch 2.14 reports an overflow to some ranks only"
    ),
    ("pipeline", "local_factors"): (
        "not compared, because the owner of a layer depends on the layers of its stage"
    ),
    (
        "pipeline",
        "fp16 with GradScaler",
    ): "not tried, because every stage would have to learn of an overflow",
    ("pipeline", "resume on another world size"): (
        "not possible, because each stage saves its layers under names of its own"
    ),
}
"""Reasons for missing ticks, by backend and row."""


def table(shown: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table with a tick for each passed test and a footnote for each gap.

    Raises:
        ValueError: If a test failed, or a gap has no reason.
    """
    reasons: list[str] = []
    lines = ["| | " + " | ".join(BACKENDS.values()) + " |", "| --- |" + " :-: |" * len(BACKENDS)]
    for row in ROWS:
        cells = []
        for backend in BACKENDS:
            outcome = shown.get(backend, {}).get(row)
            if outcome == "passed":
                cells.append("✓")
                continue
            if outcome is not None:
                raise ValueError(f"{backend}, {row}: {outcome}")
            if (backend, row) not in WHY:
                raise ValueError(f"{backend}, {row}: no test shows it, and no reason is given")
            reason = WHY[backend, row]
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"({reasons.index(reason) + 1})")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{i}. {r}" for i, r in enumerate(reasons, 1))])


def merged(parts: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """Return the outcomes of several runs of pytest as one; a failure in any run counts."""
    outcomes: dict[str, dict[str, str]] = {}
    for part in parts:
        for backend, rows in part.items():
            own = outcomes.setdefault(backend, {})
            for row, outcome in rows.items():
                own[row] = outcome if own.get(row, "passed") == "passed" else own[row]
    return outcomes


def main() -> int:
    """Return 0 for success, 1 if the document is outdated, 2 if tests are missing or failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("support", type=Path, nargs="+", help="files that pytest --support wrote")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    try:
        made = table(merged([json.loads(file.read_text()) for file in options.support]))
    except ValueError as error:
        print(f"support_table: {error}", file=sys.stderr)
        return 2
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    new = f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}"
    if options.check and new != text:
        print(f"{DOCUMENT} differs from the test outcomes; run make support", file=sys.stderr)
        return 1
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
