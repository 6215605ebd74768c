"""The training loop; every run of the suite goes through this file.

:mod:`.run` builds a :class:`Trainer` and calls :meth:`Trainer.fit`. One update of the weights is in
:mod:`.update`. What a run leaves behind are the events that the trainer emits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from kfac_bench.config import ScheduleConfig, TrainerConfig
from kfac_bench.core import KFAC
from kfac_bench.core.execution.background import wait_for_all
from kfac_bench.data.base.batch import Batch, channels_last, to_device
from kfac_bench.data.base.dataset import Data, Fingerprint
from kfac_bench.data.base.order import mixed_seed
from kfac_bench.data.images.random_methods import Mixup
from kfac_bench.distributed.backend import Backend
from kfac_bench.distributed.ranks import lost_rank
from kfac_bench.errors import RunFailedError, shortage
from kfac_bench.randomness import preserve_rng, seed_python_and_numpy
from kfac_bench.record.event_log import EventLog
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    PlanChosen,
    Predicted,
    RunEnded,
    TargetReached,
    Trained,
)
from kfac_bench.record.progress import progress
from kfac_bench.tasks.task import Task, reached
from kfac_bench.training import predictions
from kfac_bench.training.checkpoint import Checkpoint, ValidationMetric
from kfac_bench.training.rank_batches import RankBatches, RunLength, SkippedExamples
from kfac_bench.training.saving import Saving
from kfac_bench.training.state import State, check_same_model, weights_sha256
from kfac_bench.training.step_results import Clock, Meter, PendingStepResults
from kfac_bench.training.stop import Stop, Watchdog
from kfac_bench.training.update import Update, has_batch_norm


@dataclass
class Trainer:
    """One run: it ends at the target, after the last step, or when a signal arrives."""

    task: Task
    data: Data
    model: nn.Module
    """The model in the wrapper of the backend, as the loss sees it."""
    optimizer: Optimizer
    kfac: KFAC | None
    config: TrainerConfig
    schedule: ScheduleConfig
    seed: int
    backend: Backend
    log: EventLog
    directory: Path
    """The folder of the run, for checkpoints and predictions."""
    notes: Sequence[str] = ()
    """Lines for the user before the run starts, such as where weights come from."""
    say: Callable[[str], None] = lambda text: None
    """Prints a line for the user, on rank 0 only."""
    step: int = 0
    """Number of updates so far. If a loss was not finite: of updates before this loss."""
    loss: float = math.nan
    """Mean loss over all ranks, of the newest step whose result has been read."""
    fingerprint: Fingerprint = field(default_factory=dict)
    """The identity of the data, on rank 0 only; each checkpoint holds it."""
    average: AveragedModel | None = None
    """The moving average of the weights, which is evaluated in their place; None: no average."""
    mixup: Mixup | None = None
    """Mixes the examples of a training batch; None: they stay."""
    timeout_s: float = 600.0
    """Seconds that a rank waits for the others (backend.timeout_s)."""
    clock: Clock = field(init=False)
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        config, kfac, backend = self.config, self.kfac, self.backend
        self.ranks = backend.ranks
        self.length = length = RunLength.of(config, self.data.train_size)
        self._saving = Saving(
            self.directory / "checkpoints",
            self.ranks,
            config,
            length.steps_per_epoch,
            # A power cut must not leave a checkpoint that is ahead of the record.
            lambda: self.log.sync(),
        )
        # Without the thread that writes checkpoints.
        self.clock = Clock(config.clock, not_training_s=self._saving.cpu_s)
        self._eval_freq = config.eval_freq or self.length.steps_per_epoch
        self._rank_batches = RankBatches(self.data, config, self.seed, backend, self.length)
        self._update = Update(
            self.task,
            self.model,
            self.optimizer,
            kfac,
            config,
            backend,
            lambda: self._to_device(self._rank_batches.first_example()),
        )
        if kfac is not None:
            kfac.time_stages = config.time_stages
        self._meter = Meter(kfac, self.ranks, self.clock)
        # Batch norm needs two examples for a variance, in each part of a batch.
        least = 2 * config.accumulate if has_batch_norm(self.model) else 1
        self._skipped = SkippedExamples(self.ranks, self.data.faults, least)
        self._state = State(
            self.model, self.optimizer, kfac, self._update.scaler, backend, self.average
        )
        several = self.ranks.world_size > 1
        watchdog_s = config.watchdog_s
        if watchdog_s is None and several:
            # Ranks that wait for a rank that hangs end first: their own error says more.
            watchdog_s = 1.1 * self.timeout_s + 5.0
        self._watchdog = Watchdog(watchdog_s, self.directory, self.ranks.rank, in_c_code=several)
        self._pending = PendingStepResults(self.ranks)
        self._cannot_write = False  # some rank cannot write a checkpoint or the record
        self._stopping = False  # some rank was told to stop, and all ranks know
        self._is_spoilt = False  # the weights have had an update of a loss that is not finite
        self._owes_evaluation = False  # the evaluation of this step was cut short
        # Each rank draws its own labels for kfac.fisher. Epochs of the data never use -1.
        torch.manual_seed(mixed_seed(self.seed, -1, self.ranks.rank))

    def fit(self) -> str:
        """Train, and return the status of the final :class:`RunEnded` event."""
        # A signal must not end this process before its last event is written.
        with self.stop.listening():
            with self._watchdog.watching():
                try:
                    status, message = self._fit_and_save()
                except BaseException as error:  # of this rank alone: other ranks may be gone
                    if isinstance(error, Exception):
                        self._saving.close()
                    self._record_error(error)
                    raise
            self.clock.stop()
            digest = "" if self._is_spoilt else weights_sha256(self._evaluated)
            # The other ranks may have failed elsewhere, so a failed run sends no more messages.
            train_s = self.clock.train_s() if status == "failed" else self._slowest_train_s()
            self.log.emit(RunEnded(self.step, train_s, status, message, digest))
        if status != "failed" and (problem := self._problem()):
            self.say(problem)
            return "failed"  # the record lacks its last event
        return status

    def status_after(self, error: BaseException) -> str:
        """Return the status of a run that an error ends.

        A run that was told to stop counts as interrupted: a batch system starts it again.
        """
        told = isinstance(error, KeyboardInterrupt) or self.stop.signal
        return "interrupted" if told else "failed"

    def _record_error(self, error: BaseException) -> None:
        """End the record of a run that an error ends. It sends no messages to other ranks."""
        self.clock.stop()
        lost = lost_rank(error)
        text = f"lost another rank: {lost}" if lost else shortage(error) or str(error)
        message = " ".join(text.split())[:300] or type(error).__name__
        status = self.status_after(error)
        # The error that ends the run must reach the user, even if a sink fails too.
        with suppress(Exception):
            self.log.emit(RunEnded(self.step, self.clock.train_s(), status, message))

    def _fit_and_save(self) -> tuple[str, str]:
        """Train and save, and return status and message. Afterwards all checkpoints are on disk."""
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
        # Curves start with the metrics of the initial weights.
        if self.step == 0:
            is_reached = self._evaluate()
            if self._stopping:
                return "interrupted"
            if is_reached:
                self.save()
                return "reached"
        # The clock starts here: building the run and the first evaluation are not training.
        self._meter.start(self.length.examples_seen(self.step))
        self.clock.start()
        if self._owes_evaluation and (status := self._evaluate_and_save(evaluate=True)):
            return status
        for batch in self._batches():
            self._train_step(batch)
            self._report_checkpoint()
            done = self.step >= self.length.max_steps
            is_logged = self._is_logged(self.step)
            if is_logged:  # the event needs the loss of its own step
                self._read_result()
            if self._cannot_write:
                self._give_up()
            if is_logged:
                self._emit_trained()
            if status := self._evaluate_and_save(evaluate=self.step % self._eval_freq == 0 or done):
                return status
        return "finished"  # a resumed run that had no step left

    def _is_logged(self, step: int) -> bool:
        """Return whether a :class:`Trained` event follows this step."""
        return step % self.config.log_freq == 0 or step >= self.length.max_steps

    def _evaluate_and_save(self, *, evaluate: bool) -> str | None:
        """Evaluate if asked to, save if due, and return the status if the run ends here."""
        reached_target = self._evaluate() if evaluate else False
        time_is_up = evaluate and self._time_is_up()
        over = self.step >= self.length.max_steps or time_is_up
        done = over and not self._owes_evaluation
        if reached_target or done or self._stopping or self._saving.is_due(self.step):
            # If the process is killed before its last event, the next start must end here, too.
            self.save(evaluate_again=reached_target or time_is_up)
        if reached_target:
            return "reached"
        if done:
            return "finished"
        return "interrupted" if self._stopping else None

    def _time_is_up(self) -> bool:
        limit = self.config.max_train_s
        return limit is not None and self._slowest_train_s() >= limit

    def _slowest_train_s(self) -> float:
        """Return the largest training clock of all ranks. All ranks call this.

        The clock of rank 0 pauses while it writes events, and the others wait for rank 0 then.
        """
        return self.ranks.max(self.clock.train_s())

    def _batches(self) -> Iterator[Batch]:
        """Yield the batches of all remaining updates, on the device."""
        while self.step < self.length.max_steps:
            for batch in self._meter.waiting(self._rank_batches.train(self.step)):
                moved = self._to_device(batch)
                yield moved if self.mixup is None else self.mixup(moved, self.step)

    def _to_device(self, batch: Batch) -> Batch:
        batch = self.data.prepare(to_device(batch, self.ranks.device))
        return channels_last(batch) if self.config.channels_last else batch

    def report_faults(self) -> None:
        """Emit an event for each new file that cannot be read. All ranks call this."""
        with self.clock.paused():
            self._skipped.report(self.log, self.step, self.clock.train_s())

    def _count_examples(self, batch: Batch) -> int:
        """Return the examples of the next update on all ranks; unreadable ones do not count."""
        expected = self.length.next_batch_size(self.step)
        examples, has_new_faults, problem = self._skipped.count(batch, self.step + 1, expected)
        if has_new_faults:
            self.report_faults()
        if problem:
            raise RunFailedError(problem)
        return examples

    def _train_step(self, batch: Batch) -> None:
        """Make one :class:`Update`, and read the result of the step before.

        Raises:
            RunFailedError: The loss of the step before is not finite.
        """
        self.model.train()
        self._set_learning_rate()
        if self.kfac is not None:
            self.kfac.track_cosine = self._is_logged(self.step + 1)
        # The loss of a problem file may draw from these.
        seed_python_and_numpy(mixed_seed(self.seed, -3, self.step, self.ranks.rank))
        loss = self._update.backward(batch, self._count_examples(batch))
        # Not before: the device works at this step while the host waits for the step before.
        self._read_result()
        self._watchdog.beat()
        self._pending.send(
            self.step + 1,
            loss,
            should_stop=bool(self.stop.signal),
            cannot_write=self._saving.has_failed or self.log.problem is not None,
        )
        is_long = self.kfac is not None and self.kfac.will_decompose_all
        chosen = None if self.kfac is None else self.kfac.choice
        with self._showing_decompositions():
            self._update.step(batch, loss)
        if self.average is not None:
            self.average.update_parameters(self._bare)
        self.step += 1
        if self.kfac is not None and self.kfac.choice != chosen:
            self._emit_choice(self.kfac)
        self._meter.add_step()
        # Decompositions can take long. If a signal arrived meanwhile, other steps would use up the
        # time that is left for saving. So the ranks ask each other once more. A process alone
        # knows its signal without a message.
        if is_long or self.ranks.world_size == 1:
            self._stopping = self._stopping or self.ranks.any(bool(self.stop.signal))

    def _showing_decompositions(self) -> AbstractContextManager[None]:
        """Show how far K-FAC is, if the next step decomposes all factors."""
        kfac = self.kfac
        if kfac is None or not kfac.will_decompose_all:
            return nullcontext()
        return progress.task("K-FAC decomposes its factors", lambda: kfac.decomposed)

    def _read_result(self) -> None:
        """Read the result of the last step, unless it has been read. All ranks call this.

        Raises:
            RunFailedError: The loss of the step is not finite.
        """
        if (result := self._pending.read()) is None:
            return
        if not math.isfinite(result.loss):
            # The update of this loss has been made, so nothing may keep or hash the weights.
            self._is_spoilt, self.step = True, result.step - 1
            saved = self._saving.step
            restart = (
                f"continues from the checkpoint of step {saved}"
                if saved >= 0
                else "begins at step 0"
            )
            raise RunFailedError(
                f"the loss is {result.loss} at step {result.step}; the weights are lost, and a "
                f"restart {restart}"
            )
        self.loss = result.loss
        self._stopping = self._stopping or result.should_stop
        self._cannot_write = self._cannot_write or result.cannot_write

    def _give_up(self) -> None:
        """Save what can be saved, and end the run: a rank cannot write."""
        self.save()
        self._finish_saving()
        raise RunFailedError(self._problem() or "a disk failed")

    def _problem(self) -> str | None:
        """Return why the record is incomplete on any rank, or None. All ranks call this."""
        if not self.ranks.any(self.log.problem is not None):
            return None
        problems = self.ranks.gather((self.log.problem or "").encode())
        return next(problem.decode() for problem in problems if problem)

    def _set_learning_rate(self) -> None:
        """Set the learning rate of the next update. The KL clip (eq. 16) reads the same value."""
        length = self.length
        factor = self.schedule.factor(
            self.step, length.steps_per_epoch, length.max_steps, length.batch_size
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def _emit_trained(self) -> None:
        with self._outside_training():
            metrics = self._meter.read(self.length.examples_seen(self.step))
            epoch = self.length.epoch(self.step)
            lr = float(self.optimizer.param_groups[0]["lr"])
            train_s = self._slowest_train_s()
            self.log.emit(Trained(self.step, train_s, epoch, self.loss, lr, **metrics))

    def _emit_choice(self, kfac: KFAC) -> None:
        """Record and say what K-FAC has chosen within its budget."""
        assert kfac.choice is not None
        options = asdict(kfac.choice)
        overhead = options.pop("overhead")
        sent = kfac.report().payload_bytes()
        with self.clock.paused():
            self.log.emit(PlanChosen(self.step, self.clock.train_s(), options, overhead, sent))
            self.say(str(kfac.choice))

    def _evaluate(self) -> bool:
        """Compute the metrics of the whole validation set; return whether the target is reached.

        The time does not count as training time. If a rank is told to stop, the evaluation ends
        without metrics, and the resumed run evaluates first.
        """
        self._read_result()
        self._owes_evaluation = True
        if self._stopping:
            return False
        named = progress.task("evaluation", self._rank_batches.evaluated)
        with self._outside_training(), self._own_randomness(), named:
            train_s = self._slowest_train_s()
            if self.config.check_ranks:
                check_same_model(self._bare, self.kfac, self.ranks, self.step)
            self._share_buffers()
            self.model.eval()
            # Ranks run equally many forwards. Batches that only fill up do not count.
            evaluation, ignored = self.task.evaluation(), self.task.evaluation()
            before, has_examples = self.data.faults.left_out, False
            for batch, counts in self._rank_batches.evaluate(self.stop):
                self._watchdog.beat()
                (evaluation if counts else ignored).add(self._evaluated, self._to_device(batch))
                has_examples = has_examples or counts
            if self.ranks.any(bool(self.stop.signal)):
                self._stopping = True
                return False
            self._owes_evaluation = False
            self.report_faults()
            left_out = self._skipped.left_out(before, has_examples)
            metrics = evaluation.metrics(self.ranks)
            epoch = self.length.epoch(self.step)
            self.log.emit(Evaluated(self.step, train_s, epoch, metrics, left_out))
            value, target = metrics[self.task.metric], self.config.target
            metric = ValidationMetric(self.task.metric, value, self.task.higher_is_better)
            self._saving.set_metric(self.step, metric)
            if target is None or not reached(self.task, value, target):
                return False
            self.log.emit(TargetReached(self.step, train_s, self.task.metric, value, target))
            return True

    def _predict(self) -> None:
        """Save some examples with the predictions of the model. It takes no training time."""
        count = self.config.predictions
        if not count or not (self.ranks.is_main or self.backend.lockstep):
            return
        with self._outside_training(), self._own_randomness():
            self.model.eval()
            batches = map(self._to_device, self._rank_batches.show())
            shown = predictions.choose(self.task, self._evaluated, batches, count)
            if not shown or not self.ranks.is_main:
                return
            items, problem = predictions.write(self.directory, self.step, shown)
            if problem is not None:
                self.say(f"{problem}; the run itself is complete")
            path = str(self.directory / "predictions" / f"step-{self.step}")
            self.log.emit(Predicted(self.step, self.clock.train_s(), path, items))

    @property
    def _bare(self) -> nn.Module:
        """The model without its wrapper, so that names in checkpoints do not depend on it."""
        return self.backend.bare(self.model)

    @property
    def _evaluated(self) -> nn.Module:
        """The model that is evaluated: the average of the weights, if there is one."""
        return self._bare if self.average is None else self.average.module

    def _share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, also those of the average."""
        self.ranks.share_buffers(self._bare)
        if self.average is not None:
            self.ranks.share_buffers(self.average.module)

    @contextmanager
    def _outside_training(self) -> Iterator[None]:
        """Pause the training clock inside the block, and compute no gradients."""
        # Work that is still on the device, or on K-FAC's thread, belongs to the training before.
        wait_for_all()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        with self.clock.paused(), torch.no_grad():
            yield

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Seed the block, and leave the random numbers of training as they are.

        A metric may draw. A run that is interrupted repeats an evaluation, and must go on equally.
        """
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices), preserve_rng():
            torch.manual_seed(seed := mixed_seed(self.seed, -4, self.step, self.ranks.rank))
            seed_python_and_numpy(seed)
            yield

    def save(self, *, evaluate_again: bool = False) -> None:
        """Begin a checkpoint, at most once per step.

        The checkpoint is written while the next steps run. :meth:`_finish_saving` waits for it.

        Args:
            evaluate_again: Whether a start from this checkpoint evaluates before it trains.

        Raises:
            RunFailedError: The loss of the last step is not finite, or a weight is not finite.
        """
        if self._saving.step == self.step:
            return
        self._read_result()
        with self._outside_training():
            if not self._state.is_finite():
                raise RunFailedError(f"a weight is not finite after step {self.step}")
            self._share_buffers()
            owes_evaluation = self._owes_evaluation or evaluate_again
            shard = self._state.shard(self._slowest_train_s(), owes_evaluation)
            if self.ranks.is_main:
                shard["data"] = self.fingerprint
            if self.log.record is not None:
                shard["record"] = self.log.record.position
            self._saving.start(self.step, shard)

    def _finish_saving(self) -> None:
        """Wait until the checkpoint is on disk. All ranks call this."""
        with self.clock.paused(), progress.task("saving"):
            self._saving.finish()
        self._report_checkpoint()

    def _report_checkpoint(self) -> None:
        """Emit an event if a checkpoint has reached the disk since the last call."""
        if (saved := self._saving.pop_saved()) is not None:
            path, waited_s, cpu_s = str(saved.path), saved.waited_s, saved.cpu_s
            with self.clock.paused():
                train_s = self.clock.train_s()
                self.log.emit(Checkpointed(saved.step, train_s, path, waited_s, cpu_s))

    def restore(self, saved: Checkpoint, *, begins_phase: bool = False) -> None:
        """Load a checkpoint, which any number of ranks may have written.

        Args:
            saved: The checkpoint.
            begins_phase: Whether step and training time stay at 0 (option ``new_phase``).

        Raises:
            ValueError: The checkpoint does not fit the run.
        """
        train_s, owes_evaluation = self._state.load(saved)
        if begins_phase:
            return
        # With resume=PATH it is an evaluation of another run.
        self._owes_evaluation = owes_evaluation and saved.path.is_relative_to(self.directory)
        self.clock.set(train_s)
        self.step = self._saving.step = saved.step
