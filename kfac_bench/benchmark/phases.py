"""``kind: phases``: the simulated time of both phases of BERT's pre-training, and that of LAMB.

Words of a cell:

* ``hardware=NAME`` and ``ranks=N``: the machine, as in :mod:`kfac_bench.benchmark.simulated`
* ``phase1=sgd|hybrid_opt@1/2...``, ``steps1=N``, ``part1=N``: strategy, steps and sequences of a
  part in phase 1; ``sgd`` is LAMB alone, whose own step is not simulated
* ``phase2=...``, ``steps2=N``, ``part2=N``: the same for phase 2
* ``lamb_part1=N``, ``lamb_part2=N``: sequences of a part of the LAMB with which the phases are
  compared; without these words those of section 6.3.3
* ``factors=N decompose=N``: intervals in steps
"""

from collections.abc import Mapping

from kfac_bench.benchmark import simulated
from kfac_bench.simulate.sweep import SGD

WORK = {"1": ("bert_large_128", 65536), "2": ("bert_large_512", 32768)}
"""By phase, its file in conf/simulation and its global batch."""
LAMB = {"1": (7038, 96), "2": (1563, 16)}
"""By phase, the steps and the sequences of a part with LAMB alone (TPDS 2022, 6.3.3)."""


def numbers(words: Mapping[str, str]) -> dict[str, float]:
    """Return the time of both phases, and what they save compared with LAMB, in percent."""
    parts = {phase: int(words.get(f"lamb_part{phase}", LAMB[phase][1])) for phase in WORK}
    lamb_s = {phase: _seconds(words, phase, SGD, LAMB[phase][0], parts[phase]) for phase in WORK}
    steps = {phase: int(words[f"steps{phase}"]) for phase in WORK}
    own_s = {
        phase: _seconds(
            words, phase, words[f"phase{phase}"], steps[phase], int(words[f"part{phase}"])
        )
        for phase in WORK
    }
    fewer = {phase: 100 * (1 - steps[phase] / LAMB[phase][0]) for phase in WORK}
    return {
        "both_phases_s": sum(own_s.values()),
        "less_phase2_time": 100 * (1 - own_s["2"] / lamb_s["2"]),
        "less_time": 100 * (1 - sum(own_s.values()) / sum(lamb_s.values())),
        "fewer_phase1_steps": fewer["1"],
        "fewer_phase2_steps": fewer["2"],
    }


def _seconds(words: Mapping[str, str], phase: str, strategy: str, steps: int, part: int) -> float:
    """Return the seconds of a phase."""
    file, batch = WORK[phase]
    common = {name: words[name] for name in ("hardware", "ranks", "factors", "decompose")}
    own = {"file": file, "global": f"{batch}", "part": f"{part}", "steps": f"{steps}"}
    return simulated.numbers(common | own | {"strategy": strategy})["train_s"]
