"""``kfac-plan simulate``: its command line, and the steps from the words to the printed lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfac_bench.config import TrainConfig, compose
from kfac_bench.config.command_options import real_number, split_words, whole_number
from kfac_bench.config.groups import TABLES
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, simulation_figure, simulation_report, workload
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.simulation_report import Training
from kfac_bench.simulate.sweep import SGD, Intervals, SimulatedCell, Variant, sweep, variant
from kfac_bench.whole_files import write_text

USAGE = """\
usage: kfac-plan simulate hardware=NAME [world_size=N,N...] [GROUP=NAME | OPTION=VALUE]...

Simulate how long a step, an epoch and a whole training take on many ranks, with SGD and with each
K-FAC strategy. The simulation runs the plan's operations and messages on a model of the hardware.
docs/explanation/scaling.md says how accurate the model is. Each rank has the same number of
examples on any world size. All other options are those of kfac-train.

  kfac-plan simulate model=resnet50 hardware=longhorn_v100 world_size=16,32,64,128,256

  hardware=NAME      conf/hardware/NAME.yaml, or the path of your own YAML file
  world_size=16,32,64,128,256   numbers of ranks
  strategies=sgd,layer_wise,mem_opt,hybrid_opt,comm_opt   or hybrid_opt@1/4 (its fraction);
                     longhorn_v100: the strategies of the paper's code, sgd,layer_wise,comm_opt
  per_rank_batch=32  examples of one rank in a step
  update_freq_at=N   number of ranks that kfac.update_freq and kfac.factor_update_freq belong to;
                     on other numbers of ranks, K-FAC's stages run as often per epoch
  epoch_s=N          seconds of an epoch beside its steps, in place of those of the hardware file
  examples=N         examples of an epoch (for data=imagefolder: those of ImageNet)
  epochs=90 kfac_epochs=55      epochs to solution without and with K-FAC
  out=FILE.json      write every number; out=- prints them
  svg=FILE.svg       draw the figure
  --config-dir DIR   read more configuration files, laid out as in conf/
  --help             print this text and stop
"""

_OWN = {
    "hardware": "",
    "world_size": "16,32,64,128,256",
    "strategies": "",
    "per_rank_batch": "32",
    "update_freq_at": "",
    "epoch_s": "",
    "examples": "",
    "epochs": "90",
    "kfac_epochs": "55",
    "out": "",
    "svg": "",
}
_STRATEGIES = {"sc20": "sgd,layer_wise,comm_opt"}
"""The default of ``strategies=`` by conduct: the strategies of that code."""
_ALL_STRATEGIES = "sgd,layer_wise,mem_opt,hybrid_opt,comm_opt"
_CODE = {"ours": "this package", "sc20": "the paper's ResNets", "paper": "the paper"}
_REPLACED = {
    "kfac",
    "kfac.strategy",
    "kfac.grad_worker_fraction",
    "kfac.colocate_factors",
    "kfac.balance",
}
"""Options of kfac-train that ``strategies=`` replaces."""
_MOST_RANKS = 1 << 17
"""A plan names each rank in each of its operations, so its size grows with the ranks."""


@dataclass(frozen=True)
class SimulationRequest:
    """What the words of the command line ask for."""

    own: Mapping[str, str]
    config: TrainConfig
    machine: Hardware
    variants: Sequence[Variant]
    world_sizes: Sequence[int]
    intervals: Intervals
    training: Training | None
    """None if the examples of an epoch are unknown: then there are no times to solution."""


def simulate(words: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Simulate what `words` ask for, write the files, and return the lines to print.

    Raises :class:`UsageError` for words that are wrong and for files that cannot be written.
    """
    request = _parse(words, config_dir)
    own, machine = request.own, request.machine
    work = workload.of_config(request.config)
    if not work.layers and any(each.strategy != SGD for each in request.variants):
        raise UsageError("K-FAC covers no layer of this model: simulate strategies=sgd alone")
    cells = sweep(
        work,
        machine,
        request.variants,
        request.world_sizes,
        request.intervals,
        request.config.kfac.method,
        itemsize=workload.state_bytes(request.config),
    )
    content = simulation_report.as_dict(work, machine.name, cells, request.training)
    text = simulation_report.to_json(content)
    if own["svg"]:
        examples = None if request.training is None else request.training.examples
        title = f"{work.name} on {machine.name}{_blocks(request)}"
        drawn = simulation_figure.svg(cells, title, examples)
        write_text(Path(own["svg"]), drawn, f"svg={own['svg']}", make_folder=True)
    if own["out"] == "-":
        return [text.rstrip("\n")]
    if own["out"]:
        write_text(Path(own["out"]), text, f"out={own['out']}", make_folder=True)
    table = simulation_report.table(cells, request.training)
    return [
        *_heading(request),
        *table,
        *_best(cells),
        *simulation_report.validity(cells, request.training),
    ]


def _blocks(request: SimulationRequest) -> str:
    """Return the words that say how factors are divided; empty if they are whole."""
    size = request.config.kfac.block_size
    return "" if size is None else f", factors in blocks of at most {size} rows"


