"""The choice of options within a budget: a pure function, checked against sums by hand."""

import math
from dataclasses import replace

import pytest

from kfac_bench.core.planning.budget import (
    SIZES,
    STEP_CALLS,
    WRITE_CALLS,
    BudgetError,
    Choice,
    Rates,
    Seen,
    UpdateRates,
    choose,
    stage_seconds,
)
from kfac_bench.core.planning.layer_spec import LayerSpec
from kfac_bench.core.planning.plan import Stage
from kfac_bench.core.planning.planner import make_plan

FREE = Rates(0.0, math.inf, (math.inf,) * len(SIZES), (0.0,) * len(SIZES))
"""Rates at which nothing takes time; a test replaces those it is about."""
PRODUCTS = replace(FREE, product_flops=(1e9,) * len(SIZES))
LAYERS = LayerSpec("narrow", 64, 32), LayerSpec("wide", 1024, 512)
AS_GIVEN = Choice(8192, None, 10, 100, 0.0)


def plan_of(max_dim=8192, block_size=None, world_size=1, method="inverse", layers=LAYERS):
    specs = [replace(s, a_diagonal=s.a_dim > max_dim, g_diagonal=s.g_dim > max_dim) for s in layers]
    if block_size is not None:
        specs = [spec.divided(block_size) for spec in specs]
    return make_plan(specs, world_size, method=method)


def seen(step_s=1.0, rows=100.0, statistics_s=0.0):
    return Seen({spec.name: rows for spec in LAYERS}, step_s, statistics_s)


def products_s(spec, a_rows, g_rows):
    """The seconds of two products at 1 GFLOP/s; rows are those of a block, 0 for a diagonal."""
    return 2e-9 * spec.a_dim * spec.g_dim * (a_rows + g_rows)


def test_preconditioning_takes_the_products_of_all_layers():
    got = stage_seconds(plan_of(), seen().rows, PRODUCTS)[Stage.PRECONDITION]
    want = products_s(LAYERS[0], 64, 32) + products_s(LAYERS[1], 1024, 512)
    assert got == pytest.approx(want)
    eigen = stage_seconds(plan_of(method="eigen"), seen().rows, PRODUCTS)[Stage.PRECONDITION]
    assert eigen == pytest.approx(2 * want)


def test_blocks_and_diagonals_take_their_own_products():
    got = stage_seconds(plan_of(600, 256), seen().rows, PRODUCTS)[Stage.PRECONDITION]
    want = products_s(LAYERS[0], 64, 32) + products_s(LAYERS[1], 0, 256)
    assert got == pytest.approx(want)


def test_eigen_adam_rotates_twice_and_orthogonalizes_between():
    specs = LAYERS[0], replace(LAYERS[1], orthogonal_steps=3)
    updates = UpdateRates((4e9,) * len(SIZES), (1.0, 2.0, 4.0, 8.0), (2.0, 4.0, 8.0, 16.0))
    plan = plan_of(layers=specs, method="eigen_adam")
    got = stage_seconds(plan, {}, replace(PRODUCTS, updates=updates))[Stage.PRECONDITION]
    rotations = 2 * products_s(LAYERS[0], 64, 32) + 1.25 * products_s(LAYERS[1], 1024, 512)
    # 512 rows lie in the middle of 256 and 1024; 1024 columns are a third of the way to 4 x 512.
    assert got == pytest.approx(rotations + math.sqrt(32) * (1 + 1 / 3))


def test_a_wider_update_never_takes_less_time():
    rates = UpdateRates(FREE.product_flops, (1.0,) * len(SIZES), (0.5,) * len(SIZES))
    assert rates.seconds(64, 6400) == 1.0


def test_max_dim_saves_rotations_of_eigen_adam_and_no_orthogonalization():
    layers = (replace(LAYERS[1], orthogonal_steps=3),)
    times = (1e-3,) * len(SIZES)
    rates = replace(PRODUCTS, updates=UpdateRates(FREE.product_flops, times, times))

    def plan_within(max_dim, block_size):
        return plan_of(max_dim, block_size, method="eigen_adam", layers=layers)

    options = Choice(8192, None, 40, 40, 0.0)
    one_side = 1e-3 + products_s(LAYERS[1], 0, 512)
    choice = choose(1.1 * one_side, options, plan_within, seen(), rates)
    assert (choice.max_dim, choice.block_size) == (1023, None)
    assert 0.9 * one_side < choice.overhead <= 1.1 * one_side
    with pytest.raises(BudgetError, match=r"the cheapest plan takes 0\.01 of"):
        choose(0.9e-3, options, plan_within, seen(step_s=1.0), rates)


