"""Examples left out because their files cannot be read: counted and named, over all ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch

from kfac_bench.data.batch import Batch, size
from kfac_bench.data.faults import Faults
from kfac_bench.events import EventLog, SampleSkipped
from kfac_bench.ranks import Ranks


@dataclass
class Skipped:
    """Where ``data.on_error=skip``; else there is nothing to do. All ranks call every method."""

    ranks: Ranks
    faults: Faults
    _told: set[str] = field(default_factory=set)
    """Paths: each gets one event, whichever ranks meet it."""

    def count(self, batch: Batch, too_few: bool = False) -> tuple[int, bool, bool]:
        """Examples of the batches of all ranks; whether there is anything to :meth:`tell`.

        And whether a rank has ``too_few``.
        """
        mine = [size(batch), len(self.faults.new), int(too_few)]
        counts = torch.tensor(mine, dtype=torch.float64, device=self.ranks.device)
        examples, new, ranks = self.ranks.sum(counts).tolist()
        return int(examples), new > 0, ranks > 0

    def left_out(self, since: int) -> int:
        """Examples that all ranks have left out since this one had left out so many."""
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
