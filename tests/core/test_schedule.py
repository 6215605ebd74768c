"""What is due when: whatever the intervals, constant or changing, from the start or resumed."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from kfac_bench.core.schedule import (
    Doubling,
    Milestones,
    Schedules,
    Settings,
    count_free_phases,
    slice_phases,
)
from tests.support.properties import for_all

COUNTS = st.integers(1, 40)
INTERVALS = st.integers(1, 30)
NESTED = st.one_of(  # one interval a multiple of the other
    st.tuples(st.integers(1, 8), st.integers(1, 6)).map(lambda x: (x[0] * x[1], x[1])),
    st.tuples(st.integers(1, 8), st.integers(1, 6)).map(lambda x: (x[1], x[0] * x[1])),
)


def schedules(
    update_freq=10,
    factor_update_freq=1,
    damping=1e-3,
    kl_clip=1e-3,
    factor_decay=0.95,
    early_updates=False,
):
    return Schedules(damping, kl_clip, factor_decay, update_freq, factor_update_freq, early_updates)


def due(count, steps, *freqs, early=False):
    """By slice, the steps at which it is due."""
    plan = schedules(*freqs, early_updates=early)
    at = {step: plan.slices_due(step, count) for step in steps}
    return [[step for step in steps if i in at[step]] for i in range(count)]


# Phases


@pytest.mark.parametrize(
    ("update_freq", "factor_update_freq", "free"),
    [
        (10, 5, [1, 2, 3, 4, 6, 7, 8, 9]),
        (4, 2, [1, 3]),
        (5, 10, [1, 2, 3, 4]),  # factors less often: step 0 of an interval is still left to them
        (3, 1, [0, 1, 2]),  # every step has a factor update: all of them
        (15, 10, [i for i in range(15) if i % 5]),  # step 20 has a factor update, too
        (3, 2, [0, 1, 2]),  # each phase meets some
        (1, 1, [0]),
        (1, 7, [0]),
    ],
)
def test_free_phases_by_hand(update_freq, factor_update_freq, free):
    assert count_free_phases(update_freq, factor_update_freq) == len(free)
    assert slice_phases(len(free), update_freq, factor_update_freq) == free


def test_a_long_interval_needs_no_memory():
    assert schedules(2**62, 1).most_slices(layers=3) == 2**62
    assert slice_phases(2, 2**62, 2) == [1, 2**61 + 1]


def test_the_most_slices_by_hand():
    """One for each free step of an interval; one for each factor if an interval may change."""
    assert schedules(10, 5).most_slices(layers=3) == 8
    assert schedules(3, 1).most_slices(layers=9) == 3
    assert schedules(lambda step: 10, 5).most_slices(layers=3) == 6
    assert schedules(10, lambda step: 5).most_slices(layers=3) == 6


@pytest.mark.parametrize(
    ("count", "phases"),
    [
        (1, [0]),  # as without slices
        (2, [1, 6]),
        (3, [1, 3, 7]),
        (8, [1, 2, 3, 4, 6, 7, 8, 9]),
        (16, [1, 1, 2, 2, 3, 3, 4, 4, 6, 6, 7, 7, 8, 8, 9, 9]),
    ],
)
def test_slice_phases_by_hand(count, phases):
    assert slice_phases(count, 10, 5) == phases


@for_all(COUNTS, INTERVALS, INTERVALS)
def test_slices_fill_the_free_phases_evenly(count, update_freq, factor_update_freq):
    phases = slice_phases(count, update_freq, factor_update_freq)
    assert len(phases) == count
    assert phases == sorted(phases)
    if count == 1:
        assert phases == [0]
        return
    common = math.gcd(update_freq, factor_update_freq)
    free = [i for i in range(update_freq) if i % common] or [*range(update_freq)]
    per_phase = Counter(phases)
    assert set(per_phase) <= set(free)
    each = [per_phase[phase] for phase in free]
    assert max(each) - min(each) <= 1


# Slices


@for_all(COUNTS, INTERVALS, INTERVALS, st.integers(1, 200))
def test_every_slice_is_due_exactly_once_in_any_interval(count, update, factor_update, start):
    """Also in one that begins anywhere, as a resumed run does."""
    for steps in due(count, range(start, start + update), update, factor_update):
        assert len(steps) == 1


@for_all(COUNTS, INTERVALS, INTERVALS)
def test_all_slices_are_due_at_the_first_step(count, update, factor_update):
    assert schedules(update, factor_update).slices_due(0, count) == list(range(count))


@for_all(COUNTS, NESTED)
def test_no_slice_is_due_at_a_factor_step_where_there_are_others(count, freqs):
    update, factor_update = freqs
    plan = schedules(update, factor_update)
    interval = range(math.lcm(update, factor_update), 3 * math.lcm(update, factor_update))
    free = [step for step in interval if not plan.factors_due(step)]
    phases_met = {step % update for step in interval if plan.factors_due(step)}
    if count == 1 or len(phases_met) == update:  # no phase is free: any will do
        return
    used = {step for steps in due(count, interval, update, factor_update) for step in steps}
    assert used
    assert used <= set(free)


@pytest.mark.parametrize("freqs", [(15, 10), (6, 4)])
def test_phases_are_free_in_all_intervals(freqs):
    """15 and 10: phase 5 is free in the first interval, and step 20 in the second."""
    plan = schedules(*freqs)
    for steps in due(40, range(1, 200), *freqs):
        assert not any(map(plan.factors_due, steps))


def test_slices_due_by_hand():
    """Four slices, decomposed every 6 steps, factors every 3: steps 1, 2, 4, 5 are free."""
    assert due(4, range(14), 6, 3) == [[0, 1, 7, 13], [0, 2, 8], [0, 4, 10], [0, 5, 11]]
    assert due(1, range(14), 6, 3) == [[0, 6, 12]]
    assert due(3, range(4), 1, 1) == [[0, 1, 2, 3]] * 3  # update_freq=1: all, always
    assert due(3, range(4), 1, 5) == [[0, 1, 2, 3]] * 3
    assert due(3, range(7), 3, 1) == [[0, 3, 6], [0, 1, 4], [0, 2, 5]]  # factor_update_freq=1


@for_all(COUNTS, INTERVALS, INTERVALS, INTERVALS, INTERVALS, st.integers(1, 90))
def test_no_slice_waits_longer_than_an_interval_when_intervals_change(
    count, old, old_factor, new, new_factor, change
):
    freqs = (
        lambda step: old if step < change else new,
        lambda step: old_factor if step < change else new_factor,
    )
    for steps in due(count, range(change + 3 * new), *freqs):
        assert steps[0] == 0
        before = [step for step in steps if step < change]
        after = [step for step in steps if step >= change]
        later = [b - a for a, b in pairwise(before[1:])]
        assert all(gap == old for gap in later)
        assert change - before[-1] <= old
        assert after[0] - change < new
        assert all(b - a == new for a, b in pairwise(after))


def test_intervals_that_grow_by_hand():
    def every(step):
        return 2 if step < 6 else 4

    # phases 0 and 1 of 2, then 0 and 2 of 4
    assert due(2, range(16), every, 1) == [[0, 2, 4, 8, 12], [0, 1, 3, 5, 6, 10, 14]]


# Early updates


@pytest.mark.parametrize(
    ("freqs", "steps"),
    [
        ((100, 10), [0, 10, 20, 40, 80, 100, 200]),
        ((500, 10), [0, 50, 100, 200]),
        ((20, 10), [0, 10, *range(20, 300, 20)]),
        ((80, 10), [0, 10, 20, 40, 80, 160, 240]),  # 80 is the end of the interval, not within it
        ((7, 1), [0, 1, 2, 4, *range(7, 300, 7)]),
        ((25, 10), [0, 10, 20, *range(25, 300, 25)]),
        ((10, 10), list(range(0, 300, 10))),
        ((50, 60), [*range(0, 300, 50)]),
    ],
)
def test_early_updates_by_hand(freqs, steps):
    assert due(1, range(300), *freqs, early=True) == [steps]


def test_early_slices_by_hand():
    """Parts of the first interval: 3 to 5, 6 to 11, 12 to 19. Factors at multiples of 3."""
    assert due(4, range(41), 20, 3, early=True) == [
        [0, 4, 7, 12, 20, 40],
        [0, 4, 8, 14, 25],
        [0, 5, 10, 16, 30],
        [0, 5, 11, 18, 35],
    ]


@for_all(COUNTS, INTERVALS, INTERVALS)
def test_early_updates_change_the_first_interval_only(count, update, factor_update):
    late = range(update, 4 * update)
    args = (count, late, update, factor_update)
    assert due(*args, early=True) == due(*args)


@for_all(COUNTS, INTERVALS, INTERVALS)
def test_each_slice_is_due_once_in_each_part_of_the_first_interval(count, update, factor_update):
    plan = schedules(update, factor_update, early_updates=True)
    parts = {plan.interval(step) for step in range(update)}
    assert sorted(step for part in parts for step in part) == list(range(update))
    for steps in due(count, range(update), update, factor_update, early=True):
        if update <= factor_update:
            continue
        each = {part.start: sum(step in part for step in steps) for part in parts}
        assert set(each.values()) == {1}
        assert steps[0] == 0


@for_all(COUNTS, INTERVALS, INTERVALS, st.integers(0, 100))
def test_no_slice_waits_longer_than_an_interval_with_early_updates(
    count, update, factor_update, start
):
    for steps in due(count, range(start, start + update), update, factor_update, early=True):
        assert steps


@for_all(COUNTS, NESTED)
def test_early_slices_leave_factor_steps_alone_where_they_can(count, freqs):
    plan = schedules(*freqs, early_updates=True)
    for step in range(1, freqs[0]):
        part = plan.interval(step)
        if count > 1 and not all(map(plan.factors_due, part)) and plan.slices_due(step, count):
            assert not plan.factors_due(step)


def test_the_first_interval_of_a_function_is_that_of_step_0():
    def falls(step):
        return 100 if step < 30 else 25

    def rises(step):
        return 10 if step < 30 else 40

    assert due(1, range(101), falls, 10, early=True) == [[0, 10, 20, 50, 75, 100]]
    assert due(1, range(101), rises, 10, early=True) == [[0, 10, 20, 40, 80]]
    assert due(1, range(101), rises, 5, early=True) == [[0, 5, 10, 20, 40, 80]]
    # Each slice is due once in a part, also if factors are updated more often from step 7 on.
    each = due(4, range(5, 10), 40, lambda step: 5 if step < 7 else 1, early=True)
    assert each == [[6], [7], [8], [9]]
    # Functions that choose single steps: 1 in a chosen step, else more than the step.
    chosen = {0, 3, 8}
    assert due(1, range(12), lambda step: 1 if step in chosen else step + 1, 1, early=True) == [
        sorted(chosen)
    ]


# Factors


@for_all(INTERVALS, st.integers(0, 500))
def test_factors_are_due_at_multiples_of_their_interval(freq, step):
    assert schedules(3, freq).factors_due(step) == (step % freq == 0)


def test_factors_are_due_by_a_schedule_of_their_own():
    plan = schedules(3, lambda step: 1 if step < 3 else 4)
    assert [step for step in range(13) if plan.factors_due(step)] == [0, 1, 2, 4, 8, 12]


# Values


def test_numbers_and_functions_of_the_step():
    plan = Schedules(
        damping=lambda step: 1 / (1 + step),
        kl_clip=None,
        factor_decay=lambda step: 0.5 + step / 100,
        update_freq=lambda step: 10.0 * (1 + step),
        factor_update_freq=2,
        early_updates=False,
    )
    assert plan.at(0) == Settings(1.0, None, 0.5, 10, 2)
    assert plan.at(3) == Settings(0.25, None, 0.53, 40, 2)
    assert isinstance(plan.at(3).update_freq, int)
    assert schedules(kl_clip=lambda step: 0.1 * (1 + step)).at(1).kl_clip == 0.2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("damping", 0, "damping=0.0 at step 7: must be above 0"),
        ("damping", -1.0, "must be above 0"),
        ("damping", math.inf, "damping=inf at step 7: must be above 0 and finite"),
        ("damping", math.nan, "damping=nan at step 7: must be above 0"),
        ("kl_clip", 0, "kl_clip=0.0 at step 7: must be above 0"),
        ("kl_clip", math.nan, "must be above 0"),
        ("factor_decay", 1, r"factor_decay=1.0 at step 7: must be in \[0, 1\)"),
        ("factor_decay", -0.1, r"must be in \[0, 1\)"),
        ("factor_decay", math.nan, r"must be in \[0, 1\)"),
        ("update_freq", 0, "update_freq=0 at step 7: must be a whole number >= 1"),
        ("update_freq", 2.5, "update_freq=2.5 at step 7: must be a whole number >= 1"),
        ("factor_update_freq", 0.5, "factor_update_freq=0.5 at step 7: must be a whole number"),
        ("factor_update_freq", -1, "factor_update_freq=-1 at step 7: must be a whole number"),
    ],
)
def test_an_error_names_the_value_and_the_step(name, value, said):
    good = getattr(schedules(), name)
    plan = schedules(**{name: lambda step: value if step == 7 else good})
    plan.at(6)
    with pytest.raises(ValueError, match=said):
        plan.at(7)
    if name.endswith("freq"):
        with pytest.raises(ValueError, match=said):
            plan.slices_due(7, 2)
    if name == "factor_update_freq":
        with pytest.raises(ValueError, match=said):
            plan.factors_due(7)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_interval_that_is_not_a_number_gives_the_same_error(value):
    with pytest.raises(ValueError, match="must be a whole number >= 1"):
        schedules(update_freq=value).at(0)


def test_the_limits_are_allowed():
    assert schedules(1, 1, factor_decay=0).at(0) == Settings(1e-3, 1e-3, 0.0, 1, 1)


# Beside training


def begun(count, steps, *freqs, early=False):
    """By slice, (the step in which it begins, the step in which it comes into use)."""
    plan = schedules(*freqs, early_updates=early)
    out = [[] for _ in range(count)]
    for step in range(steps):
        for i, use in plan.slices_to_begin(step, count).items():
            out[i].append((step, use))
    return out


def test_slices_beside_training_by_hand():
    """Three slices every 12 steps, factors every 4: they are due at steps 1, 5 and 9."""
    assert begun(3, 26, 12, 4) == [
        [(0, 1), (13, 16), (25, 28)],
        [(1, 2), (5, 8), (17, 20)],
        [(2, 3), (9, 12), (21, 24)],
    ]
    assert begun(1, 9, 4, 1) == [[(0, 1), (4, 6), (8, 10)]]
    # Of twelve slices three begin in each of the first steps.
    firsts = [steps[0] for steps in begun(12, 5, 12, 1)]
    assert firsts == [(step, step + 1) for step in (0, 1, 2, 3) for _ in range(3)]
    assert begun(2, 4, 1, 1) == [[(0, 1), (2, 3), (3, 4)], [(1, 2), (2, 3), (3, 4)]]


def test_early_slices_beside_training_by_hand():
    """The parts of the first interval are 0 to 3, 4 to 7 and 8 to 15."""
    assert begun(3, 26, 16, 4, early=True) == [
        [(0, 1), (5, 6), (9, 11), (17, 21)],
        [(1, 2), (6, 7), (11, 13), (22, 26)],
        [(2, 3), (7, 8), (14, 16)],
    ]
    assert begun(1, 41, 40, 10, early=True) == [[(0, 1), (10, 15), (20, 30), (40, 60)]]
    # A slice does not begin again in the steps in which others begin for the first time.
    assert begun(2, 5, 4, 1, early=True) == [[(0, 1), (2, 3), (4, 5)], [(1, 2), (3, 4)]]


@for_all(COUNTS, INTERVALS, INTERVALS, st.booleans())
def test_a_slice_comes_into_use_before_it_begins_again(count, update, factor_update, early):
    """Also the first time; so no older decomposition ever replaces a newer one."""
    for steps in begun(count, count + 5 * update, update, factor_update, early=early):
        assert all(begin < use for begin, use in steps)
        assert all(use <= again for (_, use), (again, _) in pairwise(steps))


def test_milestones_multiply_from_their_steps_on():
    damping = Milestones(0.1, 0.5, (3, 5))
    assert [damping(step) for step in range(7)] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    growing = schedules(Milestones(4, 3, (6,)), Milestones(2, 3, (6,)))
    assert [step for step in range(40) if growing.factors_due(step)] == [0, 2, 4, *range(6, 40, 6)]
    assert [step for step in range(40) if growing.slices_due(step, 1)] == [0, 4, 12, 24, 36]


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        (40, [0, 5, 10, 20, *range(40, 200, 40)]),
        (20, [0, 2, 5, 10, *range(20, 200, 20)]),
        (3, [0, 1, *range(3, 200, 3)]),
        (1, list(range(200))),
    ],
)
def test_an_interval_that_doubles_begins_with_an_eighth(interval, steps):
    growing = schedules(Doubling(interval), Doubling(interval), early_updates=True)
    assert [step for step in range(200) if growing.factors_due(step)] == steps
    assert [step for step in range(200) if growing.slices_due(step, 1)] == steps


def test_slices_do_not_repeat_the_first_decompositions():
    growing = schedules(Doubling(40), Doubling(40), early_updates=True)
    assert [growing.slices_due(step, 3) for step in range(5)] == [[0, 1, 2], [], [], [], []]
    found = [i for step in range(5, 10) for i in growing.slices_due(step, 3)]
    assert found == [0, 1, 2]


@for_all(st.integers(1, 40), COUNTS)
def test_no_interval_that_doubles_is_shorter_than_the_one_before(interval, count):
    growing = schedules(Doubling(interval), Doubling(interval), early_updates=True)
    starts = [s for s in range(2 * interval + 1) if growing.interval(s).start == s]
    assert starts[-2:] == [interval, 2 * interval]
    lengths = [b - a for a, b in pairwise(starts)]
    assert lengths == sorted(lengths)
    for start, end in pairwise(starts[1:]):
        found = [i for s in range(start, end) for i in growing.slices_due(s, count)]
        assert sorted(found) == list(range(count)), "each slice once"


def test_a_shorter_interval_of_statistics_divides_no_interval_that_doubles():
    growing = schedules(Doubling(40), Doubling(10), early_updates=True)
    decomposed = [step for step in range(81) if growing.slices_due(step, 1)]
    assert decomposed == [0, 5, 10, 20, 40, 80]
    assert all(growing.factors_due(step) for step in decomposed)
