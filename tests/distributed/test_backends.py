"""A missing backend, and a model that does not fit a backend, are reported."""

import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_bench import distributed
from kfac_bench.core.distributed.collective import TorchCollective
from kfac_bench.distributed.backends.ddp import DDP
from kfac_bench.distributed.backends.fsdp2 import FSDP2
from kfac_bench.distributed.options import DDPConfig, HorovodConfig
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from tests.support.distributed import run_ranks


def test_a_missing_horovod_is_reported_with_the_install_command():
    missing = {"horovod": None, "horovod.torch": None}
    with (
        mock.patch.dict(sys.modules, missing),
        pytest.raises(UsageError, match="not installed here; run make install-horovod"),
        distributed.join(HorovodConfig("horovod")),
    ):
        pass


def test_a_launcher_of_another_backend_is_refused(monkeypatch):
    """Otherwise each of horovodrun's processes trains alone."""
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with (
        pytest.raises(UsageError, match="has started 2 ranks, but backend=ddp finds only 1: use"),
        distributed.join(DDPConfig("ddp"), "cpu"),
    ):
        pass


class Heads(nn.Module):
    """A model whose second head is not used, with a scale without dimension."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.used(self.frozen(x))


def train_without_a_head():
    backend = DDP(Ranks(torch.device("cpu"), TorchCollective()))
    model = DistributedDataParallel(Heads())
    for _ in range(2):
        try:
            with backend.part(model, last=True):
                model(torch.ones(1, 2)).sum().backward()
        except UsageError as error:
            return str(error)
    return None


@pytest.mark.ranks
def test_ddp_names_the_parameters_that_the_loss_does_not_use():
    said = "did not depend on unused.weight, unused.bias. Freeze parameters without use"
    assert all(said in line for line in run_ranks(2, train_without_a_head))


def divide_a_scalar():
    with pytest.raises(UsageError, match="backend=fsdp2 cannot divide the parameter scale, which"):
        FSDP2(Ranks(torch.device("cpu"), TorchCollective())).shard(Heads())


@pytest.mark.ranks
def test_a_parameter_without_dimension_is_refused_where_ranks_hold_parts():
    run_ranks(2, divide_a_scalar)
