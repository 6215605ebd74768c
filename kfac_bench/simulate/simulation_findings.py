"""What a simulated sweep shows, in one sentence per panel of its figure."""

from collections.abc import Sequence
from fractions import Fraction

from kfac_bench.simulate.sweep import SGD, SimulatedCell, Variant, efficiency


def fractions(cells: Sequence[SimulatedCell]) -> list[SimulatedCell]:
    """Return the cells of strategies that were simulated with three fractions or more."""
    found = [cell for cell in cells if cell.variant.fraction is not None]
    shares = {strategy: set[Variant]() for strategy in {c.variant.strategy for c in found}}
    for cell in found:
        shares[cell.variant.strategy].add(cell.variant)
    return [cell for cell in found if len(shares[cell.variant.strategy]) >= 3]


def ranks_of(cells: Sequence[SimulatedCell]) -> list[int]:
    """Return the numbers of ranks, the smallest first."""
    return sorted({cell.world_size for cell in cells})


def step_finding(cells: Sequence[SimulatedCell]) -> str:
    """Return which K-FAC has the fastest step at the most ranks, beside SGD; "" without K-FAC."""
    kfac, sgd = _on_most_ranks(cells)
    if not kfac:
        return ""
    best = min(kfac, key=lambda cell: cell.step_s)
    words = f"At {_ranks(best.world_size)} {best.variant.label} is the fastest K-FAC strategy"
    words += f": {1e3 * best.step_s:.3g} ms per step"
    return words + "".join(f", SGD {1e3 * cell.step_s:.3g} ms" for cell in sgd)


def efficiency_finding(cells: Sequence[SimulatedCell], examples: int | None) -> str:
    """Return the efficiency at the most ranks; "" without K-FAC, or for one number of ranks."""
    kfac, sgd = _on_most_ranks(cells)
    if not kfac or len(ranks_of(cells)) < 2:
        return ""
    shares = sorted(100 * efficiency(cells, cell, examples) for cell in kfac)
    least, most = (f"{share:.0f}" for share in (shares[0], shares[-1]))
    extent = most if least == most else f"{least} to {most}"
    words = f"At {_ranks(kfac[0].world_size)} K-FAC keeps {extent} % of the speed per rank"
    return words + "".join(f", SGD {100 * efficiency(cells, cell, examples):.0f} %" for cell in sgd)


def fraction_finding(cells: Sequence[SimulatedCell]) -> str:
    """Return the best share of gradient workers of one strategy, by the number of ranks."""
    best = {
        ranks: min((c for c in cells if c.world_size == ranks), key=lambda c: c.step_s)
        for ranks in ranks_of(cells)
    }
    shares = {ranks: _text(cell.variant.fraction) for ranks, cell in best.items()}
    if len(set(shares.values())) == 1:
        each = "every number of ranks" if len(shares) > 1 else _ranks(next(iter(shares)))
        return f"The fraction {next(iter(shares.values()))} is the fastest at {each}"
    listed = ", ".join(f"{share} at {_ranks(ranks)}" for ranks, share in shares.items())
    return f"The fastest fraction is {listed}"


def _ranks(number: int) -> str:
    return f"{number:,} rank{'s' if number != 1 else ''}"


def _text(fraction: float | None) -> str:
    return str(Fraction(fraction or 0).limit_denominator(1 << 20))


def _on_most_ranks(
    cells: Sequence[SimulatedCell],
) -> tuple[list[SimulatedCell], list[SimulatedCell]]:
    """Return the cells at the most ranks: those with K-FAC, and those without."""
    most = max((cell.world_size for cell in cells), default=0)
    last = [cell for cell in cells if cell.world_size == most]
    kfac = [cell for cell in last if cell.variant.strategy != SGD]
    return kfac, [cell for cell in last if cell.variant.strategy == SGD]
