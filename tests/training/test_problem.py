"""problem=FILE: a user's own model and data, trained like built-in tasks; who may run it."""

import re
import signal

import pytest
import torch

from kfac_bench import cli
from kfac_bench.benchmark import grid, local_runs
from kfac_bench.config import compose, problem_file
from kfac_bench.data.base.order import Shard
from kfac_bench.data.problem_data import ProblemData
from kfac_bench.errors import UsageError
from kfac_bench.record import runs
from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.tasks.problem_task import ProblemTask
from tests.support import ROOT
from tests.support.configs import Own
from tests.support.distributed import run_ranks
from tests.support.quick import slow
from tests.support.runs import (
    before_step,
    end,
    of_kind,
    terminate,
    train_here,
)
from tests.support.runs import train as train_run

EXAMPLES = sorted((ROOT / "examples/problems").glob("*.py"))

FILE = """\
import random

import numpy as np
import torch
from torch import nn

from kfac_bench import Problem


class Noisy(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.randn(4) + random.random() + np.random.rand()
        return x, i % 3


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


problem = Problem(
    model=network,
    train=Noisy(60),
    validation=Noisy(20),
    loss=nn.CrossEntropyLoss(),
    metric=accuracy,
    higher_is_better=True,
    batch_size=12,
    likelihood="categorical",
)
"""
BASE = (
    "logger=none",
    "trainer.threads=1",
    "optimizer.lr=0.05",
    "kfac.update_freq=3",
    "kfac.factor_update_freq=1",
)


@pytest.fixture
def own(tmp_path):
    """Return a function that writes the file, with some text replaced, and returns its path."""

    def write(*changes, name="mine.py"):
        text = FILE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def train(folder, file, *overrides, base=BASE):
    word = f"problem={file}"
    problem_file.run_named([word])
    return train_run(folder, word, *overrides, base=base)


def refused_by_command(capsys, *words):
    """Return the one line with which kfac-train ends, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        cli.train([*words])
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    return line


# ---- training ----


@pytest.mark.parametrize(
    "options",
    [slow(("kfac=none",)), ("kfac.update_freq=2", "kfac.factor_update_freq=1")],
    ids=["sgd", "kfac"],
)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_trains(tmp_path, path, options):
    limits = ("trainer.max_steps=3", "trainer.target=null", "trainer.eval_freq=3")
    base = ("logger=none", "trainer.threads=1", "optimizer.lr=0.02", "trainer.log_freq=1")
    status, folder = train(tmp_path, path, *limits, *options, base=base)
    assert status == "finished"
    assert len(of_kind(folder, Trained)) == 3
    first, last = (next(iter(e.metrics.values())) for e in of_kind(folder, Evaluated))
    assert first != last
    assert 20 <= len(path.read_text().splitlines()) <= 60


def test_batch_size_target_and_metric_come_from_the_file_unless_the_command_line_sets_them(own):
    file = own(("batch_size=12", "batch_size=15, target=np.float64(0.5), metric_name='hits'"))
    problem_file.run_named([f"problem={file}"])
    found = compose.load([f"problem={file}"])
    assert (found.trainer.batch_size, found.trainer.target) == (15, 0.5)
    assert problem_file.named(file).problem.metric_title == "hits"
    found = compose.load([f"problem={file}", "trainer.batch_size=9", "trainer.target=null"])
    assert (found.trainer.batch_size, found.trainer.target) == (9, None)


def test_a_stopped_run_ends_with_the_same_weights(tmp_path, own):
    file = own()
    options = ("trainer.max_steps=12", "trainer.eval_freq=4", "trainer.log_freq=1")
    _, straight = train(tmp_path, file, *options, "run_id=straight")
    with before_step(7, terminate):
        assert train(tmp_path, file, *options, "run_id=stopped")[0] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.default_int_handler)
    status, path = train(tmp_path, file, *options, "run_id=stopped")
    assert status == "finished"
    assert end(path).weights_sha256 == end(straight).weights_sha256
    assert [e.metrics for e in of_kind(path, Evaluated)] == [
        e.metrics for e in of_kind(straight, Evaluated)
    ]


def test_global_randomness_does_not_depend_on_workers(tmp_path, own):
    file = own()
    options = ("trainer.max_steps=6", "trainer.eval_freq=6")
    paths = [
        train(tmp_path, file, *options, f"data.workers={n}", f"run_id=w{n}")[1] for n in (0, 2)
    ]
    assert end(paths[0]).weights_sha256 == end(paths[1]).weights_sha256
    metrics = [[e.metrics for e in of_kind(path, Evaluated)] for path in paths]
    assert metrics[0] == metrics[1]


NOISY_LOSS = """\
def noisy_loss(model, batch):
    output = model(batch[0])
    return output.square().mean() * (random.random() + np.random.rand()), output


