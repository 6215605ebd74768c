"""Files and examples that cannot be read: they stop the run, or are left out and reported."""

from dataclasses import dataclass, field

from kfac_bench.counted import counted
from kfac_bench.errors import UsageError, one_line


@dataclass(frozen=True)
class Unreadable:
    """A file, or a part of one, that cannot be used, and the reason.

    Loader workers return this object instead of an exception, because an exception from a worker
    arrives with a traceback in its message.
    """

    path: str
    """The file; for a part of a file followed by a colon and the name of the part."""
    reason: str

    @classmethod
    def because(cls, path: object, error: Exception) -> "Unreadable":
        """Return the fault that an exception describes, with its message on one line."""
        return cls(str(path), one_line(error))


@dataclass
class Faults:
    """The unreadable files of one dataset, each listed once.

    With `skip` the run goes on, and batches lack the examples that cannot be read. Without it the
    first unreadable file is an error.
    """

    skip: bool = False
    new: list[Unreadable] = field(default_factory=list)
    """Faults found since the last call of `take`."""
    left_out: int = 0
    """Number of times that an example was left out."""
    _known: set[str] = field(default_factory=set)
    """Paths of all faults found so far."""

    def add(self, fault: Unreadable) -> None:
        """Record a fault. Without `skip`, raise UsageError with the name of the file."""
        if not self.skip:
            raise UsageError(
                f"{fault.path} cannot be read: {fault.reason}. Repair the file and continue with "
                "data.changed=accept, or leave bad files out with data.on_error=skip"
            )
        self.left_out += 1
        if fault.path not in self._known:
            self._known.add(fault.path)
            self.new.append(fault)

    def add_all(self, root: object, faults: list[Unreadable]) -> None:
        """Record the faults found before training in the dataset at `root`.

        Without `skip`, raise UsageError with the names of the first three files.
        """
        if faults and not self.skip:
            first = "; ".join(f"{fault.path}: {fault.reason}" for fault in faults[:3])
            raise UsageError(
                f"{counted(len(faults), 'bad file')} in {root}: {first}. Repair or remove bad "
                "files, or set data.on_error=skip to leave them out"
            )
        for fault in faults:
            self.add(fault)

    def take(self) -> list[Unreadable]:
        """Return the faults found since the last call and mark them as reported."""
        taken, self.new = self.new, []
        return taken
