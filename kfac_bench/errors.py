"""Exceptions that a user reads as one line, because the program itself is not wrong."""

import errno
import os

_SHORTAGES = (
    (
        errno.ENOMEM,
        (
            "can't allocate memory",
            "cannot allocate memory",
            "out of memory",
            "not enough memory",
            "storage size calculation overflowed",  # also in a dry run, which allocates nothing
        ),
        "the machine or a limit (ulimit -v, a cgroup) gives no more memory. Use a smaller "
        "trainer.batch_size, a larger trainer.accumulate, or fewer data.workers",
    ),
    (
        errno.EAGAIN,
        ("can't start new thread", "resource temporarily unavailable"),
        "the machine or a limit (ulimit -u, a cgroup) allows no more threads or processes. Use "
        "fewer trainer.threads or data.workers, or raise the limit",
    ),
    (
        errno.EMFILE,
        # torch says the second where it takes a tensor from another process.
        ("too many open files", "received 0 items of ancdata"),
        "too many files are open. Raise the limit (ulimit -n), or use fewer data.workers",
    ),
    (
        errno.ENOSPC,
        ("no space left on device",),
        "a disk or /dev/shm has no space or no inodes left. df and df -i show which one",
    ),
)
"""Resources that can run out: the error number, texts of torch's untyped errors, and advice."""


def shortage(error: BaseException) -> str | None:
    """Return one line if the error says that memory, threads, files or space ran out, else None."""
    if isinstance(error, MemoryError):
        return _SHORTAGES[0][2]
    text = str(error).lower()
    for number, texts, line in _SHORTAGES:
        if isinstance(error, OSError) and error.errno == number:
            return line
        if isinstance(error, RuntimeError) and any(each in text for each in texts):
            return line
    return None


_UNUSABLE_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def unusable_path(error: BaseException) -> str | None:
    """Return one line if the error says that a path cannot be used, else None.

    ``Path.exists()`` and ``Path.is_dir()`` raise such errors up to Python 3.13.
    """
    if not isinstance(error, OSError) or error.errno not in _UNUSABLE_PATH or not error.filename:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
    return printable(f"{path}: cannot be used ({error.strerror})")


class UsageError(Exception):
    """An error in the input. Its message is one line: what is wrong and what to do. Exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


EXTRAS = {
    "train": (
        "PIL",
        "hydra",
        "jinja2",
        "matplotlib",
        "numpy",
        "omegaconf",
        "pytorch_optimizer",
        "rich",
        "safetensors",
        "scipy",
        "sklearn",
        "torchvision",
        "wandb",
        "yaml",
    ),
    "dashboard": ("wandb_workspaces",),
    "deepspeed": ("deepspeed",),
    "detection": ("pycocotools",),
    "language": ("tokenizers", "transformers"),
    "parquet": ("pyarrow",),
    "pictures": ("skimage",),
    "tensorboard": ("tensorboard",),
    "timm": ("timm",),
}
"""The packages of each extra of pyproject.toml, by the names that Python imports."""


class MissingPackageError(UsageError):
    """A package of an extra is not installed. The message ends with the command that installs it.

    Args:
        package: The name that Python imports.
        what: What needs the package, such as ``data=coco``.
    """

    def __init__(self, package: str, what: str = "") -> None:
        (extra,) = (extra for extra, packages in EXTRAS.items() if package in packages)
        # Not by name: the package is not on PyPI, where the name may belong to a stranger.
        before = "DS_BUILD_OPS=0 " if package == "deepspeed" else ""
        install = f"in your clone of kfac_bench type {before}pip install '.[{extra}]'"
        super().__init__(f"{what and f'{what}: '}{package} is not installed: {install}")


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error of the extra that has the missing package, None if no extra has it."""
    package = (error.name or "").partition(".")[0]
    known = any(package in packages for packages in EXTRAS.values())
    return MissingPackageError(package) if known else None


class OneRankError(UsageError):
    """An error in the input that only one rank has met, so this rank reports it."""


class LostRanksError(Exception):
    """Another rank died, hangs, or cannot be reached. Exit code 1."""


class WorkerLostError(Exception):
    """A process of this rank that reads data died. Exit code 1."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "a process that reads data died (killed, or out of memory). Start the same command "
            f"again; fewer data.workers need less memory. {printable(reason.strip())}".strip()
        )


class RunFailedError(Exception):
    """The reason why a run cannot go on, on all ranks: an infinite loss or a full disk."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def one_line(error: BaseException) -> str:
    """Return an error's whole message on one line, or the name of its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Return `text` on one line, with control characters as escapes.

    Names and contents of files may hold such characters.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
