"""The simulator: messages and stages against closed forms, its files and its command."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kfac_bench import cli
from kfac_bench.config import compose
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.plan import STRATEGIES, Decompose, Message, Stage
from kfac_bench.core.planning.planner import make_plan
from kfac_bench.errors import UsageError
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.conduct import PAPERS_CODE
from kfac_bench.simulate.hardware import (
    NEAREST,
    NEAREST_ERRORS,
    Hardware,
    Network,
    NetworkLink,
    Rates,
    interpolate,
)
from kfac_bench.simulate.step import Workload, op_seconds, step_time
from kfac_bench.simulate.sweep import (
    Intervals,
    Variant,
    efficiency,
    fastest,
    plan_of,
    sweep,
    variant,
)
from tests.support.figures import texts

DOCS = compose.CONF_DIR.parent / "docs"
ALPHA, BETA = 1e-5, 1e9
SLOW = NetworkLink(ALPHA, BETA)
RING = Network(1, SLOW, SLOW, "ring")
RATES = Rates({"default": 1e12}, 1e12, 1e12, {1024: 0.1}, {1024: 0.02})
MACHINE = Hardware("made up", RING, RATES)
LAYERS = [LayerSpec(f"layer{i}", a, g) for i, (a, g) in enumerate([(65, 32), (33, 48), (49, 10)])]
WORK = Workload("mlp", LAYERS, {spec.name: 8 for spec in LAYERS}, 3e9, 10_000, 6, examples=8)

# ---- messages ----


@pytest.mark.parametrize("p", [2, 3, 8, 64])
def test_a_ring_moves_each_byte_twice_except_the_part_of_the_rank(p):
    ranks = range(p)
    assert RING.all_reduce_s(0, ranks) == pytest.approx(2 * (p - 1) * ALPHA)
    more = RING.all_reduce_s(1e6, ranks) - RING.all_reduce_s(0, ranks)
    assert more == pytest.approx(2 * (p - 1) / p * 1e6 / BETA)
    assert RING.rooted_s(1e6, ranks) == pytest.approx((p - 1) * ALPHA + 1e6 / BETA)


@pytest.mark.parametrize(("p", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (1024, 10)])
def test_a_tree_has_log2_levels(p, levels):
    tree = replace(RING, algorithm="tree")
    assert tree.all_reduce_s(0, range(p)) == pytest.approx(2 * levels * ALPHA)
    assert tree.rooted_s(0, range(p)) == pytest.approx(levels * ALPHA)
    assert tree.rooted_s(3e6, range(p)) == pytest.approx(levels * ALPHA + 3e6 / BETA)


def test_best_takes_the_faster_algorithm_and_one_rank_sends_nothing():
    best, tree = replace(RING, algorithm="best"), replace(RING, algorithm="tree")
    assert best.all_reduce_s(4, range(64)) == tree.all_reduce_s(4, range(64))
    assert best.all_reduce_s(1e9, range(4)) == RING.all_reduce_s(1e9, range(4))
    assert best.all_reduce_s(1e9, [3]) == 0


def test_groups_inside_a_node_use_intra_and_groups_between_nodes_share_inter():
    network = Network(4, NetworkLink(1e-6, 1e11), NetworkLink(1e-5, 1e10), "ring")
    assert network.link(range(4)) == NetworkLink(1e-6, 1e11)
    assert network.link([4, 5]) == NetworkLink(1e-6, 1e11)
    assert network.link(range(8)) == NetworkLink(1e-5, 1e10)
    assert network.link([3, 4]) == NetworkLink(1e-5, 1e10 / 4)  # one of four ranks of each node
    assert network.link(range(0, 16, 2)) == NetworkLink(1e-5, 1e10 / 2)


# ---- work ----


def test_decomposition_times_between_and_beyond_the_measured_sizes():
    table = {16: 1e-4, 64: 1e-3, 256: 3e-2}
    assert [interpolate(table, n) for n in table] == pytest.approx(list(table.values()))
    assert interpolate(table, 32) == pytest.approx(math.sqrt(1e-4 * 1e-3))
    assert interpolate(table, 1024) == pytest.approx(3e-2 * 30)
    assert interpolate({100: 1.0}, 200) == pytest.approx(8)


def test_a_batch_of_decompositions_takes_the_sum_of_their_times():
    """Each group counts, a diagonal counts nothing, and each method has a table of its own."""
    members = ((LayerSpec("a", 64, 32, groups=3), "A"), (LayerSpec("b", 64, 8, groups=3), "A"))
    for method, seconds in (("eigen", 0.1), ("ekfac", 0.1), ("inverse", 0.02)):
        each = seconds * (64 / 1024) ** 3
        assert op_seconds(Decompose((0,), members), method, WORK, MACHINE) == pytest.approx(
            6 * each
        )
    op, each = Decompose((0,), members), (64 / 1024) ** 3
    # QR steps take eigh's time where they were not measured
    assert op_seconds(op, "eigen_adam", WORK, MACHINE) == pytest.approx(6 * 0.1 * each)
    measured = replace(MACHINE, rates=replace(MACHINE.rates, qr_s={1024: 0.05}))
    assert op_seconds(op, "eigen_adam", WORK, measured) == pytest.approx(6 * 0.05 * each)
    assert op_seconds(op, "eigen", WORK, measured) == pytest.approx(6 * 0.1 * each)
    diagonal = ((LayerSpec("c", 64, 32, a_diagonal=True), "A"),)
    assert op_seconds(Decompose((0,), diagonal), "eigen", WORK, MACHINE) == 0


# ---- a step ----


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", ["eigen", "inverse", "eigen_adam"])
def test_one_rank_takes_the_sum_of_its_ops(strategy, method):
    plan = plan_of(WORK, Variant(strategy), 1, method)
    time = step_time(WORK, 1, MACHINE, plan)
    for stage in Stage:
        ops = [op_seconds(op, method, WORK, MACHINE) for op in plan.ops(stage)]
        assert all(s > 0 for s in ops)
        assert time.stages_s[stage] == pytest.approx(sum(ops), rel=1e-12)
    assert (time.forward_backward_s, time.gradients_s) == (3e9 / 1e12, 0)
    assert time.average_s(4, 20) == pytest.approx(
        0.003
        + time.stages_s[Stage.FACTORS] / 4
        + time.stages_s[Stage.DECOMPOSE] / 20
        + time.stages_s[Stage.PRECONDITION]
    )


def test_ranks_share_the_blocks_of_a_factor():
    spec = LayerSpec("a", 64, 8)
    for block_size in (64, 16, 13):
        work = replace(WORK, layers=[spec.divided(block_size)], rows={"a": 8})
        plan = plan_of(work, Variant("comm_opt"), 6, "eigen")  # five blocks at most, and G
        time = step_time(work, 6, MACHINE, plan)
        assert time.kinds_s["Decompose"] == pytest.approx(0.1 * (block_size / 1024) ** 3)


def test_the_layers_of_a_configuration_have_its_blocks():
    config = compose.load(["model=autoencoder", "task=reconstruction", "kfac.block_size=20"])
    layers = workload.of_config(config).layers
    assert max(spec.dim(f) for spec in layers for f in spec.factors) <= 20
    assert max(spec.a_dim for spec in layers) > 64


def test_a_step_equals_the_closed_form():
    """One layer with eigendecompositions on 4 ranks, calculated by hand."""
    spec, rows = LayerSpec("a", 64, 32), 8
    work = replace(WORK, layers=[spec], rows={"a": rows})
    time = step_time(work, 4, MACHINE, plan_of(work, Variant("comm_opt"), 4, "eigen"))
    factors = 2 * rows * (64**2 + 32**2) / 1e12
    packed = 4 * (64 * 65 // 2 + 32 * 33 // 2 + 2)  # and the weight of each
    assert time.stages_s[Stage.FACTORS] == pytest.approx(
        factors + 6 * ALPHA + 2 * 3 / 4 * packed / BETA
    )
    # A on one rank, G on another, at once; then two broadcasts, one after the other
    eigen_a, eigen_g = (0.1 * (n / 1024) ** 3 for n in (64, 32))
    sent = [3 * ALPHA + 4 * (n * n + n) / BETA for n in (64, 32)]
    assert eigen_g + sent[1] < eigen_a + sent[0]
    assert time.stages_s[Stage.DECOMPOSE] == pytest.approx(eigen_a + sum(sent), rel=1e-6)
    products = 2 * 2 * 64 * 32 * (64 + 32) / 1e12
    assert time.stages_s[Stage.PRECONDITION] == pytest.approx(products)
    assert time.gradients_s == pytest.approx(6 * ALPHA + 1.5 * 40_000 / BETA)


def test_backward_hides_messages_up_to_its_share():
    half = replace(MACHINE, overlap=0.5)
    sent = step_time(WORK, 4, MACHINE).gradients_s
    assert sent < 0.5 * 2 / 3 * 0.003
    assert step_time(WORK, 4, half).gradients_s == 0
    tiny = replace(MACHINE, overlap=0.01)
    assert step_time(WORK, 4, tiny).gradients_s == pytest.approx(sent - 0.01 * 2 / 3 * 0.003)


def test_the_papers_code_sends_full_factors():
    plan = plan_of(WORK, Variant("comm_opt"), 4, "eigen")
    (reduce,) = (op for op in plan.factors if isinstance(op, Message))
    ours, theirs = (op_seconds(reduce, "eigen", WORK, MACHINE, c) for c in (None, PAPERS_CODE))
    assert theirs - ours == pytest.approx(1.5 * 4 * reduce.numel / BETA)


@settings(max_examples=30, deadline=None)
@given(
    strategy=st.sampled_from(STRATEGIES),
    world=st.sampled_from([2, 4, 8]),
    algorithm=st.sampled_from(["ring", "tree", "best"]),
    faster=st.floats(1.0, 100.0),
    what=st.sampled_from(["bandwidth", "latency", "products", "eigen", "overlap", "calls"]),
)
def test_faster_hardware_makes_no_step_slower(strategy, world, algorithm, faster, what):
    link = NetworkLink(1e-4, 1e7)
    slow = Hardware("slow", Network(2, link, link, algorithm), replace(RATES, op_s=1e-5))
    net, rates = slow.network, slow.rates
    if what == "bandwidth":
        net = replace(net, intra=replace(link, bandwidth_bytes_per_s=1e7 * faster))
        net = replace(net, inter=net.intra)
    elif what == "latency":
        net = replace(net, intra=replace(link, latency_s=1e-4 / faster))
        net = replace(net, inter=net.intra)
    elif what == "calls":
        rates = replace(rates, op_s=1e-5 / faster)
    elif what == "products":
        rates = replace(
            rates, factor_flops_per_s=1e12 * faster, precondition_flops_per_s=1e12 * faster
        )
    elif what == "eigen":
        rates = replace(rates, eigen_s={1024: 0.1 / faster})
    quick = replace(slow, network=net, rates=rates, overlap=0.5 if what == "overlap" else 0.0)
    plan = plan_of(WORK, Variant(strategy), world, "eigen")
    before, after = (step_time(WORK, world, h, plan) for h in (slow, quick))
    assert after.sgd_s <= before.sgd_s + 1e-12
    for stage in Stage:
        assert after.stages_s[stage] <= before.stages_s[stage] + 1e-12
    if faster > 1.01 and what in ("bandwidth", "latency", "overlap"):
        assert after.sgd_s < before.sgd_s


# ---- a sweep ----


def test_intervals_of_one_world_size_are_rescaled_for_others():
    every = Intervals(50, 500, at=64)
    assert [every.of(n) for n in (16, 64, 256)] == [(200, 2000), (50, 500), (12.5, 125)]
    assert every.of(1 << 20) == (1, 1)
    assert Intervals(10, 100).of(256) == (10, 100)


def test_examples_per_second_and_seconds_of_an_epoch():
    cells = sweep(WORK, MACHINE, [Variant("sgd"), Variant("comm_opt")], [1, 4], Intervals(1, 2))
    assert [(c.variant.label, c.world_size, c.examples) for c in cells] == [
        ("sgd", 1, 8),
        ("comm_opt", 1, 8),
        ("sgd", 4, 32),
        ("comm_opt", 4, 32),
    ]
    assert cells[0].epoch_s(100) == pytest.approx(12 * 0.003)
    assert cells[1].step_s > cells[0].step_s


def test_the_overhead_of_an_epoch_costs_efficiency():
    """Twice the ranks take half the steps, but the overhead of the epoch stays."""
    slow = replace(MACHINE, network=Network(8, *[NetworkLink(1e-9, 1e15)] * 2), epoch_s=0.3)
    cells = sweep(WORK, slow, [Variant("sgd")], [1, 2], Intervals(1, 1))
    one, two = (cell.epoch_s(1600) for cell in cells)
    assert (one, two) == pytest.approx((200 * 0.003 + 0.3, 100 * 0.003 + 0.3), rel=1e-4)
    assert efficiency(cells, cells[1], 1600) == pytest.approx(one / two / 2)
    assert efficiency(cells, cells[1]) == pytest.approx(1, rel=1e-4)
    assert hardware.parse(good() | {"epoch_s": 2}, "x", "x").epoch_s == 2


# ---- files ----

FILES = sorted((compose.CONF_DIR / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hardware_files_name_a_source_of_every_number(path):
    assert hardware.load(path).name == path.stem
    comment = ""
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment = line
        elif any(c.isdigit() for c in line.partition("#")[0]):
            assert "#" in line or comment.startswith("  "), line


def good():
    text = """
