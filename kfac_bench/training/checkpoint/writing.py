"""Writing checkpoints while training goes on.

Each rank copies its shard within the training step. A thread of each rank then writes the copy to
disk. When a rank's file is complete and synced, its SHA-256 becomes the end of the file's name.
Rank 0's thread waits for the files of all ranks, writes the manifest and renames the folder.

The threads send no messages between ranks: messages must have the same order on all ranks, and the
training sends its own at the same time. Threads see each other's files instead. The ranks agree on
failures in `Writer.start` and `Writer.finish`, where all of them meet.
"""

import copy
import errno
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import first_line
from kfac_bench.record import checkpoint_folder
from kfac_bench.record.checkpoint_folder import MANIFEST, ValidationMetric
from kfac_bench.record.own_files import sync_folder

POLL_S = 0.02
OTHERS_S = 5.0
"""Time that a rank that ends by an error waits for the files of other ranks, which may be gone."""
OVERHEAD_BYTES = 1 << 16
"""Approximate size of a file beyond its tensors: names, headers, alignment."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk."""

    path: Path
    step: int
    waited_s: float
    """Seconds that the training waited for it."""
    cpu_s: float
    """Processor seconds of the thread that wrote rank 0's file beside the training."""


@dataclass
class _InFlight:
    """A checkpoint on its way to disk."""

    step: int
    final: Path
    partial: Path
    metric: ValidationMetric | None
    shard: dict[str, Any] | None
    record: object
    """The end of the run's record at this step; None if the shard does not say it."""
    waited_s: float = 0.0
    cpu_s: float = 0.0
    error: Exception | None = None
    own_is_done: threading.Event = field(default_factory=threading.Event)
    """Set when this rank's file is written, or never will be."""
    is_given_up: threading.Event = field(default_factory=threading.Event)
    """Set when the thread must no longer wait for the files of other ranks."""


