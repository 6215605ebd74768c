"""README: what it tells people to type works, its links lead somewhere, its numbers hold."""

import functools
import json
import math
import re
import shlex
from collections import Counter
from statistics import median

import pytest

from benchmarks import real_networks, speed, tables
from benchmarks.contest import contest_tables
from benchmarks.contest.contest_tables import medians
from benchmarks.contest.interpolated import reached
from benchmarks.contest.result_store import ResultStore
from benchmarks.contest.setup import CONF
from benchmarks.contest.sitting import ALL, tasks_of
from benchmarks.contest.studies import PART
from kfac_bench.benchmark import schema, suite
from kfac_bench.benchmark.performance_profile import profile_finding, scores
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.config import compose, conf_files, option_help, problem_file
from kfac_bench.config.options import options
from kfac_bench.record.events import Evaluated
from kfac_bench.record.score import mean_with_interval
from tests.support import ROOT
from tests.support.figures import texts

README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "docs" / "reference" / "commands.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README + COMMANDS, re.DOTALL)
LINES = [line.partition("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
LINES += re.findall(r"`([^`\n]+)`", README)


def commands(name):
    """Arguments of every line that starts with ``name``."""
    return [shlex.split(x)[1:] for x in LINES if x.removeprefix(".venv/bin/").startswith(name)]


TRAIN = [*commands("kfac-train"), *(c[c.index("kfac_bench") + 1 :] for c in commands("torchrun"))]


def test_the_commands_are_found():
    assert len(TRAIN) >= 8
    assert any({"model=resnet50", "data=imagefolder"} <= set(command) for command in TRAIN)
    assert len(commands("make")) >= 1


@functools.cache
def config_text():
    """Return the configuration that a run writes."""
    return compose.shown(compose.load(["seed=3"]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the problem file and the run that README names."""
    problem = (ROOT / "examples" / "problems" / "digits.py").read_text()
    changed = problem.replace("problem = Problem(", "def problem(width=16):\n    return Problem(")
    (tmp_path / "my_problem.py").write_text(changed)
    (tmp_path / "runs" / "RUN_ID").mkdir(parents=True)
    (tmp_path / "runs" / "RUN_ID" / "config.yaml").write_text(config_text())
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
    assert set(re.findall(r"`make ([\w-]+)", README + COMMANDS)) <= targets


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text())
    assert links
    for link in links:
        assert (ROOT / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.stem
)
def test_tables_are_whole(page):
    """An empty line within a table would end it, and its other rows would be text."""
    for block in re.split(r"\n\s*\n", page.read_text()):
        if block.startswith("| "):
            assert re.match(r".*\n\|[ :|-]+\|(\n|$)", block), block


def test_readme_is_short():
    assert len(README.splitlines()) <= 95
    assert len(README.split()) <= 850


def row(text):
    """Cells of README's row that begins with the text."""
    return (
        re.search(rf"^\| \[?{re.escape(text)}.*$", README, re.MULTILINE)[0].strip("| ").split(" | ")
    )


def test_the_numbers_of_the_autoencoder_are_those_of_its_page():
    page = (ROOT / "docs" / "lab" / "peers.md").read_text()
    seconds = dict(re.findall(r"^\| ([\w, -]+) \| 3 of 3 \| ([\d.]+) ", page, re.MULTILINE))
    _, own, others = row("deep autoencoder, to a squared error of 13")
    assert own == f"**{float(seconds['K-FAC inverse']):.0f} s**"
    # The better of the two variants of kfac-jax.
    seconds["kfac-jax"] = seconds["kfac-jax, adaptive"]
    for other in others.split(", "):
        name, number = other.removesuffix(" s").rsplit(" ", 1)
        assert float(number) == round(float(seconds[name])), other
    muon, adam = (
        float(seconds[name]) / float(seconds["K-FAC inverse"]) for name in ("Muon", "Adam")
    )
    told = (ROOT / "docs" / "explanation" / "is_kfac_for_me.md").read_text()
    assert f"{muon:.1f}x faster than Muon and {adam:.1f}x faster than Adam]" in told


def test_the_verdicts_are_counted_right():
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    of_papers, _, _ = page.partition("**Our own goals**")
    # The first line is the head of the table.
    _, *claims = re.findall(r"^\| [^|]+ \|.*\| ([a-z ]+)(?:: [^|]*)? \|$", of_papers, re.MULTILINE)
    words = ["none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    supported, not_supported, open_, untestable = (
        words[claims.count(verdict)]
        for verdict in ("supported", "not supported", "not decided", "not testable here")
    )
    text = " ".join(README.split())
    assert (
        f"Of {words[len(claims)]} published claims, small models on two cores support {supported}; "
        f"{not_supported} are not supported, {open_} are not decided, and {untestable} cannot be "
        "tested there"
    ) in text


def test_the_runs_with_faults_are_counted_right():
    page = (ROOT / "docs" / "lab" / "faults.md").read_text()
    every, ended = re.search(r"^(\d+) real runs .*?: (\d+) ended", page, re.MULTILINE).groups()
    assert f"{ended} of {every} runs with injected faults" in " ".join(README.split())


FORMS = ("K-FAC", "SGD with K-FAC's defaults", "AdamW with K-FAC's defaults")


def seconds_of_is_kfac_for_me_are_those_of(times):
    """The page has the tasks in the order of the contest, and names the fastest optimizer."""
    page = (ROOT / "docs" / "explanation" / "is_kfac_for_me.md").read_text()
    rows = re.findall(r"^\| .* \d+ steps, .*$", page, re.MULTILINE)
    for text, numbers in zip(rows, times.values(), strict=True):
        _, kfac, adamw, fastest, slower = text.strip("| ").split(" | ")
        best = min(numbers, key=numbers.get)
        assert fastest.partition(":")[0] == best, text
        own = min(numbers[form] for form in FORMS)
        expected = [(kfac, own), (adamw, numbers["AdamW"]), (slower, own / numbers[best])]
        for cell, number in [*expected, (fastest, numbers[best])]:
            (told,) = re.findall(r"([\d.]+)(?: s|x)\b", cell)
            assert told == f"{number:.{len(told.partition('.')[2])}f}", text


def pages_have_the_ratios_of(times):
    """Sentences with ratios of the contest's seconds."""
    mixer, words, dates, poisson = (
        times[f"heldout/{task}"]
        for task in ("fashion_mixer", "manpages_bert", "dates_lstm", "poisson")
    )

    def ratio(task, slower, faster="K-FAC"):
        own = {**task, "K-FAC": min(task[form] for form in FORMS)}
        return f"{own[slower] / own[faster]:.1f}x"

    over_adamw = sorted(ratio(task, "AdamW", "EigenAdam") for task in (mixer, dates, poisson))
    told = {
        "explanation/is_kfac_for_me.md": (
            f"it is {ratio(poisson, 'AdamW')} faster than AdamW, and KL-Shampoo is "
            f"{ratio(poisson, 'K-FAC', 'KL-Shampoo')} faster than K-FAC",
            f"it is {ratio(mixer, 'AdamW')} faster than AdamW, and KL-Shampoo is "
            f"{ratio(mixer, 'K-FAC', 'KL-Shampoo')} faster than K-FAC, EigenAdam "
            f"{ratio(mixer, 'K-FAC', 'EigenAdam')}",
            f"Muon is {ratio(words, 'K-FAC', 'Muon')} to {ratio(dates, 'K-FAC', 'Muon')} faster",
        ),
        "how-to/eigen_adam.md": (
            f"EigenAdam is {over_adamw[0]} to {over_adamw[-1]} faster than AdamW on three, and "
            f"{ratio(words, 'EigenAdam', 'AdamW')} slower on a masked language model",
        ),
        "lab/contest.md": (
            f"{ratio(poisson, 'Muon', 'KL-Shampoo')} slower than KL-Shampoo on Poisson's equation",
            f"takes {ratio(words, 'EigenAdam', 'Muon')[:-1]} times as long as Muon",
            "without eigenvectors is "
            f"{ratio(words, 'EigenAdam', 'EigenAdam without eigenvectors')} faster",
        ),
    }
    for page, sentences in told.items():
        text = " ".join((ROOT / "docs" / page).read_text().split())
        for sentence in sentences:
            assert sentence in text, page


def test_the_numbers_of_the_contest_are_those_of_its_runs(monkeypatch):
    """The numbers of README and of the pages follow from the runs."""
    monkeypatch.setattr(conf_files, "ADDED", [CONF])
    contest = schema.load("contest")
    store = ResultStore(ROOT / "benchmarks" / "results", "contest", PART, tasks_of(contest))
    result = contest_tables.load(contest, store)
    times = medians(result.times())
    found = scores(times)
    _, own, others = row("four held-out tasks")
    with_adamw = found["AdamW with K-FAC's defaults"]
    assert own == f"{found['K-FAC']:.2f} with SGD, {with_adamw:.2f} with AdamW and defaults"
    for cell in others.replace("**", "").split(", "):
        name, value = cell.rsplit(" ", 1)
        assert value == f"{found[name]:.2f}", cell
    seconds_of_is_kfac_for_me_are_those_of(times)
    pages_have_the_ratios_of(times)
    # Untuned Adam is a floor: a tuned AdamW behind it would be tuned badly.
    assert all(t["AdamW"] < t["Adam at 0.001, not tuned"] for t in times.values())
    # The page names the one study in which the tuned AdamW missed, and untuned Adam did not.
    weak = "heldout/manpages_bert"
    missed = {task: studies["AdamW"].count(math.inf) for task, studies in result.times().items()}
    assert missed == {task: int(task == weak) for task in missed}
    assert math.inf not in result.times()[weak]["Adam at 0.001, not tuned"]
    page = (ROOT / "docs" / "lab" / "contest.md").read_text()
    met = Counter(
        run.optimizer for run in store.runs(weak, "trial") if math.isfinite(reached(run).seconds)
    )
    told = (
        "{muon} of 30 trials of Muon reached the target, {eigen_adam} of EigenAdam, {kl_shampoo} "
        "of KL-Shampoo, {adamw} of AdamW, {soap} of SOAP, {kl_soap} of 18 of KL-SOAP and none of"
    )
    assert told.format(**met) in " ".join(page.split())
    assert not met["kfac"]
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


def test_the_row_of_resnet50_on_digits_follows_from_its_runs(tmp_path):
    runs = suite.row("resnet50_digits", None, runs_dir=str(tmp_path))
    ResultStore(ROOT / "benchmarks" / "results", "resnet50_digits", "table", [ALL]).unpack(
        runs.folder
    )
    found = {
        (line.point["optimizer"], line.quantity): line.measured
        for line in suite.results(runs, suite.attempts(runs))
    }
    page = (ROOT / "docs" / "lab" / "real_networks.md").read_text()
    for name in runs.benchmark.axes["optimizer"]:
        accuracy, train_s = found[name, "accuracy"], found[name, "seconds"].value
        to_level_s = found[name, "seconds to SGD's accuracy"].value
        span = f"{accuracy.value:.1f} % ({accuracy.low:.1f} to {accuracy.high:.1f})"
        assert f"| {name} | {span} | {train_s:.0f} | {to_level_s:.0f} |" in page
    _, own, others = row("accuracy of ResNet-50 on digits")
    told = {
        name: f"{found[name, 'accuracy'].value:.1f} % in {found[name, 'seconds'].value:.0f} s"
        for name in ("K-FAC", "SGD")
    }
    assert own == told["K-FAC"]
    assert others == f"**SGD** {told['SGD']}, ahead after equal time"
    assert found["K-FAC", "seconds to it over SGD's"].low > 1
    # The cells are the command of README, whose options come from its recipe.
    (cell,) = (cell for cell in runs.cells if cell.label == "K-FAC seed 1")
    first = compose.load(["model=resnet50", "kfac.update_freq=500", "recipe=digits_resnet"])
    ours = {name: value for name, value, _ in options(cell.config())}
    changed = {name for name, value, _ in options(first) if ours[name] != value}
    assert changed == {"trainer.clock", "trainer.threads", "seed", "runs_dir"}


def test_the_accuracies_by_damping_follow_from_their_runs():
    page = (ROOT / "docs" / "lab" / "why_inverses_win.md").read_text()
    told = re.findall(
        r"^\| (?:eigen|inverse) \| .*? \| ([\d., ]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    store = ResultStore(ROOT / "benchmarks" / "results", "damping_of_claim1", "table", [ALL])
    kept = {(run.optimizer, run.seed): run for run in store.runs(ALL, "table")}
    benchmark = schema.load("damping_of_claim1")
    assert len(told) == len(benchmark.axes["variant"])
    runs = []
    for variant, (each, middle) in zip(benchmark.axes["variant"], told, strict=True):
        found = []
        for seed in benchmark.seeds:
            *_, last = (e for e in kept[variant, seed].events if isinstance(e, Evaluated))
            found.append(100 * last.metrics["accuracy"])
        assert each == ", ".join(f"{accuracy:.2f}" for accuracy in found), variant
        assert middle == f"{median(found):.2f}"
        runs.append(found)
    eigen, smaller, split, inverse, smaller_inverse = runs
    for changed, before in ((smaller, eigen), (split, eigen), (smaller_inverse, inverse)):
        differences = [a - b for a, b in zip(changed, before, strict=True)]
        _, low, high = mean_with_interval(differences)
        assert low < 0 < high


def test_the_errors_of_the_heat_equation_follow_from_its_runs():
    page = (ROOT / "docs" / "tutorials" / "physics_informed.md").read_text()
    lines = (ROOT / "benchmarks" / "results" / "physics_informed.jsonl").read_text().splitlines()
    errors = {}
    for raw in map(json.loads, lines):
        name, (found, steps) = raw["optimizer"], zip(*raw["runs"], strict=True)
        errors[name] = f"{median(found):.2g}"
        (cells,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        best, *told = cells.replace("**", "").split(" | ")
        assert float(best.split()[1]) == raw["best"]
        assert told[:3] == [f"{error:.2g}" for error in (median(found), min(found), max(found))]
        assert told[3].split(",")[0] == f"{median(steps):.0f}"
    _, own, others = row("a heat equation")
    assert own == f"**{errors['K-FAC']}**"
    told = f"L-BFGS {errors['L-BFGS']}, Adam {errors['Adam']}"
    assert others == f"{told} (SOAP, Muon: not tried)"


def test_the_row_of_the_gpu_is_that_of_its_page():
    """The page is made from the raw results, which another test compares."""
    page = (ROOT / "docs" / "lab" / "gpu.md").read_text()
    found = {
        name: (f"{float(seconds):.0f} s", f"{float(end):.3f}")
        for name, seconds, end in re.findall(
            r"^\| ([\w -]+) \| [\d.]+ \(\d\) \| \d+ \| ([\d.]+) \| ([\d.]+) ", page, re.MULTILINE
        )
    }
    _, own, others = row("ResNet-50 on Fashion-MNIST to an accuracy of 0.9, one H100")
    seconds, end = found["SGD with K-FAC"]
    assert own == f"{seconds} (end: {end})"
    seconds, end = found["AdamW"]
    assert others == f"**AdamW {seconds}** (end: {end}), SGD never"
    assert "SGD with momentum" not in found


def ratios_of_steps():
    """K-FAC's time of a step over SGD's, by model, method and intervals, from the kept files."""
    return {
        (entry["name"], method, *setting["setting"]): setting["ratio"]
        for results in speed.kept()
        for entry in results["models"]
        for method, settings in entry["settings"].items()
        for setting in settings
    }


def test_the_times_of_steps_follow_from_the_kept_files():
    ratios = ratios_of_steps()
    own = row("a step of ResNet-32")[1]
    assert own.startswith(f"{ratios['resnet32', 'inverse', 10, 100]:.2f}x SGD's time")
    own = row("a step of BERT-base")[1]
    assert own == f"{ratios['bert_base', 'inverse', 10, 100]:.2f}x SGD's time"
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text()
    made = re.findall(
        r"^\|(.*?) \| (eigen|inverse).*? \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE
    )
    names, name = iter(("resnet32", "encoder", "resnet50", "bert_base")), ""
    told = {}
    for model, method, *cells in made:
        name = next(names) if model.strip() else name
        for setting, cell in zip(((1, 10), (10, 100)), cells, strict=True):
            told[name, method, *setting] = cell
    assert told == {key: f"{ratio:.2f}" for key, ratio in ratios.items()}
    entries = [entry for results in speed.kept() for entry in results["models"]]
    used = [entry["memory_bytes"] for entry in entries if entry["memory_bytes"]]
    over = [100 * (each[m] / each["sgd"] - 1) for each in used for m in ("eigen", "inverse")]
    found = re.findall(r"^\|.* \| (\+\d+ %) \|$", page, re.MULTILINE)
    assert found == [f"{percent:+.0f} %" for percent in over]
    # The interval of 10 and 100 steps is the second one.
    steps = {
        (entry["name"], name): summary
        for entry in entries
        for interval in entry["intervals"][1:]
        for name, summary in interval["summary"].items()
    }
    slowest = [x["slowest_over_median"] for (_, name), x in steps.items() if name != "sgd"]
    first = max(x["first_s"] / x["median_s"] for x in steps.values())
    text = " ".join(page.split())
    assert f"they take {min(slowest):.1f}x to {max(slowest):.1f}x the median step" in text
    assert f"takes up to {first:.1f}x the median step" in text


def test_the_tables_of_step_costs_follow_from_the_kept_files():
    page = (ROOT / "docs" / "lab" / "step_costs.md").read_text()
    made = page.partition(speed.BEGIN)[2].partition(speed.END)[0]
    again = "make it again: python benchmarks/speed.py --into docs/lab/step_costs.md"
    assert made.strip() == tables.render_together(speed.kept()).strip(), again
    for name, model in (("ResNet-32", "resnet32"), ("encoder", "encoder")):
        for setting in ((1, 10), (10, 100)):
            over = [ratios_of_steps()[model, m, *setting] - 1 for m in ("eigen", "inverse")]
            cells = " | ".join(f"{x:.2f}" for x in over)
            pattern = rf"^\| {name} \| {re.escape(str(setting))} \| .* \| {cells} \|$"
            assert re.search(pattern, page, re.MULTILINE)


def test_the_time_of_a_step_on_the_gpu_is_that_of_its_page():
    page = (ROOT / "docs" / "lab" / "gpu.md").read_text()
    pattern = r"^\| resnet32 \(batch 128, .*\| inverse \| 10, 100 .*\*\*([\d.]+)\*\*"
    (ratio,) = re.findall(pattern, page, re.MULTILINE)
    assert f"([H100](docs/lab/gpu.md): {ratio}x)" in row("a step of ResNet-32")[1]


def test_the_table_of_large_networks_follows_from_its_runs():
    page = (ROOT / "docs" / "lab" / "real_networks.md").read_text()
    kept = real_networks.Results(real_networks.RESULTS)
    made = "\n".join(real_networks.table(kept, real_networks.kfac_options({})))
    assert made.partition("\n\n")[0] in page
    pattern = r"lower in (\d+) of (\d+) pairs .*? in (\d+) after .*? takes ([\d.]+) times"
    steps, pairs, seconds, times = zip(*re.findall(pattern, made), strict=True)
    steps, pairs, seconds = (sum(map(int, numbers)) for numbers in (steps, pairs, seconds))
    digits, files, vit, bert = times
    text = " ".join(page.split())
    assert f"K-FAC has a lower mean loss in {steps} of the {pairs} pairs" in text
    assert f"K-FAC has a lower loss in {seconds} of the {pairs} pairs" in text
    assert (
        f"A step takes {digits}x the time of the optimizer alone on digits, {files}x with JPEG "
        f"files, {vit}x with the ViT and {bert}x with BERT-base"
    ) in text


def test_the_rates_at_which_adamw_is_better_are_counted_right():
    page = (ROOT / "docs" / "lab" / "real_networks.md").read_text()
    for data in ("digits", "JPEG folders"):
        pattern = rf"^\| ResNet-50, {data} \| adamw [\d.]+ \| ([\d.]+) .*? \| ([\d.]+) "
        losses = re.findall(pattern, page, re.MULTILINE)
        worse = [float(own) > float(alone) for alone, own in losses]
        assert (sum(worse), len(worse)) == (2, 3)
    told = (
        "AdamW with K-FAC was [worse](docs/lab/real_networks.md) than AdamW on ResNet-50 at two of "
        "three rates"
    )
    assert told in " ".join(README.split())
