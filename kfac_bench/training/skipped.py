"""Examples left out because their files cannot be read: counted and reported over all ranks."""

import json
from dataclasses import dataclass, field

from kfac_bench.data.base.batch import Batch, size
from kfac_bench.data.base.files import Faults
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError
from kfac_bench.record.event_log import EventLog
from kfac_bench.record.events import SampleSkipped


@dataclass
class SkippedExamples:
    """The examples that `data.on_error=skip` left out. All ranks call every method together."""

    ranks: Ranks
    faults: Faults
    least: int = 1
    """Smallest non-empty part of a batch that a rank can train on."""
    _reported: set[str] = field(default_factory=set)
    """Paths with an event: one event is enough if several ranks meet the same file."""

    def count(self, batch: Batch, step: int) -> tuple[int, bool, str]:
        """Count the examples of one update over all ranks.

        Returns:
            The number of examples, whether `report` has something to report, and why the update
            `step` is impossible (empty if it is possible).
        """
        too_few = 0 < size(batch) < self.least
        mine = [size(batch), len(self.faults.new), int(too_few)]
        examples, new, ranks = self.ranks.sum_numbers(mine)
        problem = ""
        if not examples:
            problem = f"no example of batch {step} can be read, on any rank; repair the files"
        elif ranks:
            problem = (
                f"only one example of a part of batch {step} can be read, and batch norm needs "
                "two: repair the files, or set a larger trainer.batch_size"
            )
        return int(examples), new > 0, problem

    def left_out(self, since: int, has_examples: bool) -> int:
        """Return how many examples of the evaluation set all ranks have left out together.

        Args:
            since: This rank's count before the evaluation.
            has_examples: Whether this rank could read any example.

        Raises:
            RunFailedError: If no rank could read any example.
        """
        if not self.ranks.any(has_examples):
            raise RunFailedError(
                "no example of the evaluation set can be read, on any rank; repair the files"
            )
        return int(self.ranks.sum_numbers([self.faults.left_out - since])[0])

    def report(self, log: EventLog, step: int, train_s: float) -> None:
        """Emit an event for each unreadable file that a rank has met since the last call."""
        mine = [(fault.path, fault.reason) for fault in self.faults.take()]
        for rank, content in enumerate(self.ranks.gather(json.dumps(mine).encode())):
            for path, reason in json.loads(content):
                if path not in self._reported:
                    self._reported.add(path)
                    log.emit(SampleSkipped(step, train_s, path, reason, rank, len(self._reported)))
