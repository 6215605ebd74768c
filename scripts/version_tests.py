"""Test kfac_bench with other versions of Python and of packages, each in a new environment.

`make test-light` runs the row `light` alone: torch and pytest are links to the packages of this
environment, so that nothing is downloaded, and no other package is there. The row runs a selection
of the core's quick tests, the row `oldest` runs all of them. `make test-versions` runs
all other rows, which install torch (about 5 GB each), and writes their outcomes into
docs/reference/supported_versions.md. The row `oldest-harness` installs the lowest versions that
pyproject.toml allows.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "supported_versions.md"
BEGIN, END = "<!-- versions: made by make test-versions -->", "<!-- end of versions -->"
# A Python whose wandb reads the logs of an old wandb, for tests/support/wandb_rows.py.
READER = sys.executable
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")

SMOKE = """
import importlib, subprocess, torch
from kfac_bench import KFAC, eigen_adam, muon
for make in (lambda m: torch.optim.SGD(m.parameters(), 0.1), eigen_adam, muon):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = make(model)
    if isinstance(optimizer, torch.optim.SGD):
        KFAC(model, optimizer).attach()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
for name in ("accelerate", "huggingface", "lightning"):
    try:
        importlib.import_module(f"kfac_bench.integrations.{name}")
    except ImportError as error:
        assert "pip install" in str(error), error
    else:
        raise AssertionError(f"{name} is here")
for name in ("train", "bench", "plan", "data"):
    done = subprocess.run([f"BIN/kfac-{name}"], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert done.stderr.endswith("type pip install '.[train]'\\n"), done
"""
"""A script that must run with torch alone."""


class Row(NamedTuple):
    """The Python of an environment, what pip installs, and the tests that run there."""

    python: str
    packages: Literal["torch alone", "lowest", "newest"]
    tests: tuple[str, ...]


HARNESS = ("training", "cli", "record", "models", "data")
ROWS = {
    "oldest": Row("3.11", "torch alone", ("core",)),
    "oldest-harness": Row("3.11", "lowest", HARNESS),
    "3.12": Row("3.12", "newest", ("core", "training", "cli")),
    "3.13": Row("3.13", "newest", ("core", "training", "cli")),
    "3.14": Row("3.14", "newest", ("core", "training", "cli")),
}

LIGHT = (
    "core/test_import.py",
    "core/test_preconditioner.py",
    "core/test_attach.py",
    "core/test_ekfac.py",
    "core/test_state.py",
    "core/test_amp.py",
    "core/test_schedule.py",
    "core/test_damping.py",
    "core/test_guards.py",
    "core/test_validation.py",
    "core/test_max_overhead.py",
    "core/test_pipeline.py",
    "core/test_background.py",
    "core/test_blocks.py",
    "core/test_half_precision.py",
    "core/kernels/test_linalg.py",
    "core/kernels/test_factors.py",
    "core/layers/test_layers.py",
    "core/layers/test_attention.py",
    "core/capture/test_fisher.py",
    "core/capture/test_derivatives.py",
    "core/planning/test_budget.py",
    "core/test_strategies.py::test_a_strategy_equals_one_process_and_its_own_plan",
)
"""The tests of the row `light`, below tests/. They use each part of the core."""

EXTRAS = ("train", "detection", "language", "parquet", "pictures", "tensorboard", "timm")
"""The extras of the rows with a harness."""

OF_THEIR_TIME = ("pydantic<2.12",)
"""Packages that the oldest packages need in versions of their time."""

NOT_RUN = {
    "oldest": (
        # torch 2.6 scales the gradients of pipeline stages differently.
        "core/test_pipeline.py::test_two_stages",
        # torch 2.6 refuses a dict in the state of an optimizer.
        "core/test_optimizer_state.py::test_distributed_checkpoint",
        # torch 2.6 cannot break such a graph, and runs a compiled nn.Sequential eagerly.
        "core/test_compile.py::test_only_the_model_with_statistics_runs_eagerly",
        # torch 2.6 asks the CUDA driver about the second device of these tests.
        "core/test_devices.py",
        # torch 2.6 warns of another deprecation.
        "core/test_validation.py::test_parameters_are_no_model",
        # torch 2.6 frees the node of an interrupted forward.
        "core/layers/test_recurrent.py::test_a_forward_after_an_interrupted_one",
        # torch 2.6 cannot divide 9 rows by FSDP2 and tensor parallelism.
        "core/distributed/test_sharded.py::test_tensor_parallel_beside_data_parallel",
    ),
    "oldest-harness": (
        # torch 2.6 compiles no evaluation: the first graph is that of a training step.
        "training/test_model_changes.py::test_a_compiled_run_equals_a_plain_run",
        "training/test_model_changes.py::test_a_model_that_cannot_be_compiled",
    ),
}
"""Tests that a row leaves out, because its torch lacks something."""


def main() -> int:
    """Return 0 if all tests passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"light, or some of {', '.join(ROWS)} (all)")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    options = parser.parse_args()
    if unknown := set(options.rows) - {"light", *ROWS}:
        parser.error(f"{' '.join(sorted(unknown))}: no such row; choose light, {', '.join(ROWS)}")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "-w", "-n", "-o", folder, str(ROOT)]
        run(build, ROOT)
        (wheel,) = Path(folder).glob("*.whl")
        for name in options.rows or ROWS:
            place = Path(folder) / name
            if name == "light":
                python = linked_environment(place, wheel)
            elif run([f"python{ROWS[name].python}", "-c", "print(1)"], ROOT, check=False) != "1\n":
                print(f"{name}: not tested, because there is no python{ROWS[name].python}")
                continue
            else:
                python = installed_environment(place, wheel, ROWS[name])
            if name in ("light", "oldest"):
                code = SMOKE.replace("BIN", str(python.parent))
                run([python, "-W", "ignore", "-c", code], place)
            else:
                run([python.parent / "kfac-plan", "model=resnet50"], place)
            results[name] = run_tests(python, place, options.workers, name)
            shutil.rmtree(place)
    write({name: result for name, result in results.items() if name in ROWS})
    return int(any(result["failed"] for result in results.values()))


