"""The console sink on a real pseudo-terminal and on a pipe, each in a separate process."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import pytest

from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.record.sinks.console import ConsoleSink
from tests.support import ROOT

RUN = """
    import sys
    from kfac_bench.record.events import *
    from kfac_bench.record.sinks.console import ConsoleSink
    sink = ConsoleSink(metric="acc[red]", higher_is_better=True, total_steps=40, target=0.9)
    sink.write(RunStarted(0, 0.0, "run [bold]x[/bold] \\x1b[2J \\u00e9", "acc[red]", True, {}, {}))
    sink.say("decomposing 108 factors, largest 4608")
    for step in range(1, 41):
        sink.write(Trained(step, 2.0 * step, step / 10, 1 / step, 0.1, 123.4))
        if step % 10 == 0:
            sink.write(Evaluated(step, 2.0 * step, step / 10, {"acc[red]": step / 40, "loss": 1.0}))
    sink.write(Checkpointed(40, 80.0, "p", 0.1))
    sink.write(TargetReached(40, 80.0, "acc[red]", 1.0, 0.9))
    sink.write(RunEnded(40, 80.0, "reached"))
"""


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **changes}


def on_terminal(script: str, columns: int = 100, **changes: str) -> tuple[str, int]:
    """Return all bytes that a terminal of this width received, and the exit status."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(**changes), stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    output = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # how Linux reports that the other side is closed
            break
        output += part
    os.close(master)
    return output.decode(), process.wait(timeout=60)


