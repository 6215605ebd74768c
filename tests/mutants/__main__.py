"""Check that tests notice small changes: `make mutants`, or `python -m tests.mutants --help`.

Each change is made in a scratch copy of the repository, never in the working tree. Finished results
are kept in build/mutants.jsonl: the same command continues. It runs again what changed since, what
was too slow, and tests that failed without a change.
"""

import json
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from kfac_bench.cli.entry import Parser, exit_with
from kfac_bench.errors import UsageError
from kfac_bench.output import say
from tests.mutants import judge, rows
from tests.mutants.rows import ROOT, Mutant

RESULTS = ROOT / "build" / "mutants.jsonl"
INVALID = "the tests fail without the change"


def main(arguments: list[str]) -> int:
    """Judge the changes and return the exit code: 1 if a change was not noticed."""
    command = Parser(prog="python -m tests.mutants", description=__doc__)
    command.add_argument("--part", default="1/1", help="i/n: the i-th of n parts of the list")
    command.add_argument("--only", default="", help="only changes of files with this text")
    command.add_argument("--limit", type=float, default=60, help="seconds for each change (60)")
    options = command.parse_args(arguments)
    chosen = [m for m in _part(rows.load(), options.part) if options.only in str(m.file)]
    for mutant in chosen:
        mutant.apply((ROOT / mutant.file).read_text())
    known = _known()
    outcomes: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        judge.copy_to(Path(folder))
        for number, mutant in enumerate(chosen, start=1):
            unchanged = replace(mutant, old="", new="")
            for change in (unchanged, mutant):
                # A test that fails without the change cannot notice the change.
                if change.key(ROOT) not in known:
                    outcome, seconds = judge.judge(change, Path(folder), options.limit)
                    known[change.key(ROOT)] = outcome
                    # A busy machine may be the reason for another outcome: try again next time.
                    if outcome == judge.SURVIVED or (change is mutant and outcome == judge.NOTICED):
                        _keep(change, outcome, seconds)
                    say(f"{number} of {len(chosen)}, {seconds:.0f} s, {outcome}: {change}")
            is_valid = known[unchanged.key(ROOT)] == judge.SURVIVED
            outcomes[mutant] = known[mutant.key(ROOT)] if is_valid else INVALID
    return _report(outcomes)


def _part(mutants: list[Mutant], part: str) -> list[Mutant]:
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise UsageError(f"--part {part}: write i/n with i from 1 to n")
    return mutants[int(number) - 1 :: int(count)]


def _known() -> dict[str, str]:
    """Return the outcomes of earlier runs by the keys of the changes."""
    if not RESULTS.exists():
        return {}
    # A run that was killed may leave a part of a line.
    lines = [line for line in RESULTS.read_text().splitlines() if line.endswith("}")]
    return {found["key"]: found["outcome"] for found in map(json.loads, lines)}


def _keep(mutant: Mutant, outcome: str, seconds: float) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    row = {
        "key": mutant.key(ROOT),
        "outcome": outcome,
        "seconds": round(seconds, 1),
        "change": str(mutant),
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _report(outcomes: dict[Mutant, str]) -> int:
    for mutant, outcome in outcomes.items():
        if outcome != judge.NOTICED:
            say(f"{outcome}: {mutant} ({' '.join(mutant.tests)})")
    noticed = sum(outcome == judge.NOTICED for outcome in outcomes.values())
    say(f"{noticed} of {len(outcomes)} changes were noticed")
    return int(noticed < len(outcomes))


if __name__ == "__main__":
    # A batch system's signal, like Ctrl-C: the scratch copy is removed, and no test goes on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    exit_with("mutants", lambda: main(sys.argv[1:]))
