"""The callback in the real Trainer of Lightning, under both of its import names."""

import copy
import importlib
import inspect
import os
import typing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from tests.support.distributed import run_ranks
from tests.support.examples import run_example
from tests.support.quick import slow

pytest.importorskip("lightning")
import lightning.fabric as lightning_fabric
import lightning.pytorch as lightning
from lightning.fabric import Fabric

from kfac_bench.integrations.lightning import KFACCallback

OPTIONS = {"damping": 0.03, "update_freq": 4, "factor_update_freq": 2}

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The '.*_dataloader' does not have many workers",
        "The number of training batches",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Checkpoint directory .* exists and is not empty",
        "The `srun` command is available",
        "You defined a `validation_step` but have no",
        "`training_step` returned `None`",
    )
]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(n=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * n, 4, generator=generator)
    return x, (x[:, :3].argmax(1))


def loader(n=8):
    return DataLoader(TensorDataset(*batches(n)), batch_size=8)


def module_of(package):
    """A LightningModule of the package with that import name."""

    class Classifier(package.LightningModule):
        optimizer_class, learning_rate = torch.optim.SGD, 0.1
        skipped = ()

        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            if batch_idx in self.skipped:
                return None
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return self.optimizer_class(self.parameters(), lr=self.learning_rate)

    return Classifier()


def trainer_with(*callbacks, package=lightning, **options):
    defaults = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return package.Trainer(callbacks=list(callbacks), **(defaults | options))


def assert_equal(model, want):
    for key, value in want.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def plain_loop(options=OPTIONS, clip=0.5, scaler=None):
    """Two epochs; two micro-batches per step."""
    model = nn.ModuleDict({"net": network()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, **options)
    x, y = batches()
    for _ in range(2):
        for step in range(4):
            optimizer.zero_grad()
            for part in (16 * step, 16 * step + 8):
                loss = F.cross_entropy(model["net"](x[part : part + 8]), y[part : part + 8])
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            kfac.step()
            optimizer.step()
    kfac.detach()
    return model, kfac


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_the_trainer_does_what_a_loop_does(name):
    """Clipping comes first; micro-batches add up; evaluations leave no statistics."""
    package = importlib.import_module(name)
    model, callback = module_of(package), KFACCallback(**OPTIONS)
    trainer = trainer_with(
        callback, package=package, accumulate_grad_batches=2, gradient_clip_val=0.5
    )
    trainer.fit(model, loader(), loader(2))
    want, kfac = plain_loop()
    assert callback.preconditioner.steps == kfac.steps == 8
    assert_equal(model, want)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, EigenAdam, eigen_adam])
def test_a_resumed_run_is_the_same_bit_by_bit(tmp_path, optimizer):
    kfac = OPTIONS
    if optimizer is not torch.optim.SGD:
        kfac = {"update_freq": 4, "factor_update_freq": 2}

    def callbacks():
        return [] if optimizer is eigen_adam else [KFACCallback(**kfac)]

    def module():
        made = module_of(lightning)
        made.optimizer_class, made.learning_rate = optimizer, 0.01
        if optimizer is eigen_adam:  # it attaches K-FAC itself, and its state has K-FAC's
            made.optimizer_class = lambda params, lr: eigen_adam(made, lr, kfac=kfac)
        return made

    whole = module()
    saved = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_epochs": 4}
    trainer_with(*callbacks(), saved, **options).fit(whole, loader(7))
    paths = sorted(tmp_path.glob("*.ckpt"))
    assert len(paths) == 4
    for path in paths[:3]:  # at steps 7, 14 and 21; decompositions are due at multiples of 4
        resumed, made = module(), callbacks()
        trainer_with(*made, saved, **options).fit(resumed, loader(7), ckpt_path=path)
        assert all(callback.preconditioner.steps == 28 for callback in made)
        assert_equal(resumed, whole)


