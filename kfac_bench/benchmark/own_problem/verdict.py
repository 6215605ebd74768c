"""The verdict of ``kfac-bench try``: from results on fresh seeds to sentences, and to a page.

All functions are pure. :mod:`.try_result` decides who is faster, and who wins.
"""

import math
from collections.abc import Sequence
from statistics import median

from kfac_bench.benchmark.own_problem.try_result import (
    LEAST_SEEDS,
    Finalist,
    SeedRun,
    TryResult,
    is_faster,
)
from kfac_bench.report.page_parts import TimeBar, VerdictPage
from kfac_bench.report.tables import metric as shown_metric


def verdict(result: TryResult) -> str:
    """Return the verdict as lines of text without a final line break."""
    lines = [*_reached(result), *_conclusion(result)]
    lines += _equal_time(result)
    lines += [f"Not run on fresh seeds: {name}: {why}" for name, why in result.left_out.items()]
    lines += _cautions(result)
    lines += _paste(result)
    return "\n".join(lines)


def verdict_page(result: TryResult) -> VerdictPage:
    """Return the part of the verdict that the page shows."""
    headline, *more = _conclusion(result)
    head, *code = _paste(result)
    return VerdictPage(
        headline=headline,
        goal=f"Training time to {result.metric} {result.target:.6g}",
        bars=[
            *(TimeBar(f.name, _bar_text(f, result), f.times_s) for f in result.finalists),
            *(
                TimeBar(name, f"not run on fresh seeds: {why}")
                for name, why in result.left_out.items()
            ),
        ],
        remarks=[*more, *_equal_time(result), *_cautions(result)],
        code_head=head.removesuffix(":"),
        code="\n".join(line.removeprefix("  ") for line in code),
    )


def _bar_text(finalist: Finalist, result: TryResult) -> str:
    if math.isfinite(finalist.times_s[0]):
        return _seconds(finalist)
    return f"not reached {_missed(finalist, result)}"


def _reached(result: TryResult) -> list[str]:
    """Return the target and who reaches it, the fastest first."""
    goal = f"{result.problem}: {result.metric} {result.target:.6g}"
    some = [f for f in result.finalists if math.isfinite(f.times_s[0])]
    entries = [f"{f.name}  {_seconds(f)}" for f in some]
    lines = [f"{goal} is reached by", f"  {'   '.join(entries)}"] if some else []
    for each in (f for f in result.finalists if math.isinf(f.times_s[0])):
        where = "" if some else f"{goal}: "
        lines.append(f"{where}{each.name} does not reach it {_missed(each, result)}.")
    return lines


def _missed(finalist: Finalist, result: TryResult) -> str:
    """Return the limit that an optimizer missed, and its best metric."""
    some = f" ({finalist.reached} of {len(finalist.runs)} seeds did)" if finalist.reached else ""
    return f"within {_s(finalist.limit_s)}{some}{_best(finalist, result)}"


def _best(finalist: Finalist, result: TryResult) -> str:
    """Return the best metrics of an optimizer: they show how far it is from the target."""
    choose = max if result.higher_is_better else min
    curves = [[m for _, m in run.curve if math.isfinite(m)] for run in finalist.runs]
    best = [choose(values) for values in curves if values]
    if not best:
        return ""
    ends = f"{shown_metric(min(best))} to {shown_metric(max(best))}"
    return f"; best {result.metric} {shown_metric(median(best))} ({ends})"


def _conclusion(result: TryResult) -> list[str]:
    fastest, reference = result.finalists[0], result.reference
    seeds = min(len(f.runs) for f in result.finalists)
    if seeds < LEAST_SEEDS:
        return [
            f"Nothing is shown: only {seeds} of {result.seeds} seeds finished. Use more --minutes."
        ]
    if math.isinf(fastest.times_s[0]):
        return [
            "Nothing is shown about the time to the target: no optimizer reaches it. Use more "
            "--minutes, or set an easier target in the file."
        ]
    if fastest is reference:
        return _reference_first(result)
    winner = result.winner
    limit_s = reference.limit_s
    if winner is None and math.isinf(reference.times_s[0]) and fastest.times_s[2] >= limit_s:
        # Nobody knows how long the reference would have taken after its limit.
        return [
            f"Nothing is shown: {fastest.name} may need more than the {_s(limit_s)} that "
            f"{reference.name} had. Use more --minutes."
        ]
    if winner is None:
        return [
            f"Nothing is shown: the intervals of {fastest.name} and {reference.name} overlap. Keep "
            f"{reference.name}, or use more --minutes."
        ]
    lines = [_faster(winner, reference), *_cost(winner, reference)]
    return lines + _against_others(result, winner)


