"""Checks of a whole configuration: ranges, and choices that do not fit together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kfac_bench.config.options import Section, check_option, options
from kfac_bench.config.registry import TABLES, options_class
from kfac_bench.config.train import TrainConfig
from kfac_bench.errors import UsageError


def check(config: TrainConfig) -> None:
    """Raise :class:`UsageError` for the first option out of range, or options that clash."""
    for name, value, meta in options(config):
        if value is not None:
            check_option(name, value, meta)
    # The checks below compute with options, so each option must be in its range by then.
    for group in TABLES:
        _check_name(group, getattr(config, group))
    for field in dataclasses.fields(config):
        section = getattr(config, field.name)
        if isinstance(section, Section):
            section.check(config)
    _check_fits_task("model", config.model, config.task.name)
    _check_fits_task("data", config.data, config.task.name)


def _check_name(group: str, section: Any) -> None:
    """Refuse ``model.name=unet`` where another choice of the group set the other options."""
    if type(section) is not options_class(group, section.name):
        raise UsageError(
            f"{group}.name={section.name}: the other options of the group belong to another "
            f"choice; write {group}={section.name}"
        )


def _check_fits_task(group: str, section: Any, task: str) -> None:
    """Refuse a model or a dataset that is for other tasks."""
    if task in section.tasks:
        return
    own_tasks = " or ".join(section.tasks)
    if group == "data":
        own_tasks += f", with model={_names('model', section.tasks)}"
    raise UsageError(
        f"{group}={section.name} does not fit task={task}: {group}={section.name} is for "
        f"task={own_tasks}; for task={task} choose {group}={_names(group, (task,))}"
    )


def _names(group: str, tasks: Sequence[str]) -> str:
    """Return the choices of a group that fit one of the tasks."""
    fitting = [n for n in TABLES[group] if {*tasks} & {*options_class(group, n).tasks}]
    return " or ".join(fitting)
