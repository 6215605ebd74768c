"""The view of a study: a table that is drawn again on a terminal, short lines in a pipe."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading

import pytest

from kfac_bench.benchmark.own_problem.leaderboard import Leaderboard
from kfac_bench.benchmark.own_problem.study_input import Asked
from kfac_bench.benchmark.trials import TrialResult
from kfac_bench.config import problem_file
from tests.benchmark.own_problem.problem_text import written

INF = float("inf")


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    file = written(tmp_path_factory.mktemp("problem"))
    problem_file.run_named([f"problem={file}"])
    return Asked(file, [], 30.0, 1, 5, 0.93, {"adamw": [], "sgd": [], "eigen_adam": []})


def trial(seed, *key, failure=""):
    return TrialResult({"optimizer.lr": 0.1}, seed, key=key, train_s=9.0, failure=failure)


def play(board):
    """Show a short study, whose tuning ends with EigenAdam in front."""
    with board:
        board.target = 0.93
        for name, key in (("adamw", (8.25, -0.93)), ("sgd", (INF, -0.5)), ("eigen_adam", (2, -1))):
            board.begin(name, "tuning", 1000)
            board.end(name, "tuning", trial(1000, *key), "about 2 min left")
        board.begin("sgd", "tuning", 1000)
        board.say("a line\x1b[2J")
        failure = "out of \x1b[2Jmemory"
        board.end("sgd", "tuning", trial(1000, INF, INF, failure=failure), "about 1 min left")
        board.begin("adamw", "final", 0)
        board.end("adamw", "final", trial(0, 8.5, -0.93), "about 0 s left")


def on_terminal(action, columns=80):
    """Return all that a terminal of this width receives from ``action(stream)``."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    parts = []

    def read():
        while part := os.read(ours, 65536):
            parts.append(part)
            if part.endswith(b"\x04"):
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stream:
        try:
            action(stream)
        finally:
            stream.write("\x04")
            stream.flush()
            reader.join(timeout=60)
    os.close(ours)
    return b"".join(parts).decode().removesuffix("\x04")


@pytest.fixture
def a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("a_terminal")
def test_a_terminal_shows_one_table_that_is_drawn_again(asked):
    seen = on_terminal(lambda stream: play(Leaderboard(asked, stream)))
    assert "\x1b[2J" not in seen
    tables = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).split("mine: training time to accuracy")
    assert seen.count("\x1b[1A") >= 5 * 6, "the table takes the place of the one before"
    assert "now: EigenAdam, trial 1; about 2 min left" in tables[3]
    assert "a line\\x1b[2J" in tables[4]
    assert [line.split("  ")[0].strip() for line in tables[-1].split("\r\n")] == [
        *("0.93", "optimizer", "AdamW", "EigenAdam", "SGD", "about 0 s left", ""),
    ]
    assert re.search(r"AdamW +1 +8\.25 s +8\.5 s \(1 seed\)", tables[-1])
    assert re.search(r"SGD +2 +missed, best 0\.5000 +\u2013", tables[-1])


@pytest.mark.usefixtures("a_terminal")
def test_ctrl_c_leaves_a_clean_terminal(asked):
    def interrupted(stream):
        with Leaderboard(asked, stream) as board:
            board.begin("sgd", "tuning", 1000)
            raise KeyboardInterrupt

    def interrupt(stream):
        with pytest.raises(KeyboardInterrupt):
            interrupted(stream)

    seen = on_terminal(interrupt)
    assert re.findall(r"\x1b\[\?25[hl]", seen)[-1] == "\x1b[?25h", "the cursor is shown"
    assert re.sub(r"\x1b\[\?25[hl]", "", seen).endswith("\n")


def test_a_pipe_gets_one_short_line_for_each_trial(asked):
    stream = io.StringIO()
    play(Leaderboard(asked, stream))
    assert stream.getvalue().splitlines() == [
        "[tuning] AdamW 1: 8.25 s to the target; about 2 min left",
        "[tuning] SGD 1: not reached in 9 s; about 2 min left",
        "[tuning] EigenAdam 1: 2 s to the target; about 2 min left",
        "a line\\x1b[2J",
        "[tuning] SGD 2: not reached in 9 s (out of \\x1b[2Jmemory); about 1 min left",
        "[seed 0] AdamW: 8.5 s to the target; about 0 s left",
    ]
