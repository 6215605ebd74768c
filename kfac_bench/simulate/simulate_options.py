"""``kfac-plan simulate``: what the words of its command line mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kfac_bench.config import TrainConfig, compose, registry
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, simulation_figure, simulation_report, workload
from kfac_bench.simulate.simulation_report import Training
from kfac_bench.simulate.sweep import SGD, Intervals, SimulatedCell, Variant, sweep, variant

USAGE = """\
usage: kfac-plan simulate hardware=NAME [world_size=N,N...] [GROUP=NAME | OPTION=VALUE]...

Simulate seconds per step, epoch and to solution of SGD and of each strategy, from the plan's ops
and messages on a model of the hardware (docs/scaling.md says how good it is). Each rank has the
same number of examples at any world size. Other options are those of kfac-train.

  kfac-plan simulate model=resnet50 hardware=longhorn_v100 world_size=16,32,64,128,256

  hardware=NAME      conf/hardware/NAME.yaml, or a path of a YAML file of your own
  world_size=16,32,64,128,256   numbers of ranks
  strategies=sgd,layer_wise,mem_opt,hybrid_opt,comm_opt   or hybrid_opt@1/4 (its fraction)
  per_rank_batch=32  examples of a rank in a step
  update_freq_at=N   ranks that kfac.update_freq and kfac.factor_update_freq belong to: on
                     others, K-FAC's stages run as often per epoch
  coordination_s=0   instead of the hardware file's: 0 for DDP, where the file's is Horovod's
  examples=N         of an epoch (ImageNet's for data=imagefolder)
  epochs=90 kfac_epochs=55      to solution
  out=FILE.json      every figure; - prints them instead      svg=FILE.svg   the figure
  --config-dir DIR   more configuration files, as in conf/    --help
"""

_OWN = {
    "hardware": "",
    "world_size": "16,32,64,128,256",
    "strategies": "sgd,layer_wise,mem_opt,hybrid_opt,comm_opt",
    "per_rank_batch": "32",
    "update_freq_at": "",
    "coordination_s": "",
    "examples": "",
    "epochs": "90",
    "kfac_epochs": "55",
    "out": "",
    "svg": "",
}
_PLANS = {f"kfac.{o}" for o in ("strategy", "grad_worker_fraction", "colocate_factors", "balance")}
"""Options that ``strategies`` says instead."""
_IMAGENET = 1_281_167
_MOST = 1 << 17
"""Ranks; a plan names each of them in each of its ops."""


@dataclass(frozen=True)
class SimulationRequest:
    """What was asked."""

    own: dict[str, str]
    config: TrainConfig
    variants: list[Variant]
    world_sizes: list[int]
    intervals: Intervals
    training: Training | None


def simulate(words: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Do it; return the lines to print. Raises :class:`UsageError`."""
    asked = _parse(words, config_dir)
    machine = hardware.load(hardware_path(asked.own["hardware"], config_dir))
    if asked.own["coordination_s"]:
        each = _number("coordination_s", asked.own["coordination_s"], zero=True)
        machine = replace(machine, network=replace(machine.network, coordination_s=each))
    work = workload.of_config(asked.config)
    if not work.layers and any(each.strategy != SGD for each in asked.variants):
        raise UsageError("K-FAC covers no layer: strategies=sgd is what is left")
    cells = sweep(
        work,
        machine,
        asked.variants,
        asked.world_sizes,
        asked.intervals,
        asked.config.kfac.method,
        itemsize=workload.state_bytes(asked.config),
    )
    found = simulation_report.to_json(
        simulation_report.as_dict(work, machine.name, cells, asked.training)
    )
    if asked.own["svg"]:
        _write(
            "svg", asked.own["svg"], simulation_figure.svg(cells, f"{work.name} on {machine.name}")
        )
    if asked.own["out"] == "-":
        return [found.rstrip("\n")]
    if asked.own["out"]:
        _write("out", asked.own["out"], found)
    return [
        *_heading(asked, machine.name),
        *simulation_report.table(cells, asked.training),
        *_best(cells),
    ]


def _heading(asked: SimulationRequest, machine: str) -> list[str]:
    config, at = asked.config, asked.intervals.at
    each = f"factors every {config.kfac.factor_update_freq}, {config.kfac.method} decompositions "
    each += f"every {config.kfac.update_freq} steps{f' at {at} ranks' if at else ''}"
    return [
        f"simulated: {config.model.name} on {config.data.name}, "
        f"{config.trainer.batch_size} examples per rank, hardware {machine}",
        each,
        "",
    ]


def _best(cells: Sequence[SimulatedCell]) -> list[str]:
    """Of each world size the fastest variant."""
    kfac = [c for c in cells if c.variant.strategy != SGD]
    if len({c.variant for c in kfac}) < 2:
        return []
    fastest = {}
    for cell in sorted(kfac, key=lambda c: -c.step_s):
        fastest[cell.world_size] = cell.variant.label
    ranks = sorted(fastest)
    return ["", "fastest K-FAC: " + ", ".join(f"{n}: {fastest[n]}" for n in ranks)]


def _parse(words: Sequence[str], config_dir: Path | None) -> SimulationRequest:
    own, overrides = dict(_OWN), []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in own:
            own[name] = value
        else:
            overrides.append(word)
    names = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    if "trainer.batch_size" in names:
        raise UsageError("trainer.batch_size is of all ranks: say per_rank_batch, of each")
    for name in sorted({"kfac", *_PLANS} & set(names)):
        raise UsageError(f"{name}={names[name]}: say strategies=, of which sgd is one")
    if names.get("model") in registry.MODELS and not {"data", "experiment"} & set(names):
        usual_data = registry.options_class("model", names["model"]).usual_data
        overrides[:0] = [] if usual_data is None else [f"data={usual_data}"]
    batch = _whole("per_rank_batch", own["per_rank_batch"])
    config = compose.load([*overrides, f"trainer.batch_size={batch}"], config_dir)
    if config.kfac.fisher != "empirical" or config.kfac.adaptive_damping:
        raise UsageError("kfac.fisher=empirical and a fixed kfac.damping are all that is simulated")
    variants = [variant(text) for text in own["strategies"].split(",")]
    world_sizes = [_whole("world_size", text, _MOST) for text in own["world_size"].split(",")]
    for name, given in (("world_size", world_sizes), ("strategies", variants)):
        if len(set(given)) < len(given):
            raise UsageError(f"{name}={own[name]}: the same twice")
    at = _whole("update_freq_at", own["update_freq_at"]) if own["update_freq_at"] else None
    kfac = config.kfac
    intervals = Intervals(kfac.factor_update_freq, kfac.update_freq, at)
    examples = own["examples"]
    if not examples and config.data.name == "imagefolder":
        examples = str(_IMAGENET)
    epochs = [_number(name, own[name]) for name in ("epochs", "kfac_epochs")]
    training = Training(_whole("examples", examples), *epochs) if examples else None
    return SimulationRequest(own, config, variants, world_sizes, intervals, training)


def hardware_path(name: str, config_dir: Path | None) -> Path:
    """Of a name in conf/hardware, or of a file; raises :class:`UsageError`."""
    folders = [compose.CONF_DIR, *([] if config_dir is None else [config_dir])]
    known = {path.stem: path for f in folders for path in sorted((f / "hardware").glob("*.yaml"))}
    if name in known:
        return known[name]
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    raise UsageError(f"hardware={name}: choose one of {', '.join(known)}, or say a file.yaml")


def _whole(name: str, text: str, most: int = 1 << 40) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 14 and 1 <= int(text) <= most):
        limit = "" if most == 1 << 40 else f" and at most {most}"
        raise UsageError(f"{name}={text}: expected a whole number of at least 1{limit}")
    return int(text)


def _number(name: str, text: str, *, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value < 1e9 or (zero and value == 0)):
        least = "of at least 0" if zero else "above 0"
        raise UsageError(f"{name}={text}: expected a number {least}")
    return value


def _write(name: str, path: str, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{name}={path}: cannot be written ({error.strerror})") from None