def test_a_new_basis_of_eigen_adam_takes_products_with_both_moments():
    plan = plan_of(layers=LAYERS[:1], method="eigen_adam")
    got = stage_seconds(plan, {}, PRODUCTS)[Stage.DECOMPOSE]
    want = sum(2e-9 * n**3 + 4e-9 * 64 * 32 * n for n in (64, 32))
    assert got == pytest.approx(want)


def test_small_layers_take_a_fixed_time():
    calls = replace(FREE, call_s=1e-6)
    one = stage_seconds(plan_of(layers=LAYERS[:1]), {}, calls)[Stage.PRECONDITION]
    two = stage_seconds(plan_of(), {}, calls)[Stage.PRECONDITION]
    assert one > (STEP_CALLS + WRITE_CALLS) * 1e-6
    assert two - one == pytest.approx(one - STEP_CALLS * 1e-6)


def test_decompositions_grow_as_cubes_beyond_the_largest_timed_size():
    rates = replace(FREE, decompose_s=(1.0, 2.0, 4.0, 8.0))
    decompose = {n: rates.decomposition_s(n) for n in (8, 16, 128, 1024, 2048)}
    assert decompose == pytest.approx({8: 1, 16: 1, 128: math.sqrt(8), 1024: 8, 2048: 64})


def test_messages_take_latency_and_bandwidth_of_a_ring():
    rates = replace(FREE, message_s=1e-3, message_bytes_per_s=1e9)
    plan = plan_of(world_size=2)
    (message,) = [op for op in plan.factors if hasattr(op, "numel")]
    got = stage_seconds(plan, {}, rates)[Stage.FACTORS]
    assert got == pytest.approx(1e-3 + 4e-9 * message.numel)


def test_the_rank_with_most_work_counts():
    rates = replace(FREE, decompose_s=(1.0,) * len(SIZES))
    one = stage_seconds(plan_of(), {}, rates)[Stage.DECOMPOSE]
    three = stage_seconds(plan_of(world_size=3), {}, rates)[Stage.DECOMPOSE]
    assert (one, three) == (4.0, 2.0)


def test_a_large_budget_changes_nothing():
    choice = choose(10.0, AS_GIVEN, plan_of, seen(), PRODUCTS)
    assert choice == replace(AS_GIVEN, overhead=choice.overhead)
    assert choice.overhead == pytest.approx(
        products_s(LAYERS[0], 64, 32) + products_s(LAYERS[1], 1024, 512)
    )


def test_blocks_come_before_diagonals():
    whole = products_s(LAYERS[1], 1024, 512)
    choice = choose(0.8 * whole, AS_GIVEN, plan_of, seen(), PRODUCTS)
    assert (choice.block_size, choice.max_dim) == (512, 8192)
    choice = choose(0.25 * whole, AS_GIVEN, plan_of, seen(), PRODUCTS)
    assert choice.max_dim < 1024


def test_a_longer_interval_comes_before_blocks_if_decompositions_are_what_costs():
    rates = replace(FREE, decompose_s=(1.0, 1.0, 1.0, 1.0))
    choice = choose(0.021, AS_GIVEN, plan_of, seen(), rates)
    assert choice == Choice(8192, None, 20, 200, pytest.approx(0.02))


def test_intervals_that_the_user_gave_as_functions_stay():
    rates = replace(FREE, decompose_s=(1.0, 1.0, 1.0, 1.0))
    choice = choose(0.021, AS_GIVEN, plan_of, seen(), rates, may_stretch=False)
    assert (choice.factor_update_freq, choice.update_freq) == (10, 100)
    assert choice.max_dim < 1024


def test_the_measured_time_of_statistics_counts_once_per_interval():
    choice = choose(0.06, AS_GIVEN, plan_of, seen(statistics_s=0.5), replace(FREE, call_s=1e-12))
    assert choice.overhead == pytest.approx(0.05)
    assert choice.factor_update_freq == 10


def test_a_budget_that_cannot_be_met_says_what_the_cheapest_plan_takes():
    slow = replace(FREE, call_s=1.0)
    with pytest.raises(BudgetError, match=r"max_overhead=0\.1 cannot be met.*1e\+03 ms"):
        choose(0.1, AS_GIVEN, plan_of, seen(), slow)


def test_no_option_becomes_finer():
    given = Choice(300, 128, 50, 500, 0.0)
    choice = choose(10.0, given, plan_of, seen(), PRODUCTS)
    assert choice == replace(given, overhead=choice.overhead)
