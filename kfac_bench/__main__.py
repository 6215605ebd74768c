"""The module form of kfac-train, for launchers: `torchrun --nproc-per-node 2 -m kfac_bench ...`."""

from kfac_bench.cli import train

train()