def test_fabric_continues_eigen_adam_bit_by_bit(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1)

    def make():
        made = network()
        return fabric.setup(made, eigen_adam(made, 0.01))

    def train(model, optimizer):
        for x, y in loader():
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    whole = make()
    train(*whole)
    fabric.save(tmp_path / "state", dict(zip("mo", whole, strict=True)))
    train(*whole)
    resumed = make()
    fabric.load(tmp_path / "state", dict(zip("mo", resumed, strict=True)))
    train(*resumed)
    assert_equal(resumed[0], whole[0])


def test_a_fit_after_a_test_starts_over(tmp_path):
    """The state that test() reads must not enter the next fit."""
    model, callback = module_of(lightning), KFACCallback(**OPTIONS)
    model.test_step = model.validation_step
    trainer = trainer_with(callback, limit_train_batches=3, max_epochs=1)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert callback.preconditioner.steps == 3
    assert copy.deepcopy(callback).preconditioner is None, "libraries pickle the Trainer's options"
    trainer.test(model, loader(1), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    again = trainer_with(callback, limit_train_batches=2, max_epochs=1)
    again.fit(model, loader())
    assert callback.preconditioner.steps == 2


def test_a_checkpoint_without_state_is_reported(tmp_path):
    trainer = trainer_with(max_epochs=1)
    trainer.fit(module_of(lightning), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match="step 8, but K-FAC starts with empty statistics"):
        trainer_with(KFACCallback()).fit(
            module_of(lightning), loader(), ckpt_path=tmp_path / "last.ckpt"
        )


def test_a_second_fit_of_a_trainer_says_why_kfac_starts_again():
    model = module_of(lightning)
    trainer = trainer_with(KFACCallback(), max_epochs=1)
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2
    with pytest.warns(UserWarning, match=r"statistics: fit\(\) without ckpt_path builds optimizer"):
        trainer.fit(model, loader())


def tunable(optimizer):
    """A module as finders need it, which counts the steps with K-FAC."""
    model = module_of(lightning)
    model.optimizer_class, model.learning_rate, model.batch_size = optimizer, 0.01, 2
    model.train_dataloader = lambda: DataLoader(
        TensorDataset(*batches()), batch_size=model.batch_size
    )
    model.validation_step = None
    return model


def finders():
    callbacks = lightning.callbacks
    rate = callbacks.LearningRateFinder(num_training_steps=5, update_attr=False)
    return {"rate": rate, "batch": callbacks.BatchSizeFinder(steps_per_trial=2, max_trials=2)}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    ("finder", "optimizer"),
    [
        ("rate", torch.optim.SGD),
        slow("rate", EigenAdam),
        slow("batch", torch.optim.SGD),
        slow("batch", EigenAdam),
    ],
)
def test_a_search_trains_with_kfac_and_leaves_no_statistics(
    tmp_path, monkeypatch, optimizer, finder
):
    steps = []
    original = KFAC._step
    monkeypatch.setattr(KFAC, "_step", lambda *a, **k: steps.append(1) or original(*a, **k))
    options = {"max_epochs": 1, "default_root_dir": tmp_path, "enable_checkpointing": True}
    kfac = {} if optimizer is EigenAdam else OPTIONS
    model, callback = tunable(optimizer), KFACCallback(**kfac)
    trainer_with(finders()[finder], callback, **options).fit(model)
    searched = len(steps) - callback.preconditioner.steps
    assert searched >= 4
    want, batch_size = tunable(optimizer), model.batch_size
    want.batch_size = batch_size
    trainer_with(KFACCallback(**kfac), **options).fit(want)
    assert_equal(model, want)
    tuner = lightning.tuner.Tuner(trainer_with(callback, **options))
    steps.clear()
    if finder == "rate":
        tuner.lr_find(model, num_training=5, update_attr=False)
    else:
        tuner.scale_batch_size(model, steps_per_trial=2, max_trials=2)
    assert len(steps) >= 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_optimizers_that_are_configured_again_get_kfac():
    class Again(lightning.Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.strategy.setup_optimizers(trainer)

    callback = KFACCallback(**OPTIONS)
    trainer_with(callback, Again(), max_epochs=1).fit(module_of(lightning), loader())
    assert callback.preconditioner.steps == 8


def test_configure_optimizers_may_build_kfac_each_time():
    model = module_of(lightning)

    def configure():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.kfac = KFAC(model, optimizer, **OPTIONS).attach()
        return optimizer

    model.configure_optimizers = configure
    trainer_with(max_epochs=1).fit(model, loader())
    with pytest.raises(RuntimeError, match=r"such as configure_optimizers, begins with that call"):
        trainer_with(max_epochs=1).fit(model, loader())
    model.configure_optimizers = lambda: KFAC.detach_all(model) or configure()
    trainer_with(max_epochs=1).fit(model, loader())
    assert model.kfac.steps == 8


def test_the_command_line_sees_the_keywords_of_kfac():
    unpacked = inspect.signature(KFACCallback.__init__).parameters["options"].annotation
    [keywords] = typing.get_args(unpacked)
    expected = set(inspect.signature(KFAC).parameters) - {"model", "optimizer", "layer_types"}
    assert keywords.__optional_keys__ == expected - {"collective", "model_parallel"}
    types = {name: p.annotation for name, p in inspect.signature(KFAC).parameters.items()}
    assert all(types[name] == kind for name, kind in keywords.__annotations__.items())


def test_states_of_fabric_fit_other_scripts():
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1)
    bare = network()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    model, optimizer = fabric.setup(bare, optimizer)
    kfac = KFAC(model, optimizer, **OPTIONS).attach()
    fabric.backward(model(torch.randn(6, 4)).square().mean())
    optimizer.step()
    kfac.detach()
    assert kfac.steps == 1
    other = KFAC(bare, torch.optim.SGD(bare.parameters(), lr=0.1), **OPTIONS)
    other.load_state_dict(kfac.state_dict())
    assert list(other.state_dict()["layers"]) == ["0", "2"]
    other.detach()


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision(precision):
    """The loss scale of 2^16 is known to K-FAC: factors are those of full precision."""
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    # On a CPU, precision="16-mixed" is bf16: the plugin makes it real.
    plugin = lightning.plugins.MixedPrecision(precision, "cpu", scaler)
    model, callback = module_of(lightning), KFACCallback(**OPTIONS)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer_with(callback, plugins=plugin, **options).fit(model, loader())
    want, kfac = plain_loop()
    layers = callback.preconditioner.state_dict()["layers"]
    for name, entry in kfac.state_dict()["layers"].items():
        for factor in "AG":
            got, value = layers[name][factor]["factor"], entry[factor]["factor"]
            torch.testing.assert_close(got, value, rtol=0.1, atol=0.03 * float(value.max()))
    for key, value in want.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0.05, atol=0.02)


