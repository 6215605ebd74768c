"""What the README tells people to type works; what it links to exists."""

import re
import shlex

import pytest

from benchmarks.contest import contest_tables
from benchmarks.contest.contest_tables import medians
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.setup import CONF
from benchmarks.contest.sitting import tasks_of
from kfac_bench.benchmark import schema
from kfac_bench.benchmark.performance_profile import profile_finding, scores
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.config import compose, conf_files, option_help, problem_file
from tests.support import ROOT
from tests.support.figures import texts

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]


def commands(name):
    """Arguments of every line that starts with ``name``."""
    return [shlex.split(x)[1:] for x in LINES if x.removeprefix(".venv/bin/").startswith(name)]


TRAIN = [*commands("kfac-train"), *(c[c.index("kfac_bench") + 1 :] for c in commands("torchrun"))]


def test_the_commands_are_found():
    assert len(TRAIN) >= 8
    assert any({"model=resnet50", "data=imagefolder"} <= set(command) for command in TRAIN)
    assert len(commands("make")) >= 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the problem file and the run that README names."""
    problem = (ROOT / "examples" / "problems" / "digits.py").read_text()
    changed = problem.replace("problem = Problem(", "def problem(width=16):\n    return Problem(")
    (tmp_path / "my_problem.py").write_text(changed)
    (tmp_path / "runs" / "RUN_ID").mkdir(parents=True)
    shown = compose.shown(compose.load(["seed=3"]))
    (tmp_path / "runs" / "RUN_ID" / "config.yaml").write_text(shown)
    monkeypatch.chdir(tmp_path)
    # Runs of later tests would look for the file, too.
    monkeypatch.setattr(problem_file, "_files", {})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", TRAIN, ids=" ".join)
def test_every_train_command_composes(arguments):
    if arguments == ["--help"]:
        assert option_help.describe([]).startswith("groups:")
        return
    problem_file.run_named(arguments)
    words = [word for word in arguments if word != "--multirun"]
    if words == arguments:
        compose.load(words)
        return
    first = [word.partition(",")[0] for word in words]
    for i, word in enumerate(words):  # Hydra splits the sweep; each choice must compose
        key, _, values = word.partition("=")
        for value in values.split(","):
            compose.load([*first[:i], f"{key}={value}", *first[i + 1 :]])


@pytest.mark.parametrize("arguments", commands("kfac-bench"), ids=" ".join)
def test_every_bench_command_is_understood(arguments):
    options = build_parser().parse_args(arguments)
    if options.command in ("run", "tune") and options.benchmark != "all":
        assert list(schema.points(schema.load(options.benchmark)))


def test_batch_scripts_exist_and_their_options_compose():
    for words in commands("sbatch"):
        script = next(word for word in words if word.endswith(".sbatch"))
        named = re.search(r"(experiment|recipe)=\w+", (ROOT / script).read_text())[0]
        options = words[words.index(script) + 1 :]
        assert options
        compose.load([named, *options])


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {c[0] for c in commands("make")} <= targets
    assert set(re.findall(r"`make ([\w-]+)", README)) <= targets


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
    assert links
    for link in links:
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_the_front_is_short():
    front = README.partition("\n## Read more\n")[0]
    assert front != README
    assert len(front.split()) <= 600


TASKS = {
    "autoencoder on digits": "embedded/digits_autoencoder",
    "ResNet-8 on digits": "embedded/digits_resnet",
    "U-Net on pictures": "embedded/pictures_unet",
    "transformer on text": "embedded/pydoc_transformer",
    "autoencoder on Fashion-MNIST": "heldout/fashion_autoencoder",
    "ResNet-8 on Fashion-MNIST": "heldout/fashion_resnet",
    "LSTM on text": "heldout/pydoc_lstm",
    "vision transformer on pictures": "heldout/patches_vit",
}
LABELS = {"K-FAC before SGD": "K-FAC inverse + SGD"}


def test_the_numbers_of_the_contest_are_those_of_its_runs(monkeypatch):
    """The table of README, and the page of all results."""
    monkeypatch.setattr(conf_files, "ADDED", [CONF])
    contest = schema.load("contest")
    store = ResultStore(ROOT / "benchmarks" / "results", "contest", "table", tasks_of(contest))
    result = contest_tables.load(contest, store)
    times = medians(result.times())
    table = README.partition("\n## Result\n")[2].partition("\n\n| ")[2].partition("\n\n")[0]
    head, _, *rows = (re.split(r" *\| *", line.strip("| ")) for line in table.split("\n"))
    names = [LABELS.get(name, name) for name in head[1:]]
    assert {TASKS[row[0]] for row in rows} == set(times)
    for name, *cells in rows:
        own = [times[TASKS[name]][optimizer] for optimizer in names]
        fastest = own.index(min(own))
        shown = [f"{seconds:.2f}" for seconds in own]
        shown[fastest] = f"**{shown[fastest]}**"
        assert cells == shown, name
    page = (ROOT / "docs" / "lab" / "contest.md").read_text()
    for made in contest_tables.tables(result):
        assert made.markdown() in page, (
            "make it again: python -m benchmarks.contest tables contest --into"
        )
    figure = ROOT / "docs" / "lab" / "contest.svg"
    assert figure.name in page
    drawn = " ".join(texts(figure.read_text()))
    assert profile_finding(times) in drawn, (
        "python -m benchmarks.contest tables contest --into draws it again"
    )
    assert all(f"{name} {score:.2f}" in drawn for name, score in scores(times).items())
