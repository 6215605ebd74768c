"""K-FAC in a DeepSpeed script: the lines marked (1) and (2).

Run: torchrun --nproc-per-node 2 examples/deepspeed_training.py     (CPUs or GPUs)
"""

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from kfac_bench import KFAC
from kfac_bench.core.distributed.deepspeed_zero import whole_gradients

CONFIG = {
    "train_micro_batch_size_per_gpu": 128,
    "gradient_clipping": 0.0,  # DeepSpeed clips to 1 by default
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,  # DeepSpeed tests Adam only, but any optimizer works
}


def main():
    """Train on the digits, and return the accuracy on the test images."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if not torch.cuda.is_available():  # skip minutes of compiling what only its inference needs
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed()
    device = torch.device(deepspeed.get_accelerator().current_device_name())
    model, x, y = model.to(device), x.to(device), y.to(device)
    preconditioner = KFAC(model, optimizer, damping=0.03, update_freq=10)  # (1) before initialize
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(60):
        batch = torch.randint(1400, (128,), generator=generator)
        loss = nn.functional.cross_entropy(engine(x[batch]), y[batch])
        engine.backward(loss)
        with whole_gradients(engine):  # (2) between backward and step
            preconditioner.step()
        engine.step()

    with torch.no_grad():
        accuracy = (engine(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}  test accuracy {accuracy:.3f}")
    engine.destroy()
    return accuracy


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
