"""The module form of kfac-train, for launchers: `torchrun --nproc-per-node 2 -m kfac_bench ...`."""

from kfac_bench.cli import train

if __name__ == "__main__":  # the documentation site imports all modules
    train()
