"""`kfac-bench export` writes weights as safetensors, and `model.weights` loads them."""

import json
from dataclasses import asdict

import pytest
import safetensors
import torch

from kfac_bench import cli
from kfac_bench.errors import UsageError
from kfac_bench.record.events import Evaluated
from kfac_bench.training import checkpoint, weights
from kfac_bench.training.state import weights_sha256
from tests.support.runs import METHODS, RESNET, config_of, end, of_kind, train, trainer_of

OPTIONS = (*METHODS["adam"], "trainer.max_steps=12", "trainer.keep_last=1")


def bench(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.bench(list(map(str, arguments)))
    return caught.value.code


def model_of(folder, *overrides, **keywords):
    """Return a model with the initial weights of a run."""
    return trainer_of(folder, *overrides, **keywords)._bare


@pytest.mark.parametrize("base", [None, RESNET])
def test_exported_weights_load_back(tmp_path, capsys, base):
    base = {} if base is None else {"base": base}
    _, path = train(tmp_path, *OPTIONS, "run_id=r", **base)
    file = tmp_path / "elsewhere.safetensors"
    assert bench("export", path, "--out", file) == 0
    assert f"{file}: " in capsys.readouterr().out
    for source in (file, path):
        model = model_of(tmp_path, *OPTIONS, "seed=5", f"model.weights={source}", **base)
        assert weights_sha256(model) == end(path).weights_sha256
    with safetensors.safe_open(file, "pt") as opened:
        about, names = opened.metadata(), set(opened.keys())
    assert names == set(model.state_dict())
    assert (about["step"], about["run_id"], about["format"]) == ("12", "r", "pt")
    assert json.loads(about["config"]) == asdict(config_of(tmp_path, *OPTIONS, "run_id=r", **base))


def test_export_takes_the_best_or_the_newest_checkpoint(tmp_path):
    worse = ("kfac=none", "optimizer.lr=1", "trainer.max_steps=12", "trainer.keep_last=1")
    _, path = train(tmp_path, *worse, "trainer.eval_freq=3", "trainer.checkpoint_freq=3")
    errors = {e.step: e.metrics["squared_error"] for e in of_kind(path, Evaluated) if e.step}
    best = min(errors, key=errors.get)
    assert best != 12, "the last checkpoint is the best, so this test shows nothing"
    assert f"from step {best}" in weights.export(path, best=True)[-1]
    with safetensors.safe_open(path / "model.safetensors", "pt") as opened:
        assert opened.metadata()["step"] == str(best)
        first = opened.get_tensor(next(iter(opened.keys())))
    assert "from step 12" in weights.export(path)[-1]
    with safetensors.safe_open(path / "model.safetensors", "pt") as opened:
        assert not torch.equal(opened.get_tensor(next(iter(opened.keys()))), first)


def test_a_damaged_checkpoint_is_reported_and_passed_over(tmp_path):
    _, path = train(tmp_path, *OPTIONS, "trainer.keep_last=9", "trainer.checkpoint_freq=4")
    newest = path / "checkpoints" / "step-00000012" / "rank0.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    said = weights.export(path)
    assert "rank0.pt: damaged" in said[0]
    assert "from step 8" in said[1]


def test_both_tied_weights_are_exported(tmp_path):
    tied = torch.arange(6.0)
    writer = checkpoint.Writer(tmp_path, trainer_of(tmp_path).ranks, 1)
    writer.start(1, {"model": {"a": tied, "b": tied, "c": tied.view(2, 3).T}})
    writer.finish()
    weights.export(tmp_path, tmp_path / "x.safetensors")
    back = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert [back[n].tolist() for n in "ab"] == [tied.tolist()] * 2
    assert torch.equal(back["c"], tied.view(2, 3).T)


def test_a_failed_export_is_one_line(tmp_path, capsys):
    _, path = train(tmp_path, *OPTIONS)
    (tmp_path / "empty").mkdir()
    for arguments, said in (
        ([tmp_path / "typo"], "typo does not exist"),
        ([tmp_path / "empty"], "empty has no good checkpoint"),
        ([tmp_path / "empty", "--best"], "has no good checkpoint of evaluated weights"),
        ([path, "--out", tmp_path / "no" / "such" / "f.safetensors"], "cannot be written"),
        ([path, "--out", path / "config.yaml" / "f.safetensors"], "cannot be written"),
        ([path, "--out", "."], "Name a file"),
    ):
        assert bench("export", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("kfac-bench: ")
        assert said in line
    assert not list(path.glob(".*partial"))


def test_weights_that_do_not_fit_are_one_line(tmp_path):
    _, path = train(tmp_path, *OPTIONS, "run_id=r")
    for more, said in (
        (
            ["model.hidden=[16,5]"],
            "[16, 6], but model=autoencoder with this data needs [16, 5]",
        ),
        (["model.hidden=[16,6,3]"], "no weights of autoencoder ("),
    ):
        with pytest.raises(UsageError) as caught:
            model_of(tmp_path, *OPTIONS, f"model.weights={path}", *more)
        assert said in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    config = config_of(tmp_path, f"model.weights={tmp_path}/no.safetensors")
    with pytest.raises(UsageError, match=r"no good checkpoint and no model\.safetensors there"):
        weights.load(torch.nn.Linear(1, 1), config.model)