def _heading(request: SimulationRequest) -> list[str]:
    config, at = request.config, request.intervals.at
    each = f"factors every {config.kfac.factor_update_freq}, {config.kfac.method} decompositions "
    each += f"every {config.kfac.update_freq} steps{f' at {at} ranks' if at else ''}"
    each += _blocks(request)
    return [
        f"simulated: {config.model.name} on {config.data.name}, "
        f"{config.trainer.batch_size} examples per rank, {config.trainer.precision}, "
        f"hardware {request.machine.name}, code of {_CODE[request.machine.conduct]}",
        each,
        "",
    ]


def _best(cells: Sequence[SimulatedCell]) -> list[str]:
    """Return a line with the fastest variant on each world size."""
    kfac = [c for c in cells if c.variant.strategy != SGD]
    if len({c.variant for c in kfac}) < 2:
        return []
    fastest = {}
    for cell in sorted(kfac, key=lambda c: -c.step_s):
        fastest[cell.world_size] = cell.variant.label
    ranks = sorted(fastest)
    return ["", "fastest K-FAC: " + ", ".join(f"{n}: {fastest[n]}" for n in ranks)]


def _parse(words: Sequence[str], config_dir: Path | None) -> SimulationRequest:
    own, overrides = split_words(words, _OWN)
    machine = _machine(own, config_dir)
    config = _config(own, overrides, config_dir, machine)
    strategies = own["strategies"] or _STRATEGIES.get(machine.conduct, _ALL_STRATEGIES)
    variants = [variant(text) for text in strategies.split(",")]
    sizes = own["world_size"].split(",")
    world_sizes = [whole_number("world_size", text, _MOST_RANKS) for text in sizes]
    for name, given in (("world_size", world_sizes), ("strategies", variants)):
        if len(set(given)) < len(given):
            raise UsageError(f"{name}={own[name]}: the same value twice; remove one")
    at = whole_number("update_freq_at", own["update_freq_at"]) if own["update_freq_at"] else None
    return SimulationRequest(
        own,
        config,
        machine,
        variants,
        world_sizes,
        Intervals(config.kfac.factor_update_freq, config.kfac.update_freq, at),
        _training(own, config),
    )


def _config(
    own: Mapping[str, str], overrides: Sequence[str], config_dir: Path | None, machine: Hardware
) -> TrainConfig:
    """Return the configuration of one rank; refuse options that the command sets itself."""
    names = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    if "trainer.batch_size" in names:
        raise UsageError(
            "trainer.batch_size counts the examples of all ranks: "
            "set per_rank_batch, the examples of one rank"
        )
    for name in sorted(_REPLACED & set(names)):
        raise UsageError(f"{name}={names[name]}: set strategies= instead; sgd means no K-FAC")
    batch = whole_number("per_rank_batch", own["per_rank_batch"])
    # The defaults come first, so words can replace them.
    defaults = []
    if "experiment" not in names:
        defaults = [f"trainer.precision={machine.precision}"]
        defaults += ["kfac.method=eigen"] if machine.conduct == "sc20" else []
    if names.get("model") in TABLES["model"] and not {"data", "experiment"} & set(names):
        usual_data = TABLES["model"][names["model"]].usual_data
        defaults += [] if usual_data is None else [f"data={usual_data}"]
    config = compose.load([*defaults, *overrides, f"trainer.batch_size={batch}"], config_dir)
    machine.check_precision(config.trainer.precision)
    if config.kfac.fisher != "empirical" or config.kfac.adaptive_damping:
        raise UsageError(
            "the simulation knows only kfac.fisher=empirical with a fixed kfac.damping: "
            "remove kfac.fisher and kfac.adaptive_damping"
        )
    if config.kfac.interval_growth_epochs:
        raise UsageError(
            f"kfac.interval_growth_epochs={config.kfac.interval_growth_epochs}: the simulation "
            "knows only fixed intervals; remove the option, and simulate each interval alone"
        )
    return config


def _machine(own: Mapping[str, str], config_dir: Path | None) -> Hardware:
    machine = hardware.load(hardware_path(own["hardware"], config_dir))
    if not own["epoch_s"]:
        return machine
    return replace(machine, epoch_s=real_number("epoch_s", own["epoch_s"], allow_zero=True))


def _training(own: Mapping[str, str], config: TrainConfig) -> Training | None:
    epochs = [real_number(name, own[name]) for name in ("epochs", "kfac_epochs")]
    examples = own["examples"]
    if not examples and config.data.name == "imagefolder":
        examples = str(workload.IMAGENET_EXAMPLES)
    return Training(whole_number("examples", examples), *epochs) if examples else None


def hardware_path(name: str, config_dir: Path | None) -> Path:
    """Return the file of a name in conf/hardware, or of a path that ends in ``.yaml``.

    Raises :class:`UsageError` if `name` is neither.
    """
    folders = [compose.CONF_DIR, *([] if config_dir is None else [config_dir])]
    known = {path.stem: path for f in folders for path in sorted((f / "hardware").glob("*.yaml"))}
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    raise UsageError(f"hardware={name}: choose one of {', '.join(known)}, or name a .yaml file")
