"""Image classifiers of torchvision and timm by name: every shape of image, bad names, weights."""

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from benchmarks import architectures
from kfac_bench.config import compose
from kfac_bench.errors import UsageError
from kfac_bench.models.library_options import TimmConfig, TorchvisionConfig
from kfac_bench.record.events import RunStarted, Trained
from kfac_bench.training import weights
from tests.support.runs import of_kind, train, trainer_of

VIT = ("model=timm", "model.architecture=test_vit", "data.image_size=32")
SHUFFLE = ("model=torchvision", "model.architecture=shufflenet_v2_x0_5", "model.image_size=32")
SHORT = ("logger=none", "trainer.threads=1", "trainer.batch_size=16", "trainer.predictions=0")


def timm_model(name, shape=(1, 32, 32), **options):
    return TimmConfig("timm", architecture=name, **options).build(shape, 7, "classification")


def torchvision_model(name, shape=(3, 64, 64), **options):
    config = TorchvisionConfig("torchvision", architecture=name, **options)
    return config.build(shape, 7, "classification")


@pytest.mark.parametrize("base", [VIT, pytest.param(SHUFFLE, marks=pytest.mark.slow)])
def test_a_run_goes_on_where_it_stopped(tmp_path, base):
    base = (*base, *SHORT, "run_id=r")
    status, path = train(tmp_path, "trainer.max_steps=2", base=base)
    assert status == "finished"
    assert train(tmp_path, "trainer.max_steps=3", base=base) == ("finished", path)
    started, *_ = of_kind(path, RunStarted)
    assert started.config["model"]["architecture"] == base[1].partition("=")[2]
    assert [event.step for event in of_kind(path, Trained)][-1] == 3


@pytest.mark.parametrize(
    ("model", "images"),
    [
        (lambda: timm_model("test_resnet", (1, 32, 32)), (2, 1, 32, 32)),
        (lambda: timm_model("test_vit.r160_in1k", (5, 48, 48)), (2, 5, 48, 48)),
        (lambda: timm_model("test_vit", (3, 20, 24), image_size=32), (2, 3, 20, 24)),
        (lambda: torchvision_model("squeezenet1_1", (1, 64, 64)), (2, 1, 64, 64)),
    ],
)
def test_images_of_any_shape_are_classified(model, images):
    model = model()
    assert model.training
    assert model(torch.randn(images)).shape == (2, 7)
    with torch.device("meta"):  # a dry run
        assert model.to("meta")(torch.empty(images)).shape == (2, 7)


def test_a_grey_image_is_repeated_and_resized_as_torchvision_does():
    model = torchvision_model("squeezenet1_1", (1, 20, 20), image_size=64).eval()
    grey = torch.randn(2, 1, 20, 20)
    wide = torchvision.transforms.functional.resize(grey, [64, 64]).repeat(1, 3, 1, 1)
    plain = torchvision.models.squeezenet1_1(num_classes=7).eval()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(grey), plain(wide))


def test_auxiliary_classifiers_are_left_out():
    with torch.device("meta"):
        model = torchvision_model("googlenet", (3, 32, 32))
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 7)
        assert not [name for name, _ in model.named_modules() if name.startswith("aux")]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: timm_model("resnet18x"), "timm has no .* did you mean resnet18, "),
        (lambda: timm_model("hf-hub:timm/resnet18"), "timm has no image classifier of this name"),
        (lambda: torchvision_model("test_vit"), "it belongs to model=timm"),
        (lambda: torchvision_model("fasterrcnn_resnet50_fpn"), "list_models.* lists them"),
        (lambda: torchvision_model("alexnet", (5, 64, 64)), "1 or 3 channels, not 5"),
        (
            lambda: torchvision_model("inception_v3", (1, 8, 8)),
            "fails on images of 1 x 8 x 8 .*a side of 299 pixels: set model.image_size",
        ),
        (lambda: timm_model("test_vit", (3, 30, 30)), "fails on images of 3 x 30 x 30"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(build, said):
    with torch.device("meta"), pytest.raises(UsageError, match=said) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_an_output_that_is_no_logits_is_refused(monkeypatch):
    class Pair(torch.nn.Flatten):
        def forward(self, x):
            return x, x

    for make, said in ((Pair, "a tuple, not a tensor"), (torch.nn.Flatten, r"\[1, 3072\], not")):
        monkeypatch.setattr(timm, "create_model", lambda *_, make=make, **__: make())
        with pytest.raises(UsageError, match=said):
            timm_model("test_resnet")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=efficientnet_b0"], "model=torchvision model.architecture=efficientnet_b0"),
        (["model=timm/resnet18"], "model=timm model.architecture=resnet18"),
        (["model=gpt2"], "write model=huggingface model.path=FOLDER, "),
        (["model=google-bert/bert-base-uncased"], "write model=huggingface model.path=FOLDER, "),
        (["model=bert_tin"], "did you mean bert_tiny"),
        (["data=files/train.parquet"], "a file or folder is data.root=files/train.parquet"),
        (["model=timm"], "set model.architecture=NAME"),
        (["model=torchvision", "model.architecture=alexnet", "model.image_size=0"], "at least 1"),
    ],
)
def test_a_wrong_word_names_the_right_words(words, said):
    with pytest.raises(UsageError, match=said):
        compose.load(words)


def test_without_timm_the_line_names_its_extra(monkeypatch):
    monkeypatch.setattr(TimmConfig, "architectures", classmethod(lambda _: ()))
    with pytest.raises(UsageError, match=r"pip install '.\[timm\]'"):
        timm_model("test_vit")


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_of_a_file_get_a_new_head(tmp_path, suffix):
    theirs = timm.create_model("test_vit", num_classes=1000, img_size=32).state_dict()
    file = tmp_path / f"vit.{suffix}"
    if suffix == "pth":
        torch.save({"state_dict": {f"module.{name}": x for name, x in theirs.items()}}, file)
    else:
        save_file(theirs, file)
    trainer = trainer_of(tmp_path, f"model.weights={file}", base=(*VIT, *SHORT))
    own = trainer._bare.state_dict()
    assert all(torch.equal(own[n], x) for n, x in theirs.items() if not n.startswith("head."))
    assert own["head.weight"].shape == (10, 64)
    assert any(line.endswith("new, for another number of classes: head") for line in trainer.notes)


def test_weights_of_another_architecture_are_refused(tmp_path):
    file = tmp_path / "other.pth"
    torch.save(timm.create_model("test_vit2", img_size=32).state_dict(), file)
    config = TimmConfig("timm", architecture="test_vit", weights=str(file))
    with pytest.raises(UsageError, match=r"model\.weights="):
        weights.load(timm_model("test_vit"), config)


def test_the_table_of_architectures_names_shares_and_errors():
    row = architectures.train("timm", "test_vit")
    assert row["covered"] == row["parameters"] - sum(
        parameter.numel()
        for name, parameter in timm.create_model(
            "test_vit", num_classes=10, img_size=64
        ).named_parameters()
        if "norm" in name or name in ("cls_token", "pos_embed")
    )
    about = {"library": "timm", "family": "test", "warnings": []}
    rows = [about | row | {"name": "good"}, about | {"name": "bad", "error": "too small"}]
    lines = [*architectures.table({("timm", each["name"]): each for each in rows})]
    share = 100 * row["covered"] // row["parameters"]
    assert f"| timm | {share} % | good |" in lines
    assert lines[-1] == "* timm, bad: too small"