def linked_environment(place: Path, wheel: Path) -> Path:
    """Make an environment of links to torch, pytest and what they need; return its Python."""
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_paths()["purelib"])
    for name in required(("torch", *TOOLS)):
        tops = {Path(file).parts[0] for file in distribution(name).files or ()}
        for top in tops - {"..", "__pycache__"}:
            if not top.endswith(".pth") and not (site / top).exists():
                (site / top).symlink_to(here / top)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "-q", "--python", python, "install"]
    run([*pip, "--no-deps", "--no-index", wheel], place)
    return python


def required(names: Iterable[str]) -> set[str]:
    """Return the names of distributions, and of all distributions that they require here."""
    todo, seen = [Requirement(name) for name in names], set()
    while todo:
        wanted = todo.pop()
        for extra in ("", *wanted.extras):
            if (wanted.name, extra) in seen:
                continue
            seen.add((wanted.name, extra))
            for line in distribution(wanted.name).requires or ():
                needed = Requirement(line)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append(needed)
    return {name for name, _ in seen}


def installed_environment(place: Path, wheel: Path, row: Row) -> Path:
    """Install the packages of a row and pytest from the package index; return the Python."""
    run([f"python{row.python}", "-m", "venv", place], ROOT)
    python = place / "bin" / "python"
    words = [f"torch=={lowest('torch')}", wheel]
    if row.packages != "torch alone":
        words = ["webdataset", "-e", f"{ROOT}[{','.join(EXTRAS)}]"]
    if row.packages == "lowest":
        words += [*OF_THEIR_TIME, *(f"{name}=={lowest(name)}" for name in requirements())]
    run([python, "-m", "pip", "-q", "install", "--no-cache-dir", *words, *TOOLS], place)
    return python


def requirements() -> dict[str, Requirement]:
    """Return the requirements of the library and of the tested extras, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    made = {needed.name: needed for needed in map(Requirement, lines)}
    del made["kfac-bench"]
    return made


def lowest(name: str) -> str:
    """Return the lowest version that a requirement allows."""
    (version,) = (each.version for each in requirements()[name].specifier if each.operator == ">=")
    return version


def run_tests(python: Path, place: Path, workers: str, name: str) -> dict[str, str | int]:
    """Run the quick tests of a row and return the outcomes.

    The tests of the harness run in the checkout, those of torch alone on the wheel outside of it.
    """
    row = ROWS["oldest"]._replace(tests=LIGHT) if name == "light" else ROWS[name]
    words = ["-q", "-n", workers, "-m", "not slow and not alone", "-p", "no:cacheprovider"]
    words.append("--ignore=tests/core/test_architecture.py")  # reads the documentation
    words += [f"--deselect=tests/{test}" for test in NOT_RUN.get(name, ())]
    if row.packages == "torch alone":
        copy_tests(place)
    if row.packages == "lowest":
        words += ["-W", "default"]  # old packages call what is deprecated now
    words += [f"tests/{folder}" for folder in row.tests]
    folder = place if row.packages == "torch alone" else ROOT
    said = run([python, "-m", "pytest", *words], folder, check=False)
    print(said[-6000:])
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    for count, outcome in re.findall(r"(\d+) (passed|skipped|failed|error)", said.splitlines()[-1]):
        counts["failed" if outcome == "error" else outcome] += int(count)
    if not counts["passed"]:
        raise SystemExit("no test has passed")
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    version, torch = run([python, "-W", "ignore", "-c", code], place).split()
    date = datetime.now(UTC).date().isoformat()
    return {
        "python": version,
        "torch": torch,
        "tests": ", ".join(row.tests),
        **counts,
        "date": date,
    }


def copy_tests(place: Path) -> None:
    """Copy the tests of the core, so that they import the installed wheel."""
    for name in ("__init__.py", "conftest.py", "support", "core"):
        copy = shutil.copytree if (ROOT / "tests" / name).is_dir() else shutil.copy
        (place / "tests").mkdir(exist_ok=True)
        copy(ROOT / "tests" / name, place / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", place)
    shutil.copytree(ROOT / "examples", place / "examples")


def run(command: Sequence[object], folder: Path, *, check: bool = True) -> str:
    """Run a command in a folder; return what it prints, or end the script with it."""
    if not check and shutil.which(str(command[0])) is None:
        return ""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KFAC"))}
    done = subprocess.run(  # noqa: S603
        [str(word) for word in command],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1", "READER_OF_WANDB": READER},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if check and done.returncode:
        raise SystemExit(done.stdout)
    return done.stdout


def write(results: dict[str, dict[str, str | int]]) -> None:
    """Replace the rows of the page that were tested now."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    made, after = rest.split(END)
    head, rule, *lines = made.strip().splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines}
    for name, result in results.items():
        rows[name] = f"| {' | '.join(map(str, (name, *result.values())))} |"
    table = "\n".join([head, rule, *(rows[name] for name in ROWS if name in rows)])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
