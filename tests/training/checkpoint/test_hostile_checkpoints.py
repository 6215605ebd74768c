"""Checkpoints made by hand: `resume=` refuses them in one line with the reason."""

import hashlib
import io
import json
import math
import re
import warnings
import zipfile

import pytest
import torch

from kfac_bench import cli
from kfac_bench.errors import UsageError
from kfac_bench.training import checkpoint
from tests.support import slow_keys
from tests.support.quick import slow
from tests.support.runs import KFAC, SMALL, end, train

STEPS = (*KFAC, "trainer.max_steps=5", "optimizer=adam", "optimizer.lr=0.001")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the shard of a real run after step 5."""
    _, path = train(tmp_path_factory.mktemp("runs"), *STEPS, "kfac.method=eigen", "run_id=r")
    return path / "checkpoints" / "step-00000005" / "rank0.pt"


def packed(tree, **options):
    out = io.BytesIO()
    torch.save(tree, out, **options)
    return out.getvalue()


def forge(folder, content, step=5):
    """Write a checkpoint whose manifest fits the content, as an attacker would."""
    path = folder / "from" / "checkpoints" / "step-00000005"
    path.mkdir(parents=True)
    (path / "rank0.pt").write_bytes(content)
    sha256 = {"rank0.pt": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(
        json.dumps({"step": step, "world_size": 1, "sha256": sha256})
    )
    return path


@pytest.fixture
def refusal(tmp_path, capsys):
    """Return a function that returns the line with which kfac-train resume=PATH ends."""

    def refuse():
        words = [*SMALL, *STEPS, "trainer.max_steps=7", f"runs_dir={tmp_path}", "run_id=new"]
        with pytest.raises(SystemExit) as caught:
            cli.train([*words, f"resume={tmp_path / 'from'}"])
        assert caught.value.code == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1, line
        assert line.startswith("kfac-train: resume"), line
        return line

    return refuse


def at(*keys):
    """Return a function that replaces one value of a state."""

    def replace(state, value):
        *parents, last = keys
        for key in parents:
            state = state[key]
        state[last] = value

    return replace


def quantized():
    with warnings.catch_warnings(action="ignore"):  # torch will remove quantized tensors
        return torch.quantize_per_tensor(torch.zeros(16, 64), 0.1, 0, torch.quint8)


MOMENTUM = at("optimizer", "state", 0, "exp_avg")

CASES = {
    "time nan": (at("train_s"), math.nan, "the training time is nan"),
    "time infinite": (at("train_s"), math.inf, "the training time is inf"),
    "time negative": (at("train_s"), -1.0, "the training time is -1.0"),
    "time huge": (at("train_s"), 10**400, "the training time is 1000"),
    "momentum shape": (MOMENTUM, torch.zeros(3), r"exp_avg of parameter 0 has the shape \[3\]"),
    "momentum type": (MOMENTUM, torch.zeros(16, 64).char(), "has the type torch.int8"),
    "momentum list": (MOMENTUM, [1.0], "exp_avg of parameter 0 is no tensor"),
    "adam step": (at("optimizer", "state", 0, "step"), torch.zeros(3), r"step of .* is \[3\]"),
    "unknown parameter": (at("optimizer", "state", 99), {}, "unknown parameter 99"),
    "stride 0": (MOMENTUM, torch.zeros(1).expand(16, 64), r"strides \[0, 0\], which overlap"),
    "2^40 elements": (MOMENTUM, torch.zeros(1).expand(2**20, 2**20), r"\[1048576, 1048576\]"),
    "overlap": (MOMENTUM, torch.zeros(99).as_strided((16, 64), (1, 1)), "which overlap"),
    "sparse": (MOMENTUM, torch.zeros(16, 64).to_sparse(), r"exp_avg is sparse"),
    "huge sparse": (
        MOMENTUM,
        torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (2**40,), check_invariants=True),
        "is sparse",
    ),
    "quantized": (
        MOMENTUM,
        quantized(),
        "is quantized",
    ),
    "complex": (MOMENTUM, torch.zeros(16, 64, dtype=torch.complex64), "is complex"),
    "kfac steps": (at("kfac", "steps"), math.inf, "steps is inf, expected a whole number"),
}


QUICK = ("time nan", "momentum shape", "2^40 elements", "sparse")


@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_a_forged_state_is_refused_with_the_reason(tmp_path, saved, refusal, case):
    replace, value, reason = CASES[case]
    state = torch.load(saved, weights_only=True)
    replace(state, value)
    forge(tmp_path, packed(state))
    assert re.search(reason, refusal())


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("weight", torch.zeros(3), r"expected a \[\] weight of A, found \[3\]"),
        ("factor", torch.zeros(1, 65, 65).char(), "A has the type torch.int8"),
        ("eigen", [torch.zeros(1, 3), torch.zeros(1, 3, 3)], r"eigen of A, found \[1, 3\]"),
        ("eigen", torch.zeros(3), "eigen of A is no list of 2 tensors"),
    ],
)
def test_a_forged_preconditioner_is_refused_with_the_reason(
    tmp_path, saved, refusal, key, value, reason
):
    state = torch.load(saved, weights_only=True)
    layer = next(iter(state["kfac"]["layers"].values()))
    assert layer["A"][key] is not None
    layer["A"][key] = value
    forge(tmp_path, packed(state))
    assert re.search(reason, refusal())


def test_weights_of_another_type_are_refused(tmp_path, saved, refusal):
    state = torch.load(saved, weights_only=True)
    name, weight = next(iter(state["model"].items()))
    state["model"][name] = weight.char()
    forge(tmp_path, packed(state))
    assert f"{name} has the type torch.int8, expected torch.float32" in refusal()


def test_a_step_that_no_run_has_is_refused(tmp_path, saved):
    for step in (-1, 10**30, math.inf):
        path = forge(tmp_path / str(step), saved.read_bytes(), step)
        with pytest.raises(UsageError, match=r"no checkpoint \(manifest.json: "):
            checkpoint.load(path)


def test_a_compressed_shard_is_refused_before_it_is_unpacked(tmp_path):
    """A gigabyte of zeros becomes a megabyte."""
    plain = zipfile.ZipFile(io.BytesIO(packed({"model": {"w": torch.zeros(2**18)}})))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    path = forge(tmp_path, bomb.getvalue())
    with pytest.raises(UsageError, match=r"has \d+ bytes and unpacks to 10\d{5} bytes"):
        checkpoint.load(path)


def test_a_shard_in_the_old_format_is_refused(tmp_path):
    """Its sizes are numbers in a pickle, for which torch allocates memory."""
    content = packed({"model": {}}, _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match="it is no zip file"):
        checkpoint.load(forge(tmp_path, content))


def test_containers_that_nobody_can_read_are_refused(tmp_path):
    wide = []
    for _ in range(60):
        wide = [wide, wide]
    deep = []
    for _ in range(300):
        deep = [deep]
    for name, state, why in (("wide", wide, "entries to read"), ("deep", deep, "100 levels or")):
        path = forge(tmp_path / name, packed({"model": {}, "more": state}))
        with pytest.raises(UsageError, match=f"more than .*{why}"):
            checkpoint.load(path)


@pytest.mark.parametrize(("levels", "width"), [(60, 2), (6, 1000)])
def test_a_key_whose_hash_takes_for_ever_is_refused(tmp_path, levels, width):
    content = slow_keys.zipped(slow_keys.program(levels, width))
    with pytest.raises(UsageError, match="more than 200,000,000 entries"):
        checkpoint.load(forge(tmp_path, content))


@pytest.mark.parametrize("called", ["builtins\nbytearray", "__builtin__\nbytearray"])
def test_a_call_that_makes_gigabytes_is_refused(tmp_path, called):
    """torch runs it: 40 bytes of a pickle make 3 GB."""
    number = (3 * 10**9).to_bytes(5, "little")
    program = b"\x80\x02c" + called.encode() + b"\n\x8a\x05" + number + b"\x85R."
    with pytest.raises(UsageError, match=r"calls .* bytearray"):
        checkpoint.load(forge(tmp_path, slow_keys.zipped(program)))


def test_a_file_in_the_old_format_with_a_zip_file_at_its_end_is_refused(tmp_path):
    """torch looks at the first bytes, and zipfile at the last ones."""
    content = slow_keys.in_old_format(slow_keys.program()) + packed({"model": {}})
    with pytest.raises(UsageError, match="it is no zip file"):
        checkpoint.load(forge(tmp_path, content))


def test_a_good_checkpoint_still_resumes(tmp_path, saved):
    forge(tmp_path, saved.read_bytes())
    words = ["trainer.max_steps=7", "run_id=new", f"resume={tmp_path / 'from'}"]
    train(tmp_path, *STEPS, *words)
    assert end(tmp_path / "new").step == 7