def _reference_first(result: TryResult) -> list[str]:
    reference, second = result.finalists[:2]
    if not is_faster(reference, second):
        return [
            f"Nothing is shown: {reference.name} has the smaller median, but the intervals of "
            f"{reference.name} and {second.name} overlap. Keep {reference.name}."
        ]
    if math.isinf(second.times_s[0]):
        where = " on most seeds" if any(rival.reached for rival in result.rivals) else ""
        return [
            f"{reference.name} is better here: of the optimizers that ran on fresh seeds only "
            f"{reference.name} reaches the target{where}. Keep {reference.name}."
        ]
    return [
        f"{reference.name} is better here: it is {_factor(second, reference)} faster than "
        f"{second.name}, the fastest of the others. Keep {reference.name}."
    ]


def _faster(winner: Finalist, reference: Finalist) -> str:
    pairs = list(zip(winner.runs, reference.runs, strict=False))
    wins = sum(own.time_s < other.time_s for own, other in pairs)
    on = f"on {wins} of {len(pairs)} seeds"
    if math.isinf(reference.times_s[0]):
        least = reference.limit_s / winner.times_s[0]
        # The target may be beyond what the reference can reach: then no factor means anything.
        time = f"{_ratio(least)} the time" if least > 1 else _s(reference.limit_s)
        does = f"does not reach it in {time}"
        if reference.reached:
            some = f"{reference.reached} of {len(reference.runs)} seeds"
            does = f"reaches it in {time} on {some} only"
        return (
            f"{winner.name} is faster than {reference.name} {on}: it reaches the target, and "
            f"{reference.name} {does}."
        )
    return (
        f"{winner.name} is {_factor(reference, winner)} faster than {reference.name} "
        f"{_in_steps(winner, reference)}, {on}."
    )


def _in_steps(winner: Finalist, reference: Finalist) -> str:
    own, other = (median(run.steps for run in f.runs) for f in (winner, reference))
    if own == other:
        return "in as many steps"
    if own < other:
        return f"in {_ratio(other / own)} fewer steps"
    return f"in {_ratio(own / other)} more steps"


def _cost(winner: Finalist, reference: Finalist) -> list[str]:
    """Return a sentence about the costs of a step, as far as they were measured."""
    parts = []
    if math.isfinite(winner.step_s) and reference.step_s > 0:
        ratio = winner.step_s / reference.step_s
        parts.append(f"One step costs {ratio:.2f} steps of {reference.name}")
    memory = winner.memory_bytes - reference.memory_bytes
    if parts and math.isfinite(memory):
        parts[0] += f" and {abs(memory) / 1e6:.0f} MB {'more' if memory >= 0 else 'less'}"
    total = sum(winner.stages_s.values())
    if parts and total > 0:
        name, most = max(winner.stages_s.items(), key=lambda item: item[1])
        # What K-FAC does in hooks of forward and backward is in no stage.
        parts.append(f"{100 * most / total:.0f} % of the time of K-FAC's stages is {name}")
    return [f"{'; '.join(parts)}."] if parts else []


def _against_others(result: TryResult, winner: Finalist) -> list[str]:
    """Return sentences about the second fastest optimizer, and about K-FAC if it did not win."""
    others = [f for f in result.finalists if f not in (winner, result.reference)]
    lines = []
    if others and not is_faster(winner, others[0]):
        lines.append(
            f"The intervals of {winner.name} and {others[0].name} overlap: which of the two is "
            "faster is not shown."
        )
    return lines if winner.uses_kfac else [*lines, _about_kfac(result, winner, others)]


def _about_kfac(result: TryResult, winner: Finalist, others: Sequence[Finalist]) -> str:
    """Return a sentence that compares K-FAC with AdamW and with the winner, which has no K-FAC."""
    forms = [f for f in others if f.uses_kfac]
    if not forms:
        if not result.has_tried_kfac:
            return "No optimizer with K-FAC was tried."
        return "No optimizer with K-FAC was fast enough in tuning to run on fresh seeds."
    reference = result.reference
    kfac = next((f for f in forms if is_faster(f, reference)), forms[0])
    if is_faster(reference, kfac):
        return f"K-FAC does not help here: {kfac.name}, its fastest form, is slower than AdamW."
    if not is_faster(kfac, reference):
        return (
            f"It is not shown that K-FAC helps here: the intervals of {kfac.name}, its fastest "
            f"form, and {reference.name} overlap."
        )
    if math.isinf(reference.times_s[0]):
        faster = f"{kfac.name} is faster than {reference.name}"
    else:
        faster = f"{kfac.name} is {_factor(reference, kfac)} faster than {reference.name}"
    if is_faster(winner, kfac):
        return f"K-FAC helps, too: {faster}. {winner.name} is {_factor(kfac, winner)} faster still."
    return f"K-FAC is among the fastest: {faster}. It is not shown that {winner.name} is faster."