def test_hooks_are_gone_after_fit_and_after_an_exception():
    model, callback = module_of(lightning), KFACCallback()
    trainer_with(callback).fit(model, loader())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer_with(callback).fit(model, loader())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_skipped_batch_changes_nothing():
    """training_step returns None for it."""
    model, callback = module_of(lightning), KFACCallback(**OPTIONS)
    model.skipped = (1, 2)
    trainer_with(callback, max_epochs=1).fit(model, loader())
    assert all(p.isfinite().all() for p in model.parameters())


def gan(package=lightning):
    """A tiny GAN with manual optimization, as in Lightning's documentation."""

    class Gan(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = network(1), network(2)

        def training_step(self, batch, batch_idx):
            g, d = self.optimizers()
            real = batch[0]
            self.toggle_optimizer(g)
            fake = F.pad(self.generator(torch.randn_like(real)), (0, 1))
            loss = F.softplus(-self.discriminator(fake)[:, 0]).mean()
            g.zero_grad()
            self.manual_backward(loss)
            g.step()
            self.untoggle_optimizer(g)
            self.toggle_optimizer(d)
            loss = F.softplus(self.discriminator(fake.detach())[:, 0]).mean()
            loss = loss + F.softplus(-self.discriminator(real)[:, 0]).mean()
            d.zero_grad()
            self.manual_backward(loss)
            d.step()
            self.untoggle_optimizer(d)

        def configure_optimizers(self):
            return [torch.optim.Adam(net.parameters()) for net in self.children()], []

    return Gan()


def test_several_optimizers(tmp_path):
    """One callback each; both states are in a checkpoint."""
    with pytest.raises(ValueError, match="the model has 2 optimizers: pass one callback"):
        trainer_with(KFACCallback()).fit(gan(), loader())

    def callbacks():
        return [
            KFACCallback(module=name, optimizer_index=index, **OPTIONS)
            for index, name in enumerate(("generator", "discriminator"))
        ]

    trainer = trainer_with(*callbacks(), max_epochs=1)
    trainer.fit(gan(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed = callbacks()
    trainer_with(*resumed, max_epochs=2).fit(gan(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert [c.preconditioner.steps for c in resumed] == [16, 16]


def test_what_cannot_work_is_refused():
    class FSDPStrategy(lightning.strategies.SingleDeviceStrategy):
        pass

    with pytest.raises(ValueError, match=r'FSDPStrategy keeps the gradients .* strategy="ddp"'):
        trainer_with(KFACCallback(), strategy=FSDPStrategy("cpu")).fit(
            module_of(lightning), loader()
        )
    with pytest.raises(ValueError, match="optimizer_index=1: the model has 1 optimizers"):
        trainer_with(KFACCallback(optimizer_index=1)).fit(module_of(lightning), loader())
    model = module_of(lightning)
    model.optimizer_class = torch.optim.LBFGS
    with pytest.raises((RuntimeError, TypeError, ValueError), match="LBFGS"):
        trainer_with(KFACCallback()).fit(model, loader())
    with pytest.raises(RuntimeError, match="fisher_backward"):
        trainer_with(KFACCallback(fisher="mc")).fit(module_of(lightning), loader())


def test_fisher_mc_is_called_in_the_training_step():
    callback = KFACCallback(fisher="mc", **OPTIONS)
    model = module_of(lightning)

    def training_step(batch, batch_idx):
        logits = model.net(batch[0])
        callback.preconditioner.fisher_backward(logits)
        return F.cross_entropy(logits, batch[1])

    model.training_step = training_step
    trainer_with(callback, accumulate_grad_batches=2).fit(model, loader())
    assert callback.preconditioner.steps == 8


def on_rank(folder, options, path):
    """Train in a process of two."""
    environment = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    model, callback = module_of(lightning), KFACCallback(**OPTIONS, **options)
    trainer = trainer_with(callback, strategy="ddp", devices=2, max_epochs=2 if path else 1)
    trainer.fit(model, loader(), ckpt_path=path)
    assert callback.preconditioner.collective.world_size == 2
    if not path:
        trainer.save_checkpoint(folder / "last.ckpt")
        trainer = trainer_with(callback, strategy="ddp", devices=2, max_epochs=2)
        trainer.fit(model, loader(), ckpt_path=folder / "last.ckpt")
    return callback.preconditioner.steps, model.state_dict()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
def test_two_ranks_resume_bit_by_bit(tmp_path, strategy):
    """With mem_opt, no rank holds all decompositions: rank 0 gathers them for the checkpoint."""
    whole = run_ranks(2, on_rank, tmp_path, {"strategy": strategy}, None)
    resumed = run_ranks(2, on_rank, tmp_path, {"strategy": strategy}, tmp_path / "last.ckpt")
    for steps, weights in (*whole, *resumed):
        assert steps == 8
        for key, value in whole[0][1].items():
            assert torch.equal(weights[key], value), key


@pytest.mark.slow
def test_the_example_runs_and_learns(tmp_path, monkeypatch):
    trainer = run_example("lightning_training.py", tmp_path, monkeypatch)["trainer"]
    assert list(tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt"))
    x, y = (tensor for tensor in trainer.train_dataloader.dataset.tensors)
    with torch.no_grad():
        assert F.cross_entropy(trainer.model.net(x / 16), y) < 0.5
