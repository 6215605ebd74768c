"""Examples left out because their files cannot be read: counted and named, over all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch

from kfac_bench.data.base.batch import Batch, size
from kfac_bench.data.base.unreadable import Faults
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import RunFailedError
from kfac_bench.record.events import EventLog, SampleSkipped


@dataclass
class Skipped:
    """Where ``data.on_error=skip``; else there is nothing to do. All ranks call every method."""

    ranks: Ranks
    faults: Faults
    least: int = 1
    """Examples of a batch that a rank needs, if it has any at all."""
    _told: set[str] = field(default_factory=set)
    """Paths: each gets one event, whichever ranks meet it."""

    def count(self, batch: Batch, step: int) -> tuple[int, bool, str]:
        """Examples of the batches of all ranks; whether there is anything to :meth:`tell`.

        And why there cannot be an update ``step`` of them, if so.
        """
        too_few = 0 < size(batch) < self.least
        mine = [size(batch), len(self.faults.new), int(too_few)]
        counts = torch.tensor(mine, dtype=torch.float64, device=self.ranks.device)
        examples, new, ranks = self.ranks.sum(counts).tolist()
        problem = ""
        if not examples:
            problem = f"no example of batch {step} can be read, on any rank"
        elif ranks:
            problem = (
                f"of a part of batch {step} one example alone can be read, and batch norm "
                "needs two: mend the files, or set a larger trainer.batch_size"
            )
        return int(examples), new > 0, problem

    def left_out(self, since: int, there: bool) -> int:
        """Examples that all ranks have left out since this one had left out so many.

        ``there``: whether this rank could read any. Raises :class:`RunFailedError` if none could.
        """
        if not self.ranks.any(there):
            raise RunFailedError("no example of the evaluation set can be read, on any rank")
        mine = torch.tensor(float(self.faults.left_out - since), dtype=torch.float64)
        return int(self.ranks.sum(mine.to(self.ranks.device)).item())

    def tell(self, log: EventLog, step: int, train_s: float) -> None:
        """An event for each bad file that a rank has met since the last time."""
        mine = [(fault.path, fault.reason) for fault in self.faults.take()]
        for rank, heard in enumerate(self.ranks.gather(json.dumps(mine).encode())):
            for path, reason in json.loads(heard):
                if path not in self._told:
                    self._told.add(path)
                    log.emit(SampleSkipped(step, train_s, path, reason, rank, len(self._told)))