def _factor(slow: Finalist, fast: Finalist) -> str:
    return _ratio(slow.times_s[0] / fast.times_s[0])


def _equal_time(result: TryResult) -> list[str]:
    """Return the metrics of AdamW and of its best rival after the same training seconds."""
    fastest, reference = result.winner or result.finalists[0], result.reference
    # Each optimizer has its own limit. A run that was stopped there must not be compared with one
    # that went on.
    missed = [f.limit_s for f in result.finalists if f.reached < len(f.runs)]
    at_s = min([fastest.times_s[0], reference.limit_s, *missed])
    sign = 1 if result.higher_is_better else -1
    # A run without a number, such as a diverged one, counts as the worst of all. Otherwise only the
    # runs that went well would count.
    values = {
        f.name: [_at(run, at_s, -sign * math.inf) for run in f.runs] for f in result.finalists
    }
    middle = {name: median(each) for name, each in values.items()}
    if math.isinf(middle[reference.name]):
        return []
    ordered = sorted(middle, key=lambda name: -sign * middle[name])
    best = fastest.name if math.isfinite(fastest.times_s[0]) else ordered[0]
    names = [best, next((n for n in [reference.name, *ordered] if n != best), best)]
    said = [
        f"{n} has {_shown(middle[n])} ({_shown(min(values[n]))} to {_shown(max(values[n]))})"
        for n in names
    ]
    return [f"After {_s(at_s)} of training (median {result.metric}, range): {', '.join(said)}."]


def _at(run: SeedRun, seconds: float, worst: float) -> float:
    """Return the metric at the last evaluation until then, or ``worst`` if it is no number.

    A run that has ended keeps its last metric.
    """
    values = [value for at_s, value in run.curve if at_s <= seconds]
    return values[-1] if values and math.isfinite(values[-1]) else worst


def _shown(value: float) -> str:
    return "no number" if math.isinf(value) else shown_metric(value)


def _cautions(result: TryResult) -> list[str]:
    lines = []
    finished = min(len(f.runs) for f in result.finalists)
    if LEAST_SEEDS <= finished < result.seeds:
        lines.append(f"Only {finished} of {result.seeds} seeds fit into the budget.")
    if finished == LEAST_SEEDS:
        # Of six rivals: 1 - integral of 3 (1 - m)^2 (1 - m^3)^6 dm from 0 to 1 = 0.19.
        lines.append(
            "Three seeds show little: if seven optimizers were equal, one would look faster than "
            "AdamW in one of five studies."
        )
    if result.is_own_target:
        lines.append(
            "The problem has no target. So this one was fixed before tuning: AdamW's default "
            f"setting reached it in {result.reference_steps} steps."
        )
    if result.is_quick:
        lines.append(
            f"This was a quick look of {result.minutes:g} minutes. It can only show large "
            "differences: run again without --quick before you decide."
        )
    return lines


def _paste(result: TryResult) -> list[str]:
    winner, name = result.winner, result.reference.name
    words = f"The best setting of {name} that was found:" if winner is None else "Paste this:"
    chosen = winner or result.reference
    return [words, *(f"  {line}" for line in chosen.paste.splitlines())]


def _seconds(finalist: Finalist) -> str:
    """Return the median with its interval: ``38 s (35-44)``."""
    middle, low, high = finalist.times_s
    ends = "-".join("not reached" if math.isinf(x) else _number(x) for x in (low, high))
    part = (
        ""
        if finalist.reached == len(finalist.runs)
        else (f", {finalist.reached} of {len(finalist.runs)} seeds")
    )
    return f"{_s(middle)} ({ends}{part})"


def _s(seconds: float) -> str:
    return f"{_number(seconds)} s"


def _number(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _ratio(ratio: float) -> str:
    if ratio >= 10:
        return f"{ratio:.0f}x"
    return f"{ratio:.1f}x" if ratio >= 1.1 else f"{ratio:.2f}x"
