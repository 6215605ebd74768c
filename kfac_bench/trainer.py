"""The training loop: every run of the suite goes through this file."""

from __future__ import annotations

import hashlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from kfac_bench import agreement, checkpoint, environment, learning_rate, predictions
from kfac_bench.backends.backend import Backend
from kfac_bench.config import ScheduleConfig, TrainerConfig
from kfac_bench.core import KFAC
from kfac_bench.core.sharded import full, local
from kfac_bench.data.batch import Batch, channels_last, size, to_device
from kfac_bench.data.batches import Shard, mixed_seed, steps_per_epoch
from kfac_bench.data.data import Data
from kfac_bench.errors import UsageError
from kfac_bench.events import (
    Checkpointed,
    Clock,
    Evaluated,
    EventLog,
    Predicted,
    Resumed,
    RunEnded,
    TargetReached,
    Trained,
)
from kfac_bench.skipped import Skipped
from kfac_bench.stages import StageTimes
from kfac_bench.tasks.task import Task, reached
from kfac_bench.update import Update, has_batch_norm
from kfac_bench.watchdog import Watchdog

DEFAULT_EPOCHS = 20
"""Where neither trainer.max_epochs nor trainer.max_steps is set."""

CHECKPOINT_INTERVAL_S = 60.0
"""Between checkpoints at epoch ends: epochs of a demo last milliseconds."""


STAND_INS = 100
"""Examples that a rank without one tries to read before it gives up."""


class RunFailedError(Exception):
    """The run cannot go on, and why: a loss that is no number, a disk that is full."""


