"""The commands as users type them: exit codes, output, and the files they leave."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import kfac_bench
from kfac_bench import cli
from kfac_bench.cli import bench_command, entry, sweep, train_command
from kfac_bench.cli.entry import exit_with
from kfac_bench.config import compose
from kfac_bench.errors import LostRanksError, OneRankError, UsageError
from kfac_bench.output import say
from kfac_bench.record.events import RunEnded, RunStarted, Trained, read
from kfac_bench.simulate import plan_report
from kfac_bench.training import dry_run
from tests.support import forks
from tests.support.language import gpt2_folder
from tests.support.quick import quick_if, slow
from tests.support.runs import before_step
from tests.support.written_runs import two_optimizers

BIN = Path(sys.executable).parent
ROOT = compose.CONF_DIR.parent
TINY = (
    "model=autoencoder",
    "model.hidden=[4]",
    "logger=none",
    "trainer.max_steps=3",
    "trainer.threads=1",
    "kfac.update_freq=2",
    "kfac.factor_update_freq=1",
)


@pytest.fixture
def command(tmp_path):
    """Run a command in an empty folder, as a user's shell would, and capture its output."""

    def run(*arguments, **options):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        return subprocess.run(
            [str(a) for a in arguments],
            cwd=tmp_path,
            env=environment,
            text=True,
            timeout=120,
            **({"capture_output": True} | options),
        )

    return run


