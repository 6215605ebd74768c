"""``kfac-plan simulate``: the steps from its options to the printed lines."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfac_bench.config import TrainConfig, compose
from kfac_bench.config.command_options import real_number, whole_number
from kfac_bench.config.groups import TABLES
from kfac_bench.core.planning.plan import IDENTITY
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, simulation_figure, simulation_report, workload
from kfac_bench.simulate.hardware import Hardware
from kfac_bench.simulate.simulation_report import Training
from kfac_bench.simulate.sweep import SGD, Intervals, Variant, sweep, variant
from kfac_bench.whole_files import write_text

_STRATEGIES = {"sc20": "sgd,layer_wise,comm_opt"}
"""The default of ``--strategies`` by conduct: the strategies of that code."""
_ALL_STRATEGIES = "sgd,layer_wise,mem_opt,hybrid_opt,comm_opt"
_CODE = {"ours": "this package", "sc20": "the paper's ResNets", "paper": "the paper"}
_REPLACED = {
    "kfac",
    "kfac.strategy",
    "kfac.grad_worker_fraction",
    "kfac.colocate_factors",
    "kfac.balance",
}
"""Options of kfac-train that ``--strategies`` replaces."""
_MOST_RANKS = 1 << 17
"""A plan names each rank in each of its operations, so its size grows with the ranks."""


@dataclass(frozen=True)
class SimulationRequest:
    """The checked input of a simulation, from the command line."""

    config: TrainConfig
    machine: Hardware
    variants: Sequence[Variant]
    world_sizes: Sequence[int]
    intervals: Intervals
    training: Training | None
    """None if the examples of an epoch are unknown: then there are no times to solution."""


def simulate(options: argparse.Namespace) -> list[str]:
    """Simulate what the user asks for, write the files, and return the lines to print.

    Args:
        options: The parsed options of ``kfac-plan simulate``.

    Raises:
        UsageError: An option is wrong, or a file cannot be written.
    """
    request = _request(options)
    machine = request.machine
    work = workload.of_config(request.config)
    cells = sweep(
        work,
        machine,
        request.variants,
        request.world_sizes,
        request.intervals,
        request.config.kfac.method,
        itemsize=workload.state_bytes(request.config),
    )
    content = simulation_report.as_dict(work, machine, cells, request.training)
    text = simulation_report.to_json(content)
    if options.svg:
        examples = None if request.training is None else request.training.examples
        title = f"{work.name} on {machine.name}{_blocks(request)}"
        drawn = simulation_figure.svg(cells, title, machine.nearest_errors, examples)
        write_text(Path(options.svg), drawn, f"--svg {options.svg}", make_folder=True)
    if options.out == "-":
        return [text.rstrip("\n")]
    if options.out:
        write_text(Path(options.out), text, f"--out {options.out}", make_folder=True)
    return [
        *_heading(request),
        *simulation_report.accuracy(cells, machine),
        "",
        *simulation_report.table(cells, request.training, machine.nearest_errors),
        *simulation_report.conclusions(cells, machine, request.training),
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
    ]


def _request(options: argparse.Namespace) -> SimulationRequest:
    machine = _machine(options)
    config = _config(options, machine)
    # EKFAC needs all eigenvectors on all ranks, which most strategies do not give.
    usual = _STRATEGIES.get(machine.conduct, _ALL_STRATEGIES)
    strategies = options.strategies or ("sgd,comm_opt" if config.kfac.method == "ekfac" else usual)
    variants = [variant(text) for text in strategies.split(",")]
    sizes = options.world_size.split(",")
    world_sizes = [whole_number("--world-size", text, _MOST_RANKS) for text in sizes]
    for name, value, given in (
        ("world-size", options.world_size, world_sizes),
        ("strategies", strategies, variants),
    ):
        if len(set(given)) < len(given):
            raise UsageError(f"--{name} {value}: the same value twice; remove one")
    at = options.update_freq_at
    return SimulationRequest(
        config,
        machine,
        variants,
        world_sizes,
        Intervals(
            config.kfac.factor_update_freq,
            config.kfac.update_freq,
            whole_number("--update-freq-at", at) if at else None,
        ),
        _training(options, config),
    )


def _config(options: argparse.Namespace, machine: Hardware) -> TrainConfig:
    """Return the configuration of one rank; refuse options that the command sets itself."""
    overrides, config_dir = options.overrides, options.config_dir
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    names = {name: value for name, _, value in pairs}
    if "trainer.batch_size" in names:
        raise UsageError(
            "trainer.batch_size counts the examples of all ranks: "
            "set --per-rank-batch, the examples of one rank"
        )
    for name in sorted(_REPLACED & set(names)):
        raise UsageError(f"{name}={names[name]}: set --strategies instead; sgd means no K-FAC")
    batch = whole_number("--per-rank-batch", options.per_rank_batch)
    # The defaults come first, so words can replace them.
    defaults = []
    has_file = bool({"experiment", "from", "recipe"} & set(names))
    if not has_file:
        defaults = [f"trainer.precision={machine.precision}"]
        defaults += ["kfac.method=eigen"] if machine.conduct == "sc20" else []
    if names.get("model") in TABLES["model"] and "data" not in names and not has_file:
        usual_data = TABLES["model"][names["model"]].usual_data
        defaults += [] if usual_data is None else [f"data={usual_data}"]
    words = [*defaults, *overrides, f"trainer.batch_size={batch}"]
    config = compose.load(words, config_dir)
    if not config.kfac.enabled and options.strategies != SGD:
        # An experiment of the optimizer alone; the command simulates K-FAC before the optimizer.
        config = compose.load([*words, "kfac.enabled=true"], config_dir)
    machine.check_precision(config.trainer.precision)
    if config.kfac.method == IDENTITY:
        raise UsageError(
            "kfac.method=identity has no factors, so its step is that of SGD: simulate "
            "--strategies sgd, without kfac.method"
        )
    if config.kfac.fisher != "empirical" or config.kfac.adaptive_damping:
        raise UsageError(
            "the simulation knows only kfac.fisher=empirical with a fixed kfac.damping: "
            "remove kfac.fisher and kfac.adaptive_damping"
        )
    kfac = config.kfac
    for option, value in (
        ("interval_growth_epochs", kfac.interval_growth_epochs or None),
        ("max_overhead", kfac.max_overhead),
        ("background", kfac.background or None),
    ):
        if value is not None:
            raise UsageError(
                f"kfac.{option}={value}: the simulation knows only fixed intervals, with all "
                "work of K-FAC in the steps; remove the option"
            )
    return config


def _machine(options: argparse.Namespace) -> Hardware:
    machine = hardware.load(hardware_path(options.hardware, options.config_dir))
    if not options.epoch_s:
        return machine
    return replace(machine, epoch_s=real_number("--epoch-s", options.epoch_s, allow_zero=True))


def _training(options: argparse.Namespace, config: TrainConfig) -> Training | None:
    epochs = real_number("--epochs", options.epochs or "90")
    kfac_epochs = real_number("--kfac-epochs", options.kfac_epochs or "55")
    examples = options.examples
    if not examples and config.data.name == "imagefolder":
        examples = str(workload.IMAGENET_EXAMPLES)
    if not examples:
        for name in ("epochs", "kfac-epochs", "epoch-s"):
            if value := getattr(options, name.replace("-", "_")):
                raise UsageError(
                    f"--{name} {value}: the number of examples of "
                    f"data={config.data.name} is not known. Add --examples N, or remove --{name}"
                )
        return None
    return Training(whole_number("--examples", examples), epochs, kfac_epochs)


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
    given = f"--hardware {name}" if name else "--hardware is missing"
    raise UsageError(f"{given}: choose one of {', '.join(known)}, or name a .yaml file")
