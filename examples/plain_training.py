"""K-FAC with DDP, AMP and accumulation: the line (1). Run: torchrun examples/plain_training.py."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from kfac_bench import KFAC

dist.init_process_group()
device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
pixels, classes = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16, device=device).float(), torch.tensor(classes, device=device)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(x.device.type)
KFAC(model, optimizer).attach(scaler)  # (1)
for _ in range(100):
    batch = torch.randperm(len(x))[dist.get_rank() : 128 : dist.get_world_size()]
    for i, rows in enumerate(batch.chunk(2)):
        model.require_backward_grad_sync = i == 1  # the last micro-batch sends the gradients
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x[rows]).float(), y[rows]) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(f"loss {nn.functional.cross_entropy(model(x), y).item():.3f}")
dist.destroy_process_group()