def refused(done, fragment):
    """Check for exit code 2 and exactly one line, on stderr."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("kfac-")
    assert fragment in done.stderr


def refused_here(folder, monkeypatch, capsys, command, arguments, fragment):
    """Check the same of a command in this process, and that it leaves no file."""
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert fragment in said.err
    assert list(folder.iterdir()) == []


# ---- help and configuration ----


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (cli.train, []),
        (cli.train, ["model=resnet50"]),
        (cli.plan, []),
        (cli.plan, ["simulate"]),
        (cli.bench, []),
        (cli.bench, ["run"]),
        (cli.bench, ["scaling"]),
        (cli.data, []),
        (cli.data, ["verify"]),
    ],
)
def test_every_command_has_a_version(main, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--version"])
    assert stop.value.code == 0
    assert capsys.readouterr() == (f"{kfac_bench.__version__}\n", "")


def test_the_value_of_an_option_may_begin_with_dashes():
    def parsed(*words):
        return bench_command.build_parser().parse_args(["run", "demo", *words])

    assert parsed("--sbatch", "--gpus=4", "--retry").sbatch == "--gpus=4"
    assert parsed("--sbatch=--gpus=4").sbatch == parsed("--sbatch", "--gpus=4").sbatch
    with pytest.raises(UsageError, match="--sbatch: expected one argument"):
        parsed("--sbatch", "--retry")


@pytest.mark.parametrize("main", [cli.train, cli.plan])
def test_help_explains_a_group_or_an_option(main, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help", "kfac.damping"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("kfac.damping\n  Tikhonov damping")
    with pytest.raises(SystemExit) as stop:
        main(["--help", "kfac.dampin"])
    assert stop.value.code == 2
    assert "did you mean kfac.damping?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words", "start"),
    [
        (cli.train, ["--help", "hardware"], "--hardware NAME: "),
        (cli.plan, ["--help", "hardware"], "--hardware NAME: "),
        (cli.plan, ["simulate", "--help", "hardware"], "--hardware NAME: "),
        (cli.plan, ["simulate", "--help", "kfac.damping"], "kfac.damping\n  Tikhonov damping"),
        # The usage explains the options that only the command has.
        (cli.plan, ["simulate", "--help", "strategies"], "usage: kfac-plan simulate "),
        (cli.plan, ["simulate", "--help"], "usage: kfac-plan simulate "),
    ],
)
def test_help_explains_the_words_of_a_simulation(main, words, start, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize(
    ("main", "words", "line"),
    [
        (cli.bench, ["tune"], "Tune each optimizer with the same budget."),
        (cli.bench, ["runs", "list"], "List runs with their state, size and age."),
        (cli.data, ["make-demo"], "Write a small demo in a published layout."),
    ],
)
def test_the_help_of_a_subcommand_says_what_it_does(main, words, line, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    assert f"\n\n{line}\n\n" in capsys.readouterr().out


def test_help_needs_no_torch(command):
    code = (
        "import sys, kfac_bench.cli\n"
        "try: kfac_bench.cli.train(['--help'])\n"
        "except SystemExit as stop: code = stop.code\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'wandb', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    done = command(sys.executable, "-c", code)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith("usage: kfac-train")
    for fragment in (
        "--multirun",
        "dry_run=true",
        "kfac.update_freq=100",
        "model=autoencoder|bert_base",
    ):
        assert fragment in done.stdout


def test_cfg_job_prints_the_configuration_as_yaml(command):
    done = command(BIN / "kfac-train", "model=resnet50", "kfac.update_freq=500", "--cfg", "job")
    assert (done.returncode, done.stderr) == (0, "")
    said = yaml.safe_load(done.stdout)
    assert (said["model"]["name"], said["kfac"]["update_freq"]) == ("resnet50", 500)
    assert said.keys() >= {"data", "task", "optimizer", "trainer", "logger", "seed", "run_id"}
    assert not said.keys() & {"hydra", "schema", "defaults"}


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("kfac-train", ["--help"]),
        ("kfac-train", ["--cfg", "job"]),
        ("kfac-bench", ["--help"]),
        ("kfac-bench", ["list"]),
    ],
)
def test_a_closed_pipe_is_no_error(command, script, arguments):
    reader, writer = os.pipe()
    os.close(reader)  # as head does
    done = command(
        BIN / script, *arguments, capture_output=False, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert done.stderr == ""


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["kfac.update_freq=-3"], "must be at least 1"),
        (["model=resnet51"], "Choose one of autoencoder"),
        (["--cfg", "all"], "--cfg"),
        (["--layers"], "add dry_run=true"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--config-dir", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_bad_input_to_kfac_train_is_one_line(tmp_path, monkeypatch, capsys, arguments, fragment):
    refused_here(tmp_path, monkeypatch, capsys, cli.train, arguments, fragment)


@pytest.mark.parametrize("arguments", [["kfac.dampign=1"], ["--multirun", "kfac.dampign=0,1"]])
def test_a_command_with_bad_input_ends_with_exit_code_2(command, tmp_path, arguments):
    """Other bad input is given to the function that is behind the command."""
    refused(command(BIN / "kfac-train", *arguments), "did you mean kfac.damping?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "command"),
        (["lst"], "choose from"),
        (["run", "no_such"], "no such benchmark; choose one of claim1_epochs"),
        (["run", "demo", "--seeds", "x"], "--seeds: 'x' is not a whole number"),
        (["run", "demo", "--seeds", "0", "kfac.dampign=1"], "did you mean kfac.damping?"),
        (["report", "demo", "--retry", "--profile=smoke"], "unrecognized arguments: --retry"),
        (["tune", "demo"], "--out"),
        (["tune", "demo", "--out", "/nowhere"], "/nowhere: no such folder"),
        (
            ["tune", "demo", "--out", ".", "--only", "x"],
            "--only x: no experiment begins with this text",
        ),
        (["compare", "no_such_run"], "no_such_run"),
        (["compare", "."], "no runs here"),
        (["compare", ".", "--watch"], "--watch writes a page again and again: add --html"),
        (["runs", "list"], "--runs-dir runs: no such folder"),
        (["runs", "prune", "--runs-dir", ".", "--keep", "0"], "--keep 0: must be at least 1"),
        (["runs", "prune", "--runs-dir", ".", "--older-than", "nan"], "--older-than nan: must be"),
    ],
)
def test_bad_input_to_kfac_bench_is_one_line(tmp_path, monkeypatch, capsys, arguments, fragment):
    refused_here(tmp_path, monkeypatch, capsys, cli.bench, arguments, fragment)


def test_the_report_package_imports_no_torch(command):
    code = "import sys, kfac_bench.report; print('torch' in sys.modules)"
    assert command(sys.executable, "-c", code).stdout == "False\n"


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["data=imagefolder", "data.root=/var"], ["/var/train", "<class>/<image>.JPEG"]),
        (["data=cifar10", "data.root=/var"], ["/var", "cifar-10"]),
        (["data=cifar10", "data.root=/nowhere"], ["data.root=/nowhere: no such file or folder"]),
        (["data=cifar10"], ["data.root"]),
        (["trainer.batch_size=5000"], ["5000", "1347"]),
        (["model=autoencoder", "model.hidden=[0]"], ["positive"]),
        (["kfac.skip=[.]"], ["kfac"]),
        (["run_id=a/b"], ["run_id='a/b'"]),
        (["resume=/nowhere"], ["resume=/nowhere"]),
        (
            ["kfac.adaptive_damping=true", "kfac.damping=1e-7"],
            ["kfac.damping=1e-07: an adaptive damping starts between 1e-06 and 100"],
        ),
        (
            ["trainer.batch_size=8", "trainer.accumulate=8"],
            ["model=resnet8", "batch norm", "twice the number of ranks times trainer.accumulate"],
        ),
    ],
)
def test_bad_input_that_only_the_run_detects_is_one_line(tmp_path, capsys, overrides, fragments):
    with pytest.raises(SystemExit) as caught:
        cli.train([*overrides, "logger=none", f"runs_dir={tmp_path}"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert len(said.splitlines()) == 1, said
    for fragment in fragments:
        assert fragment in said
    assert list(tmp_path.iterdir()) == []  # kfac-bench compare runs/* must find complete runs only


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", ["runs_dir={}"]),
        ("train", ["--config-dir={}"]),
        ("bench", ["compare", "{}"]),
        ("bench", ["runs", "list", "--runs-dir={}"]),
    ],
)
def test_a_path_that_the_system_refuses_is_one_line(name, words, capsys):
    path = "x" * 300  # as a folder that this user must not search, which the root of CI may
    with pytest.raises(SystemExit) as caught:
        getattr(cli, name)([word.format(path) for word in words])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    if sys.version_info < (3, 14):  # later, Path.exists() hides the reason
        assert "cannot be used (File name too long)\n" in said


@pytest.mark.slow
def test_only_rank_0_prints_an_error(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(entry, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        cli.train(["kfac.dampign=1"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""
    assert waits == [entry.RANK_0_SPEAKS_S], "the launcher may end rank 0 before it has spoken"


@pytest.mark.parametrize(
    ("overrides", "is_said"),
    [
        (["model=resnet50", "kfac.update_freq=500"], True),
        (["data=digits"], False),
        (["experiment=digits/resnet_kfac"], False),
        (["model=resnet50", "data=imagefolder", "data.root=FOLDER"], False),
        (["task=denoising", "model=unet", "data=pictures"], False),
        (["dry_run=true"], False),
    ],
)
def test_a_command_without_data_says_what_it_trains_on(overrides, is_said, monkeypatch, capsys):
    monkeypatch.setattr(train_command, "train_one", lambda config, by_layer: 0)
    assert train_command.train(overrides) == 0
    said = capsys.readouterr().out
    assert said.startswith("The command names no data") == is_said
    assert ("add data=imagefolder data.root=FOLDER" in said) == is_said
    monkeypatch.setenv("RANK", "1")
    assert train_command.train(overrides) == 0
    assert capsys.readouterr().out == ""


# ---- the dry run ----


@pytest.mark.slow
def test_a_dry_run_prints_the_cost_of_the_papers_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model=resnet50", "data=imagefolder", "kfac.update_freq=500", "dry_run=true"]
    with pytest.raises(SystemExit) as caught:
        cli.train([*words, "--layers"])
    printed, said = capsys.readouterr()
    assert (caught.value.code, said) == (0, "")
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing behind"
    recipe, _, text = printed.partition("\n")
    assert recipe.startswith("recipe=imagenet_resnet: ")
    assert text.startswith("K-FAC adds ")
    assert "imagefolder [3, 224, 224]" in text
    assert "parameters 25,557,032 (102.23 MB in fp32)" in text
    assert "K-FAC covers 54 layers" in text  # 53 convolutions and the last layer
    assert re.search(r"layer3\.0\.conv2 +Conv2d +A 2304, G 256", text)
    assert re.search(r"fc +Linear +A 2049, G 1000", text)
    assert re.search(r"left to the optimizer: 53 modules\n(.*BatchNorm2d .*\n)+", text)
    reason = re.search(r"bn1 +BatchNorm2d +(.*)", text)[1]
    assert len(reason) > 5
    assert re.search(r"\nmemory\n  factors +[\d.]+ MB\n  decompositions +[\d.]+ MB", text)
    for stage, every in (("factors", 50), ("decompose", 500), ("precondition", 1)):
        assert flop_of(text, stage)[1] == every
    flop = float(re.search(r"forward and backward: ([\d.]+) GFLOP", text)[1])
    assert flop == pytest.approx(32 * 3 * 2 * 4.09, rel=0.05)


def test_a_dry_run_of_a_job_is_for_all_its_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "64")
    words = ["model=resnet8", "data=digits", "trainer.batch_size=128", "dry_run=true"]
    assert train_command.train(words) == 0
    assert "method inverse, 64 rank(s)" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "5")
    assert train_command.train(words) == 0
    assert capsys.readouterr().out == ""


def peak_bytes():
    """Return the most memory that this process has held. A fork starts from 0."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def bytes_of_a_dry_run():
    """Return by how much a dry run raises the peak, and how many layers K-FAC covers."""
    before = peak_bytes()
    big = ["model=resnet152", "data=imagefolder", "trainer.batch_size=999"]
    covered = len(dry_run.trace(compose.load(big)).report.layers)
    return peak_bytes() - before, covered