def in_pipe(script: str, **changes: str) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**changes), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def plain(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_terminal_shows_a_bar_with_lines_above():
    output, status = on_terminal(RUN + "    sink.close()\n    print('after')")
    assert status == 0
    text = plain(output)
    assert "100% 40/40 epoch 4.0/4  0.0 s left  loss 0.025  acc[red] 1  123 ex/s" in text
    for line in (
        "decomposing 108 factors, largest 4608",
        "step 10  epoch 1.00  validation: acc[red] 0.25  loss 1  train 20.0 s",
        "target reached: acc[red] 1 >= 0.9 at step 40 after 1 min 20 s of training",
        "reached at step 40 after 1 min 20 s of training, acc[red] 1",
    ):
        assert line in text
    assert "saved p" not in text
    assert text.splitlines()[-1] == "after"  # on a line of its own, below the bar


def test_untrusted_text_is_literal():
    for text in (plain(on_terminal(RUN)[0]), "\n".join(in_pipe(RUN))):
        assert r"run run [bold]x[/bold] \x1b[2J é, 40 steps at most, until acc[red] >= 0.9" in text


@pytest.mark.parametrize(
    "end", ["raise ValueError('boom')", "sys.exit(3)", "os.kill(os.getpid(), 9)"]
)
def test_cursor_is_visible_whatever_ends_the_process(end):
    output, status = on_terminal(f"{RUN}\n    import os\n    {end}\n")
    assert status != 0
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")
    if "boom" in end:
        assert "ValueError: boom" in plain(output)
    if "kill" not in end:
        assert plain(output)[-1] == "\n"  # the shell's prompt starts on its own line


def test_bar_stays_on_one_line_of_a_narrow_terminal():
    output, status = on_terminal(RUN + "    sink.close()", columns=50)
    assert status == 0
    bars = [line for line in re.split(r"[\r\n]+", plain(output)) if "/40 " in line]
    assert bars
    assert all(len(line) <= 50 for line in bars)
    assert "100% 40/40 epoch 4.0/4  0.0 s left" in bars[-1]
    assert "lr 0.1" not in plain(output)  # cut off, not wrapped to a second line


@pytest.mark.parametrize(
    ("steps_per_epoch", "epoch"),
    [(5000, "epoch 24.7/90 "), (4500, "epoch 27/100 "), (338, "epoch 365/1331 ")],
)
def test_a_long_run_fits_a_terminal_of_80_columns(steps_per_epoch, epoch):
    script = f"""
        import sys
        from kfac_bench.record.events import Evaluated, Trained
        from kfac_bench.record.sinks.console import ConsoleSink
        sink = ConsoleSink(metric="accuracy", higher_is_better=True, total_steps=450000)
        sink.write(Evaluated(0, 0.0, 0.0, {{"accuracy": 0.7123}}))
        for step in (10, 123450):
            sink.write(Trained(step, 0.5 * step, step / {steps_per_epoch}, 0.01234, 0.1, 51234.5))
        sink.close()
    """
    output, status = on_terminal(script, columns=80)
    assert status == 0
    bar = [line for line in re.split(r"[\r\n]+", plain(output)) if "/450000" in line][-1]
    assert len(bar) <= 80
    for part in (" 27%", epoch, "1 d 21 h left", "loss 0.01234"):
        assert part in bar


def test_terminal_without_utf8():
    output, status = on_terminal(RUN + "    sink.close()", PYTHONIOENCODING="ascii")
    assert status == 0
    assert r"\x1b[2J \xe9" in plain(output)
    assert output.isascii()


def test_pipe_gets_few_plain_lines():
    lines = in_pipe(RUN + "    sink.close()")
    assert not any("\x1b" in line for line in lines)
    trained = [line for line in lines if "  lr " in line]
    assert trained == [
        "step 1/40  epoch 0.1/4  1 min 18 s left  loss 1  123 ex/s  lr 0.1  train 2.0 s"
    ]
    assert len([line for line in lines if "validation" in line]) == 4
    assert lines[-2:] == [
        "target reached: acc[red] 1 >= 0.9 at step 40 after 1 min 20 s of training",
        "reached at step 40 after 1 min 20 s of training, acc[red] 1",
    ]


def test_dumb_terminal_gets_plain_lines():
    output, status = on_terminal(RUN + "    sink.close()", TERM="dumb")
    assert status == 0
    assert "\x1b" not in output
    assert "step 1/40" in output


def test_closed_pipe_does_not_stop_training():
    command = [sys.executable, "-c", textwrap.dedent(RUN + "    print('x', file=sys.stderr)")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read().startswith(b"x\n")  # it went on to the end
    process.stderr.close()
    process.wait(timeout=60)


def test_the_time_left_does_not_count_the_steps_before_the_first_line():
    """The first step decomposes all factors: its 60 s will not come again."""
    stream = Stream()
    sink = ConsoleSink(
        metric="m", higher_is_better=True, total_steps=100, stream=stream, interval_s=0.0
    )
    for step, train_s in ((10, 80.0), (20, 100.0)):
        sink.write(Trained(step, train_s, 1.0, 1.0, 0.1, 1.0))
    assert re.findall(r"(\d+ min \d+ s) left", stream.text) == ["12 min 0 s", "2 min 40 s"]


@pytest.mark.parametrize(
    ("epochs", "shown"), [(99, r"\d+\.\d/99"), (100, r"\d+/100"), (1330, r"\d+/1330")]
)
def test_long_runs_show_whole_epochs_in_each_line(epochs, shown):
    stream = Stream()
    total_steps = 3 * epochs
    sink = ConsoleSink(
        metric="m", higher_is_better=True, total_steps=total_steps, stream=stream, interval_s=0.0
    )
    for step in range(1, total_steps + 1):
        sink.write(Trained(step, 1.0 * step, step / 3, 1.0, 0.1, 1.0))
    lines = re.findall(r"  epoch (\S+)  ", stream.text)
    assert len(lines) == total_steps
    assert [line for line in lines if not re.fullmatch(shown, line)] == []


class Stream:
    """A stream that records lines in order, with the time between them set by the test."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return False

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("higher_is_better", "best"),
    [(True, ["", "1", "1", "", "2"]), (False, ["", "", "0.5", "0.5", "0.5"])],
)
def test_each_evaluation_is_shown_and_beside_a_worse_value_the_best(higher_is_better, best):
    stream = Stream()
    sink = ConsoleSink(metric="m", higher_is_better=higher_is_better, stream=stream)
    values = (1.0, 0.5, 0.5, 2.0, 1.0)
    for value in values:
        sink.write(Evaluated(1, 1.0, 1.0, {"a": 7.0, "m": value}))
    shown = re.findall(r"validation: m (\S+)(?:  \(best (\S+)\))?  a 7 ", stream.text)
    assert [(float(value), text) for value, text in shown] == [*zip(values, best, strict=True)]


def test_any_value_is_better_than_nan():
    stream = Stream()
    sink = ConsoleSink(metric="m", higher_is_better=True, stream=stream)
    for value in ("nan", "0.5", "0.4"):
        sink.write(Evaluated(1, 1.0, 1.0, {"m": float(value)}))
    assert re.findall(r"best (\S+)\)", stream.text) == ["0.5"]


def test_training_lines_are_rate_limited(monkeypatch):
    now = 100.0
    monkeypatch.setattr("kfac_bench.record.sinks.console.time.monotonic", lambda: now)
    stream = Stream()
    sink = ConsoleSink(metric="m", higher_is_better=True, stream=stream)
    for step in range(1, 12):
        sink.write(Trained(step, 1.0, 1.0, 1.0, 0.1, 1.0))
        now += 1.0
    assert re.findall(r"^step (\d+) ", stream.text, re.MULTILINE) == ["1", "6", "11"]