@dataclass
class Stop:
    """Set by SIGTERM, SIGUSR1 (a batch system's notice) and SIGINT.

    Ranks agree on it once a step; an evaluation is cut short by it.
    """

    signal: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block."""

        def note(number: int, frame: object) -> None:
            if self.signal == number == signal.SIGINT:
                raise KeyboardInterrupt  # a second Ctrl-C means now
            self.signal = number

        signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {s: signal.signal(s, note) for s in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Trainer:
    """Trains until the target is reached, the steps are used up, or somebody says stop."""

    task: Task
    data: Data
    model: nn.Module
    """As the loss sees it: in the backend's wrapper."""
    optimizer: Optimizer
    kfac: KFAC | None
    config: TrainerConfig
    schedule: ScheduleConfig
    seed: int
    backend: Backend
    log: EventLog
    directory: Path
    """Of the run: checkpoints and predictions go below it."""
    notes: Sequence[str] = ()
    """Lines for the user before it starts: what weights it has."""
    say: Callable[[str], None] = lambda text: None
    """Tells the user a line, on rank 0."""
    step: int = 0
    """Updates done."""
    clock: Clock = field(init=False)
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        self.ranks = self.backend.ranks
        config = self.config
        self.clock = Clock(kind=config.clock)
        self.steps_per_epoch = steps_per_epoch(
            self.data.train_size, config.batch_size, config.drop_last
        )
        self.max_steps = _max_steps(self.config, self.steps_per_epoch)
        self._eval_freq = self.config.eval_freq or self.steps_per_epoch
        self._update = Update(
            self.task,
            self.model,
            self.optimizer,
            self.kfac,
            self.config,
            self.backend,
            self._first_example,
        )
        self._stages = None if self.kfac is None else StageTimes(self.kfac, self.ranks)
        if self.kfac is not None:
            self.kfac.time_stages = self.config.time_stages
        self._has_batch_norm = has_batch_norm(self.model)
        self._skipped = Skipped(self.ranks, self.data.faults)
        self._waited_s = 0.0  # for batches, since the last Trained event
        self._saved_at, self._saved_s = -1, time.monotonic()
        self._writer = checkpoint.Writer(
            self.directory / "checkpoints", self.ranks, config.keep_last, config.keep_best
        )
        self._watchdog = Watchdog(config.watchdog_s, self.directory, self.ranks.rank)
        self._in_trouble = False  # some rank cannot write
        self._figure: tuple[int, checkpoint.Figure] | None = None  # the last, and its step
        self._since = (0, 0.0)  # examples and clock at the last Trained event
        self._stopping = False  # all ranks know that one was told to
        self._owes_evaluation = False  # of this step: it was cut short
        # Labels that kfac.fisher draws: each rank its own; -1 is no epoch of the data order.
        torch.manual_seed(mixed_seed(self.seed, -1, self.ranks.rank))

    def fit(self) -> str:
        """Train; the status of the :class:`RunEnded` event it ends with."""
        with self.stop.listening(), self._watchdog.watching():
            try:
                status, message = self._fit_and_save()
            except Exception:  # of this rank: others may be gone
                self._writer.close()
                raise
        self.clock.stop()
        self.log.emit(
            RunEnded(self.step, self.clock.train_s(), status, message, weights_sha256(self._bare))
        )
        if status != "failed" and (problem := self._problem()):
            self.say(problem)
            return "failed"  # the record does not say how it ended
        return status

    def _fit_and_save(self) -> tuple[str, str]:
        """Status and message; all that was to be saved is on disk then."""
        try:
            status, message = self._fit(), ""
            self._finish_saving()
            if status in ("reached", "finished"):
                self._predict()
        except RunFailedError as error:
            status, message = "failed", str(error)
        try:
            self._finish_saving()
        except RunFailedError as error:
            message += f"; {error}"
        if status != "failed" and (problem := self._problem()):
            status, message = "failed", problem
        return status, message

    def _fit(self) -> str:
        if self.step == 0:
            self._evaluate()
            if self._stopping:
                return "interrupted"
        self._since = (self._examples_seen, self.clock.train_s())
        self.clock.start()
        if self._owes_evaluation and (status := self._look(evaluate=True)):
            return status
        for batch in self._batches():
            loss, self._stopping = self._train_step(batch)
            self._tell_of_checkpoint()
            if self._in_trouble:
                self._give_up()
            done = self.step >= self.max_steps
            if self.step % self.config.log_freq == 0 or done:
                self._emit_trained(loss)
            if status := self._look(evaluate=self.step % self._eval_freq == 0 or done):
                return status
        return "finished"  # nothing was left to do

    def _look(self, *, evaluate: bool) -> str | None:
        """Evaluate if told to, save if it is time; the run's status if it ends here."""
        reached_target = self._evaluate() if evaluate else False
        over = self.step >= self.max_steps or (evaluate and self._time_is_up())
        done = over and not self._owes_evaluation
        if reached_target or done or self._stopping or self._checkpoint_is_due():
            self.save()
        if reached_target:
            return "reached"
        if done:
            return "finished"
        return "interrupted" if self._stopping else None

    def _time_is_up(self) -> bool:
        limit = self.config.max_train_s
        return limit is not None and self.ranks.max(self.clock.train_s()) >= limit

    def _checkpoint_is_due(self) -> bool:
        if self.config.checkpoint_freq is not None:
            return self.step % self.config.checkpoint_freq == 0
        if self.step % self.steps_per_epoch:
            return False
        return self.ranks.any(time.monotonic() - self._saved_s > CHECKPOINT_INTERVAL_S)

    def _batches(self) -> Iterator[Batch]:
        """From the next step on: the order is a function of seed, epoch and rank alone."""
        shard = Shard(self.ranks.rank, self.ranks.world_size)
        while self.step < self.max_steps:
            epoch, start = divmod(self.step, self.steps_per_epoch)
            batches = self.data.train(
                self.config.batch_size, self.seed, epoch, start, shard, self.config.drop_last
            )
            while (batch := self._next(batches)) is not None:
                yield self._to_device(batch)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        began = self.clock.train_s()
        batch = next(batches, None)
        self._waited_s += self.clock.train_s() - began
        return batch

    @property
    def _examples_seen(self) -> int:
        """By all ranks, in all updates."""
        epochs, steps = divmod(self.step, self.steps_per_epoch)
        per_epoch = min(self.steps_per_epoch * self.config.batch_size, self.data.train_size)
        return epochs * per_epoch + steps * self.config.batch_size

    @property
    def _batch_size(self) -> int:
        """Of the next update, over all ranks."""
        start = self.step % self.steps_per_epoch * self.config.batch_size
        return min(self.config.batch_size, self.data.train_size - start)

    def _first_example(self) -> Batch:
        return self._to_device(self._first(self.data.train(1, self.seed, 0, 0, Shard())))

    def _first(self, batches: Iterator[Batch]) -> Batch:
        """The first that has an example; those passed over do not count as left out."""
        left_out = self.data.faults.left_out
        batch = next(filter(size, islice(batches, STAND_INS)), None)
        self.data.faults.left_out = left_out
        if batch is None:
            raise UsageError(f"none of the first {STAND_INS} examples can be read")
        return batch

    def _to_device(self, batch: Batch) -> Batch:
        batch = self.data.prepare(to_device(batch, self.ranks.device))
        return channels_last(batch) if self.config.channels_last else batch

    def tell_of_faults(self) -> None:
        """An event for each file that cannot be read and was not told of; all ranks call it."""
        if self.data.faults.skip:
            self._skipped.tell(self.log, self.step, self.clock.train_s())

    def _examples_there(self, batch: Batch) -> int:
        """Of the next update, over all ranks: without those that cannot be read, told of here."""
        if not self.data.faults.skip:
            return self._batch_size
        alone = self._has_batch_norm and 0 < size(batch) < 2 * self.config.accumulate
        examples, news, too_few = self._skipped.count(batch, alone)
        if news:
            self.tell_of_faults()
        if not examples:
            raise RunFailedError(f"no example of batch {self.step + 1} can be read, on any rank")
        if too_few:
            raise RunFailedError(
                f"of a part of batch {self.step + 1} one example alone can be read, and batch norm "
                "needs two: mend the files, or set a larger trainer.batch_size"
            )
        return examples

    def _train_step(self, batch: Batch) -> tuple[float, bool]:
        """One :class:`Update`, unless the loss is no number.

        Returns the global mean loss, and whether a rank was told to stop.
        """
        self.model.train()
        self._set_learning_rate()
        if self.kfac is not None:
            self.kfac.track_cosine = (self.step + 1) % self.config.log_freq == 0
        loss = self._update.backward(batch, self._examples_there(batch))
        trouble = self._writer.failed or self.log.problem is not None
        flags = loss.new_tensor([float(bool(self.stop.signal)), float(trouble)])
        total, stops, troubles = self.ranks.sum(torch.cat([loss.reshape(1), flags])).tolist()
        mean = total / self.ranks.world_size
        if not math.isfinite(mean):
            raise RunFailedError(f"the loss is {mean} at step {self.step + 1}; no update was made")
        self._in_trouble = troubles > 0
        long = self._decomposes_all()
        self._watchdog.beat()
        self._update.step(batch, loss)
        self.step += 1
        if self._stages is not None:
            self._stages.add()
        # Decompositions may take longer than a step: one more would come out of the time to save.
        return mean, stops > 0 or (long and self.ranks.any(bool(self.stop.signal)))

    def _decomposes_all(self) -> bool:
        """Whether the next update decomposes all factors at once; equal on all ranks."""
        if self.kfac is None or len(self.kfac.plan.slices) > 1:
            return False
        return bool(self.kfac.schedules.slices_due(self.kfac.steps, 1))

    def _give_up(self) -> None:
        """A rank cannot write a checkpoint or the record: save what can be, say what is wrong."""
        self.save()
        self._finish_saving()
        raise RunFailedError(self._problem() or "a disk failed")

    def _problem(self) -> str | None:
        """Why the record is not whole, on any rank; all ranks call it."""
        if not self.ranks.any(self.log.problem is not None):
            return None
        said = self.ranks.gather((self.log.problem or "").encode())
        return next(line.decode() for line in said if line)

    def _set_learning_rate(self) -> None:
        """Of the next update; K-FAC's clip (eq. 16) reads it as the optimizer does."""
        factor = learning_rate.factor(
            self.schedule, self.step, self.steps_per_epoch, self.max_steps, self.config.batch_size
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _emit_trained(self, loss: float) -> None:
        self._synchronize()
        with self.clock.paused():
            train_s = self.clock.train_s()
            examples, seconds = self._examples_seen - self._since[0], train_s - self._since[1]
            waited = self.ranks.max(self._waited_s / seconds if seconds > 0 else 0.0)
            memory = self.ranks.max(environment.peak_memory_bytes(self.ranks.device))
            statistics = self._kfac_statistics() | {
                "data_wait_share": waited,
                "peak_memory_bytes": memory,
            }
            self.log.emit(
                Trained(
                    self.step,
                    train_s,
                    self.step / self.steps_per_epoch,
                    loss,
                    float(self.optimizer.param_groups[0]["lr"]),
                    examples / seconds if seconds > 0 else 0.0,
                    **statistics,
                )
            )
            self._since, self._waited_s = (self._examples_seen, train_s), 0.0

    def _kfac_statistics(self) -> dict[str, Any]:
        """K-FAC's fields of the :class:`Trained` event; all ranks call it."""
        if self.kfac is None or self._stages is None:
            return {}
        counts = torch.tensor(
            [self.kfac.failed_decompositions, self.kfac.dropped_statistics],
            device=self.ranks.device,
        )
        failed, dropped = self.ranks.sum(counts).tolist()
        return self.kfac.statistics() | {
            "stage_mean_s": self._stages.mean_s(),
            "damping": self.kfac.damping,
            "failed_decompositions": failed,
            "dropped_statistics": dropped,
        }

    def _evaluate(self) -> bool:
        """Exact metrics of the validation set; whether the target is reached. No training time.

        A rank that is told to stop ends its part: then there are no metrics, and they are owed.
        """
        self._owes_evaluation = True
        if self._stopping:
            return False
        self._synchronize()
        with self.clock.paused(), torch.no_grad():
            train_s = self.ranks.max(self.clock.train_s())
            self._check_ranks()
            self.ranks.share_buffers(self._bare)
            self.model.eval()
            evaluation, aside = self.task.evaluation(), self.task.evaluation()
            before, there = self.data.faults.left_out, False
            for batch, counts in self._eval_batches():
                self._watchdog.beat()
                (evaluation if counts else aside).add(self._bare, self._to_device(batch))
                there = there or counts
            if self.ranks.any(bool(self.stop.signal)):
                self._stopping = True
                return False
            self._owes_evaluation = False
            left_out = self._left_out(before, there)
            metrics = evaluation.metrics(self.ranks)
            epoch = self.step / self.steps_per_epoch
            self.log.emit(Evaluated(self.step, train_s, epoch, metrics, left_out))
            value, target = metrics[self.task.metric], self.config.target
            figure = checkpoint.Figure(self.task.metric, value, self.task.higher_is_better)
            self._figure = (self.step, figure)
            if target is None or not reached(self.task, value, target):
                return False
            self.log.emit(TargetReached(self.step, train_s, self.task.metric, value, target))
            return True

    def _check_ranks(self) -> None:
        """All ranks call it; those that do not agree end the run before it is saved."""
        if not self.config.check_ranks:
            return
        if (line := agreement.difference(self._bare, self.kfac, self.ranks)) is not None:
            raise RunFailedError(
                f"after step {self.step} {line}: the run goes on from its last checkpoint if it is "
                "started again; on unlike machines set trainer.check_ranks=false"
            )

    def _eval_batches(self) -> Iterator[tuple[Batch, bool]]:
        """Batches of this rank, and whether they count.

        In lockstep, as many as the rank with the most has: others repeat an example.
        """
        shard = Shard(self.ranks.rank, self.ranks.world_size)
        batches = filter(size, self.data.evaluate(self.config.eval_batch_size, shard))
        while True:
            batch = None if self.stop.signal else next(batches, None)
            if not self.backend.lockstep and batch is None:
                return
            if self.backend.lockstep and not self.ranks.any(batch is not None):
                return
            yield batch or self._first(self.data.evaluate(1, Shard())), batch is not None

    def _left_out(self, before: int, there: bool) -> int:
        """Examples that all ranks have left out since ``before``; they are told of."""
        if not self.data.faults.skip:
            return 0
        self.tell_of_faults()
        if not self.ranks.any(there):
            raise RunFailedError("no example of the evaluation set can be read, on any rank")
        return self._skipped.left_out(before)

    def _predict(self) -> None:
        """Keep some examples with what the model makes of them, for people; no training time."""
        count = self.config.predictions
        if not count or not (self.ranks.is_main or self.backend.lockstep):
            return
        self._synchronize()
        with self.clock.paused(), torch.no_grad():
            self.model.eval()
            a_ranks = -(-self.config.eval_batch_size // self.ranks.world_size)
            batches = filter(size, self.data.evaluate(min(a_ranks, predictions.POOL), Shard()))
            shown = predictions.choose(self.task, self._bare, map(self._to_device, batches), count)
            if not shown or not self.ranks.is_main:
                return
            items, complaint = predictions.write(self.directory, self.step, shown)
            if complaint is not None:
                self.say(f"{complaint}; the run itself is complete")
            path = str(self.directory / "predictions" / f"step-{self.step}")
            self.log.emit(Predicted(self.step, self.clock.train_s(), path, items))

    @property
    def _bare(self) -> nn.Module:
        """The model without its wrapper: names in checkpoints know nothing of it."""
        return self.backend.bare(self.model)

    def _synchronize(self) -> None:
        """Let the clock see what the device has really done."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def save(self) -> None:
        """Begin a checkpoint, once per step; a model with a non-finite weight is not one.

        It is written beside the steps that follow; :meth:`_finish_saving` waits for it.
        """
        if self._saved_at == self.step:
            return
        self._synchronize()
        with self.clock.paused(), torch.no_grad():
            finite = all(torch.isfinite(local(p).sum()) for p in self._bare.parameters())
            if self.ranks.any(not finite):
                raise RunFailedError(f"a weight is not finite after step {self.step}")
            self.ranks.share_buffers(self._bare)
            figure = self._figure[1] if self._figure and self._figure[0] == self.step else None
            with _failing():
                self._writer.start(self.step, self._shard(), figure)
            self._saved_at, self._saved_s = self.step, time.monotonic()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint on its way; all ranks call it."""
        with self.clock.paused(), _failing():
            self._writer.finish()
        self._tell_of_checkpoint()

    def _tell_of_checkpoint(self) -> None:
        """An event, once it is on disk."""
        if (saved := self._writer.written()) is not None:
            self.log.emit(
                Checkpointed(
                    saved.step, self.clock.train_s(), str(saved.path), saved.waited_s, saved.cpu_s
                )
            )

    def _shard(self) -> dict[str, Any]:
        """What this rank adds to a checkpoint."""
        cuda = self.ranks.device.type == "cuda"
        shard: dict[str, Any] = {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if cuda else None,
            "kfac": None if self.kfac is None else self.kfac.state_dict(shard=True),
            **self.backend.state(self.model, self.optimizer),
        }
        if self.ranks.is_main:
            shard["scaler"] = self._update.scaler.state_dict()
            shard["train_s"] = self.clock.train_s()
            shard["owes_evaluation"] = self._owes_evaluation
        return shard

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint, of any number of ranks. ``ValueError`` if it does not fit."""
        try:
            self._restore(saved)
        except RuntimeError as error:  # torch's own, of tensors of another kind
            raise ValueError(
                f"{saved.path}: no state of a run ({str(error).splitlines()[0]})"
            ) from None

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        main = saved.shards[0]
        states = [s["kfac"] for s in saved.shards if s["kfac"] is not None]
        if self.kfac is not None and states:
            self.kfac.load_state_dict(*states)
        self._check_optimizer(main["optimizer"], saved.path)
        settings = [
            {k: v for k, v in g.items() if k not in _NO_SETTINGS}
            for g in self.optimizer.param_groups
        ]
        try:
            self.backend.load(self.model, self.optimizer, saved.shards)
        except RuntimeError as error:
            raise ValueError(
                f"{saved.path}: another model ({str(error).splitlines()[0]})"
            ) from None
        for group, before in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(before)  # momenta are the checkpoint's, settings the configuration's
        if main.get("scaler") and self._update.scaler.is_enabled():
            self._update.scaler.load_state_dict(main["scaler"])
        if self.ranks.rank < len(saved.shards):
            own = saved.shards[self.ranks.rank]
            torch.set_rng_state(own["rng"])
            if own["cuda_rng"] is not None and self.ranks.device.type == "cuda":
                torch.cuda.set_rng_state(own["cuda_rng"])
        self.step = self._saved_at = saved.step
        self.clock = self.clock.at(float(main["train_s"]))
        self._owes_evaluation = bool(main.get("owes_evaluation"))
        self.log.emit(Resumed(self.step, self.clock.train_s(), str(saved.path)))

    def _check_optimizer(self, state: dict[str, Any], path: Path) -> None:
        theirs = [set(g) - _NO_SETTINGS for g in state["param_groups"]]
        if [set(g) - _NO_SETTINGS for g in self.optimizer.param_groups] != theirs:
            raise ValueError(f"{path}: another optimizer")


@contextmanager
def _failing() -> Iterator[None]:
    """A checkpoint that cannot be written, on every rank, ends the run."""
    try:
        yield
    except OSError as error:
        raise RunFailedError(f"{error}; older checkpoints are untouched") from None


_NO_SETTINGS = {"params", "step"}
"""Of a parameter group; Apex's optimizers count their steps there."""


def _max_steps(config: TrainerConfig, steps_per_epoch: int) -> int:
    epochs = config.max_epochs
    if epochs is None:
        if config.max_steps is not None:
            return config.max_steps
        epochs = DEFAULT_EPOCHS
    return min(epochs * steps_per_epoch, config.max_steps or sys.maxsize)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over all parameters and buffers, names included; all ranks call it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        whole: Any = full(tensor.detach()).cpu().contiguous()
        digest.update(whole.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