def test_a_dry_run_allocates_nothing():
    grown, covered = forks.call(bytes_of_a_dry_run)
    assert covered == 156
    assert grown < 100e6, f"{grown / 1e6:.0f} MB; the weights alone would be 240 MB"


def dry_run_of(*overrides):
    return plan_report.describe(dry_run.trace(compose.load(overrides)))


def flop_of(text, stage):
    """Return the printed FLOPs of a stage and the printed interval."""
    found = re.search(rf"\n  {stage} +(\d+) +([\d.]+) (k|M|G|T)FLOP", text)
    assert found, text
    unit = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[3]]
    return float(found[2]) * unit, int(found[1])


ALL = ("kfac.skip=[]", "kfac.method=ekfac", "kfac.fisher=type2", "kfac.adaptive_damping=true")
OTHERS = ("kfac.weight_sharing=reduce", "kfac.max_dim=64", "kfac.fisher=mc", "kfac=layer_wise")


# The quick run has one or two sizes of each family.
OTHER_SIZES = {f"resnet{depth}" for depth in (18, 20, 32, 34, 44, 56, 101, 110, 152)}
OTHER_SIZES |= {"bert_base", "bert_large", "maskrcnn_resnet50_fpn"}
MODELS = sorted({*compose.options_of("model")} - {"problem"})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *quick_if(lambda case: case[0] not in OTHER_SIZES, [(m, ALL) for m in MODELS]),
        *(slow(m, OTHERS) for m in MODELS if m not in OTHER_SIZES - {"maskrcnn_resnet50_fpn"}),
    ],
)
def test_a_dry_run_works_for_every_model(model, options, tmp_path):
    data = {
        "huggingface": "pydoc",
        "unet": "lgg",
        "transformer": "pydoc",
        "lstm": "pydoc",
        "maskrcnn": "coco",
        "bert": "text",
    }
    family = model.partition("_")[0]
    empirical = ["kfac.fisher=empirical"] if family in ("maskrcnn", "bert") else []
    # A loss that is a mean over tokens refuses an adaptive damping.
    if family in ("bert", "huggingface", "transformer", "lstm"):
        options = [word for word in options if "adaptive_damping" not in word]
    named = {
        "torchvision": ["model.architecture=resnet18"],
        "timm": ["model.architecture=resnet18"],
    }.get(model, [])
    if model == "huggingface":
        named = [f"model.path={gpt2_folder(tmp_path)}", "data.sequence_length=16"]
    text = dry_run_of(f"model={model}", "trainer.batch_size=4", *options, *empirical, *named)
    assert f": {model} on {data.get(family, 'digits')}" in text
    assert re.search(
        r"K-FAC adds [\d.]+ .FLOP per step on average \(\d+ (%|times those) of forward", text
    )


