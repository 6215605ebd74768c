"""Train on 1, 2 and 4 gloo ranks of this machine, and compare the times with the simulation.

    python scripts/validate_local.py [HARDWARE] [MODEL]

HARDWARE is a file of scripts/measure_hardware.py with the rates of a ResNet-20. MODEL is another
model of this kind. The steps are sorted by what K-FAC does in them, and the median of each sort
counts. The script takes a minute and a half.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench.cli.entry import Parser, exit_with
from kfac_bench.config import compose
from kfac_bench.core import KFAC
from kfac_bench.core.planning.plan import Stage
from kfac_bench.simulate import hardware, workload
from kfac_bench.simulate.step import step_time
from kfac_bench.simulate.sweep import Variant, plan_of
from kfac_bench.training import environment

FACTORS, DECOMPOSE, STEPS = 3, 9, 37
BATCH = 32
"""Examples of a rank."""
RANKS = (1, 2, 4)
SORTS = ("precondition", "factors too", "decompositions too")


def overrides(model: str) -> list[str]:
    """Return the options of kfac-train."""
    return [f"model={model}", "data=cifar10", f"trainer.batch_size={BATCH}"]


def _rank(rank: int, world_size: int, model_name: str, path: str, results: str) -> None:
    torch.set_num_threads(1)
    environment.keep_freed_memory()  # like kfac-train
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        torch.manual_seed(0)
        config = compose.load(overrides(model_name))
        bare = config.model.build((3, 32, 32), 10, "classification")
        model = DistributedDataParallel(bare) if world_size > 1 else bare
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.01)
        kfac = KFAC(
            model, optimizer, update_freq=DECOMPOSE, factor_update_freq=FACTORS, spread=False
        )
        x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
        seconds: list[list[torch.Tensor]] = [[] for _ in SORTS]
        for step in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            kfac.step()
            optimizer.step()
            took = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            sort = 2 if step % DECOMPOSE == 0 else 1 if step % FACTORS == 0 else 0
            if step > 0:
                seconds[sort].append(took)
        if rank == 0:
            torch.save(torch.stack([torch.stack(s).median() for s in seconds]), results)
        kfac.detach()
        # No rank may leave while another rank still reads its last message.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measured(world_size: int, model: str) -> list[float]:
    """Measure the seconds of each sort of step."""
    with tempfile.TemporaryDirectory() as folder:
        path, results = f"{folder}/join", f"{folder}/seconds.pt"
        mp.spawn(_rank, (world_size, model, path, results), nprocs=world_size)
        seconds: list[float] = torch.load(results, weights_only=True).tolist()
    return seconds


def predicted(world_size: int, model: str, machine: hardware.Hardware) -> list[float]:
    """Simulate the seconds of each sort of step."""
    work = workload.of_config(compose.load(overrides(model)))
    plan = plan_of(work, Variant("comm_opt"), world_size, "eigen")
    time = step_time(work, world_size, machine, plan)
    first = time.sgd_s + time.stages_s[Stage.PRECONDITION]
    second = first + time.stages_s[Stage.FACTORS]
    return [first, second, second + time.stages_s[Stage.DECOMPOSE]]


def mean(sorts: list[float]) -> float:
    """Return the mean step, with each sort as often as it occurs."""
    some = (DECOMPOSE - DECOMPOSE // FACTORS, DECOMPOSE // FACTORS - 1, 1)
    return sum(n * s for n, s in zip(some, sorts, strict=True)) / DECOMPOSE


def main() -> int:
    """Print the table."""
    parser = Parser(prog="validate_local.py", description=__doc__.partition("\n")[0])
    parser.add_argument("hardware", nargs="?", default="two_cores", help="two_cores (default)")
    parser.add_argument("model", nargs="?", default="resnet32", help="resnet32 (default)")
    options = parser.parse_args()
    model = options.model
    machine = hardware.load(Path(compose.CONF_DIR) / "hardware" / f"{options.hardware}.yaml")
    compose.load(overrides(model))  # a wrong name is refused here, not by each rank
    print("| ranks | step | predicted | measured | error |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for world_size in RANKS:
        columns = predicted(world_size, model, machine), measured(world_size, model)
        rows = zip((*SORTS, "mean"), *([*c, mean(c)] for c in columns), strict=True)
        for sort, ours, real in rows:
            values = f"{1e3 * ours:.1f} ms | {1e3 * real:.1f} ms | {100 * (ours / real - 1):+.0f} %"
            print(f"| {world_size} | {sort} | {values} |")
    return 0


if __name__ == "__main__":
    exit_with("validate_local.py", main)
