"""The callback in the real Trainer of transformers."""

import copy
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from tests.support import slow_keys
from tests.support.distributed import run_ranks
from tests.support.examples import run_example
from tests.support.quick import slow

transformers = pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("accelerate")

from accelerate.utils import DistributedType  # noqa: E402

from kfac_bench.integrations.accelerate import check_engine  # noqa: E402
from kfac_bench.integrations.huggingface import KFACCallback  # noqa: E402

TOKENS, LENGTH = 32, 8
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPTIONS = {"damping": 0.03, "update_freq": 4, "factor_update_freq": 2}


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def language_model(**options):
    """A GPT-2 with dropout, as small as possible."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def documents(n=32):
    """Counting modulo TOKENS; a few labels are not in the loss."""
    start = torch.randint(TOKENS, (n, 1), generator=torch.Generator().manual_seed(1))
    tokens = (start + torch.arange(LENGTH)) % TOKENS
    labels = tokens.clone()
    labels[::3, 5:] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def trainer_in(folder, *callbacks, cls=transformers.Trainer, model=None, **options):
    """A Trainer of 8 steps: two epochs of 4."""
    defaults = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return cls(
        model or language_model(),
        transformers.TrainingArguments(**(defaults | options)),
        train_dataset=documents(),
        eval_dataset=documents(8),
        callbacks=list(callbacks),
    )


def weights(trainer):
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def test_the_trainer_does_what_a_loop_does(tmp_path):
    """Clipping comes first, then K-FAC, then the optimizer; micro-batches add up."""
    callback = KFACCallback(**OPTIONS)
    trainer = trainer_in(
        tmp_path,
        callback,
        cls=InOrder,
        model=language_model(**NO_DROPOUT),
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
        save_strategy="no",
    )
    trainer.train()
    assert callback.preconditioner.steps == 4
    assert copy.deepcopy(callback).preconditioner is None, "ray pickles the Trainer"

    model = language_model(**NO_DROPOUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    KFAC(model, optimizer, **OPTIONS).attach()
    data = documents()
    for _ in range(2):
        for step in range(2):
            halves = [data[16 * step : 16 * step + 8], data[16 * step + 8 : 16 * step + 16]]
            count = sum(int((x["labels"] != -100).sum()) for half in halves for x in half)
            for half in halves:
                tokens = torch.stack([x["input_ids"] for x in half])
                labels = torch.stack([x["labels"] for x in half])
                model(input_ids=tokens, labels=labels, num_items_in_batch=count).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for key, want in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[key], want, msg=key)


def test_a_resumed_run_is_the_same_bit_by_bit(tmp_path):
    """Dropout, accumulation, evaluation in between, and the best model at the end."""
    options = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 4,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
    }
    whole = KFACCallback(**OPTIONS)
    trainer = trainer_in(tmp_path, whole, **options)
    trainer.train()
    want, state = weights(trainer), whole.preconditioner.state_dict()
    for step in (6, 8):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    resumed = KFACCallback(**OPTIONS)
    trainer = trainer_in(tmp_path, resumed, **options)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(weights(trainer), want)
    assert resumed.preconditioner.steps == state["steps"] == 8
    for name, entry in resumed.preconditioner.state_dict()["layers"].items():
        assert torch.equal(entry["G"]["factor"], state["layers"][name]["G"]["factor"])


OFTEN = {"update_freq": 2, "factor_update_freq": 1}


class WithEigenAdam(transformers.Trainer):
    """A Trainer that makes the optimizer of method eigen_adam."""

    def create_optimizer(self, *args, **kwargs):
        if any(isinstance(c, KFACCallback) for c in self.callback_handler.callbacks):
            self.optimizer = EigenAdam(self.model.parameters(), lr=self.args.learning_rate)
        else:
            self.optimizer = eigen_adam(self.model, lr=self.args.learning_rate, kfac=OFTEN)
        return self.optimizer


@pytest.mark.parametrize("callbacks", [slow(True), False])
def test_eigen_adam_resumes_bit_by_bit_and_needs_no_options(tmp_path, callbacks):
    """A checkpoint at step 3 of 8; decompositions in steps 0, 2, 4 and 6."""

    def make():
        made = [KFACCallback(**OFTEN)] if callbacks else []
        return trainer_in(tmp_path, *made, cls=WithEigenAdam)

    trainer = make()
    start = weights(trainer)
    trainer.train()
    want = weights(trainer)
    assert not torch.equal(want["lm_head.weight"], start["lm_head.weight"])
    folder = tmp_path / "checkpoint-3"
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    assert (folder / "kfac.pt").exists() == callbacks
    assert any("kfac" in entry for entry in state.values()) != callbacks
    resumed = make()
    resumed.train(resume_from_checkpoint=str(folder))
    assert_equal(weights(resumed), want)


def test_a_checkpoint_without_state_is_reported(tmp_path):
    trainer_in(tmp_path, save_steps=4).train()
    with pytest.warns(UserWarning, match=r"step 4, but K-FAC starts with empty statistics: .*-4 "):
        trainer_in(tmp_path, KFACCallback()).train(f"{tmp_path}/checkpoint-4")


def test_a_state_whose_key_takes_for_ever_to_hash_is_refused(tmp_path):
    trainer_in(tmp_path, KFACCallback(**OPTIONS), save_steps=4).train()
    content = slow_keys.zipped(slow_keys.program())
    (tmp_path / "checkpoint-4" / "kfac.pt").write_bytes(content)
    with pytest.raises(ValueError, match="entries to read"):
        trainer_in(tmp_path, KFACCallback(**OPTIONS)).train(f"{tmp_path}/checkpoint-4")


@pytest.mark.slow
def test_a_checkpoint_in_another_folder(tmp_path):
    """The Trainer does not tell which folder it read: a file of another run must not be taken."""
    for name, rate in (("old", 1e-2), ("new", 1e-3)):
        trainer_in(tmp_path / name, KFACCallback(**OPTIONS), learning_rate=rate).train()
    old = str(tmp_path / "old" / "checkpoint-6")
    trainer = trainer_in(tmp_path / "new", KFACCallback(**OPTIONS))
    with pytest.warns(UserWarning, match="has no kfac.pt of this run"):
        trainer.train(old)
    resumed = KFACCallback(**OPTIONS)
    trainer = trainer_in(tmp_path / "new", resumed, resume_from_checkpoint=old)
    trainer.train(old)
    want = trainer_in(tmp_path / "old", KFACCallback(**OPTIONS))
    want.train(old)
    assert_equal(weights(trainer), weights(want))
    assert resumed.preconditioner.steps == 8


@pytest.mark.slow
def test_a_log_with_nan_is_recognized(tmp_path):
    trainer_in(tmp_path, KFACCallback(**OPTIONS)).train()
    path = tmp_path / "checkpoint-6" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"][0]["grad_norm"] = float("nan")
    path.write_text(json.dumps(state))
    callback = KFACCallback(**OPTIONS)
    trainer_in(tmp_path, callback).train(str(tmp_path / "checkpoint-6"))
    assert callback.preconditioner.steps == 8


@pytest.mark.slow
def test_hooks_are_gone_after_training(tmp_path):
    """Also after an exception, at the latest when training begins again."""

    class Interrupt(transformers.TrainerCallback):
        armed = True

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and self.armed:
                raise KeyboardInterrupt

    callback, interrupt = KFACCallback(), Interrupt()
    trainer = trainer_in(tmp_path, callback, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    interrupt.armed = False
    for _ in range(2):
        trainer.train()
        assert callback.preconditioner.steps == 8
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
        assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
def test_weights_alone_get_no_state(tmp_path):
    trainer_in(tmp_path, KFACCallback(), save_only_model=True).train()
    assert not list(tmp_path.glob("*/kfac.pt"))
    assert list(tmp_path.glob("*/model.safetensors"))


def g_factors(callback):
    layers = callback.preconditioner.state_dict()["layers"]
    return {name: entry["G"]["factor"] for name, entry in layers.items()}


class Seeded(transformers.TrainerCallback):
    """The same random numbers in each step."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(7)


