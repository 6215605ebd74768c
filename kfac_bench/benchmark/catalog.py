"""The names, titles and sizes of all benchmarks, read without the packages that run them.

``kfac-bench list`` prints them. The cells of a benchmark are in :mod:`kfac_bench.benchmark.suite`.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from kfac_bench.config.conf_files import file_of, options_of

ORDER = (
    "kaisa_memory_vs_fraction",
    "fig7_step_profile",
    "sec634_bert_interval",
    "fig8_resnet_scaling",
    "fig9bc_bert_scaling",
    "kaisa_fixed_memory_bert",
    "kaisa_fixed_memory_resnet50",
    "kaisa_unet_lgg",
    "table2_fig4_cifar_correctness",
    "table5_fig6_update_interval",
    "fig5a_resnet50_convergence",
    "table1_cifar_inv_vs_eigen",
    "table6_fig9a_maskrcnn_scaling",
    "fig5bc_maskrcnn_convergence",
    "table3_bert_lamb",
    "table4a_bert_kfac_phase2",
    "table4b_bert_kfac_phase1",
    "table4c_bert_kfac_both",
)
"""The papers' tables and figures. Cheap rows come first, so that results appear early."""
CLAIMS = (
    "classic_autoencoder",
    "claim3_distribution",
    "claim4_memory",
    "claim2_intervals",
    "claim1_epochs",
)
"""The papers' claims as small experiments: the rows of ``--profile cpu``, cheap rows first."""


@dataclass(frozen=True)
class Entry:
    """A benchmark as lists show it."""

    name: str
    title: str
    source: str
    """The paper and its table, figure or section; empty for a study of this repository."""
    sizes: tuple[str, ...]
    """The profiles of the benchmark; empty if it has one size."""


def groups() -> dict[str, list[Entry]]:
    """Return all benchmarks that ``kfac-bench run`` knows, by group."""
    others = [name for name in options_of("benchmark") if name not in (*ORDER, *CLAIMS)]
    named = {
        "Tables and figures of the papers (kfac-bench run all)": ORDER,
        "Claims of the papers on this machine (kfac-bench run all --profile cpu)": CLAIMS,
        "Studies of this repository": others,
    }
    found = {group: [_entry(name) for name in names] for group, names in named.items()}
    return {group: [e for e in entries if e is not None] for group, entries in found.items()}


def _entry(name: str) -> Entry | None:
    """Return the entry of a benchmark in lists; None without cells, as for kfac-bench try."""
    content = _content(name)
    if not content["overrides"] and not content.get("computed"):
        return None
    sizes = tuple(content.get("profiles", {}))
    return Entry(name, content["title"], content.get("source", ""), sizes)


def _content(name: str) -> dict[str, Any]:
    text = file_of("benchmark", name).read_text(encoding="utf-8")
    # The parser in C is ten times as fast, but not every PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load(text, loader)  # noqa: S506 - both are safe
    base = content.get("extends")
    return (_content(base) if base else {}) | content
