"""W&B, the primary dashboard, as a view of the event stream.

* The mode, online or offline, is decided before ``wandb.init``. With a key but without a network
  ``wandb.init`` would block for 102 s.
* A run that continues also continues its W&B run, because the run id is the same.
* No failure of W&B stops or delays a training: a separate thread talks to W&B.
* ``eval/*`` is drawn over ``train_s``, because time to target is compared. Everything else is
  drawn over ``step``. W&B's own counter ``_step`` is not set: it must never decrease, but our step
  decreases when a run continues from an earlier checkpoint.
"""

import hashlib
import inspect
import json
import math
import os
import queue
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import wandb
from PIL import Image
from wandb.sdk import wandb_setup

from kfac_bench.errors import UsageError, one_line
from kfac_bench.record.events import Event, Predicted, RunEnded
from kfac_bench.record.runs import number
from kfac_bench.record.sinks.reachable import connect_problem, first_hop
from kfac_bench.record.sinks.view import AXES, ShownRun, metrics_of

ANSWER_S = 20
CONNECT_S = 3.0
INIT_S = 30.0
FINISH_S = 30.0
QUEUED_EVENTS = 1000
ID_LENGTH = 64
NO_KEY = "no API key is configured, see `wandb login`"
ModeName = Literal["online", "offline", "disabled"]
_MODES: dict[str, ModeName] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


class Mode(NamedTuple):
    """``online``, ``offline`` or ``disabled``, and the reason in one line."""

    mode: ModeName
    reason: str


def decide_mode(requested: str = "auto") -> Mode:
    """Choose the mode: as requested, else by WANDB_DISABLED, WANDB_MODE, key and connection.

    This takes 3 s at most.

    Raises:
        UsageError: There is no such mode.
    """
    # Otherwise wandb prints which settings files it reads.
    os.environ.setdefault("WANDB_SILENT", "true")
    is_off = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
    for source, mode in (
        ("logger.mode", requested),
        ("WANDB_DISABLED", "disabled" if is_off else None),
        ("WANDB_MODE", os.environ.get("WANDB_MODE")),
    ):
        if mode and mode != "auto":
            if mode not in _MODES:
                raise UsageError(f"{source}={mode}: use online, offline, disabled or auto")
            return Mode(_MODES[mode], f"{source}={os.environ.get(source, mode)}")
    try:
        # wandb.init uses the same: environment, then settings files, then defaults.
        settings = wandb_setup._setup(start_service=False).settings
        if settings.mode != "online":
            return Mode(_MODES.get(settings.mode, "offline"), "set in wandb's settings file")
        if not _has_key(settings):
            return Mode("offline", NO_KEY)
        https = settings.base_url.startswith("https:")
        proxy = settings.https_proxy if https else settings.http_proxy
        host, port = first_hop(settings.base_url, proxy)
    except Exception as error:
        return Mode("offline", f"cannot read wandb's settings: {one_line(error)[:200]}")
    problem = connect_problem(host, port, CONNECT_S)
    if problem:
        return Mode("offline", f"an API key is configured, but {host}:{port}: {problem}")
    return Mode("online", f"an API key is configured and {host}:{port} answers")


def _has_key(settings: wandb.Settings) -> bool:
    if settings.api_key or settings.identity_token_file:  # environment or settings file
        return True
    try:
        from wandb.sdk.lib.wbauth import read_netrc_auth
    except ImportError:  # before wandb 0.24
        from wandb.sdk.lib import apikey  # type: ignore[attr-defined]

        return bool(apikey.api_key(settings))
    return bool(read_netrc_auth(host=settings.base_url))


def wandb_id(run_id: str) -> str:
    """Return the run id in characters that W&B allows; different ids stay different."""
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "-", run_id)
    if clean == run_id and len(run_id) <= ID_LENGTH:
        return run_id
    return f"{clean[: ID_LENGTH - 9]}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def local_runs(directory: Path, run_id: str, kind: str = "*run") -> list[Path]:
    """Return W&B's folders of the run in its run directory: all, or those of a kind."""
    return sorted(directory.glob(f"wandb/{kind}-????????_??????-{wandb_id(run_id)}"))


