"""Seconds to a target beside other libraries, on the same work: K-FAC, kfac-jax, SOAP and others.

    python benchmarks/peers.py [--competitors NAME,...] [--trials 6] [--seeds 0,1,2]
    python benchmarks/peers.py --into docs/lab/peers.md

The work is the autoencoder 784-1000-500-250-30 of conf/experiment/cpu/autoencoder.yaml. Each
competitor of benchmarks/peers.yaml gets the same initial weights, the same batches in the same
order, one thread, and as many trials from its own space as the others. The best trial then runs on
seeds that no trial had. Seconds are CPU seconds of the process, without compilation and evaluation.

kfac-jax needs an environment of its own. Without it the other competitors run:

    python3 -m venv build/peers && build/peers/bin/pip install -r benchmarks/peers_requirements.txt

Finished runs are kept in ``runs/peers.json``. If the command is killed, the same command continues.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

# A file that is started directly does not find its package.
if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peers_desk, peers_results, speed
from benchmarks.peers_desk import Desk
from benchmarks.peers_results import Competitor, Results, Row, Run
from kfac_bench.benchmark.schema import Tuning
from kfac_bench.benchmark.trials import trial_settings
from kfac_bench.errors import UsageError
from kfac_bench.training import environment

STUDY: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("peers.yaml").read_text())
COMPETITORS = {name: Competitor(name, **row) for name, row in STUDY["competitors"].items()}
SLOWS_DOWN = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that make jax's linear algebra use the instructions of older processors."""


def draw(competitor: Competitor, trials: int) -> list[dict[str, Any]]:
    """Return the settings of the trials: quasi-random points of the competitor's space."""
    space = {competitor.name: competitor.space}
    tuning = Tuning(overrides=[], trials=trials, seeds=[], space=space, experiment="")
    return trial_settings(tuning, competitor.name)


@dataclass(frozen=True)
class Planned:
    """A run that is due."""

    title: str
    competitor: Competitor
    kind: str
    """``trial``, or ``final`` for a run of the table."""
    seed: int
    settings: Mapping[str, Any]
    limit_s: float

    def finish(self, desk: Desk, results: Results) -> None:
        """Run it, unless it has been run before."""
        name, settings = self.competitor.name, self.settings
        if results.find(self.kind, name, self.seed, settings) is not None:
            return
        run = {
            "kind": self.kind,
            "competitor": name,
            "seed": self.seed,
            "settings": dict(settings),
            "limit_s": self.limit_s,
        }
        result = desk.run({**run, "runs": self.competitor.runs})
        results.add({**run, **result, "measured": measured()})
        chosen = " ".join(f"{k}={settings[k]}" for k in self.competitor.ranges)
        end = result.get("why") or "{end} after {seconds:.1f} s, {steps} steps".format(**result)
        say(f"{self.title}, {self.competitor.label} {chosen}: {end}")


def measure(
    desk: Desk, results: Results, able: Sequence[Competitor], trials: int, seeds: Sequence[int]
) -> None:
    """Run what is missing: the trials, then the best trial of each competitor on all seeds.

    The competitors take turns, so that a slow hour slows all of them.
    """
    limit_s, tuning_seed = desk.work["limit_s"], STUDY["tuning_seed"]
    for number in range(trials):
        for competitor in able:
            settings = draw(competitor, trials)[number]
            before = map(peers_results.seconds, _trials(results, competitor, number))
            # A trial that is slower than the best one cannot win any more.
            least_s = min([limit_s, *before])
            title = f"trial {number + 1} of {trials}"
            trial = Planned(title, competitor, "trial", tuning_seed, settings, least_s)
            trial.finish(desk, results)
    for seed in seeds:
        for competitor in able:
            best = min(_trials(results, competitor, trials), key=peers_results.merit)
            final = Planned(f"seed {seed}", competitor, "final", seed, best["settings"], limit_s)
            final.finish(desk, results)


def _trials(results: Results, competitor: Competitor, count: int) -> list[Run]:
    """Return the runs of the first so many trials; a trial that has not run is left out."""
    seed = STUDY["tuning_seed"]
    settings = draw(competitor, count) if count else []
    found = (results.find("trial", competitor.name, seed, s) for s in settings)
    return [run for run in found if run is not None]


def rows(results: Results, trials: int, seeds: Sequence[int]) -> list[Row]:
    """Return a row for each competitor whose trials and final runs are done."""
    found = []
    for competitor in COMPETITORS.values():
        row = Row(competitor, _trials(results, competitor, trials), [])
        if len(row.trials) < trials:
            continue
        settings = row.winner["settings"]
        finals = [results.find("final", competitor.name, seed, settings) for seed in seeds]
        done = [run for run in finals if run is not None]
        if len(done) == len(seeds):
            found.append(Row(competitor, row.trials, done))
    return found


