"""Writing beside the training: each rank copies its part in the step, a thread does the rest.

A rank's file gets its SHA-256 as the end of its name once it is whole and synced. Rank 0's thread
waits for all of them, writes the manifest and renames the folder into place. Threads use no
messages, which belong to the training; ranks agree where they meet anyway (:class:`Writer`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kfac_bench.distributed.ranks import Ranks
from kfac_bench.training.checkpoint import folder
from kfac_bench.training.checkpoint.folder import MANIFEST, Figure
from kfac_bench.training.checkpoint.snapshot import nbytes, snapshot

POLL_S = 0.02
OTHERS_S = 5.0
"""How long a rank that ends by an error waits for the parts of others, which may be gone."""
OVERHEAD_BYTES = 1 << 16
"""Of a file over its tensors, about: names, headers, alignment."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete on disk."""

    path: Path
    step: int
    waited_s: float
    """Seconds that the training waited for it."""
    cpu_s: float
    """Processor seconds of the thread that wrote rank 0's part, beside the training."""


@dataclass
class _Job:
    """A checkpoint on its way to disk."""

    step: int
    final: Path
    partial: Path
    figure: Figure | None
    shard: dict[str, Any] | None
    waited_s: float = 0.0
    cpu_s: float = 0.0
    error: Exception | None = None
    own: threading.Event = field(default_factory=threading.Event)
    """This rank's part is written, or never will be."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """The parts of other ranks are waited for no longer."""


class Writer:
    """Checkpoints of one run, at most one at a time on its way.

    All ranks call :meth:`start` and :meth:`finish` together; all else is this rank's own. An older
    checkpoint is removed only after a newer one is complete.
    """

    def __init__(self, directory: Path, ranks: Ranks, keep_last: int, keep_best: int = 0) -> None:
        self._directory, self._ranks = directory, ranks
        self._keep_last, self._keep_best = keep_last, keep_best
        self._word = ""  # of this start: what an earlier one has left is not taken for ours
        self._job: _Job | None = None
        self._thread = threading.Thread()
        self._complete: deque[_Job] = deque()

    def start(self, step: int, shard: dict[str, Any], figure: Figure | None = None) -> None:
        """Copy ``shard`` and begin to write it, once the one before is complete.

        Raises ``OSError`` on every rank if that failed on one, or if the disk has no room.
        """
        self.finish()
        began = time.perf_counter()
        final, copied = folder.path_of(self._directory, step), snapshot(shard)
        self._check_space(final, nbytes(copied))
        self._word = self._word or self._ranks.gather(uuid.uuid4().hex[:8].encode())[0].decode()
        partial = self._directory / f".{final.name}.{self._word}.partial"
        job = self._job = _Job(step, final, partial, figure, copied)
        self._thread = threading.Thread(target=self._write, args=(job,), daemon=True)
        self._thread.start()
        job.waited_s = time.perf_counter() - began

    @property
    def failed(self) -> bool:
        """Whether this rank could not write: then all must be told, and :meth:`finish`."""
        return self._job is not None and self._job.error is not None

    def written(self) -> Written | None:
        """On rank 0: a checkpoint that is complete by now and was not asked for before."""
        if not self._complete:
            return None
        job = self._complete.popleft()
        return Written(job.final, job.step, job.waited_s, job.cpu_s)

    def finish(self) -> None:
        """Wait until all is on disk. Raises ``OSError`` on every rank if one could not write."""
        if self._job is None:
            return
        job, began = self._job, time.perf_counter()
        job.own.wait()
        failed = self._ranks.any(job.error is not None)
        if failed:
            job.given_up.set()
        self._thread.join()
        self._job = None
        failed = self._ranks.any(job.error is not None)
        job.waited_s += time.perf_counter() - began
        if failed:
            self._complete.clear()
            if self._ranks.is_main:
                shutil.rmtree(job.partial, ignore_errors=True)
            said = self._ranks.gather(_line(job.error).encode())
            rank, line = next((r, line.decode()) for r, line in enumerate(said) if line)
            raise OSError(f"checkpoint {job.final}: {f'rank {rank}: ' if rank else ''}{line}")

    def close(self) -> None:
        """After an error of this rank, when others may be gone: complete what can be."""
        if self._job is None:
            return
        job, self._job = self._job, None
        job.own.wait()
        self._thread.join(OTHERS_S)
        job.given_up.set()
        self._thread.join()

    def _check_space(self, final: Path, own_bytes: int) -> None:
        mine = torch.tensor(
            float(own_bytes + OVERHEAD_BYTES), dtype=torch.float64, device=self._ranks.device
        )
        needed, free = self._ranks.sum(mine).item(), math.inf
        with suppress(OSError):  # then writing will say it
            there = next(p for p in (self._directory, *self._directory.parents) if p.exists())
            free = shutil.disk_usage(there).free
        if self._ranks.any(self._ranks.is_main and free < needed):
            raise OSError(
                f"checkpoint {final}: it needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
            )

    def _write(self, job: _Job) -> None:
        """The thread."""
        try:
            if self._ranks.is_main:
                for left in self._directory.glob(".step-*.partial"):  # by a process that was killed
                    if not left.name.endswith(f".{self._word}.partial"):
                        shutil.rmtree(left, ignore_errors=True)
            job.partial.mkdir(parents=True, exist_ok=True)
            _write_synced(job.partial / f"rank{self._ranks.rank}.pt", job.shard)
            job.shard = None
            job.own.set()
            if self._ranks.is_main and (files := self._wait_for_parts(job)):
                self._commit(job, files)
        except Exception as error:
            job.error = error
        finally:
            job.cpu_s = time.thread_time()
            if self._ranks.is_main and job.error is None and not job.given_up.is_set():
                self._complete.append(job)
            job.own.set()

    def _wait_for_parts(self, job: _Job) -> dict[str, str]:
        """SHA-256 by file, of all ranks; nothing if they are not waited for any longer."""
        while True:
            found = (re.fullmatch(r"(rank\d+\.pt)\.(\w{64})", n) for n in os.listdir(job.partial))
            files = {m[1]: m[2] for m in found if m}
            if len(files) == self._ranks.world_size:
                return files
            if job.given_up.wait(POLL_S):
                return {}

    def _commit(self, job: _Job, files: dict[str, str]) -> None:
        """Write the manifest, rename the folder into place, let old ones go."""
        for name, digest in files.items():
            (job.partial / f"{name}.{digest}").rename(job.partial / name)
        manifest = {"step": job.step, "world_size": len(files), "sha256": files}
        if job.figure is not None:
            manifest["figure"] = asdict(job.figure)
        with (job.partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(job.partial)
        shutil.rmtree(job.final, ignore_errors=True)
        job.partial.rename(job.final)
        _sync_directory(self._directory)
        with suppress(OSError):
            folder.remove_old(self._directory, job.step, self._keep_last, self._keep_best)


class _Hashing:
    """A file that knows the SHA-256 of what was meant to be in it, and why a write failed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all."""
        self.sha256.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """``torch.save`` calls it at the end."""
        self._file.flush()


def _write_synced(path: Path, state: dict[str, Any] | None) -> None:
    """Write, sync, and add the hash to the name."""
    with path.open("wb") as raw:
        file = _Hashing(raw)
        try:
            torch.save(state, file)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch's own after a failed write: that its file is cut off
            raise (file.error or error) from None
        raw.flush()
        os.fsync(raw.fileno())
    path.rename(f"{path}.{file.sha256.hexdigest()}")


def _line(error: Exception | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "" if error is None else (str(error).splitlines() or [type(error).__name__])[0]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
