"""A network in pipeline stages, one per rank. Each rank preconditions the layers that it holds.

Run: torchrun --nproc-per-node 2 examples/pipeline.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from kfac_bench import KFAC
from kfac_bench.core.distributed.collective import SingleProcess, TorchCollective

WIDTH, BATCH, MICRO_BATCHES, STEPS = 16, 128, 4, 60


def main() -> None:
    """Learn a function that is made of two linear maps."""
    rank, stages, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    torch.manual_seed(0)  # the same batches on all ranks
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages - 1)]
    mine = [*layers, nn.Linear(WIDTH, WIDTH)][rank]

    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    preconditioner = KFAC(
        mine,
        optimizer,
        damping=0.01,
        update_freq=10,
        factor_update_freq=1,
        collective=SingleProcess(),  # with data parallelism: TorchCollective(its group)
        model_parallel=TorchCollective(),
    )
    # Give the shapes of a micro-batch. Otherwise the schedule finds them by a trial run on
    # uninitialized memory. That run includes a backward, which K-FAC would count.
    given = torch.empty(BATCH // MICRO_BATCHES, WIDTH, requires_grad=rank > 0)
    made = torch.empty(BATCH // MICRO_BATCHES, WIDTH, requires_grad=True)
    stage = PipelineStage(mine, rank, stages, device, input_args=given, output_args=made)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=F.mse_loss)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        with torch.no_grad():
            y = teacher(x)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        # The first stage gets the inputs, the last one the targets.
        inputs = [x] if rank == 0 else []
        targets = {"target": y, "losses": losses} if rank == stages - 1 else {}
        schedule.step(*inputs, **targets)
        # The schedule divides gradients by the number of micro-batches, but after all backwards.
        preconditioner.step(loss_scale=MICRO_BATCHES)
        optimizer.step()
        if losses and step in (0, STEPS - 1):
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