def test_a_dry_run_works_without_kfac():
    text = dry_run_of("kfac=none", "kfac.fisher=mc")
    assert text.startswith("K-FAC: off (kfac=none)\n")
    assert "forward and backward" in text


AUTOENCODER = ("model=autoencoder", "model.hidden=[4]", "trainer.batch_size=32")
A, G = (65, 5), (4, 64)  # 64-4-64, and a bias each


def test_a_dry_run_derives_flops_from_the_layer_shapes():
    text = dry_run_of(*AUTOENCODER)
    assert text.startswith("K-FAC adds ")
    assert "A 65, G 4" not in text, "only --layers lists the layers"
    squares = sum(n * n for n in (*A, *G))
    assert flop_of(text, "factors") == (pytest.approx(2 * 32 * squares, rel=0.01), 10)
    cubes = sum(n**3 for n in (*A, *G))
    assert flop_of(text, "decompose") == (pytest.approx(cubes, rel=0.01), 100)
    assert "  fisher" not in text
    assert "  damping" not in text


def test_a_dry_run_counts_the_flops_that_options_add():
    plain = flop_of(dry_run_of(*AUTOENCODER), "factors")[0]
    second = 2 * 32 * sum(a * a + g * g + a * g for a, g in zip(A, G, strict=True))
    ekfac = flop_of(dry_run_of(*AUTOENCODER, "kfac.method=ekfac"), "factors")[0]
    assert ekfac - plain == pytest.approx(second, rel=0.02)

    to_layers = 2 * 32 * 64 * 4  # from the output back through the last weight
    mc = dry_run_of(*AUTOENCODER, "kfac.fisher=mc", "kfac.factor_update_freq=5")
    assert flop_of(mc, "fisher") == (pytest.approx(to_layers, rel=0.01), 5)
    assert flop_of(mc, "factors")[0] == plain
    type2 = dry_run_of(*AUTOENCODER, "kfac.fisher=type2")
    assert flop_of(type2, "fisher") == (pytest.approx(64 * to_layers, rel=0.01), 10)
    squares = [sum(n * n for n in side) for side in (A, G)]
    assert flop_of(type2, "factors")[0] == pytest.approx(
        2 * 32 * (squares[0] + 64 * squares[1]), rel=0.01
    )
    classes = flop_of(dry_run_of("kfac.fisher=type2"), "fisher")[0]
    assert classes == pytest.approx(10 * flop_of(dry_run_of("kfac.fisher=mc"), "fisher")[0], 0.01)

    adaptive = dry_run_of(*AUTOENCODER, "kfac.adaptive_damping=true", "kfac.damping_freq=3")
    assert flop_of(adaptive, "damping") == (pytest.approx(2 * 2 * 32 * 64 * 4, rel=0.01), 3)

    expand, reduce = (
        flop_of(dry_run_of(f"kfac.weight_sharing={how}"), "factors")[0]
        for how in ("expand", "reduce")
    )
    assert reduce < expand / 4, "reduce makes one row of 64, 16 and 4 positions"


