"""A run that continues notices that its data changed since its checkpoint."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from kfac_bench.errors import UsageError
from kfac_bench.record.events import DataChanged, Resumed, RunStarted
from kfac_bench.training.checkpoint import MANIFEST
from tests.support.distributed import run_ranks
from tests.support.runs import before_step, end, kill, of_kind, train, train_here

BASE = (
    *("model=autoencoder", "model.hidden=[12,4]", "data=imagefolder", "data.image_size=4"),
    *("data.workers=0", "logger=none", "trainer.threads=1", "trainer.batch_size=8"),
    *("trainer.checkpoint_freq=4", "trainer.max_steps=10", "kfac=none", "run_id=run"),
    "trainer.predictions=0",
)


@pytest.fixture
def root(tmp_path):
    generator = np.random.default_rng(0)
    for split, count in (("train", 33), ("val", 6)):
        for i in range(count):
            path = tmp_path / "data" / split / f"class{i % 2}" / f"{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (6, 5, 3), dtype=np.uint8)).save(path)
    return tmp_path / "data"


def begun(tmp_path, root):
    """Return the run directory of a run that was killed after its checkpoint of step 4."""
    with before_step(7, kill), pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, f"data.root={root}", base=BASE)
    return tmp_path / "run"


def test_a_missing_image_stops_the_run_unless_it_is_accepted(tmp_path, root, capsys):
    path = begun(tmp_path, root)
    checkpoints = sorted(path.glob("checkpoints/*"))
    (root / "train/class0/04.png").unlink()
    said = r"the data changed since .*step-00000004: train has 32 examples, before 33\. Restore the"
    with pytest.raises(UsageError, match=said):
        train(tmp_path, f"data.root={root}", base=BASE)
    assert sorted(path.glob("checkpoints/*")) == checkpoints
    accepted = (f"data.root={root}", "data.changed=accept")
    assert train(tmp_path, *accepted, base=BASE) == ("finished", path)
    (started,) = of_kind(path, RunStarted)
    assert started.data["train"]["examples"] == 33
    (changed,) = of_kind(path, DataChanged)
    assert (changed.step, changed.difference) == (4, "train has 32 examples, before 33")
    assert changed.data["train"]["examples"] == 32
    assert "the data changed since" in capsys.readouterr().out


def test_the_same_data_elsewhere_continue(tmp_path, root):
    path = begun(tmp_path, root)
    moved = shutil.move(root, tmp_path / "moved")
    assert train(tmp_path, f"data.root={moved}", base=BASE)[0] == "finished"
    assert [e.step for e in of_kind(path, Resumed)] == [4]
    assert of_kind(path, DataChanged) == []
    once = tmp_path / "once"
    train(once, f"data.root={moved}", base=BASE)
    assert end(path).weights_sha256 == end(once / "run").weights_sha256


def test_a_checkpoint_without_a_fingerprint_continues_with_one_line(tmp_path, root, capsys):
    path = begun(tmp_path, root)
    forget(path / "checkpoints" / "step-00000004")
    (root / "train/class0/04.png").unlink()
    capsys.readouterr()
    assert train(tmp_path, f"data.root={root}", base=BASE)[0] == "finished"
    said = [x for x in capsys.readouterr().out.splitlines() if "does not say which data" in x]
    assert len(said) == 1
    assert of_kind(path, DataChanged) == []


def forget(checkpoint):
    """Remove the fingerprint from a checkpoint."""
    shard = torch.load(checkpoint / "rank0.pt", weights_only=True)
    del shard["data"]
    torch.save(shard, checkpoint / "rank0.pt")
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    digest = hashlib.sha256((checkpoint / "rank0.pt").read_bytes()).hexdigest()
    manifest["sha256"]["rank0.pt"] = digest
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def test_another_run_may_start_from_a_checkpoint_of_other_data(tmp_path, root):
    path = begun(tmp_path, root)
    (root / "train/class0/04.png").unlink()
    other = (f"data.root={root}", f"resume={path}", "run_id=other")
    assert train(tmp_path, *other, base=BASE)[0] == "finished"
    assert [e.step for e in of_kind(tmp_path / "other", DataChanged)] == [4]


@pytest.mark.ranks
def test_all_ranks_stop(tmp_path, root):
    begun(tmp_path, root)
    (root / "train/class0/04.png").unlink()
    saids = run_ranks(2, _refused, str(tmp_path), [f"data.root={root}"])
    assert all("train has 32 examples, before 33" in said for said in saids)


def _refused(folder, options):
    torch.set_num_threads(1)
    with pytest.raises(UsageError) as caught:
        train_here(folder, options, base=BASE)
    return str(caught.value)