class Noisy"""


def test_a_loss_may_draw_random_numbers(tmp_path, own):
    file = own(("loss=nn.CrossEntropyLoss()", "loss=noisy_loss"), ("class Noisy", NOISY_LOSS))
    steps = ("trainer.max_steps=6", "trainer.eval_freq=6")
    first, again = (train(tmp_path, file, *steps, f"run_id={name}")[1] for name in "ab")
    with before_step(3, terminate):
        train(tmp_path, file, *steps, "run_id=stopped")
    stopped = train(tmp_path, file, *steps, "run_id=stopped")[1]
    ends = {end(path).weights_sha256 for path in (first, again, stopped)}
    assert len(ends) == 1


NOISY_METRIC = """\
def noisy_loss(model, batch):
    output = model(batch[0])
    return output.square().mean() * torch.rand(()), output


def noisy_metric(model, batch):
    return model(batch[0]).mean() + torch.rand(()) + random.random() + np.random.rand()


class Noisy"""


def test_a_metric_may_draw_random_numbers(tmp_path, own):
    drawn = (
        ("loss=nn.CrossEntropyLoss()", "loss=noisy_loss"),
        ("metric=accuracy", "metric=noisy_metric"),
    )
    file = own(*drawn, ("class Noisy", NOISY_METRIC))
    train_all = ("trainer.max_steps=6", "trainer.eval_freq=3")
    first, again = (train(tmp_path, file, *train_all, f"run_id={name}")[1] for name in "ab")
    train(tmp_path, file, *train_all, "trainer.max_train_s=1e-9", "run_id=cut")
    cut = train(tmp_path, file, *train_all, "run_id=cut")[1]
    seldom = train(tmp_path, file, "trainer.max_steps=6", "trainer.eval_freq=6", "run_id=seldom")[1]
    assert len({end(path).weights_sha256 for path in (first, again, cut, seldom)}) == 1
    metrics = [{e.step: e.metrics for e in of_kind(p, Evaluated)} for p in (first, again, cut)]
    assert metrics[0] == metrics[1] == metrics[2]


def test_examples_change_from_epoch_to_epoch_and_keep_the_global_state(own):
    file = own()
    problem_file.run_named([f"problem={file}"])
    data = ProblemData(problem_file.named(file))
    state = torch.get_rng_state()
    first, again, later = (
        {int(i): x for i, x in zip(t, b, strict=True)}
        for epoch in (0, 0, 1)
        for b, t in data.train(60, 0, epoch, 0, Shard())
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[i], again[i]) for i in first)
    assert not any(torch.equal(first[i], later[i]) for i in first)
    assert not data.notes


def test_randomness_of_its_own_is_reported(own):
    own_state = "__import__('itertools').count()"
    file = own(("x = torch.randn(4)", "x = next(COUNT) + torch.randn(4)"),
               ("class Noisy", f"COUNT = {own_state}\n\n\nclass Noisy"))  # fmt: skip
    problem_file.run_named([f"problem={file}"])
    (note,) = ProblemData(problem_file.named(file)).notes
    assert "cannot be reproduced" in note


@pytest.mark.parametrize("workers", [0, 1])
def test_examples_that_do_not_make_a_batch_are_one_line(tmp_path, own, workers):
    file = own(("x = torch.randn(4)", "x = torch.randn(5 if i == 30 else 4)"))
    line = r"the batch of `train` that begins with example \d+ cannot be made: RuntimeError: stack"
    with pytest.raises(UsageError, match=rf"^{file}: {line} .*$"):
        train(tmp_path, file, f"data.workers={workers}", "trainer.max_steps=5")


def test_missing_values_are_no_randomness(own):
    file = own(("x = torch.randn(4)", "x = torch.tensor([1.0, 2.0, 3.0, float('nan')])"))
    problem_file.run_named([f"problem={file}"])
    assert not ProblemData(problem_file.named(file)).notes


def _train_on_rank(folder, file, overrides):
    problem_file.run_named([f"problem={file}"])
    return train_here(folder, (f"problem={file}", *overrides), BASE)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_equal_one_process(tmp_path, own):
    file = own()
    options = ("kfac=none", "trainer.max_steps=8", "trainer.log_freq=1", "trainer.eval_freq=8")
    both = run_ranks(2, _train_on_rank, tmp_path, file, (*options, "run_id=two"))
    assert both[0][2] == both[1][2], "the ranks' weights differ"
    train(tmp_path, file, *options, "run_id=one")
    losses = [[e.loss for e in of_kind(tmp_path / name, Trained)] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_labels_are_drawn_from_the_likelihood(tmp_path, own):
    file = own()
    options = ("trainer.max_steps=4", "trainer.eval_freq=4")
    paths = [train(tmp_path, file, *options, f"kfac.fisher={f}")[1] for f in ("mc", "empirical")]
    assert end(paths[0]).weights_sha256 != end(paths[1]).weights_sha256
    without = own(('    likelihood="categorical",\n', ""), name="without.py")
    with pytest.raises(UsageError, match="Set likelihood= in Problem"):
        train(tmp_path, without, "kfac.fisher=mc")


def test_kfac_gets_the_classes_in_the_last_dimension(own):
    file = own()
    problem_file.run_named([f"problem={file}"])
    task = ProblemTask(problem_file.named(file), has_parts=True)
    logits, labels = torch.randn(2, 3, 5, requires_grad=True), torch.zeros(2, 5, dtype=torch.int64)
    loss, output = task.forward(lambda x: x, (logits, labels))
    assert output.shape == (2, 5, 3)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(output.mT, labels))


def test_tables_name_the_file(tmp_path, own):
    _, path = train(tmp_path, own(), "trainer.max_steps=1", "kfac=none")
    assert path.name.startswith("problem-mine-sgd-kfac_none-")
    (setting,) = runs.group([runs.load(path)])
    assert setting.task == "mine, accuracy"


@pytest.mark.parametrize("change", [(), (("nn.Linear(4, 8)", "nn.LazyLinear(8)"),)])
def test_a_dry_run_and_a_plan(own, capsys, change):
    file = own(*change)
    for command, words in (
        (cli.train, ["dry_run=true"]),
        (cli.plan, ["--world-size=4", "--out=null"]),
    ):
        with pytest.raises(SystemExit) as caught:
            command([f"problem={file}", "kfac.fisher=type2", *words])
        assert caught.value.code == 0
        assert "K-FAC covers 2 layers, 67 of 67 parameters" in capsys.readouterr().out


# ---- the file changes ----


def test_another_version_of_the_file_is_another_run_and_is_refused_at_resume(tmp_path, own):
    options = ("trainer.max_steps=2", "kfac=none")
    file = own()
    _, before = train(tmp_path, file, *options)
    train(tmp_path, file, *options, "run_id=r")
    problem_file._files.clear()
    own(("nn.Tanh()", "nn.ReLU()"))
    _, after = train(tmp_path, file, *options)
    assert before != after
    with pytest.raises(UsageError, match=r"has changed since .*/r began: .*Restore"):
        train(tmp_path, file, *options, "run_id=r")


def test_changed_labels_of_a_table_are_noticed_at_resume(tmp_path, own):
    labels = tmp_path / "labels.txt"
    labels.write_text("0 1 2 " * 20)
    read = f"torch.from_numpy(np.loadtxt({str(labels)!r}, dtype=np.int64))"
    table = f"torch.utils.data.TensorDataset(torch.ones(60, 4), {read})"
    file = own(("Noisy(60)", table), ("Noisy(20)", table))
    options = ("run_id=r", "trainer.max_steps=4", "kfac=none")
    with before_step(3, terminate):
        train(tmp_path, file, *options)
    labels.write_text("0 2 1 " * 20)
    problem_file._files.clear()
    said = "train has 60 examples as before, but names, sizes or labels changed"
    with pytest.raises(UsageError, match=said):
        train(tmp_path, file, *options)


# ---- arguments of the file, and several files ----

PARAMETERS = "width=8, rate=0.5, kind='tanh', is_wide=False"


@pytest.fixture
def with_arguments(own):
    """Return a file whose problem is a function that builds a network of the given width."""
    function = f"def problem({PARAMETERS}):\n    return Problem("
    return own(
        ("def network():", "def network(width=8):"),
        ("nn.Linear(4, 8)", "nn.Linear(4, width)"),
        ("nn.Linear(8, 3)", "nn.Linear(width, 3)"),
        ("problem = Problem(", function),
        ("model=network", "model=lambda: network(width)"),
    )


def test_arguments_of_the_file_are_part_of_the_run_and_of_its_names(tmp_path, with_arguments):
    options = ("trainer.max_steps=1", "kfac=none")
    own_words = ("problem.width=5", "problem.rate=.5")
    _, path = train(tmp_path, with_arguments, *options, *own_words)
    chosen = problem_file.chosen([f"problem={with_arguments}", *own_words])
    assert chosen.problem.model()[0].out_features == 5
    assert path.name.startswith("problem-mine-width=5-sgd-")
    (setting,) = runs.group([runs.load(path)])
    assert setting.task == "mine-width=5, accuracy"
    _, plain = train(tmp_path, with_arguments, *options)
    _, default = train(tmp_path, with_arguments, *options, "problem.width=8")
    assert plain == default != path


def test_a_sweep_over_files_and_arguments(tmp_path, with_arguments, capsys):
    other = tmp_path / "other.py"
    other.write_text((tmp_path / "mine.py").read_text())
    words = [f"problem={with_arguments},{other}", "problem.width=3,4", *BASE, "kfac=none"]
    with pytest.raises(SystemExit) as caught:
        cli.train([*words, "trainer.max_steps=1", f"runs_dir={tmp_path / 'runs'}", "--multirun"])
    assert caught.value.code == 0, capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [name.partition("-sgd")[0] for name in names] == [
        f"problem-{file}-width={width}" for file in ("mine", "other") for width in (3, 4)
    ]


def test_annotations_of_the_file_stay_types(own):
    file = own(("def network():", "def network(width: int = 8):"))
    problem_file.run_named([f"problem={file}"])
    assert problem_file.named(file).problem.model.__annotations__ == {"width": int}


def test_two_files_with_modules_of_one_name_are_refused(tmp_path, own):
    own()
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_module_of_a_test.py").write_text(f"name = {folder!r}\n")
        text = (tmp_path / "mine.py").read_text()
        (tmp_path / folder / "same.py").write_text(f"import own_module_of_a_test\n{text}")
    problem_file.run_named([f"problem={tmp_path / 'first/same.py'}"])
    with pytest.raises(UsageError, match=r"the module own_module_of_a_test comes from .*first"):
        problem_file.run_named([f"problem={tmp_path / 'second/same.py'}"])


def test_a_fork_builds_the_problem_with_its_arguments(tmp_path, with_arguments):
    problem_file.run_named([f"problem={with_arguments}"])
    words = [f"problem={with_arguments}", "problem.width=4", *BASE, "kfac=none", "run_id=r"]
    assert local_runs.train_forked([*words, "trainer.max_steps=1", f"runs_dir={tmp_path}"])[0] == 0
    assert end(tmp_path / "r").status == "finished"


@pytest.mark.parametrize(("word", "line"), [
    ("problem.widht=3", "problem.widht=3: the function `problem` in .* has the parameters width, "),
    ("problem.width=3.5", "problem.width=3.5: must be a whole number, as its default 8"),
    ("problem.width=3,4", "must be a whole number, as its default 8; several values need --mult"),
    ("problem.is_wide=1", "problem.is_wide=1: must be true or false, as its default false"),
    ("data.arguments=\"'\"", "data.arguments"),
    ("data.arguments=width=3", "data.arguments"),
])  # fmt: skip
def test_wrong_arguments_are_one_line(with_arguments, capsys, word, line):
    said = refused_by_command(capsys, f"problem={with_arguments}", word, *BASE)
    assert re.search(line, said), said


def test_a_file_without_parameters_takes_no_arguments(own, capsys):
    file = own()
    said = refused_by_command(capsys, f"problem={file}", "problem.width=3", *BASE)
    assert "takes no arguments. Write a function `def problem(width=64):`" in said
    assert "Add problem=FILE" in refused_by_command(capsys, "problem.width=3")
    said = refused_by_command(capsys, f"problem={file},{file}", *BASE)
    assert "or add --multirun for several files" in said


# ---- who may run the file ----


@pytest.fixture
def trap(tmp_path):
    """Return a problem file that nobody has named, and the file that it would write."""
    written = tmp_path / "it ran"
    path = tmp_path / "trap.py"
    path.write_text(f"open({str(written)!r}, 'w').close()\n{FILE}")
    yield str(path)
    assert not written.exists()


GROUPS = "# @package _global_\ndefaults:\n" + "".join(
    f"  - override /{group}: problem\n" for group in ("data", "task", "model")
)


def test_an_experiment_cannot_run_a_file(tmp_path, trap, capsys):
    files = "".join(f"{group}: {{file: {trap}}}\n" for group in ("data", "task", "model"))
    Own(tmp_path).write("received", GROUPS + files)
    line = refused_by_command(capsys, "experiment=received", f"--config-dir={tmp_path}")
    assert "your command line does not" in line


def test_a_file_that_the_command_names_permits_no_other_file(tmp_path, trap, own, capsys):
    files = "".join(f"{group}: {{file: {trap}}}\n" for group in ("data", "task", "model"))
    Own(tmp_path).write("received", GROUPS + files)
    file = own()
    problem_file.run_named([f"problem={file}"])
    # The words of the command line come after the file.
    found = compose.load(["experiment=received", f"problem={file}"], tmp_path)
    assert {found.data.file, found.task.file, found.model.file} == {file}
    with pytest.raises(UsageError, match="your command line does not"):
        compose.load([f"problem={trap}"])


def test_a_table_and_an_option_cannot_run_a_file(trap, capsys):
    cell = grid.Cell("received", (f"problem={trap}", "kfac=none"))
    for refused in (cell.config, cell.command, cell.rank_command):
        with pytest.raises(UsageError, match="your command line does not"):
            refused()
    words = [f"{group}.file={trap}" for group in ("data", "task", "model")]
    words += [f"{group}=problem" for group in ("data", "task", "model")]
    assert "your command line does not" in refused_by_command(capsys, *words)
    code, line = local_runs.train_forked([f"problem={trap}"])
    assert code == 2
    assert "your command line does not" in line


def test_a_fork_runs_the_file_that_the_command_names(tmp_path, own):
    file = own()
    problem_file.run_named([f"problem={file}"])
    words = [f"problem={file}", *BASE, "kfac=none", "trainer.max_steps=1", f"runs_dir={tmp_path}"]
    assert local_runs.train_forked([*words, "run_id=r"])[0] == 0
    assert end(tmp_path / "r").status == "finished"


# ---- bad input ----

BAD = [
    ("import random", "import randomm", r"mine.py:1: ModuleNotFoundError: No"),
    ("import random", "import random random", r"mine.py:1: SyntaxError"),
    ("import random", "import random; raise SystemExit", r"mine.py:1: SystemExit"),
    ("problem = Problem", "problems = Problem", r"mine.py: the file has no variable `problem`"),
    ("problem = Problem", "def problem(width): Problem", r"`width` of the function `problem` has"),
    ("problem = Problem", "def problem(): dict", r"`problem` returned an object of class NoneType"),
    ("model=network", "model=network()", r"mine.py:\d+: Problem: model must be a function that"),
    ("batch_size=12", "batch_size=0", r"Problem: batch_size=0 must be"),
    ("train=Noisy(60)", "train=iter([])", r"Problem: train must be a map-style dataset"),
    ("validation=Noisy(20)", "validation=[]", r"Problem: validation has no example"),
    ("nn.Linear(4, 8)", "nn.Linear(5, 8)", r"mine.py: the model or the loss fails on the first"),
    ("return nn.Seq", "return 1, nn.Seq", r"`model` returned an object of class tuple"),
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(reduction='sum')", r"the loss is a sum over"),
    ("nn.CrossEntropyLoss()", "lambda net, all: net.forward(all[0]).sum()", "`net` to `model`$"),
    ("float().mean()", "float().sum()", r"the metric `accuracy` is a sum over the examples"),
    ("batch[1]).float", "batch[2]).float", r"mine.py:\d+: the metric fails on the first batch"),
    ("validation=Noisy(20)", "validation=[(torch.zeros(5), 0)]", r"must have the same shapes"),
    ("return x, i % 3", "raise OSError('no such file')", r"mine.py:\d+: train\[0\]: OSError"),
]  # fmt: skip
MORE = [  # of what is refused when the model is built and tried, which takes a second
    ("batch_size=12", "batch_size=61", r"batch_size=61 is larger than the training set of .*60 ex"),
    ("return nn.Seq", "1 / 0\n    return nn.Seq", r"mine.py:\d+: the model cannot be built: Zero"),
    ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(reduction='none')", r"of shape \[8\]"),
    ("nn.CrossEntropyLoss()", "lambda net, batch: net(batch[0]).sum()", "`net` to `model`$"),
    ("nn.CrossEntropyLoss()", "lambda output, target: 1.0", r"the loss is an object of class fl"),
    ("nn.CrossEntropyLoss()", "lambda o, t: o.mean() / 0", r"the loss of the first batch is"),
    ("float().mean()", "float().mean() * np.nan", r"the metric `accuracy` of the .* is NaN"),
    ("float().mean()", "float()[:3]", r"the metric has the shape \[3\]"),
    ("metric=", "collate=lambda e: (torch.eye(len(e)), [0]), metric=", r"\[8, 8\], \[1\]\. The"),
    ("return x, i % 3", "return x[: i % 3], i % 3", r"8 examples of `train` do not make a batch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line"),
    BAD + [slow(*case) for case in MORE],
    ids=[new for _, new, _ in BAD + MORE],
)
def test_bad_input_is_one_line_with_the_place(tmp_path, own, capsys, old, new, line):
    file = own((old, new))
    runs_dir = tmp_path / "runs"
    said = refused_by_command(capsys, f"problem={file}", *BASE, f"runs_dir={runs_dir}")
    assert re.search(line, said), said
    assert not list(runs_dir.glob("*")), "a run directory is left behind"


def test_own_words_clash_with_a_problem(own, capsys):
    file = own()
    assert "Remove model=resnet8" in refused_by_command(capsys, f"problem={file}", "model=resnet8")
    assert "name one problem" in refused_by_command(capsys, f"problem={file}", f"problem={file}x")
    assert "problem=FILE" in refused_by_command(capsys, *GROUP_WORDS)


GROUP_WORDS = [f"{group}=problem" for group in ("data", "task", "model")]
