"""What cannot be read in a data set: named, and left out where the user allows it."""

from dataclasses import dataclass, field

from kfac_bench.counted import counted
from kfac_bench.errors import UsageError


@dataclass(frozen=True)
class Unreadable:
    """A bad file (or a member of one), and why.

    Workers send it: an exception would arrive with a traceback in it.
    """

    path: str
    reason: str


@dataclass
class Faults:
    """The bad files that were met, each once; unless `skip` says so none may be left out.

    With `skip`, batches lack the examples that cannot be read.
    """

    skip: bool = False
    new: list[Unreadable] = field(default_factory=list)
    """Not yet taken."""
    left_out: int = 0
    """Examples, each time one is."""
    _known: set[str] = field(default_factory=set)

    def add(self, fault: Unreadable) -> None:
        """Note it. Raises UsageError naming the file, unless it may be left out."""
        if not self.skip:
            raise UsageError(f"{fault.path} cannot be read: {fault.reason}")
        self.left_out += 1
        if fault.path not in self._known:
            self._known.add(fault.path)
            self.new.append(fault)

    def add_all(self, where: object, faults: list[Unreadable]) -> None:
        """Note what was found before training. Raises UsageError naming the first, likewise."""
        if faults and not self.skip:
            said = "; ".join(f"{fault.path}: {fault.reason}" for fault in faults[:3])
            raise UsageError(
                f"{counted(len(faults), 'bad file')} in {where}; {said}; mend what is bad, "
                "or set data.on_error=skip"
            )
        for fault in faults:
            self.add(fault)

    def take(self) -> list[Unreadable]:
        """The new ones; they are new no longer."""
        taken, self.new = self.new, []
        return taken