def sent(run_id: str, project: str, entity: str | None) -> tuple[float, int, str]:
    """Return the time of the last points on W&B's server, and the run's state there.

    Returns:
        The training time of the latest points in seconds, -inf without a point. The number of
        points from the first one at this time on. And a state such as ``finished`` or ``crashed``,
        empty if the server has no such run.

    Raises:
        UsageError: The server does not answer, or does not send its rows.
    """
    try:
        api = wandb.Api(timeout=ANSWER_S)
        run = api.run(f"{entity or api.default_entity}/{project}/{wandb_id(run_id)}")
        last = run.lastHistoryStep
        # From wandb 0.28 the rows can come from a cache on disk that is older than the newest rows.
        has_cache = "use_cache" in inspect.signature(run.scan_history).parameters
        fresh: dict[str, Any] = {"use_cache": False} if has_cache else {}
        rows = list(run.scan_history(**fresh)) if last >= 0 else []
        if last >= 0 and not rows:  # otherwise the caller would send all rows again
            raise ValueError(f"it has rows up to {last}, but sends none")
        times = [number(row.get("train_s", 0)) for row in rows]
        last_s = max(times, default=-math.inf)
        # A checkpoint is written beside training, so its point may come after later times.
        return last_s, len(times) - times.index(last_s) if times else 0, run.state
    except Exception as error:  # some reads raise errors of wandb's own service, of another class
        if "could not find run" in str(error).lower():
            return -math.inf, 0, ""
        raise UsageError(f"W&B does not say what it has of {run_id}: {error}") from None


class WandbSink:
    """The view in W&B; its files are in ``<run_directory>/wandb``.

    W&B keeps the best value of the run's metric in the run's summary. ``hint`` is one line that
    says where the run is or how to upload it. The sink prints that line at the start and at most
    one line about a failure, always on the thread that calls the sink. A training cannot wait for
    W&B, but an upload can: with ``patience_s`` the sink waits that long, so that nothing is lost if
    W&B is slow.
    """

    def __init__(self, run: ShownRun, patience_s: float = 0.0) -> None:
        self._say = run.say
        self._patience_s = patience_s
        self._run: Any = None
        self._error: Exception | None = None
        self._failed = False
        self._exit_code = 1  # until RunEnded reports success
        best = {"loss": "min", "accuracy": "max"}
        best[run.metric] = "max" if run.higher_is_better else "min"
        self._summaries = {f"eval/{name}": f"last,{which}" for name, which in best.items()}
        self._summaries["train/loss"] = "last,min"
        self._events: queue.Queue[Event | dict[str, float] | None] = queue.Queue(QUEUED_EVENTS)
        # A daemon thread: a hung W&B must not keep the process alive.
        self._worker = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._directory = run.directory.absolute()
        logger = run.logger
        self.mode, self.reason = decide_mode(logger.mode)
        options = {
            "dir": str(self._directory),
            "id": wandb_id(logger.id or run.run_id),
            # wandb itself reads the variables of options that are None.
            "name": None if os.environ.get("WANDB_NAME") else run.run_id[:128],
            "project": logger.project,
            "entity": logger.entity,
            "group": logger.group,
            "tags": logger.tags or None,
            "notes": logger.notes,
            "config": run.config,
        }
        if self.mode != "disabled":
            self._start(options)
        self.failed = self._run is None
        """True if W&B did not get everything; final only after :meth:`close`."""
        if self._run is not None:
            self._worker.start()
        self.hint = self._hint()
        self._say(self.hint)

    def write(self, event: Event) -> None:
        """Pass the event to the thread and return at once."""
        if isinstance(event, RunEnded):
            self._exit_code = 0 if event.status in ("reached", "finished") else 1
        self._hand_over(event)

    def log(self, row: Mapping[str, float]) -> None:
        """Pass a row of :func:`metrics_of` to the thread."""
        self._hand_over(dict(row))

    def _hand_over(self, event: Event | dict[str, float]) -> None:
        if self._run is None or self._failed:
            return
        if self._error is not None:
            self._fail(one_line(self._error)[:200])
            return
        try:
            self._events.put(event, block=self._patience_s > 0, timeout=self._patience_s or None)
        except queue.Full:
            self._fail("its process does not answer")

    def close(self) -> None:
        """Finish the run, which takes little more than ``FINISH_S`` at most."""
        if self._run is None:
            return
        if not self._failed:
            with suppress(queue.Full):
                self._events.put(None, timeout=1.0 + self._patience_s)
                self._worker.join(timeout=FINISH_S + self._patience_s + 5.0)
            if self._error is not None:
                self._fail(one_line(self._error)[:200])
            elif self._worker.is_alive():
                self._fail("its process does not answer")
        self._run = None

    def _start(self, options: Mapping[str, Any]) -> None:
        """Open the run; if that fails online, try offline; if that fails too, give up."""
        try:
            self._run = _init(options, self.mode, FINISH_S + self._patience_s)
        except Exception as error:
            _give_up()  # otherwise wandb keeps the id reserved
            self.reason = one_line(error)[:200]
            if self.mode == "online":
                self.mode = "offline"
                self._start(options)

    def _work(self) -> None:
        """Send events to W&B until None arrives; only this thread talks to W&B."""
        try:
            for axis in AXES:
                self._run.define_metric(axis)
            defined = set(AXES)
            while (event := self._events.get()) is not None:
                row = self._row(event)
                if not row:
                    continue
                for name in [name for name in row if name not in defined]:
                    _define(self._run, name, self._summaries.get(name))
                    defined.add(name)
                self._run.log(row)
            self._run.finish(exit_code=self._exit_code)
        except Exception as error:
            self._error = error

    def _row(self, event: Event | dict[str, float]) -> dict[str, Any]:
        """Return the row for W&B: metrics, or predictions as pictures and a table of texts."""
        if isinstance(event, dict):
            return event
        if not isinstance(event, Predicted):
            return dict(metrics_of(event))
        row: dict[str, Any] = {"step": event.step, "train_s": event.train_s}
        files = [self._directory / i["file"] for i in event.items if i["file"] is not None]
        captions = [i["caption"] for i in event.items if i["file"] is not None]
        if files:
            pictures = zip(_of_one_size(files), captions, strict=True)
            row["predictions"] = [wandb.Image(x, caption=caption) for x, caption in pictures]
        texts = [[i["caption"], i["text"]] for i in event.items if i["text"] is not None]
        if texts:
            row["predicted_texts"] = wandb.Table(columns=["caption", "text"], data=texts)
        return row

    def _fail(self, reason: str) -> None:
        self._failed = self.failed = True
        _give_up()
        self._say(
            f"W&B failed ({reason}): training goes on without it; "
            f"what it has got so far: {self._upload}"
        )

    def _hint(self) -> str:
        if self._run is None:
            return f"W&B is off ({self.reason})"
        if self.mode == "online":
            return f"W&B: {self._run.url}"
        # One line of 80 columns has no room for the path of a run, so the command takes all runs.
        folder = self._directory.parent
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        reason = "no API key" if self.reason == NO_KEY else self.reason
        command = f"kfac-bench wandb upload {shlex.quote(str(folder))}"
        return f"W&B is offline ({reason}); to upload all runs: {command}"

    @property
    def _upload(self) -> str:
        """The command that uploads every part of the run, also the parts before a resume."""
        online = " --include-online" if self.mode == "online" else ""
        return f"wandb sync{online} {shlex.quote(str(self._directory / 'wandb'))}"


