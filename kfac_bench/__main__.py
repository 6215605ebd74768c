"""``torchrun --nproc-per-node 2 -m kfac_bench model=resnet20 ...`` is kfac-train on 2 ranks."""

from kfac_bench.cli import train

train()