def test_labels_of_the_model_go_backward_from_the_logits(tmp_path):
    """It equals a call by hand: a token's label is the next token, and -100 is not in the loss."""
    callback = KFACCallback(fisher="mc", **OPTIONS)
    options = {"cls": InOrder, "model": language_model(**NO_DROPOUT), "max_steps": 1}
    trainer_in(tmp_path, Seeded(), callback, **options).train()

    model = language_model(**NO_DROPOUT)
    optimizer = torch.optim.AdamW(model.parameters())
    kfac = KFAC(model, optimizer, fisher="mc", **OPTIONS).attach()
    tokens = torch.stack([x["input_ids"] for x in documents()[:8]])
    labels = torch.stack([x["labels"] for x in documents()[:8]])
    torch.manual_seed(7)
    output = model(input_ids=tokens, labels=labels)
    in_loss = torch.zeros(8, LENGTH)
    in_loss[:, :-1] = (labels != -100)[:, 1:]
    kfac.fisher_backward(output.logits, mask=in_loss)
    output.loss.backward()
    optimizer.step()
    layers = kfac.state_dict()["layers"]
    for name, got in g_factors(callback).items():
        torch.testing.assert_close(got, layers[name]["G"]["factor"], msg=name)


def test_what_fisher_cannot_do_is_an_error(tmp_path):
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    trainer = trainer_in(
        tmp_path,
        KFACCallback(fisher="mc"),
        model=transformers.BertForSequenceClassification(config),
    )
    trainer.train_dataset = [x | {"labels": 0.5} for x in documents(8)]
    with pytest.raises(ValueError, match=r'logits of shape \[8, 1\] .* Use fisher="empirical"'):
        trainer.train()
    with pytest.raises(ValueError, match="loss_type=ForQuestionAnswering of Bert"):
        trainer_in(
            tmp_path,
            KFACCallback(fisher="mc"),
            model=transformers.BertForQuestionAnswering(config),
        ).train()


