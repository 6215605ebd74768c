"""The choices of each group: each has a YAML file, a class, and a file that needs no torch."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kfac_bench.config import compose, problem_file
from kfac_bench.config.groups import TABLES
from kfac_bench.data.base.dataset import UNKNOWN
from kfac_bench.errors import UsageError
from kfac_bench.tasks.task import Task
from tests.support import ROOT
from tests.support.configs import Own

ROWS = [(group, name) for group, table in TABLES.items() for name in table]


@pytest.mark.parametrize("group", TABLES)
def test_each_row_has_a_yaml_file_and_each_yaml_file_a_row(group):
    assert compose.options_of(group) == sorted(TABLES[group])


def test_files_of_things_and_lists_need_no_torch():
    """kfac-train --help imports every class, kfac-bench list reads every benchmark."""
    code = (
        "import sys\n"
        "from kfac_bench import cli\n"
        "from kfac_bench.config.groups import TABLES\n"
        "assert all(len(table) for table in TABLES.values())\n"
        "for command in (lambda: cli.train(['--help']), lambda: cli.bench(['list'])):\n"
        "    try:\n"
        "        command()\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("group", "name"), ROWS)
def test_each_thing_is_documented_and_can_be_built(group, name):
    found = TABLES[group][name]
    method = {"schedule": "after_warmup", "backend": "join"}.get(group, "build")
    assert getattr(found, method) is not getattr(found.__mro__[-3], method, None)
    assert found.__doc__
    assert not found.__doc__.startswith(f"{found.__name__}("), "dataclass made it"


def test_only_the_options_of_models_are_imported():
    code = (
        "import sys\n"
        "from kfac_bench.config import compose\n"
        "compose.load(['model=unet'])\n"
        "print(sorted(m for m in sys.modules if m.startswith('kfac_bench.models.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['kfac_bench.models.library_options', 'kfac_bench.models.options']\n"


def test_a_yaml_file_without_a_row_is_reported_with_file_and_table(tmp_path):
    own = Own(tmp_path)
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "mine.yaml"
    file.write_text("defaults: [/schema/model/mine@_here_, _self_]\nname: mine\n")
    said = own.refused("model=mine")
    table = "CHOICES in kfac_bench/models/options.py"
    assert said.startswith(f"{file}: /schema/model/mine: {table} has no such row")
    assert "resnet8" in said


def test_a_name_that_belongs_to_other_options_is_refused():
    with pytest.raises(UsageError, match="write model=unet"):
        compose.load(["model.name=unet"])
    assert compose.load(["model.name=resnet20"]).model.name == "resnet20"


@pytest.mark.parametrize("name", TABLES["task"])
def test_the_likelihood_of_the_options_is_that_of_the_task(name):
    data = SimpleNamespace(
        shape=(1, 2, 2),
        num_classes=2,
        eval_volumes=1,
        truth=[],
        tokens=[],
        eval_questions=[],
        looks=UNKNOWN,
    )
    options = TABLES["task"][name](name)
    if name == "problem":
        file = str(ROOT / "examples/problems/digits.py")
        problem_file.run_named([f"problem={file}"])
        data.file, data.has_parts, options.file = problem_file.named(file), True, file
    task: Task = options.build(data)
    assert task.likelihood == options.likelihood