network:
  ranks_per_node: 4
  intra: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1e9}
  inter: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e+9}
rates:
  step_flops_per_s: {default: 1.0e+12}
  factor_flops_per_s: 1.0e+12
  precondition_flops_per_s: 1.0e+12
  eigen_s: {1024: 0.1}
  inverse_s: {1024: 0.1}
"""
    return yaml.safe_load(text)


def test_ranks_of_a_node_share_its_cores():
    """Crowding slows work but not messages. Ranks on other nodes do not matter."""
    crowded = replace(MACHINE, network=replace(RING, ranks_per_node=8), crowding={4: 2.5, 2: 1.1})
    factors = [crowded.slowdown(n) for n in (1, 2, 3, 4, 8, 64)]
    assert factors == pytest.approx([1, 1.1, 1.8, 2.5, 5, 5])
    assert MACHINE.slowdown(64) == 1
    plan = make_plan(LAYERS, 4, strategy="comm_opt")
    slow, fast = (step_time(WORK, 4, machine, plan) for machine in (crowded, MACHINE))
    assert slow.forward_backward_s == 2.5 * fast.forward_backward_s
    assert slow.gradients_s == fast.gradients_s
    computed = Stage.PRECONDITION
    assert slow.stages_s[computed] == pytest.approx(2.5 * fast.stages_s[computed])
    assert slow.kinds_s["ReduceFactors"] == fast.kinds_s["ReduceFactors"]
    assert hardware.parse(good() | {"crowding": {2: 1.5}}, "x", "x").slowdown(2) == 1.5


def test_a_number_without_a_decimal_point_is_read_as_a_number():
    assert hardware.parse(good(), "x", "x").network.intra.bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("path", "value", "fragment"),
    [
        (["network", "inter"], None, "network: inter is missing"),
        (["network", "intra", "latency_s"], -1, "network.intra.latency_s=-1: expected a number"),
        (["network", "intra", "speed"], 1, "unknown key 'speed'; there are latency_s"),
        (["network", "algorithm"], "star", "algorithm: choose one of ring, tree, best"),
        (["network", "ranks_per_node"], 2.5, "ranks_per_node=2.5"),
        (["epoch_s"], -1, "epoch_s=-1: expected a number of at least 0"),
        (["rates"], None, "rates: expected names and values"),
        (["rates", "eigen_s"], {"a": 1}, "rates.eigen_s: expected matrix sizes"),
        (["rates", "eigen_s"], {64: True}, "rates.eigen_s[64]=True"),
        (["rates", "step_flops_per_s"], {"conv": 1e9}, "'default' is missing"),
        (["rates", "op_s"], float("nan"), "rates.op_s=nan"),
        (["overlap"], 2, "overlap=2: must be in [0, 1]"),
        (["crowding"], 2, "crowding: expected names and values"),
        (["crowding"], {1: 1.0}, "crowding: expected numbers of ranks above 1"),
        (["crowding"], {2: 0}, "crowding[2]=0: expected a number above 0"),
        (["links"], 1, "unknown key 'links'"),
        (["conduct"], "theirs", "conduct='theirs': choose one of ours, sc20, paper"),
        (["errors"], {"time": 0.1, "ratio": -0.1}, "errors.ratio=-0.1: expected a number above 0"),
        (["errors"], {"time": 0.1}, "errors: ratio is missing"),
        pytest.param(["overlap"], 10**400, "expected a number of at least 0", id="too large"),
    ],
)
def test_a_bad_hardware_file_raises_a_one_line_error(path, value, fragment):
    found = good()
    *parents, last = path
    at = found
    for key in parents:
        at = at[key]
    at[last] = value
    if value is None:
        del at[last]
    with pytest.raises(UsageError) as caught:
        hardware.parse(found, "mine", "mine.yaml")
    assert fragment in str(caught.value)
    assert str(caught.value).startswith("mine.yaml: ")


@pytest.mark.parametrize(
    "text",
    ["2026-13-01", "1" * 5000, "[" * 1200, "[&a [1], *a]"],
    ids=["date", "digits", "brackets", "aliases"],
)
def test_a_hardware_file_with_an_impossible_value_cannot_be_read(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(f"overlap: {text}")
    with pytest.raises(UsageError, match=r"hardware file .*mine\.yaml: cannot be read"):
        hardware.load(path)


def test_a_hardware_file_that_is_no_yaml_is_one_short_line(tmp_path):
    (tmp_path / "mine.yaml").write_text("overlap: [1")
    with pytest.raises(UsageError, match=r"not valid YAML \(while parsing a flow sequence\)$"):
        hardware.load(tmp_path / "mine.yaml")


def test_a_list_of_layers_becomes_a_workload():
    folder = compose.CONF_DIR / "simulation"
    heads = workload.of_file(folder / "maskrcnn_heads.yaml", 2)
    assert [s.name for s in heads.layers][2:4] == ["mask_head.fcn.0", "mask_head.fcn.1"]
    assert heads.rows["box_predictor.cls"] == 1024
    bert = workload.of_file(folder / "bert_large_128.yaml", 10)
    assert len(bert.layers) == 146
    covered = sum(s.grad_numel for s in bert.layers)
    assert covered == 24 * (4 * 1025 * 1024 + 1025 * 4096 + 4097 * 1024) + 1025 * 1026


LAYER = "name: a, a_dim: 2, g_dim: 2, rows: 1"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "layers: 3",
        "layers: [{name: a}]",
        f"layers: [{{{LAYER}, repeat: 0}}]",
        f"layers: [{{{LAYER}, repeat: x}}]",
        f"{{parameters: 0, layers: [{{{LAYER}}}]}}",
        f"{{parameters: 1, tensors: 1, step_flops_per_example: 1, layers: [{{{LAYER}}}, "
        f"{{{LAYER}}}]}}",
        "more: 1",
        "layers: 2026-13-01",
        "\x00",
    ],
)
def test_a_bad_list_of_layers_raises_a_one_line_error(tmp_path, text):
    path = tmp_path / "layers.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"layers\.yaml: "):
        workload.of_file(path, 1)


# ---- the command ----


def simulate_here(capsys, *arguments):
    """Return the exit code, stdout and stderr of the command."""
    with pytest.raises(SystemExit) as caught:
        cli.plan(["simulate", *arguments])
    return caught.value.code, *capsys.readouterr()


SMALL = ("model=autoencoder", "task=reconstruction", "--hardware=two_cores")


def test_the_command_writes_json_a_figure_and_a_table(capsys, tmp_path):
    out, svg = tmp_path / "a.json", tmp_path / "new" / "a.svg"
    words = (*SMALL, "--world-size=1,2,4", "--strategies=sgd,comm_opt,hybrid_opt@1/2")
    code, text, error = simulate_here(
        capsys,
        *words,
        "--examples=1000",
        "--epochs=3",
        "--kfac-epochs=2",
        f"--out={out}",
        f"--svg={svg}",
    )
    assert (code, error) == (0, "")
    assert text.splitlines()[-1].startswith("next: kfac-bench scaling ")
    found = json.loads(out.read_text())
    assert [c["world_size"] for c in found["cells"]] == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    first, kfac = found["cells"][0], found["cells"][1]
    assert first["solution_s"] == pytest.approx(3 * 31 * first["step_s"])
    assert kfac["solution_s"] == pytest.approx(2 * 31 * kfac["step_s"])
    assert kfac["scaling_efficiency"] == 1
    assert "hybrid_opt@1/2" in text
    assert "\nfastest K-FAC, within the error:\n     1 " in text
    assert kfac["saved"] == pytest.approx(1 - kfac["solution_s"] / first["solution_s"])
    errors = hardware.load(compose.CONF_DIR / "hardware" / "two_cores.yaml").nearest_errors
    assert kfac["saved_error"] == pytest.approx(errors.ratio * (1 - kfac["saved"]))
    assert f"{100 * kfac['saved']:.1f} ±{100 * kfac['saved_error']:>4.1f} %" in text
    for key in ("step_s", "examples_per_s", "epoch_s", "solution_s"):
        assert kfac[f"{key}_error"] == pytest.approx(errors.time * kfac[key])
    shares = [found["cells"][i]["scaling_efficiency_error"] for i in (1, 4)]
    assert shares == [0, pytest.approx(errors.time * found["cells"][4]["scaling_efficiency"])]
    drawn = svg.read_text()
    assert drawn.startswith("<svg")
    least = min(c["step_s"] for c in found["cells"][-2:])  # of K-FAC on 4 ranks
    assert "At 4 ranks" in drawn
    assert f"{1e3 * least:.3g} ms" in drawn


def test_table_and_figure_name_the_blocks(capsys, tmp_path):
    svg = tmp_path / "a.svg"
    words = (*SMALL, "--world-size=2", "--strategies=sgd,comm_opt", "kfac.block_size=64")
    code, text, _ = simulate_here(capsys, *words, f"--svg={svg}")
    assert code == 0
    assert text.splitlines()[-1].endswith("--out steps.json   (every number)")
    # The figure breaks its title into lines of their own.
    drawn = " ".join(re.findall(r">([^<>\n]+)</t", svg.read_text()))
    assert "factors in blocks of at most 64 rows" in text
    assert "factors in blocks of at most 64 rows" in drawn


def test_the_errors_are_those_of_the_pages():
    """The folds give the errors of Longhorn and of machines that were never compared."""
    folds = (DOCS / "lab" / "simulation_folds.md").read_text()
    longhorn = hardware.load(compose.CONF_DIR / "hardware" / f"{NEAREST}.yaml").errors
    assert longhorn == NEAREST_ERRORS["sc20"] == NEAREST_ERRORS["paper"]
    for label, errors in (
        ("none: the simulation as it is now", longhorn),
        ("plan, calls and messages of this package (`conduct: ours`)", NEAREST_ERRORS["ours"]),
    ):
        (row,) = (line.split(" | ") for line in folds.splitlines() if label in line)
        assert (row[1], row[3]) == (f"{100 * errors.time:.1f} %", f"{100 * errors.ratio:.1f} %")


def test_the_output_says_whose_error_it_prints_and_what_was_never_validated(capsys):
    words = ("model=resnet18", "--world-size=4")
    code, text, _ = simulate_here(capsys, *words, "--hardware=longhorn_v100")
    assert code == 0
    assert "fp32, hardware longhorn_v100, code of the paper's ResNets" in text
    assert "eigen decompositions" in text
    assert "mean error: ±12.1 % of each time, examples/s and efficiency, ±13.1 % of K-FAC" in text
    assert "not validated" not in text
    assert "hybrid_opt" not in text
    more = "--strategies=sgd,comm_opt,mem_opt"
    code, text, _ = simulate_here(capsys, *words, "--hardware=longhorn_v100", more)
    assert code == 0
    assert "\nnot validated: mem_opt. The errors are those of the validated strategies\n" in text
    code, text, _ = simulate_here(capsys, *words, "--hardware=h100_ndr", "--strategies=sgd")
    assert code == 0
    assert "bf16, hardware h100_ndr, code of this package" in text
    assert f"mean error: ±{100 * NEAREST_ERRORS['ours'].time:.1f} % of each time" in text
    assert (
        "\nnot validated: h100_ndr has no errors of its own. These are the errors of\n  longhorn"
        in text
    )
    assert "\nsgd on 4 ranks: backward hides the whole all-reduce (overlap: 1)." in text
    code, text, _ = simulate_here(capsys, *SMALL, "--world-size=4")
    assert code == 0
    assert "hides" not in text


def test_strategies_within_the_error_are_equally_fast():
    both = [Variant("comm_opt"), Variant("mem_opt")]
    cells = sweep(WORK, MACHINE, both, [4], Intervals(1, 1))
    best, worst = sorted(cells, key=lambda cell: cell.step_s)
    gap = worst.step_s / best.step_s - 1
    assert gap > 0
    assert fastest(cells, 0.99 * gap) == [best]
    assert fastest(cells, 1.01 * gap) == [best, worst]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["how-to/simulate.md", "lab/scaling_to_16384.md"])
def test_a_page_shows_what_its_commands_print_and_draw(page, tmp_path, monkeypatch, capsys):
    text = (DOCS / page).read_text()
    found = re.findall(r"```bash\n(kfac-plan simulate [^`]*)```\n(?:\n```text\n([^`]*)```)?", text)
    assert len(found) == text.count("\nkfac-plan simulate ") > 0
    monkeypatch.chdir(tmp_path)
    for command, shown in found:
        words = shlex.split(command.replace("\\\n", ""))
        code, printed, _ = simulate_here(capsys, *words[2:])
        assert code == 0
        assert not shown or printed.partition("\nnext: ")[0].rstrip() == shown.rstrip()
        drawing = Path(words[words.index("--svg") + 1]) if "--svg" in words else None
        if drawing is not None and drawing.parts[0] == "docs":
            assert texts(drawing.read_text()) == texts((DOCS.parent / drawing).read_text())


def test_without_strategies_those_of_the_method_are_simulated(capsys):
    code, text, error = simulate_here(capsys, *SMALL, "--world-size=2", "kfac.method=ekfac")
    assert (code, error) == (0, "")
    assert "comm_opt" in text
    assert "mem_opt" not in text


def test_out_dash_prints_json_alone(capsys):
    code, text, _ = simulate_here(capsys, *SMALL, "--world-size=2", "--strategies=sgd", "--out=-")
    assert code == 0
    (cell,) = json.loads(text)["cells"]
    assert (cell["stages_s"], cell["every"]) == ({}, {})
    assert "epoch_s" not in cell


def test_help_prints_the_usage(capsys):
    code, text, _ = simulate_here(capsys, "--help")
    assert code == 0
    assert "kfac-plan simulate model=resnet50 --hardware longhorn_v100" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--hardware=cray"], "--hardware cray: choose one of h100_ndr"),
        (["--hardware="], "--hardware is missing: choose one of h100_ndr"),
        (["--hardware=no/such.yaml"], "no/such.yaml: cannot be read"),
        (["--world-size=0"], "--world-size 0: expected a whole number of at least 1"),
        (["--world-size=2,2"], "the same value twice"),
        (["--world-size=999999"], "at most 131072"),
        (["--strategies=magic"], "strategy magic: unknown; choose one of sgd, comm_opt"),
        (["--strategies=comm_opt@1/2"], "takes no fraction"),
        (["--strategies=hybrid_opt@0/0"], "write the fraction as 1/4"),
        (["--strategies=hybrid_opt@1e400"], "write the fraction as 1/4"),
        (["--strategies=hybrid_opt@2"], "must be in (0, 1]"),
        (["--world-size=4", "--strategies=hybrid_opt@3/4"], "do not divide the ranks"),
        (["--world-size=5"], "hybrid_opt needs an even number of ranks, not 5"),
        (["trainer.batch_size=8"], "set --per-rank-batch"),
        (["--per-rank-batch=-1"], "--per-rank-batch -1"),
        (["--epochs=soon"], "--epochs soon: expected a number above 0"),
        (["--epoch-s=-1"], "--epoch-s -1: expected a number of at least 0"),
        (["--epochs=90"], "--epochs 90: the number of examples of data="),
        (["--kfac-epochs=55"], "is not known. Add --examples N, or remove --kfac-epochs"),
        (["--epoch-s=2"], "is not known. Add --examples N, or remove --epoch-s"),
        (["trainer.precision=bf16"], "two_cores are those of fp32; set trainer.precision"),
        (["kfac=none"], "kfac=none: set --strategies"),
        (["kfac.grad_worker_fraction=0.5"], "kfac.grad_worker_fraction=0.5: set --strategies"),
        (["kfac.fisher=mc"], "kfac.fisher=empirical"),
        (["kfac.adaptive_damping=true"], "a fixed kfac.damping"),
        (["kfac.max_overhead=0.25"], "kfac.max_overhead=0.25: the simulation knows only fixed"),
        (["kfac.background=true"], "kfac.background=True: the simulation knows only fixed"),
        (["kfac.method=identity"], "kfac.method=identity has no factors"),
        (["model=resnet5O"], "did you mean"),
        (["per_rank_batch=8"], "per_rank_batch=8: write --per-rank-batch 8"),
        (
            ["--out=/proc/none/x.json", "--world-size=1"],
            "--out /proc/none/x.json: cannot be written",
        ),
    ],
)
def test_wrong_words_give_a_one_line_error(capsys, arguments, fragment):
    words = arguments if arguments[0].startswith("--hardware") else [*SMALL, *arguments]
    code, text, error = simulate_here(capsys, *words)
    assert (code, text) == (2, "")
    assert fragment in error
    assert error.count("\n") == 1


def test_an_experiment_of_the_optimizer_alone_is_simulated_with_kfac_too(capsys):
    words = ["experiment=digits/autoencoder_adam", "--hardware=two_cores", "--world-size=2"]
    code, text, _ = simulate_here(capsys, *words)
    assert code == 0
    assert "comm_opt" in {line.split()[0] for line in text.splitlines() if line}


@pytest.mark.parametrize("word", ["from={}", "recipe=text_bert"])
def test_precision_and_method_are_those_of_the_file(tmp_path, capsys, word):
    file = tmp_path / "config.yaml"
    file.write_text(compose.to_yaml(compose.load(["model=resnet8", "kfac.method=inverse"])))
    words = [word.format(file), "trainer.accumulate=1", "--hardware=longhorn_v100"]
    code, text, error = simulate_here(capsys, *words, "--world-size=2")
    if word.startswith("from"):
        assert "inverse decompositions" in text
    else:
        assert code == 2
        assert "trainer.precision" in error


def test_the_label_of_a_variant_is_the_text_that_names_it():
    for text in ("sgd", "comm_opt", "hybrid_opt@1/4", "owner_reduce@3/8"):
        assert variant(text).label == text
    assert variant("hybrid_opt@0.25") == Variant("hybrid_opt", 0.25)


def test_the_sweep_imports_no_torch():
    code = "import sys; import kfac_bench.simulate.sweep; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60)
