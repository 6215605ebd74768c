"""The training loop: every run of the suite goes through this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from kfac_bench.config import ScheduleConfig, TrainerConfig
from kfac_bench.core import KFAC
from kfac_bench.data.base.batch import Batch, channels_last, to_device
from kfac_bench.data.base.dataset import Data
from kfac_bench.data.base.order import mixed_seed
from kfac_bench.distributed.backend import Backend
from kfac_bench.errors import RunFailedError
from kfac_bench.record.events import (
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
from kfac_bench.tasks.task import Task, reached
from kfac_bench.training import agreement, predictions
from kfac_bench.training.checkpoint import Checkpoint, ValidationMetric
from kfac_bench.training.course import Course
from kfac_bench.training.feed import Feed
from kfac_bench.training.meter import Meter
from kfac_bench.training.saving import Saving
from kfac_bench.training.skipped import SkippedExamples
from kfac_bench.training.state import State, weights_sha256
from kfac_bench.training.stop import Stop
from kfac_bench.training.update import Update, has_batch_norm
from kfac_bench.training.watchdog import Watchdog


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
        config, kfac, backend = self.config, self.kfac, self.backend
        self.ranks = backend.ranks
        self.clock = Clock(config.clock)
        self.course = Course.of(config, self.data.train_size)
        self._eval_freq = config.eval_freq or self.course.steps_per_epoch
        self._feed = Feed(self.data, config, self.seed, backend, self.course)
        self._update = Update(
            *(self.task, self.model, self.optimizer, kfac, config, backend),
            lambda: self._to_device(self._feed.first_example()),
        )
        if kfac is not None:
            kfac.time_stages = config.time_stages
        self._meter = Meter(kfac, self.ranks, self.clock)
        least = 2 * config.accumulate if has_batch_norm(self.model) else 1
        self._skipped = SkippedExamples(self.ranks, self.data.faults, least)
        self._state = State(self.model, self.optimizer, kfac, self._update.scaler, backend)
        self._saving = Saving(
            self.directory / "checkpoints", self.ranks, config, self.course.steps_per_epoch
        )
        self._watchdog = Watchdog(config.watchdog_s, self.directory, self.ranks.rank)
        self._in_trouble = False  # some rank cannot write
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
                self._saving.close()
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
        self._meter.start(self.course.examples_seen(self.step))
        self.clock.start()
        if self._owes_evaluation and (status := self._look(evaluate=True)):
            return status
        for batch in self._batches():
            loss, self._stopping = self._train_step(batch)
            self._tell_of_checkpoint()
            if self._in_trouble:
                self._give_up()
            done = self.step >= self.course.max_steps
            if self.step % self.config.log_freq == 0 or done:
                self._emit_trained(loss)
            if status := self._look(evaluate=self.step % self._eval_freq == 0 or done):
                return status
        return "finished"  # nothing was left to do

    def _look(self, *, evaluate: bool) -> str | None:
        """Evaluate if told to, save if it is time; the run's status if it ends here."""
        reached_target = self._evaluate() if evaluate else False
        over = self.step >= self.course.max_steps or (evaluate and self._time_is_up())
        done = over and not self._owes_evaluation
        if reached_target or done or self._stopping or self._saving.is_due(self.step):
            self.save()
        if reached_target:
            return "reached"
        if done:
            return "finished"
        return "interrupted" if self._stopping else None

    def _time_is_up(self) -> bool:
        limit = self.config.max_train_s
        return limit is not None and self.ranks.max(self.clock.train_s()) >= limit

    def _batches(self) -> Iterator[Batch]:
        """On the device, from the next update to the last."""
        while self.step < self.course.max_steps:
            for batch in self._meter.waiting(self._feed.train(self.step)):
                yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        batch = self.data.prepare(to_device(batch, self.ranks.device))
        return channels_last(batch) if self.config.channels_last else batch

    def tell_of_faults(self) -> None:
        """An event for each file that cannot be read and was not told of; all ranks call it."""
        if self.data.faults.skip:
            self._skipped.report(self.log, self.step, self.clock.train_s())

    def _examples_there(self, batch: Batch) -> int:
        """Of the next update, over all ranks: without those that cannot be read, told of here."""
        if not self.data.faults.skip:
            return self.course.next_batch_size(self.step)
        examples, news, problem = self._skipped.count(batch, self.step + 1)
        if news:
            self.tell_of_faults()
        if problem:
            raise RunFailedError(problem)
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
        trouble = self._saving.has_failed or self.log.problem is not None
        flags = loss.new_tensor([float(bool(self.stop.signal)), float(trouble)])
        total, stops, troubles = self.ranks.sum(torch.cat([loss.reshape(1), flags])).tolist()
        mean = total / self.ranks.world_size
        if not math.isfinite(mean):
            raise RunFailedError(f"the loss is {mean} at step {self.step + 1}; no update was made")
        self._in_trouble = troubles > 0
        long = self._update.decomposes_all()
        self._watchdog.beat()
        self._update.step(batch, loss)
        self.step += 1
        self._meter.add_step()
        # Decompositions may take longer than a step: one more would come out of the time to save.
        return mean, stops > 0 or (long and self.ranks.any(bool(self.stop.signal)))

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
        course = self.course
        factor = self.schedule.factor(
            self.step, course.steps_per_epoch, course.max_steps, course.batch_size
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _emit_trained(self, loss: float) -> None:
        with self._aside():
            found = self._meter.read(self.course.examples_seen(self.step))
            epoch = self.course.epoch(self.step)
            lr = float(self.optimizer.param_groups[0]["lr"])
            self.log.emit(Trained(self.step, self.clock.train_s(), epoch, loss, lr, **found))

    def _evaluate(self) -> bool:
        """Exact metrics of the validation set; whether the target is reached. No training time.

        A rank that is told to stop ends its part: then there are no metrics, and they are owed.
        """
        self._owes_evaluation = True
        if self._stopping:
            return False
        with self._aside():
            train_s = self.ranks.max(self.clock.train_s())
            if self.config.check_ranks:
                agreement.check(self._bare, self.kfac, self.ranks, self.step)
            self.ranks.share_buffers(self._bare)
            self.model.eval()
            evaluation, aside = self.task.evaluation(), self.task.evaluation()
            before, there = self.data.faults.left_out, False
            for batch, counts in self._feed.evaluate(self.stop):
                self._watchdog.beat()
                (evaluation if counts else aside).add(self._bare, self._to_device(batch))
                there = there or counts
            if self.ranks.any(bool(self.stop.signal)):
                self._stopping = True
                return False
            self._owes_evaluation = False
            left_out = self._left_out(before, there)
            metrics = evaluation.metrics(self.ranks)
            epoch = self.course.epoch(self.step)
            self.log.emit(Evaluated(self.step, train_s, epoch, metrics, left_out))
            value, target = metrics[self.task.metric], self.config.target
            metric = ValidationMetric(self.task.metric, value, self.task.higher_is_better)
            self._saving.set_metric(self.step, metric)
            if target is None or not reached(self.task, value, target):
                return False
            self.log.emit(TargetReached(self.step, train_s, self.task.metric, value, target))
            return True

    def _left_out(self, before: int, there: bool) -> int:
        """Examples that all ranks have left out since ``before``; they are told of."""
        if not self.data.faults.skip:
            return 0
        self.tell_of_faults()
        return self._skipped.left_out(before, there)

    def _predict(self) -> None:
        """Keep some examples with what the model makes of them, for people; no training time."""
        count = self.config.predictions
        if not count or not (self.ranks.is_main or self.backend.lockstep):
            return
        with self._aside():
            self.model.eval()
            batches = map(self._to_device, self._feed.show())
            shown = predictions.choose(self.task, self._bare, batches, count)
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

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, no training time and no gradient; the clock has seen what the device did."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        with self.clock.paused(), torch.no_grad():
            yield

    def save(self) -> None:
        """Begin a checkpoint, once per step; a model with a non-finite weight is not one.

        It is written beside the steps that follow; :meth:`_finish_saving` waits for it.
        """
        if self._saving.step == self.step:
            return
        with self._aside():
            if not self._state.is_finite():
                raise RunFailedError(f"a weight is not finite after step {self.step}")
            self.ranks.share_buffers(self._bare)
            shard = self._state.shard(self.clock.train_s(), self._owes_evaluation)
            self._saving.start(self.step, shard)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint on its way; all ranks call it."""
        with self.clock.paused():
            self._saving.finish()
        self._tell_of_checkpoint()

    def _tell_of_checkpoint(self) -> None:
        """An event, once it is on disk."""
        if (saved := self._saving.pop_saved()) is not None:
            self.log.emit(
                Checkpointed(
                    saved.step, self.clock.train_s(), str(saved.path), saved.waited_s, saved.cpu_s
                )
            )

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, of any number of ranks. ``ValueError`` if it does not fit."""
        train_s, self._owes_evaluation = self._state.load(saved)
        self.clock.set(train_s)
        self.step = self._saving.step = saved.step
        self.log.emit(Resumed(self.step, self.clock.train_s(), str(saved.path)))
