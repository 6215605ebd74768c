"""Recipes: the published settings that follow from data and model, as files of conf/recipe.

``kfac-train data=imagefolder model=resnet50`` trains as the paper does, because this module chooses
``recipe=imagenet_resnet`` before Hydra composes. Words of the command line win over the recipe. The
batch follows the number of ranks. Warm-up and intervals follow the batch. The experiments of the
papers load the same files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kfac_bench import plain_yaml
from kfac_bench.config.conf_files import CONF_DIR, first_sentence, folders, options_of
from kfac_bench.config.groups import TABLES
from kfac_bench.config.option_table import no_such_choice
from kfac_bench.errors import UsageError, first_line

GROUP = "recipe"
FIRST_ORDER = "_first_order"
"""Ending of the recipe that ``kfac=none`` chooses."""
_SET_ALL = ("experiment", "problem", "from")
"""Words that set all options themselves."""
_SHALLOW = ("resnet18", "resnet34", "resnet50")
_DEEP = ("resnet101", "resnet152")
_CIFAR = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
_BERT = ("bert_base", "bert_large")
_SHOWN = (
    "trainer.batch_size",
    "trainer.accumulate",
    "trainer.max_epochs",
    "trainer.max_steps",
    "optimizer.lr",
    "schedule.base_batch_size",
    "kfac.update_freq",
    "kfac.factor_update_freq",
)
"""Options that the line about a recipe names, if the recipe sets them."""


@dataclass(frozen=True)
class RecipeRule:
    """The data and models of a recipe, and how its values follow the number of ranks."""

    data: tuple[str, ...]
    models: tuple[str, ...]
    ranks: int
    """The number of ranks that the values in the file are for."""
    keeps_batch: bool = False
    """True if the batch of all ranks stays, so that a rank divides its share into more parts."""
    scales_intervals: bool = False
    """True if the intervals of K-FAC are inversely proportional to the batch."""
    keeps_warmup: bool = False
    """True if the start of the warm-up does not follow the number of ranks."""


RULES: Mapping[str, RecipeRule] = {
    "imagenet_resnet": RecipeRule(
        ("imagefolder", "shards"), (*_SHALLOW, *_DEEP), 64, scales_intervals=True
    ),
    "cifar10_resnet": RecipeRule(("cifar10",), _CIFAR, 1),
    "coco_maskrcnn": RecipeRule(("coco",), ("maskrcnn_resnet50_fpn",), 32, keeps_warmup=True),
    "text_bert": RecipeRule(("text",), _BERT, 16, keeps_batch=True),
    "squad_bert": RecipeRule(("squad",), _BERT, 1),
    "lgg_unet": RecipeRule(("lgg",), ("unet",), 1),
    "digits_resnet": RecipeRule(("digits",), _SHALLOW, 1, keeps_batch=True),
    "digits_deep_resnet": RecipeRule(("digits",), _DEEP, 1, keeps_batch=True),
}
"""The rules by recipe. A file ``<data>_<model>.yaml`` needs no rule: its values are not scaled.
With ``data.root=demo``, the name of the file begins with ``<data>_demo_``. Such a file is also
chosen if the user names no data."""


@dataclass(frozen=True)
class Recipe:
    """A recipe that a command line chooses, without the options that the command line sets."""

    name: str
    about: str
    """The first sentence of its file."""
    defaults: tuple[Any, ...]
    """The defaults list of its file."""
    values: Mapping[str, Any]
    """The values that the recipe sets, by group."""
    ranks: int | None

    def line(self) -> str:
        """Return a line with the name, the source and the values of the recipe."""
        flat = _flat(self.values)
        shown = [f"{name}={flat[name]}" for name in _SHOWN if name in flat]
        batch = flat.get("trainer.batch_size")
        if isinstance(batch, int) and self.ranks is not None and self.ranks > 1:
            shown[0] += f" ({batch // self.ranks} on each of {self.ranks} ranks)"
        others = len(flat) - len(shown)
        listed = ", ".join([*shown, *([f"{others} more options (--cfg job)"] if others else [])])
        return f"recipe={self.name}: {self.about} It sets {listed}. recipe=none turns it off."


def apply(words: Sequence[str], recipe: Recipe | None) -> list[str]:
    """Return the words with the recipe as a choice that Hydra knows, and without ``recipe=``."""
    rest = [word for word in words if not word.startswith(f"{GROUP}=")]
    if recipe is None:
        return rest
    node = {"defaults": [*recipe.defaults, "_self_"], **recipe.values}
    # Hydra searches this store last, so no file may have the name.
    ConfigStore.instance().store("<chosen>", node, group=GROUP, package="_global_")
    return [f"{GROUP}='<chosen>'", *rest]


def choose(words: Sequence[str], config_dir: Path | None, ranks: int | None) -> Recipe | None:
    """Return the recipe of a command line.

    Args:
        words: Words of the command line.
        config_dir: A folder of the user's own with more recipes.
        ranks: Number of ranks of the run. None: only ``recipe=NAME`` chooses a recipe, and its
            values stay as they are in the file.

    Raises:
        UsageError: There is no such recipe, or its file is not valid.
    """
    given = _given(words)
    found = _find(given, config_dir, ranks)
    if found is None:
        return None
    name, rule = found
    defaults, values = _read(name, config_dir, ())
    _leave_out(values, defaults, given)
    if _is_first_order(given) or name.endswith(FIRST_ORDER):
        values.pop("kfac", None)
    if ranks is not None:
        try:
            _scale(values, given, rule, ranks)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            # Only a file of the user's own, in place of ours, can lack the numbers.
            raise UsageError(
                f"{GROUP}={name}: needs whole numbers for trainer.batch_size and kfac.update_freq"
            ) from None
    _drop_given(values, given)
    file = _file(name, config_dir)
    assert file is not None
    return Recipe(name, first_sentence(file), tuple(defaults), values, ranks)


def _given(words: Sequence[str]) -> dict[str, str]:
    """Return the options and groups that the words set; the last word of an option counts."""
    pairs = (word.lstrip("+").partition("=") for word in words)
    return {name: value.strip("'\"") for name, _, value in pairs}


def _find(
    given: Mapping[str, str], config_dir: Path | None, ranks: int | None
) -> tuple[str, RecipeRule | None] | None:
    """Return the name of the recipe and its rule, if there is a recipe."""
    named = given.get(GROUP)
    if named is None and ranks is not None and not any(word in given for word in _SET_ALL):
        name = _of_pair(given, config_dir)
    else:
        name = named if named not in ("none", "null") else None
    if name is None:
        return None
    if _file(name, config_dir) is None:
        known = ["none", *options_of(GROUP, config_dir)]
        raise UsageError(no_such_choice(GROUP, name, known))
    if other := next((word for word in _SET_ALL if word in given), None):
        raise UsageError(
            f"{GROUP}={name} does not fit {other}={given[other]}, which sets all options itself. "
            "Remove one of them"
        )
    rule = RULES.get(name.removesuffix(FIRST_ORDER))
    if _is_first_order(given) and _file(name + FIRST_ORDER, config_dir) is not None:
        name += FIRST_ORDER
    return name, rule


def _is_first_order(given: Mapping[str, str]) -> bool:
    return given.get("kfac") == "none" or given.get("kfac.enabled", "").lower() == "false"


def _of_pair(given: Mapping[str, str], config_dir: Path | None) -> str | None:
    """Return the recipe of the data and the model that the command line chooses."""
    model = given.get("model", "") or _chosen_by("train", "model")
    data = given.get("data") or _chosen_by(f"model/{model}", "data") or _chosen_by("train", "data")
    demo = f"{data}_demo"
    # A model that needs data from disk trains on a demo if the user names no data.
    is_unnamed = not {"data", "data.root"} & set(given)
    if given.get("data.root") == "demo" or (
        is_unnamed and _file(f"{demo}_{model}", config_dir) is not None
    ):
        data = demo
    if _file(f"{data}_{model}", config_dir) is not None:
        return f"{data}_{model}"
    fitting = (n for n, rule in RULES.items() if data in rule.data and model in rule.models)
    return next(fitting, None)


def _chosen_by(file: str, group: str) -> str:
    """Return the choice of a group in the defaults list of a file of conf/, or nothing."""
    path = CONF_DIR / f"{file}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for entry in content.get("defaults", []):
        if isinstance(entry, dict):
            found = entry.get(group) or entry.get(f"override /{group}")
            if found:
                return str(found)
    return ""


def _file(name: str, config_dir: Path | None) -> Path | None:
    """Return the file of a recipe, if there is one."""
    # options_of compares whole names, so a name with slashes finds no other file.
    if name not in options_of(GROUP, config_dir):
        return None
    return next(p for d in folders(config_dir) if (p := d / GROUP / f"{name}.yaml").is_file())


def _read(
    name: str, config_dir: Path | None, before: tuple[str, ...]
) -> tuple[list[Any], dict[str, Any]]:
    """Return defaults and values of a recipe, together with those of the recipes that it loads."""
    file = _file(name, config_dir)
    if file is None or name in before:
        problem = "loads itself" if name in before else f"loads {name}: no such recipe"
        raise UsageError(f"{GROUP}={before[-1]}: the file {problem}")
    own, content = _content(file)
    defaults: list[Any] = []
    values: Any = OmegaConf.create({})
    for entry in own:
        if not isinstance(entry, str):
            # A choice replaces the same choice of an inherited recipe.
            defaults = [d for d in defaults if isinstance(d, str) or not set(entry) & set(d)]
            defaults.append(entry)
        elif entry.startswith("/") and not entry.startswith(f"/{GROUP}/"):
            defaults.append(entry)
        elif entry != "_self_":
            parent = entry.removeprefix(f"/{GROUP}/")
            inherited, parents_values = _read(parent, config_dir, (*before, name))
            defaults += inherited
            values = OmegaConf.merge(values, parents_values)
    merged = OmegaConf.to_container(OmegaConf.merge(values, content))
    assert isinstance(merged, dict)
    return defaults, {str(key): value for key, value in merged.items()}


def _content(file: Path) -> tuple[list[Any], dict[str, Any]]:
    """Return the defaults list and the values of one file."""
    try:
        plain_yaml.refuse_aliases(file.read_text(encoding="utf-8"))
        loaded = OmegaConf.load(file)
        content = OmegaConf.to_container(loaded) if isinstance(loaded, DictConfig) else None
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise UsageError(f"{file}: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file}: expected options, such as optimizer: {{lr: 0.1}}")
    if "hydra" in content:
        raise UsageError(f"{file}: hydra: options of Hydra itself have no effect. Remove it")
    own = content.pop("defaults", [])
    if not isinstance(own, list) or not all(isinstance(entry, str | dict) for entry in own):
        raise UsageError(f"{file}: defaults: expected a list, such as [/recipe/lgg_unet, _self_]")
    for group in (*TABLES, "kfac", "trainer", "logger"):
        if not isinstance(content.get(group, {}), dict):
            raise UsageError(f"{file}: {group}: expected options, not {content[group]!r}")
    return own, {str(key): value for key, value in content.items()}


def _leave_out(values: dict[str, Any], defaults: list[Any], given: Mapping[str, str]) -> None:
    """Remove the values of groups of which the command line makes another choice.

    A learning rate means nothing for another optimizer. Another schedule has the same warm-up, but
    no milestones.
    """
    chosen = {
        str(key).removeprefix("override /"): value
        for entry in defaults
        if isinstance(entry, dict)
        for key, value in entry.items()
    }
    for group in TABLES:
        other = given.get(group, chosen.get(group))
        if other is None or other == chosen.get(group) or other not in TABLES[group]:
            continue
        if group == "optimizer":
            values.pop("optimizer", None)
            values.get("schedule", {}).pop("base_batch_size", None)
        else:
            known = {field.name for field in fields(TABLES[group][other])}
            own = values.get(group, {})
            values[group] = {key: value for key, value in own.items() if key in known}
    if "eigen_adam" in (given.get("kfac"), given.get("optimizer")):
        values.pop("kfac", None)
        defaults[:] = [d for d in defaults if isinstance(d, dict) and "override /kfac" not in d]


def _scale(
    values: dict[str, Any], given: Mapping[str, str], rule: RecipeRule | None, ranks: int
) -> None:
    """Let batch, warm-up and intervals follow the number of ranks and the options of the user."""
    trainer, schedule, kfac = (values.get(name, {}) for name in ("trainer", "schedule", "kfac"))
    share = 1.0
    if rule is not None:
        of_file = trainer["batch_size"]
        part = -(-of_file // (rule.ranks * trainer.get("accumulate", 1)))
        if not rule.keeps_batch:
            trainer["batch_size"] = of_file // rule.ranks * ranks
        batch = _whole(given, "trainer.batch_size") or trainer["batch_size"]
        if "accumulate" in trainer:
            trainer["accumulate"] = max(1, -(-batch // (ranks * part)))
        share = of_file / batch
        if "warmup_start" in schedule and not rule.keeps_warmup:
            schedule["warmup_start"] = min(1.0, schedule["warmup_start"] * share)
    if "update_freq" in kfac:
        scaled = kfac["update_freq"] * (share if rule and rule.scales_intervals else 1.0)
        _set_intervals(kfac, given, max(1, round(scaled)))


def _set_intervals(kfac: dict[str, Any], given: Mapping[str, str], update: int) -> None:
    """Set both intervals: factors ten times as often as decompositions, unless the user says."""
    own, own_factor = _whole(given, "kfac.update_freq"), _whole(given, "kfac.factor_update_freq")
    if own is not None:
        kfac["factor_update_freq"] = _tenth(own)
    elif own_factor is not None:
        kfac["update_freq"] = own_factor * max(1, round(update / own_factor))
    elif update != kfac["update_freq"]:
        if update >= 10 and not 2 / 5 <= 10 * _tenth(update) / update <= 5 / 2:
            update = 10 * round(update / 10)
        kfac |= {"update_freq": update, "factor_update_freq": _tenth(update)}


def _tenth(update: int) -> int:
    """Return the divisor of an interval that is nearest to its tenth in ratio."""
    small = [i for i in range(1, math.isqrt(update) + 1) if update % i == 0]
    divisors = [*small, *(update // i for i in small)]
    return min(divisors, key=lambda d: max(10 * d / update, update / (10 * d)))


def _whole(given: Mapping[str, str], name: str) -> int | None:
    """Return a whole number above 0 of the command line; None for no word and other values."""
    text = given.get(name, "")
    is_whole = text.isascii() and text.isdecimal() and 0 < len(text) < 14
    return int(text) or None if is_whole else None


def _drop_given(values: dict[str, Any], given: Mapping[str, str]) -> None:
    """Remove the options that the command line sets."""
    for name in given:
        group, _, option = name.partition(".")
        section = values.get(group)
        if option and isinstance(section, dict):
            section.pop(option, None)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their dotted names."""
    flat: dict[str, Any] = {}
    for group, section in values.items():
        if isinstance(section, dict):
            flat |= {f"{group}.{key}": value for key, value in section.items()}
        else:
            flat[group] = section
    return flat
