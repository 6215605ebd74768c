"""Starts the ranks of one run on this machine: `python -m kfac_bench.benchmark.local_ranks N ...`.

torchrun starts and watches them. By itself it listens on all addresses of the machine. Here it
keeps its own store in a private file, and the ranks meet at the loopback address.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Start `kfac-train` on several ranks.

    Args:
        arguments: The number of ranks, and the overrides of kfac-train.
    """
    # Otherwise torchrun opens a store for the ranks, which listens on all addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ranks, *overrides = arguments
    with tempfile.TemporaryDirectory(prefix="kfac-ranks-") as folder:
        own = ["--nnodes=1", f"--nproc-per-node={ranks}", "--local-addr=127.0.0.1"]
        own += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
        own += [f"--rdzv-endpoint={Path(folder, 'store')}"]
        sys.argv = ["torchrun", *own, "-m", "kfac_bench", *overrides]
        runpy.run_module("torch.distributed.run", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
