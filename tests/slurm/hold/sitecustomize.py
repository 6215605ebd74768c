"""Change what the processes of a test's job do, as the test asks by environment variables.

Python imports this file by itself, because its folder is on PYTHONPATH.

KFAC_TEST_TRIALS shortens `kfac-bench try`: so many settings of each optimizer, and two seeds.

KFAC_TEST_HOLD holds the ranks at a place until Slurm's notice arrives. For example,
`evaluation:8,decomposition:12` has the place and the step for each start of the job.
KFAC_TEST_HOLD_TASK names the task of an array. Every rank leaves a file and waits.
"""

import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_S = 120
held = set()


def main(places, folder):
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    task = os.environ.get("KFAC_TEST_HOLD_TASK")
    job = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ["SLURM_JOB_ID"]
    if restarts >= len(places) or task not in (None, os.environ.get("SLURM_ARRAY_TASK_ID")):
        return
    place, _, step = places[restarts].partition(":")
    import torch

    from kfac_bench.training.trainer import Trainer

    now = {}  # the trainer, and the place it has reached

    def within(name, method):
        def wrapped(self, *arguments):
            now["trainer"], now["place"] = self, name
            if name == place == "step":
                hold()
            try:
                return method(self, *arguments)
            finally:
                now["place"] = None

        return wrapped

    def hold():
        """Wait until this rank has received the signal and handled it."""
        if now["trainer"].step != int(step) or place in held:
            return
        held.add(place)
        seen, handler = [], signal.getsignal(signal.SIGUSR1)

        def note(number, frame):
            seen.append(number)
            handler(number, frame)

        signal.signal(signal.SIGUSR1, note)
        rank = now["trainer"].ranks.rank
        (folder / f"{job}-{place}-{restarts}-{rank}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not seen and time.monotonic() < deadline:
            time.sleep(0.02)

    def holding(function, of):
        def wrapped(*arguments, **keywords):
            if of == place and now.get("place") == {"decomposition": "step"}.get(of, of):
                hold()
            return function(*arguments, **keywords)

        return wrapped

    Trainer._train_step = within("step", Trainer._train_step)
    Trainer._evaluate = within("evaluation", Trainer._evaluate)
    Trainer._to_device = holding(Trainer._to_device, "evaluation")
    torch.linalg.eigh = holding(torch.linalg.eigh, "decomposition")


def shorten_study(trials):
    from kfac_bench.benchmark.own_problem import study_input
    from kfac_bench.cli import try_command

    whole = study_input.candidates
    study_input.candidates = lambda *words, **more: whole(*words, **more)[:trials]
    try_command.SEEDS = 2


if "KFAC_TEST_TRIALS" in os.environ and "try" in sys.orig_argv:
    shorten_study(int(os.environ["KFAC_TEST_TRIALS"]))
if "KFAC_TEST_HOLD" in os.environ and "SLURM_STEP_ID" in os.environ:
    main(os.environ["KFAC_TEST_HOLD"].split(","), Path(os.environ["KFAC_TEST_FOLDER"]))
