"""K-FAC for a small transformer whose heads and hidden features are split over ranks.

Run: torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kfac_bench import KFAC

TOKENS, WIDTH, STEPS = 16, 16, 40


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, tokens, WIDTH] to the same shape."""
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def main() -> None:
    """Learn to repeat each token two positions later."""
    torch.manual_seed(0)  # the same weights, and the same batches, on all ranks
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), Block(), nn.Linear(WIDTH, TOKENS))
    style = {f"1.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    style |= {f"1.{name}": RowwiseParallel() for name in ("out", "down")}
    style["2"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, style)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    preconditioner = KFAC(
        model,
        optimizer,
        damping=0.03,
        grafting=False,
        update_freq=10,
        factor_update_freq=1,
        skip=[],
    )
    for step in range(STEPS):
        x = torch.randint(TOKENS, (64, 8))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[:, 2:].flatten(0, 1), x[:, :-2].flatten())
        loss.backward()
        preconditioner.step()
        optimizer.step()
        if dist.get_rank() == 0 and step in (0, STEPS - 1):
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