def _init(options: Mapping[str, Any], mode: ModeName, finish_s: float) -> Any:
    # Values that JSON does not know, such as paths, become text.
    plain_config = json.loads(json.dumps(options["config"], default=str))
    # Before wandb 0.27 the thread that finishes a run can hang; WandbSink.close reports that.
    limits: dict[str, Any] = {"finish_timeout": finish_s, "finish_timeout_raises": True}
    settings = wandb.Settings(
        silent=True,
        console="off",  # a captured console breaks progress bars
        disable_code=True,
        disable_git=True,  # otherwise wandb uploads uncommitted changes of the user's files
        x_save_requirements=False,
        init_timeout=INIT_S,
        **(limits if limits.keys() <= wandb.Settings.model_fields.keys() else {}),
    )
    return wandb.init(
        **{**options, "config": plain_config},
        mode=mode,
        resume="allow",
        reinit="create_new",
        allow_val_change=True,
        settings=settings,
    )


def _of_one_size(files: Sequence[Path]) -> list[Image.Image]:
    """Return the pictures in one size, with black on the right and below, as W&B requires."""
    pictures = [Image.open(file).convert("RGB") for file in files]
    width, height = (max(sides) for sides in zip(*(p.size for p in pictures), strict=True))
    return [p.crop((0, 0, width, height)) for p in pictures]


def _define(run: Any, name: str, summary: str | None) -> None:
    # Each name is defined, because "*" in wandb matches neither "/" nor an escaped dot.
    # A dot, as in names of layers, is escaped, because it would mean a nested value.
    if "*" in name:  # W&B takes the star for a pattern, and refuses a star inside a name
        return
    axis = "train_s" if name.startswith("eval/") else "step"
    run.define_metric(name.replace(".", r"\."), step_metric=axis, summary=summary)


def _give_up() -> None:
    """Stop wandb's service. Otherwise the exit of Python would wait for it, or fail."""

    def teardown() -> None:
        with suppress(Exception):  # the failure has been reported already
            wandb.teardown()

    thread = threading.Thread(target=teardown, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(timeout=2.0)
