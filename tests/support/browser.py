"""A real browser for tests: Chromium without a window, driven by its DevTools protocol.

Over a pipe (``--remote-debugging-pipe``): JSON objects, each ended by a zero byte, on the
browser's file descriptors 3 and 4. No port to find, no driver, no websocket.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *(
        "--remote-debugging-pipe",
        "--no-first-run",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
    ),
    # what it would send home by itself is not the page's doing
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def find() -> str | None:
    """The browser's path, if there is one."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def require() -> str:
    """The browser's path. Without one the test is skipped, or fails where one must be there."""
    if (found := find()) is not None:
        return found
    missing = f"no Chromium (looked for $CHROMIUM, {', '.join(NAMES)}): make browser installs one"
    if os.environ.get("KFAC_BENCH_REQUIRE_BROWSER") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


class Page:
    """One tab: calls of the protocol, and the events that came meanwhile."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call and wait for the result."""
        return self._browser.call(method, self._session, **params)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of that name so far."""
        return [e["params"] for e in self._browser.events if e["method"] == method]

    def open(self, path: Path) -> None:
        """Load the file, and wait until it is loaded and drawn."""
        loads = len(self.events("Page.loadEventFired"))
        self.call("Page.navigate", url=path.as_uri())
        self._browser.wait(lambda: len(self.events("Page.loadEventFired")) > loads)
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.run(f"{drawn}.then(() => 1)")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, a promise's when it is kept."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """``kind``: ``Moved``, ``Pressed`` or ``Released``, at a place of the window."""
        held = {"Pressed": {"button": "left", "clickCount": clicks}}
        held["Released"] = held["Pressed"]
        buttons = 0 if kind == "Released" else 1
        self.call(
            "Input.dispatchMouseEvent",
            type=f"mouse{kind}",
            x=x,
            y=y,
            buttons=buttons,
            **held.get(kind, {}),
        )

    def complaints(self) -> list[str]:
        """Exceptions, what the console says, and what the browser logs, such as blocked things."""
        thrown = self.events("Runtime.exceptionThrown")
        said = self.events("Runtime.consoleAPICalled") + self.events("Log.entryAdded")
        return [json.dumps(e) for e in thrown + said]

    def requests(self) -> list[str]:
        """All addresses that were asked for, without data inside of the page."""
        asked = [e["request"]["url"] for e in self.events("Network.requestWillBeSent")]
        return [url for url in asked if not url.startswith("data:")]

    def cpu_s(self) -> float:
        """Processor seconds of all the page's tasks since it was opened: not those of the clock."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Show it in a window of that size, in light or dark mode."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50, 1)))")


class Browser:
    """The process and the pipe to it."""

    def __init__(self, path: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # above 9, so that making them 3 and 4 overwrites neither
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        start = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", start, "bash", path, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (*ends, theirs_in, theirs_out):
            os.close(fd)
        self._in, self._out = ours_in, ours_out
        self._buffer, self._number = b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []

    def page(self) -> Page:
        """A new tab, and no events of those before."""
        self.events.clear()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        return Page(self, attached["sessionId"])

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call the protocol; its errors are assertions."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        self.wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, until: Any) -> None:
        """Take messages until ``until()``; an assertion if the browser is gone or silent."""
        end = time.monotonic() + PATIENCE_S
        while not until():
            left = end - time.monotonic()
            ready, _, _ = select.select([self._in], [], [], max(0.0, left))
            assert ready, f"the browser did not answer in {PATIENCE_S} s"
            received = os.read(self._in, 1 << 20)
            assert received, f"the browser ended with exit code {self._process.wait()}"
            *messages, self._buffer = (self._buffer + received).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                else:
                    self.events.append(message)

    def close(self) -> None:
        """End it and all its processes."""
        os.close(self._out)  # it ends when nobody can call it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start one (dear: some seconds; one per module is enough), and end it."""
    started = Browser(require(), profile)
    try:
        yield started
    finally:
        started.close()


if __name__ == "__main__":  # make browser asks whether there is one
    sys.exit(find() is None)