def test_a_dry_run_prints_parts_and_precision():
    text = dry_run_of("trainer.precision=bf16", "trainer.accumulate=4")
    assert "batch 256 in 4 parts, bf16" in text
    with pytest.raises(UsageError, match="batch norm"):
        dry_run_of("trainer.batch_size=8", "trainer.accumulate=8")


# ---- runs ----


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run `kfac-train --multirun seed=0,1` in an empty folder."""
    folder = tmp_path_factory.mktemp("sweep")
    done = subprocess.run(
        [str(BIN / "kfac-train"), "--multirun", "seed=0,1", "runs_dir=runs", *TINY],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return folder, done


def test_a_sweep_makes_one_run_for_each_value(swept):
    folder, done = swept
    assert done.returncode == 0, done.stderr
    runs = [read(p) for p in sorted((folder / "runs").iterdir())]
    assert sorted(r[0].config["seed"] for r in runs) == [0, 1]
    assert all(r[-1].status == "finished" and r[-1].step == 3 for r in runs)


def test_on_several_ranks_an_error_of_one_rank_ends_its_sweep(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("kfac_bench.cli.entry.RANK_0_SPEAKS_S", 0)

    def train(config):
        raise OneRankError("a file of this rank is damaged")

    with pytest.raises(OneRankError):  # kfac-train then prints the line on this rank
        sweep.run(["seed=0,1"], None, train)


def test_the_state_of_one_run_is_not_that_of_a_sweep(tmp_path, monkeypatch):
    """slurm/common.sh ends a job with exit code 0 if the last state is a good one."""
    state = tmp_path / "job.state"
    monkeypatch.setenv("KFAC_STATE_FILE", str(state))

    def train(config):
        state.write_text("finished 2 a\n")
        return codes[config.seed]

    codes = [1, 0]
    assert sweep.run(["seed=0,1"], None, train) == 1
    assert not state.exists()
    codes = [0, 128 + signal.SIGUSR1]  # the job is requeued
    assert sweep.run(["seed=0,1"], None, train) == codes[1]
    assert state.exists()


def test_glob_chooses_the_files_that_fit_it(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    trained = []
    words = ["model=glob([resnet2*,resnet3*],exclude=resnet32)", "experiment=glob(min*)"]
    assert sweep.run(words, tmp_path, lambda config: trained.append(config) or 0) == 0
    assert [config.model.name for config in trained] == ["resnet20", "resnet34"]
    assert {config.seed for config in trained} == {7}


def test_the_runs_of_a_sweep_are_one_group_in_wandb(monkeypatch):
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    trained = []
    for words in (["seed=0,1"], ["seed=0,1"], ["seed=0"], ["seed=0,1", "logger.group=mine"]):
        sweep.run(words, None, lambda config: trained.append(config.logger.group) or 0)
    assert trained[0].startswith("sweep-")
    assert trained[:4] == [trained[0]] * 4
    assert trained[4:] == [None, "mine", "mine"]


def test_a_sweep_leaves_no_stray_files(swept):
    assert [p.name for p in swept[0].iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["model=foo,bar"], "no such model"),
        (["a b"], "'a b' is not an override"),
        (["model=glob(x*)"], "model=glob(x*): no choice fits; choose from autoencoder, "),
        (["seed=glob(*)"], "seed=glob(*): no choice fits; seed is not a group"),
        (["model=glob(["], "'model=glob([' is not an override"),
        (["logger.id=x", "seed=0,1"], "a sweep of 2 runs needs a W&B run for each. Unset it"),
        (["run_id=x", "seed=0,1"], "run_id=x: a sweep of 2 runs needs a directory for each"),
        (["seed=range(0,5000)"], "a sweep of more than 1000 runs is not possible"),
        (["seed=range(0,900)", "trainer.log_freq=range(1,900)"], "more than 1000 runs"),
        (["seed=range(0,1000000000)"], "more than 1000 runs"),
        (["kfac.damping=interval(0,1)"], "this names no single values. List them"),
    ],
)
def test_bad_input_to_a_sweep_is_one_line(tmp_path, monkeypatch, capsys, overrides, fragment):
    arguments = ["--multirun", *overrides]
    refused_here(tmp_path, monkeypatch, capsys, cli.train, arguments, fragment)


def test_list_shows_the_benchmarks_in_groups_without_slow_imports(command):
    code = (
        "import sys, kfac_bench.cli\n"
        "try: kfac_bench.cli.bench(['list'])\n"
        "except SystemExit as stop: code = stop.code\n"
        "slow = {'torch', 'numpy', 'hydra', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "print(code, sorted(slow), file=sys.stderr)"
    )
    done = command(sys.executable, "-c", code)
    assert done.stderr == "0 []\n"
    papers, claims, own = done.stdout.split("\n\n")[:3]
    assert papers.startswith("Tables and figures of the papers")
    assert "\n  table2_fig4_cifar_correctness: Table 2, Fig. 4: ResNet-32" in papers
    assert "\n  claim4_memory: " in claims
    assert "\n  demo: Handwritten digits" in own
    assert "  try: " not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next: kfac-bench run demo ")


# ---- how commands end ----


def test_a_run_ends_with_its_result_and_the_command_without_kfac(tmp_path, capsys):
    def end(*words):
        with pytest.raises(SystemExit) as stop:
            cli.train([*TINY, f"runs_dir={tmp_path}", *words])
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()

    words = ["kfac.skip=[a b]"]
    result, then = end(*words)[-2:]
    assert re.match(r"result: K-FAC \+ SGD: squared_error [\d.]+ after 3 steps, ", result)
    command = then.removeprefix("next: kfac-train ").partition("   (")[0]
    assert shlex.split(command) == [
        *(word for word in TINY if not word.startswith("kfac.")),
        f"runs_dir={tmp_path}",
        "kfac=none",
    ]
    with pytest.raises(SystemExit):
        cli.train(shlex.split(command))
    _, alone, compare = capsys.readouterr().out.splitlines()[-3:]
    assert alone.startswith("next: ") or compare.startswith("next: ")
    result, beside, then = end(*words)[-3:]
    assert beside.startswith("beside: SGD: squared_error ")
    folders = [line.rpartition("; ")[2] for line in (result, beside)]
    assert then == f"next: kfac-bench compare {' '.join(folders)}"


def test_a_run_from_a_file_that_names_it_has_no_other_run_beside_it(tmp_path, capsys):
    for words in ([*TINY, f"runs_dir={tmp_path}", "run_id=mine"], [f"from={tmp_path}/mine"]):
        with pytest.raises(SystemExit) as stop:
            cli.train(words)
        assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "beside: " not in said
    assert said.splitlines()[-1] == f"next: kfac-bench compare {tmp_path}/mine"


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=0,1")], ids=["run", "sweep"])
def test_an_interrupted_run_ends_with_the_command_that_continues(tmp_path, sweep):
    words = [*sweep, *TINY, "kfac=none", f"runs_dir={tmp_path}"]
    code, said = forks.call(_interrupted, words)
    assert code == 128 + signal.SIGTERM
    assert said.splitlines()[-1] == f"next: {shlex.join(['kfac-train', *words])}   (continues)"
    assert len(list(tmp_path.iterdir())) == 1


def _interrupted(words):
    output = io.StringIO()
    with (
        before_step(2, lambda _: os.kill(os.getpid(), signal.SIGTERM)),
        contextlib.redirect_stdout(output),
        pytest.raises(SystemExit) as stop,
    ):
        cli.train(words)
    return stop.value.code, output.getvalue()


def test_a_warning_is_one_line(command):
    code = (
        "import warnings; from kfac_bench.cli.entry import exit_with\n"
        "exit_with('kfac-train', lambda: warnings.warn('K-FAC: too\\nslow') or 0)"
    )
    done = command(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "kfac-train: warning: K-FAC: too slow\n")


def test_compare_writes_one_page_that_loads_nothing_from_the_network(swept, command, tmp_path):
    runs = sorted((swept[0] / "runs").iterdir())
    done = command(BIN / "kfac-bench", "compare", *runs, "--html", "out.html", "--svg", "out.svg")
    assert done.returncode == 0, done.stderr
    assert "optimizer" in done.stdout
    assert "K-FAC + SGD" in done.stdout
    assert "out.html" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("--markdown   (the table as Markdown)")
    page = (tmp_path / "out.html").read_text()
    assert "<svg" in page
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert (tmp_path / "out.svg").read_text().lstrip().startswith(("<?xml", "<svg"))


def test_compare_prints_markdown_and_reports_an_unwritable_file(swept, capsys):
    runs = str(swept[0] / "runs")
    with pytest.raises(SystemExit) as caught:
        cli.bench(["compare", runs, "--markdown"])
    assert caught.value.code == 0
    assert re.search(r"^\| *task *\| *optimizer *\| *steps to target", capsys.readouterr().out)
    for option in ("--html", "--svg"):
        with pytest.raises(SystemExit) as caught:
            cli.bench(["compare", runs, option, "/nowhere/out"])
        assert caught.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.supports("ddp", "documented command")
def test_torchrun_with_the_module_trains_on_two_ranks(command, tmp_path):
    done = command(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "kfac_bench",
        *TINY,
        "trainer.device=cpu",
        "trainer.batch_size=64",
    )
    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "runs").iterdir()
    result, then = done.stdout.splitlines()[-2:]
    assert result.startswith("result: K-FAC + SGD: squared_error ")
    assert then == f"next: kfac-bench compare runs/{path.name}"
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    events = read(path)
    assert isinstance(events[0], RunStarted)
    assert events[-1].status == "finished"
    assert [e.step for e in events if isinstance(e, Trained)] == [3]
    about = json.loads((path / "run.json").read_text())
    assert about["world_size"] == 2
    assert "Traceback" not in done.stderr
    ends = [e for e in events if isinstance(e, RunEnded)]
    assert len(ends) == 1
    assert sorted(p.name for p in path.glob("checkpoints/*/*")) == [
        "manifest.json",
        "rank0.pt",
        "rank1.pt",
    ]


# ---- what is printed ----


def test_no_line_holds_control_characters(capsys):
    """Names from files could otherwise move the cursor or change the terminal's title."""

    def fail():
        raise LostRanksError("\x1b]0;title\x07")

    say("a\x1b[31m\x9b\nb")
    with pytest.raises(SystemExit):
        exit_with("kfac-train", fail)
    said = capsys.readouterr()
    assert said.out == "a\\x1b[31m\\x9b\nb\n"
    assert said.err == "kfac-train: lost another rank: \\x1b]0;title\\x07\n"


def test_a_shell_that_closed_stdout_gets_the_exit_code(monkeypatch):
    """Python's standard output is None then."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as caught:
        exit_with("kfac-bench", lambda: say("unread") or 0)
    assert caught.value.code == 0
    sys.stdout.close()


def test_a_table_is_printed_in_a_locale_without_its_dash(tmp_path, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(SystemExit) as caught:
        cli.bench(["compare", str(two_optimizers(tmp_path))])
    assert caught.value.code == 0
    assert b"K-FAC + SGD" in screen.buffer.getvalue()
