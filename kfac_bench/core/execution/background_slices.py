"""Slices of decompositions that a thread beside training computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from kfac_bench.core.execution.background import Background
from kfac_bench.core.execution.decomposition import Decomposition, FactorKey
from kfac_bench.core.execution.solver import Solver
from kfac_bench.core.planning.plan import Decompose, Op, Plan

Made = Mapping[FactorKey, Decomposition]
"""Decompositions by factor. Those that failed are missing."""


class BackgroundSlices:
    """The slices that have begun and are not in use yet.

    All ranks begin and use the same slices at the same steps, also slices that they have no work
    in. A rank decomposes copies of the running factors, because these change at the next update.

    Attributes:
        due: By slice, the step in which its decompositions come into use.
    """

    def __init__(self, plan: Plan, rank: int, solver: Solver, background: Background) -> None:
        self.due: dict[int, int] = {}
        self._plan, self._rank = plan, rank
        self._solver, self._background = solver, background
        self._results: dict[Decompose, Callable[[], Made]] = {}

    def begin(self, slices: Mapping[int, int], damping: float | None) -> None:
        """Begin slices with the factors as they are now.

        Args:
            slices: By slice, the step in which its decompositions come into use. A slice that has
                begun before and is not in use yet does not begin again.
            damping: The damping of this step, for the inverse method.
        """
        for i, step in slices.items():
            if i in self.due:
                continue
            self.due[i] = step
            for op in self._my_ops(i):
                problem = self._solver.problem(op.members, damping, copy=True)
                job = partial(self._solver.solve, problem)
                reads = (*problem.matrices, *problem.dampings)
                self._results[op] = self._background.submit(job, reads).result

    def _my_ops(self, index: int) -> Iterator[Decompose]:
        for op in self._plan.slices[index]:
            if isinstance(op, Decompose) and self._rank in op.ranks:
                yield op

    def pop_due(self, step: int) -> list[int]:
        """Return the slices that come into use in this step. They may begin again from now on."""
        due = [i for i, at in self.due.items() if at == step]
        for i in due:
            del self.due[i]
        return due

    def take(self, op: Decompose) -> Made | None:
        """Wait for the decompositions of an op, and return them; None if it has not begun."""
        result = self._results.pop(op, None)
        if result is None:
            return None
        made = result()
        self._background.take_over(x for part in made.values() for x in part.tensors)
        return made

    def clear(self) -> None:
        """Forget all slices that have begun."""
        self.due.clear()
        self._results.clear()

    def pending(self) -> Iterator[tuple[FactorKey, int, Decomposition | None]]:
        """Wait for this rank's decompositions; yield them with the step in which they are used."""
        for i, step in self.due.items():
            for op in self._my_ops(i):
                made = self._results[op]()
                for spec, factor in op.members:
                    key = (spec.name, factor)
                    yield key, step, made.get(key)

    def restore(self, due: Mapping[int, int], made: Made) -> None:
        """Take over slices that had begun in a saved run, with all decompositions of them."""
        self.due = dict(due)
        for i in due:
            for op in self._my_ops(i):
                keys = [(spec.name, factor) for spec, factor in op.members]
                mine = {key: made[key] for key in keys if key in made}
                self._results[op] = partial(dict, mine)


def factors_of(ops: Sequence[Op]) -> list[FactorKey]:
    """Return the factors that a slice decomposes."""
    return [
        (spec.name, factor)
        for op in ops
        if isinstance(op, Decompose)
        for spec, factor in op.members
    ]