@pytest.mark.slow
def test_a_grad_scaler(tmp_path):
    """The Trainer has none on a CPU, so the test puts one in; results are nearly the same."""
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        callback = KFACCallback(**OPTIONS)
        options = {"cls": InOrder, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
        trainer = trainer_in(tmp_path, callback, optim="sgd", **options)
        if scaler is not None:
            trainer.accelerator.scaler, trainer.accelerator.native_amp = scaler, True
            trainer.accelerator.state._mixed_precision = "fp16"
        trainer.train()
        results.append(weights(trainer) | g_factors(callback))
    for key, value in results[0].items():
        bound = 0.02 * float(value.abs().max())  # of half precision
        torch.testing.assert_close(results[1][key], value, rtol=0.1, atol=bound, msg=key)


def test_engines_that_own_the_gradients_are_refused():
    with pytest.raises(ValueError, match=r"DEEPSPEED.*examples/deepspeed_training.py"):
        check_engine(DistributedType.DEEPSPEED)


def test_several_gpus_in_one_process_are_refused(tmp_path):
    trainer = trainer_in(tmp_path, KFACCallback())
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"model to 2 GPUs .* torchrun --nproc-per-node 2"):
        trainer.train()


def test_two_callbacks_are_refused(tmp_path):
    with pytest.raises((ValueError, RuntimeError), match="has another KFAC already"):
        trainer_in(tmp_path, KFACCallback(), KFACCallback()).train()


def on_rank(folder, options, resume):
    """Train in a process of two; return the weights and what the checkpoint holds."""
    environment = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in environment.items()}
    callback = KFACCallback(**OPTIONS, **options)
    trainer = trainer_in(
        folder, callback, per_device_train_batch_size=4, ddp_backend="gloo", max_grad_norm=0.5
    )
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.args.world_size == 2
    assert callback.preconditioner.collective.world_size == 2
    return weights(trainer), callback.preconditioner.steps


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["comm_opt", "mem_opt"])
def test_two_ranks_resume_bit_by_bit(tmp_path, strategy):
    """With mem_opt, no rank holds all decompositions: rank 0 gathers them for the checkpoint."""
    first, other = run_ranks(2, on_rank, tmp_path, {"strategy": strategy}, False)
    assert_equal(first[0], other[0])
    for step in (6, 8):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    saved = torch.load(tmp_path / "checkpoint-3" / "kfac.pt", weights_only=True)
    assert ("shards" in saved) == (strategy == "mem_opt")
    for resumed in run_ranks(2, on_rank, tmp_path, {"strategy": strategy}, True):
        assert resumed[1] == 8
        assert_equal(resumed[0], first[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_the_example_runs_and_learns(tmp_path, monkeypatch):
    trainer = run_example("huggingface_trainer.py", tmp_path, monkeypatch)["trainer"]
    assert trainer.state.log_history[-1]["eval_loss"] < 2.1  # log(10) is 2.303
    assert (tmp_path / "runs" / "huggingface" / "checkpoint-66" / "kfac.pt").exists()