def measured() -> dict[str, str]:
    """Return when, where and with which code a run was made."""
    machine = environment.describe()
    cpu = f"{machine['hardware']['cpu']} with {torch.backends.cpu.get_cpu_capability()}"
    date = datetime.now(UTC).date().isoformat()
    return {"date": date, "cpu": cpu, "commit": machine["git_commit"]}


def head(results: Results, finished: Sequence[Row], seeds: Sequence[int]) -> str:
    """Return a paragraph about the machines and the work."""
    places = [run["measured"] for row in finished for run in (*row.trials, *row.finals)]
    cpus, dates, codes = (sorted({p[key] for p in places}) for key in ("cpu", "date", "commit"))
    # A short hash, and "+changes" if files differed from the commit.
    commits = [code[:9] + code[40:] for code in codes]
    work = results.work
    where = ", ".join([*cpus, "one thread", *dates])
    return (
        f"{where}, commit {', '.join(commits)}. The target is a squared error of "
        f"{work['target']:g}; a run ends after {work['limit_s']:g} CPU s or {work['max_steps']} "
        f"steps. Settings were tuned on seed {STUDY['tuning_seed']}, and the table has the seeds "
        f"{', '.join(map(str, seeds))}."
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options."""
    parser = speed.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--competitors", type=speed.words, default=[*COMPETITORS], help=", ".join(COMPETITORS))
    add("--trials", type=speed.whole, default=6, help="trials of each competitor (6)")
    add("--seeds", type=speed.words, default=["0", "1", "2"], help="seeds of the table (0,1,2)")
    add("--steps", type=speed.whole, help="updates of a run at most, to try the command")
    add("--environment", type=Path, default=Path("build/peers"), help="of kfac-jax (build/peers)")
    add("--out", type=Path, default=Path("runs/peers.json"), help="results (runs/peers.json)")
    add("--into", type=Path, help="write the tables between the marks of this page, too")
    options = parser.parse_args(arguments)
    if not options.competitors:
        raise UsageError(f"--competitors names nothing: choose from {', '.join(COMPETITORS)}")
    unknown = [name for name in options.competitors if name not in COMPETITORS]
    if unknown:
        raise UsageError(f"unknown competitor {unknown[0]!r}: choose from {', '.join(COMPETITORS)}")
    if not all(seed.isdecimal() for seed in options.seeds) or not options.seeds:
        raise UsageError(f"--seeds {','.join(options.seeds)}: name whole numbers from 0")
    options.seeds = [int(seed) for seed in options.seeds]
    if STUDY["tuning_seed"] in options.seeds:
        raise UsageError(f"--seeds: {STUDY['tuning_seed']} is the seed of the trials. Leave it out")
    if options.into:
        peers_results.parts_of(options.into)  # a wrong page is refused now, not after the runs
    return options


def run(options: argparse.Namespace) -> str:
    """Run the competitors that can run, and return the tables."""
    for name in SLOWS_DOWN:
        os.environ.pop(name, None)
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    chosen = [COMPETITORS[name] for name in options.competitors]
    with tempfile.TemporaryDirectory() as folder:
        experiment, limit_s = STUDY["experiment"], STUDY["limit_s"]
        desk = Desk(Path(folder), options.environment, experiment, limit_s, options.steps)
        results = Results(options.out, desk.work)
        # The torch model is the one that others are compared with.
        libraries = dict.fromkeys(["torch", *(competitor.library for competitor in chosen)])
        reasons = peers_desk.find_reasons(desk, [*libraries], STUDY["tuning_seed"])
        for competitor in chosen:
            if reason := reasons[competitor.library]:
                say(f"{competitor.label} is left out: {reason}")
        able = [competitor for competitor in chosen if not reasons[competitor.library]]
        measure(desk, results, able, options.trials, options.seeds)
        finished = rows(results, options.trials, options.seeds)
        if not finished:
            raise UsageError("no competitor could run, so there is no table")
        short = " **Short runs: the numbers mean nothing.**" if desk.is_short else ""
        return peers_results.render(finished, head(results, finished, options.seeds) + short)


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measure, print the tables, and return the exit code: 2 for bad input."""
    try:
        options = parse(arguments)
        text = run(options)
        if options.into:
            peers_results.into(options.into, text)
        print(text)
    except UsageError as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("peers.py: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