class Writer:
    """The checkpoints of one run, with at most one in flight.

    All ranks call `start` and `finish` together. Each rank calls the other methods alone. An older
    checkpoint is removed only after a newer one is complete.
    """

    def __init__(
        self,
        directory: Path,
        ranks: Ranks,
        keep_last: int,
        keep_best: int = 0,
        before_commit: Callable[[], None] = lambda: None,
        every: int | None = None,
    ) -> None:
        self._directory, self._ranks = directory, ranks
        self._keep_last, self._keep_best, self._every = keep_last, keep_best, every
        self._before_commit = before_commit
        # A name that all ranks of this start share: a thread must not take the files that a killed
        # process has left behind for the files of this start.
        self._start_name = ""
        self._in_flight: _InFlight | None = None
        self._thread = threading.Thread()
        # Filled by the thread and emptied by the training: a deque needs no lock for this.
        self._complete: deque[_InFlight] = deque()
        self._cpu_lock, self._cpu_s = threading.Lock(), 0.0
        self._thread_clock: int | None = None

    def start(
        self, step: int, shard: dict[str, Any], metric: ValidationMetric | None = None
    ) -> None:
        """Copy `shard` and begin to write the copy, once the previous checkpoint is complete.

        Raises:
            OSError: On every rank, if the previous checkpoint failed on one rank, or if the disk
                has no room.
        """
        self.finish()
        began = time.perf_counter()
        final = checkpoint_folder.path_of(self._directory, step)
        copied, copied_bytes = snapshot(shard)
        self._check_space(final, copied_bytes)
        if not self._start_name:
            self._start_name = self._ranks.gather(uuid.uuid4().hex[:8].encode())[0].decode()
        partial = self._directory / f".{final.name}.{self._start_name}.partial"
        saving = self._in_flight = _InFlight(
            step, final, partial, metric, copied, shard.get("record")
        )
        self._thread = threading.Thread(target=self._write, args=(saving,), daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            # No thread can be started, so nothing may wait for this one.
            self._in_flight = None
            raise
        saving.waited_s = time.perf_counter() - began

    def cpu_s(self) -> float:
        """Return the processor seconds of the threads that wrote so far, or that still write."""
        with self._cpu_lock:
            running = 0.0 if self._thread_clock is None else time.clock_gettime(self._thread_clock)
            return self._cpu_s + running

    @property
    def has_failed(self) -> bool:
        """True if this rank could not write. All ranks must learn of it and call `finish`."""
        return self._in_flight is not None and self._in_flight.error is not None

    def pop_saved(self) -> SavedCheckpoint | None:
        """Return, on rank 0, the oldest complete checkpoint that no call has returned before."""
        if not self._complete:
            return None
        saved = self._complete.popleft()
        return SavedCheckpoint(saved.final, saved.step, saved.waited_s, saved.cpu_s)

    def finish(self) -> None:
        """Wait until the checkpoint in flight is on disk.

        Raises:
            OSError: On every rank, if one rank could not write.
        """
        if self._in_flight is None:
            return
        saving, began = self._in_flight, time.perf_counter()
        # Rank 0's thread waits for the files of all ranks. If one rank failed, its file will never
        # come. So the ranks tell each other about their own files before they join the threads.
        saving.own_is_done.wait()
        if self._ranks.any(saving.error is not None):
            saving.is_given_up.set()
        self._thread.join()
        self._in_flight = None
        # Rank 0 may have failed after its own file was done: the manifest and the rename follow.
        has_failed = self._ranks.any(saving.error is not None)
        saving.waited_s += time.perf_counter() - began
        if has_failed:
            self._complete.clear()
            if self._ranks.is_main:
                shutil.rmtree(saving.partial, ignore_errors=True)
            lines = self._ranks.gather(_line(saving.error, self._directory).encode())
            rank, line = next((r, line.decode()) for r, line in enumerate(lines) if line)
            raise OSError(f"checkpoint {saving.final}: {f'rank {rank}: ' if rank else ''}{line}")

    def close(self) -> None:
        """Complete what can be completed, after an error of this rank: other ranks may be gone."""
        if self._in_flight is None:
            return
        saving, self._in_flight = self._in_flight, None
        saving.own_is_done.wait()
        self._thread.join(OTHERS_S)
        saving.is_given_up.set()
        self._thread.join()

    def _check_space(self, final: Path, own_bytes: int) -> None:
        mine = torch.tensor(
            float(own_bytes + OVERHEAD_BYTES), dtype=torch.float64, device=self._ranks.device
        )
        needed, free = self._ranks.sum(mine).item(), math.inf
        # If the disk cannot be asked, writing will report what is wrong with it.
        with suppress(OSError):
            free = shutil.disk_usage(_existing(self._directory)).free
        if self._ranks.any(self._ranks.is_main and free < needed):
            raise OSError(
                f"checkpoint {final}: it needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
            )

    def _write(self, saving: _InFlight) -> None:
        """Write this rank's file, and on rank 0 the rest. The thread runs this method."""
        if clock_of := getattr(time, "pthread_getcpuclockid", None):  # not on macOS
            self._thread_clock = clock_of(threading.get_ident())
        try:
            if self._ranks.is_main:
                self._remove_leftovers()
            saving.partial.mkdir(parents=True, exist_ok=True)
            _write_synced(saving.partial / f"rank{self._ranks.rank}.pt", saving.shard)
            # Free the copy's memory before rank 0 waits for the other ranks.
            saving.shard = None
            saving.own_is_done.set()
            if self._ranks.is_main and (files := self._wait_for_files(saving)):
                self._commit(saving, files)
        except Exception as error:
            saving.error = error
        finally:
            with self._cpu_lock:
                self._thread_clock, saving.cpu_s = None, time.thread_time()
                self._cpu_s += saving.cpu_s
            if self._ranks.is_main and saving.error is None and not saving.is_given_up.is_set():
                self._complete.append(saving)
            saving.own_is_done.set()

    def _remove_leftovers(self) -> None:
        """Remove the unfinished checkpoints of processes that were killed."""
        for leftover in self._directory.glob(".step-*.partial"):
            if not leftover.name.endswith(f".{self._start_name}.partial"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _wait_for_files(self, saving: _InFlight) -> dict[str, str]:
        """Return the SHA-256 of each rank's file, or nothing if the checkpoint is given up."""
        while True:
            names = os.listdir(saving.partial)
            matches = (re.fullmatch(r"(rank\d+\.pt)\.(\w{64})", name) for name in names)
            files = {m[1]: m[2] for m in matches if m}
            if len(files) == self._ranks.world_size:
                return files
            if saving.is_given_up.wait(POLL_S):
                return {}

    def _commit(self, saving: _InFlight, files: dict[str, str]) -> None:
        """Write the manifest, rename the folder into place, and remove old checkpoints."""
        for name, digest in files.items():
            (saving.partial / f"{name}.{digest}").rename(saving.partial / name)
        manifest = {"step": saving.step, "world_size": len(files), "sha256": files}
        if saving.metric is not None:
            manifest["metric"] = asdict(saving.metric)
        # Whoever reads the record of a finished run can check it without torch.
        if saving.record is not None:
            manifest["record"] = saving.record
        with (saving.partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        self._before_commit()
        # The order is what makes a checkpoint atomic: first the files and their names reach the
        # disk, then the folder gets its name, then this name reaches the disk. A power cut at any
        # point leaves either the whole checkpoint or a folder that does not count.
        sync_folder(saving.partial)
        # A damaged checkpoint of the same step may be there: the run was continued before it.
        shutil.rmtree(saving.final, ignore_errors=True)
        saving.partial.rename(saving.final)
        sync_folder(self._directory)
        with suppress(OSError):
            checkpoint_folder.remove_old(
                self._directory, saving.step, self._keep_last, self._keep_best, self._every
            )


def snapshot(state: Any) -> tuple[Any, int]:
    """Return a copy of `state` and the bytes of its tensors, each counted once.

    The copy's tensors are on the CPU and share no memory with `state`, which training changes while
    the copy is written. Two tensors that are the same view of one memory (tied weights) stay one
    tensor.
    """
    seen: dict[tuple[Any, ...], Tensor] = {}
    copied = _copy(state, seen)
    return copied, sum(t.nbytes for t in seen.values())


def _copy(x: Any, seen: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(x, Tensor):
        view = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype)
        if view not in seen:
            # A copy of the view alone: torch.save writes the whole memory behind a tensor, which
            # may be much larger than the view.
            seen[view] = x.detach().to("cpu", copy=True)
        return seen[view]
    if isinstance(x, dict):
        # copy.copy keeps the dict's own type and attributes: state_dict() keeps versions there.
        copied = copy.copy(x)
        for k, v in x.items():
            copied[k] = _copy(v, seen)
        return copied
    if isinstance(x, list | tuple):
        return type(x)(_copy(v, seen) for v in x)
    return copy.deepcopy(x)


class _HashingFile:
    """A file that computes the SHA-256 of what it should contain, and notes why a write failed.

    Hashing here instead of reading the file again means that the hash also protects against a disk
    that did not store what was written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write and hash `data`."""
        self.sha256.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Flush the file. `torch.save` calls this method at its end."""
        self._file.flush()


def _write_synced(path: Path, state: dict[str, Any] | None) -> None:
    """Write and sync the file, then add its hash to its name."""
    with path.open("wb") as raw:
        file = _HashingFile(raw)
        try:
            torch.save(state, file)  # type: ignore[arg-type]
        except RuntimeError as error:
            # After a failed write torch only says that its file is cut off. The cause says more.
            raise (file.error or error) from None
        raw.flush()
        os.fsync(raw.fileno())
    path.rename(f"{path}.{file.sha256.hexdigest()}")


def _existing(directory: Path) -> Path:
    """Return the directory, or the nearest folder above that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _has_no_inodes(directory: Path) -> bool:
    """Return whether a disk with free bytes is full all the same: each file needs an inode."""
    try:
        disk = os.statvfs(_existing(directory))
    except OSError:
        return False
    # Some file systems have no fixed number of inodes and report 0 of 0.
    return disk.f_files > 0 and disk.f_favail == 0


def _line(error: Exception | None, directory: Path) -> str:
    if isinstance(error, OSError) and error.strerror:
        is_full = error.errno == errno.ENOSPC and _has_no_inodes(directory)
        return error.strerror + (" (no inodes are left, see df -i)" if is_full else "")
    return "" if error is None else first_line(error)
