"""A step without a decomposition reads nothing from the device, so the host never waits for it."""

import contextlib
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfac_bench.core import KFAC
from kfac_bench.core.execution.write_back import WriteBack
from tests.support.quick import quick_if, slow
from tests.support.reads import WaitError, refuse_reads, refuse_waits_on_meta, steps_on_meta

REFUSE = {"cpu": refuse_reads, "meta": refuse_waits_on_meta}
DEVICES = pytest.mark.parametrize("device", REFUSE)
QUICK_ON_CPU = pytest.mark.parametrize("device", quick_if("cpu".__eq__, REFUSE))
"""On the meta device, the steps take seconds."""


class Net(nn.Module):
    """All kinds of layers; some of one shape; one that the loss does not need."""

    def __init__(self, device):
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=2)
        self.transposed = nn.ConvTranspose1d(4, 4, 3, padding=1)
        # The lengths of its sequences are on the host, which only the meta device shows.
        self.recurrent = nn.LSTM(4, 4, batch_first=True) if device == "meta" else None
        self.batch_norm = nn.BatchNorm1d(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=bias) for bias in (True, True, False))
        self.unused = nn.Linear(4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.conv(self.tokens(x).mT).relu()
        h = self.group_norm(self.grouped(h.unsqueeze(3)).squeeze(3))
        h = self.batch_norm(self.transposed(h)).mT
        if self.recurrent is not None:
            h = self.recurrent(h)[0]
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        for block in self.blocks:
            h = h + block(h).tanh()
        self.unused(h)
        return self.head(h.mean(1))


OPTIONS = {
    "eigen": {},
    "inverse": {"method": "inverse"},
    "ekfac": {"method": "ekfac"},
    "identity": {"method": "identity"},
    "mc": {"fisher": "mc"},
    "type2": {"fisher": "type2"},
    "type2, ekfac": {"fisher": "type2", "method": "ekfac"},
    "no clip": {"kl_clip": None},
    "reduce": {"weight_sharing": "reduce"},
    "reduce, ekfac": {"weight_sharing": "reduce", "method": "ekfac"},
    "half precision": {"state_dtype": torch.bfloat16},
    "half precision, inverse": {"state_dtype": torch.float16, "method": "inverse"},
    "factored damping": {"factored_damping": True},
    "factored damping, inverse": {"factored_damping": True, "method": "inverse"},
    "schedules": {"damping": lambda step: 0.1 / (1 + step), "factor_decay": lambda step: 0.9},
    "averages from the identity": {"factor_init": "identity"},
    "sc20": {"factor_convention": "sc20"},
    "diagonal": {"max_dim": 4},
}


def train(device, *, parts=1, autocast=False, loss_scale=1.0, **options):
    """One step with decompositions, then steps in which nothing may wait."""
    torch.manual_seed(0)
    model = Net(device).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    defaults = {"damping": 0.03, "kl_clip": 0.001, "update_freq": 100, "factor_update_freq": 2}
    defaults["early_updates"] = False
    kfac = KFAC(model, optimizer, **(defaults | {"skip": [], "spread": False} | options))
    x, y = torch.randint(9, (8, 5), device=device), torch.randint(3, (8,), device=device)

    def step():
        optimizer.zero_grad()
        for i, (inputs, labels) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            more = kfac.accumulate() if i < parts - 1 else contextlib.nullcontext()
            with more, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(inputs)
                kfac.fisher_backward(output)
                (F.cross_entropy(output, labels) / parts).backward()
        kfac.step(loss_scale)
        optimizer.step()

    with contextlib.ExitStack() as stack:
        stack.callback(kfac.detach)
        stack.enter_context(steps_on_meta())
        step()
        kfac.track_cosine = True
        for _ in range(2):  # with and without an update of the factors
            with REFUSE[device]():
                step()
    assert kfac.failed_decompositions == 0
    assert device == "meta" or kfac.dropped_statistics == 0


QUICK = ("eigen", "inverse", "ekfac", "mc")


@pytest.mark.parametrize(
    ("name", "device"),
    quick_if(
        lambda case: (case[0] in QUICK and case[1] == "cpu") or case == ("ekfac", "meta"),
        product(OPTIONS, REFUSE),
    ),
)
def test_a_step_reads_nothing(device, name):
    train(device, **OPTIONS[name])


@QUICK_ON_CPU
@pytest.mark.parametrize("name", ["eigen", *map(slow, ("mc", "ekfac", "inverse", "type2"))])
def test_a_batch_in_parts_reads_nothing(device, name):
    train(device, parts=2, **OPTIONS[name])


@QUICK_ON_CPU
@pytest.mark.parametrize("kind", ["tensor", slow("function")])
def test_a_loss_scale_on_the_device_is_not_read(device, kind):
    scale = torch.full((), 4.0, device=device)
    train(device, loss_scale=scale if kind == "tensor" else lambda: scale)


@pytest.mark.parametrize("name", ["eigen", *map(slow, ("mc", "type2", "reduce", "ekfac"))])
def test_mixed_precision_reads_nothing(name):
    train("cpu", autocast=True, **OPTIONS[name])


# ---- these tests can fail ----


@DEVICES
def test_a_read_in_the_step_is_found(device, monkeypatch):
    original = WriteBack.write

    def write(self, gradients, *arguments, **keywords):
        original(self, gradients, *arguments, **keywords)
        if keywords["track_cosine"]:  # not in the first step, where meta tensors may not be read
            float(self._nu)

    monkeypatch.setattr(WriteBack, "write", write)
    with pytest.raises(WaitError):
        train(device)


READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: 1 if x.isfinite().all() else 0,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: x.repeat_interleave(x.long()),
}
COPIES = {
    "tensor": lambda x: torch.tensor(1.0, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "to": lambda x: torch.zeros(3).to(x.device),
    "copy_": lambda x: x.copy_(torch.zeros(3)),
    "item of the host": lambda x: x.__setitem__(0, torch.zeros(())),
    "list as index": lambda x: x[[0, 1]],
}
HARMLESS = {
    "full": lambda x: x.new_full((), 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "select": lambda x: x[0:2].sum(),
    "set": lambda x: x.__setitem__(0, 2.0),
    "non_blocking": lambda x: torch.zeros(3).to(x.device, non_blocking=True),
    "times a number of the host": lambda x: x * torch.tensor(2.0),
}


@DEVICES
@pytest.mark.parametrize("name", READS)
def test_reads_are_found(device, name):
    if name == "numpy":
        pytest.importorskip("numpy")
    with pytest.raises(WaitError), REFUSE[device]():
        READS[name](torch.ones(3, device=device))


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_wait_are_found(name):
    with pytest.raises(WaitError), refuse_waits_on_meta():
        COPIES[name](torch.ones(3, device="meta"))


@DEVICES
@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_else_is_refused(device, name):
    with REFUSE[device]():
        HARMLESS[name](torch.ones(3, device=device))
