"""BERT: its tasks, what a batch's mean is, where weights come from, runs on small text."""

import builtins
import math
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertForPreTraining, BertForQuestionAnswering

from kfac_bench import models
from kfac_bench.config import compose
from kfac_bench.data.base.batch import split
from kfac_bench.data.base.order import Shard
from kfac_bench.data.language import masked_text
from kfac_bench.errors import UsageError
from kfac_bench.models import bert
from kfac_bench.models.options import BertConfig
from kfac_bench.record.events import Evaluated, Trained
from kfac_bench.tasks.language_tasks import Pretraining
from kfac_bench.training import checkpoint, dry_run, weights
from kfac_bench.training.state import weights_sha256
from tests.data.language.test_text import refused
from tests.support.distributed import run_ranks
from tests.support.language import BERT, LENGTH, QA, make_squad, make_text
from tests.support.quick import quick_if, slow
from tests.support.runs import (
    ALONE,
    before_step,
    config_of,
    end,
    evaluated,
    here,
    of_kind,
    terminate,
    train,
    trainer_of,
)

VOCABULARY = 500


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return make_squad(tmp_path_factory.mktemp("data") / "squad")


@pytest.fixture(scope="module")
def batch(root):
    data = masked_text.load(root, LENGTH, max_predictions=5)
    return next(iter(data.train(6, 0, 0, 0, Shard())))


def model_of(kind=bert.PretrainingBert, vocabulary=VOCABULARY, seed=0):
    torch.manual_seed(seed)
    return kind(bert.config("bert_tiny", vocabulary, 0.0, 16, 1)).eval()


# ---- the network ----


def test_bert_is_the_network_of_transformers(batch, tmp_path):
    """By its names, its weights and its outputs at the masked places."""
    model, inputs = model_of(), batch[0]
    theirs = BertForPreTraining(bert.config("bert_tiny", VOCABULARY, 0.0, 16, 1)).eval()
    assert model.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(model.state_dict())
    logits, next_logits = model(inputs)
    want = theirs(**{k: v for k, v in inputs.items() if k != "positions"})
    for i, places in enumerate(inputs["positions"]):
        torch.testing.assert_close(logits[i], want.prediction_logits[i, places])
    torch.testing.assert_close(next_logits, want.seq_relationship_logits)
    one, two = model_of(bert.QuestionAnsweringBert), None
    two = BertForQuestionAnswering(bert.config("bert_tiny", VOCABULARY, 0.0, 16, 1)).eval()
    two.load_state_dict(one.state_dict())
    want = two(**{k: v for k, v in inputs.items() if k != "positions"})
    torch.testing.assert_close(one(inputs), torch.stack([want.start_logits, want.end_logits], 1))


def test_a_width_that_heads_cannot_share_is_one_line():
    config = BertConfig(name="bert_tiny", hidden=200)
    with pytest.raises(UsageError, match=r"model.hidden=200: 3 heads .*192") as caught:
        config.build((16,), 100, "pretraining")
    assert len(str(caught.value).splitlines()) == 1


def test_padding_changes_nothing(batch):
    model, inputs = model_of(), batch[0]
    longer = {
        k: torch.cat([v, torch.zeros_like(v)], 1) if k != "positions" else v
        for k, v in inputs.items()
    }
    longer["input_ids"][:, LENGTH:] = 7
    for a, b in zip(model(inputs), model(longer), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "millions"), [("bert_tiny", 4.4), ("bert_base", 110.1), ("bert_large", 336.2)]
)
def test_bert_has_the_published_sizes(name, millions):
    with torch.device("meta"):
        model = bert.PretrainingBert(bert.config(name, 30522, 0.1, None, None))
    encoder = sum(p.numel() for p in model.bert.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert whole / 1e6 == pytest.approx(millions, abs=0.1)
    assert whole > encoder
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


# ---- the loss and the figures ----


class Given(nn.Module):
    """Puts out what it was made with."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, inputs):
        at = inputs["at"]
        return tuple(x[at] for x in self.outputs)


def some(n=5, places=4, vocabulary=7):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, places, vocabulary, generator=generator)
    next_logits = torch.randn(n, 2, generator=generator)
    labels = torch.randint(vocabulary, (n, places), generator=generator)
    for i in range(n):
        labels[i, 1 + i % places :] = masked_text.IGNORED
    random = torch.randint(2, (n,), generator=generator)
    return Given(logits, next_logits), ({"at": torch.arange(n)}, labels, random)


def by_hand(model, batch):
    """By example: (losses of its tokens, right ones, next-sentence loss, whether told right)."""
    (logits, next_logits), (_, labels, random) = model.outputs, batch
    for i in range(len(labels)):
        places = [p for p in range(labels.shape[1]) if labels[i, p] != masked_text.IGNORED]
        losses = [-logits[i, p].double().log_softmax(0)[labels[i, p]].item() for p in places]
        right = sum(logits[i, p].argmax() == labels[i, p] for p in places)
        told = -next_logits[i].double().log_softmax(0)[random[i]].item()
        yield losses, int(right), told, next_logits[i].argmax() == random[i]


def test_the_loss_is_the_mean_over_examples_of_the_mean_over_tokens():
    model, batch = some()
    loss, logits = Pretraining().forward(model, batch)
    found = [sum(losses) / len(losses) + told for losses, _, told, _ in by_hand(model, batch)]
    assert loss.item() == pytest.approx(sum(found) / 5, rel=1e-6)
    assert logits.shape == (5, 4, 7)
    parts = [Pretraining().forward(model, part)[0].item() for part in split(batch, 2)]
    assert loss.item() == pytest.approx((2 * parts[0] + 3 * parts[1]) / 5, rel=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_metrics_count_all_masked_tokens(parts):
    model, batch = some()
    task = Pretraining()
    totals = torch.stack([task.totals(model, part) for part in split(batch, parts)]).sum(0)
    found = list(by_hand(model, batch))
    tokens = [x for losses, *_ in found for x in losses]
    assert task.metrics(totals) == pytest.approx({
        "masked_lm_loss": sum(tokens) / len(tokens),
        "masked_lm_accuracy": sum(right for _, right, _, _ in found) / len(tokens),
        "next_sentence_accuracy": sum(bool(told) for *_, told in found) / 5,
        "loss": sum(sum(x) / len(x) + told for x, _, told, _ in found) / 5,
    })  # fmt: skip


def test_predictions_show_masked_words(root):
    data = masked_text.load(root, LENGTH, max_predictions=5)
    batch = next(iter(data.evaluate(6, Shard())))
    shown = Pretraining(data.tokens).show(model_of(), batch, 4)
    losses = [float(p.caption.split()[2].rstrip(";")) for p in shown]
    assert losses == sorted(losses, reverse=True)
    assert len(shown) == 4
    wanted = set()
    for ids, labels, places in zip(
        batch[0]["input_ids"], batch[1], batch[0]["positions"], strict=True
    ):
        said = " ".join(data.tokens[t] for t in ids if t)
        trues = [
            (p, data.tokens[t]) for p, t in zip(places.tolist(), labels, strict=True) if t >= 0
        ]
        wanted.add((said, tuple(trues)))
    for prediction in shown:
        said, *lines = prediction.text.split("\n")
        found = [(int(x.partition(":")[0]), x.rpartition(" ")[2]) for x in lines]
        assert (said, tuple(found)) in wanted


# ---- updates of ranks and parts ----


EQUAL = ("model.dropout=0", "optimizer.lr=0.05", "kfac.update_freq=2", "kfac.damping=0.01")
BASES = {"pretraining": (*BERT, *EQUAL), "question_answering": (*QA, *EQUAL)}
STEPS = 3


def updated(folder, task, options, backend=None):
    """Losses of some updates; weights before and after them."""
    keywords = {} if backend is None else {"backend": backend}
    trainer = trainer_of(folder, *options, base=BASES[task], **keywords)
    try:
        before = {n: p.detach().clone() for n, p in trainer._bare.named_parameters()}
        batches = zip(range(STEPS), trainer._batches(), strict=False)
        losses = []
        for _, b in batches:
            trainer._train_step(b)
            trainer._read_result()
            losses.append(trainer.loss)
        return losses, before, {n: p.detach().clone() for n, p in trainer._bare.named_parameters()}
    finally:
        if trainer.kfac is not None:
            trainer.kfac.detach()


def updated_here(folder, task, options):
    return updated(folder, task, options, here())


@pytest.mark.ranks
@pytest.mark.parametrize("kfac", [slow("none"), "comm_opt"])
@pytest.mark.parametrize("task", BASES)
def test_ranks_and_parts_make_the_update_of_one_process(root, questions, tmp_path, task, kfac):
    """Parts have different numbers of masked tokens: short examples are among them."""
    options = (f"data.root={root if task == 'pretraining' else questions}", f"kfac={kfac}")
    losses, before, alone = updated(tmp_path, task, options)
    assert max((p - before[n]).abs().max().item() for n, p in alone.items()) > 3e-3
    for found in run_ranks(2, updated_here, tmp_path, task, (*options, "trainer.accumulate=3")):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for name, p in alone.items():
            torch.testing.assert_close(found[2][name], p, rtol=1e-3, atol=2e-5, msg=name)


def test_parts_have_different_numbers_of_masked_tokens(root):
    data = masked_text.load(root, LENGTH, masked=0.3, max_predictions=12)
    for rank in range(2):
        for _, batch in zip(range(STEPS), data.train(8, 0, 0, 0, Shard(rank, 2)), strict=False):
            masked = [(part[1] != masked_text.IGNORED).sum(1) for part in split(batch, 3)]
            counts = {x.double().mean().item() for x in masked}
            if len(counts) > 1:
                return
    raise AssertionError("choose others")


def test_a_batch_in_parts_needs_the_memory_of_one_part(root, tmp_path):
    """Whatever a part's forward made is gone before the next part begins."""
    options = (f"data.root={root}", "trainer.accumulate=4", "optimizer=adam")
    trainer = trainer_of(tmp_path, *options, base=BERT)
    made, alive = [], []

    def begin(module, args):
        alive.append(sum(ref() is not None for ref in made))

    def note(module, args, output):
        outputs = output if isinstance(output, tuple) else (output,)
        made.extend(weakref.ref(x) for x in outputs if isinstance(x, torch.Tensor))

    trainer.model.register_forward_pre_hook(begin)
    for module in trainer.model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.register_forward_hook(note)
    for _, batch in zip(range(3), trainer._batches(), strict=False):
        trainer._train_step(batch)  # with factors, decompositions
    trainer.kfac.detach()
    assert len(made) > 100
    assert alive == [0] * 12


# ---- weights to start from ----


def run_of(folder, root, *options):
    return train(folder, f"data.root={root}", "kfac=none", *options, base=BERT)[1]


def test_a_second_phase_starts_from_weights_alone(root, tmp_path, capsys):
    first = run_of(tmp_path, root, "trainer.max_steps=3", "run_id=first")
    config = config_of(
        tmp_path, f"data.root={root}", f"model.weights={first}", "seed=7", "kfac=none", base=BERT
    )
    model = config.model.build((LENGTH,), VOCABULARY, "pretraining")
    (said,) = weights.load(model, config.model)
    assert said.startswith(f"weights of {first}, step 3: ")
    assert "new" not in said
    digest = end(first).weights_sha256
    assert weights_sha256(model) == digest
    second = run_of(tmp_path, root, "trainer.max_steps=2", f"model.weights={first}", "run_id=two")
    before = of_kind(first, Evaluated)[-1].metrics
    assert of_kind(second, Evaluated)[0].metrics == pytest.approx(before)
    assert [e.step for e in of_kind(second, Trained)] == [2]
    assert "weights of" in capsys.readouterr().out


def test_fine_tuning_takes_the_encoder_and_a_new_head(root, questions, tmp_path):
    first = run_of(tmp_path, root, "trainer.max_steps=1", "run_id=first")
    config = config_of(tmp_path, f"model.weights={first}", base=QA)
    model = config.model.build((LENGTH,), VOCABULARY, "question_answering")
    head = model.qa_outputs.weight.detach().clone()
    (said,) = weights.load(model, config.model)
    assert "; new: qa_outputs; not used: bert.pooler.dense, cls.predictions" in said
    assert torch.equal(model.qa_outputs.weight, head)
    saved = checkpoint.find(first)[0].shards[0]["model"]
    for name, value in model.bert.state_dict().items():
        assert torch.equal(value, saved[f"bert.{name}"])
    other = refused(train, tmp_path, f"data.root={questions}", f"model.weights={first}", base=QA)
    assert "word_embeddings.weight has shape [500, 16], but model=bert_tiny" in other


@pytest.mark.parametrize("names", ["now", "first published", "encoder alone"])
def test_weights_in_transformers_layout(tmp_path, batch, names):
    theirs = BertForPreTraining(bert.config("bert_tiny", VOCABULARY, 0.0, 16, 1)).eval()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if names == "first published":
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, name in old.items():
            tensors = {k.replace(new, name): v for k, v in tensors.items()}
    if names == "encoder alone":
        tensors = {k.removeprefix("bert."): v for k, v in tensors.items() if k.startswith("bert.")}
    save_file(tensors, file)
    config = config_of(tmp_path, f"model.weights={tmp_path}", base=BERT)
    model = model_of(seed=1)
    (said,) = weights.load(model, config.model)
    assert str(file) in said
    inputs = {k: v for k, v in batch[0].items() if k != "positions"}
    encoded = bert._encode(model.bert, inputs)[0]
    torch.testing.assert_close(encoded, theirs.bert(**inputs).last_hidden_state)
    if names != "encoder alone":
        torch.testing.assert_close(model(batch[0])[1], theirs(**inputs).seq_relationship_logits)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no good checkpoint and no model.safetensors there"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
        (
            lambda folder: save_file({"fc.weight": torch.ones(2)}, folder / "model.safetensors"),
            "no weights of BERT (bert.embeddings.LayerNorm.bias is missing)",
        ),
        (
            lambda folder: torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin"),
            "no good checkpoint and no model.safetensors there",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path, make, said):
    make(tmp_path)
    config = config_of(tmp_path, f"model.weights={tmp_path}", base=BERT)
    assert said in refused(weights.load, model_of(), config.model)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["data=text"], "data=text is for task=pretraining, with model=bert_base or bert_large"),
        (["model=bert_tiny", "data=digits"], "data=digits does not fit task=pretraining"),
        (
            ["model=bert_tiny", "task=question_answering"],
            "for task=question_answering choose data=squad",
        ),
        (["model=bert_tiny", "kfac.fisher=mc"], "kfac.fisher=mc draws labels from one likelihood"),
        (["model=bert_tiny", "data.image_size=8"], "data.image_size=8"),
    ],
)
def test_options_that_clash_are_refused(options, said):
    assert said in refused(compose.load, options)


def test_a_sequence_longer_than_the_positions_is_refused():
    config = compose.load(["model=bert_tiny", "data.sequence_length=513"])
    assert "model=bert_tiny has 512 positions" in refused(dry_run.trace, config)


def test_without_the_packages_one_line_says_what_to_install(root, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] in ("transformers", "tokenizers"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "kfac_bench.models.bert")
    monkeypatch.delattr(models, "bert")
    monkeypatch.setattr(builtins, "__import__", without)
    config = compose.load(BERT)
    said = refused(config.model.build, (LENGTH,), VOCABULARY, "pretraining")
    assert said.startswith("model=bert_tiny: transformers is not installed: in your clone ")
    said = refused(make_text, tmp_path / "t")
    assert said.endswith("pip install '.[language]'")


@pytest.mark.parametrize("model", [slow("bert_large"), "bert_base"])
def test_a_plan_of_bert_needs_no_data(model):
    run = dry_run.trace(compose.load([f"model={model}", "kfac.skip=[Norm,Embedding,'^cls']"]), 4)
    layers = {"bert_large": 24, "bert_base": 12}[model]
    assert len(run.report.layers) == 6 * layers + 1  # and the pooler
    hidden = {"bert_large": 1024, "bert_base": 768}[model]
    tokens = 64 * 128
    products = 12 * hidden**2 * tokens + 2 * 128 * hidden * tokens
    head = 64 * 20 * hidden * (hidden + 30522) + 64 * (hidden**2 + 2 * hidden)
    assert run.forward_flops == pytest.approx(2 * (layers * products + head))


def test_a_plan_of_question_answering_counts_type2_fishers():
    options = ["model=bert_tiny", "data=squad", "task=question_answering", "trainer.batch_size=4"]
    plain = dry_run.trace(compose.load(options))
    one = dry_run.trace(compose.load([*options, "kfac.fisher=mc"]))
    all_ = dry_run.trace(compose.load([*options, "kfac.fisher=type2"]))
    assert plain.fisher_flops == 0 < one.fisher_flops
    assert all_.fisher_flops == 384 * one.fisher_flops


# ---- runs ----


def test_a_network_learns_small_text(root, tmp_path):
    options = (f"data.root={root}", "kfac=comm_opt", "optimizer=adam", "optimizer.lr=0.01")
    _, path = train(tmp_path, *options, "trainer.max_steps=40", "model.dropout=0", base=BERT)
    metrics = [e.metrics for e in of_kind(path, Evaluated)]
    assert metrics[0]["masked_lm_loss"] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert metrics[-1]["masked_lm_loss"] < 0.95 * metrics[0]["masked_lm_loss"]
    assert metrics[-1]["masked_lm_accuracy"] > metrics[0]["masked_lm_accuracy"]


@pytest.mark.parametrize("fisher", [slow("empirical"), "mc", slow("type2")])
def test_a_network_learns_small_questions(questions, tmp_path, fisher):
    options = (f"data.root={questions}", f"kfac.fisher={fisher}", "kfac.damping=0.01")
    more = ("optimizer=adam", "optimizer.lr=0.01", "trainer.max_steps=24", "trainer.eval_freq=12")
    _, path = train(tmp_path, *options, *more, base=QA)
    losses = [e.loss for e in of_kind(path, Trained)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("task", quick_if("question_answering".__eq__, BASES))
def test_an_interrupted_run_ends_with_the_same_weights(root, questions, tmp_path, task):
    """With dropout, in the middle of an epoch, reading ahead."""
    where = root if task == "pretraining" else questions
    options = (f"data.root={where}", "trainer.max_steps=6", "model.dropout=0.2", "data.workers=1")
    base = BERT if task == "pretraining" else QA
    _, straight = train(tmp_path, *options, "run_id=straight", base=base)
    with before_step(4, terminate):
        train(tmp_path, *options, "run_id=stopped", base=base)
    _, path = train(tmp_path, *options, "run_id=stopped", base=base)
    assert end(path).weights_sha256 == end(straight).weights_sha256


def evaluate(folder, root, backend=ALONE):
    options = (f"data.root={root}", "kfac=none", "trainer.eval_batch_size=7")
    return evaluated(trainer_of(folder, *options, base=BERT, backend=backend))


def evaluate_here(folder, root):
    return evaluate(folder, root, here())


@pytest.mark.ranks
def test_metrics_are_the_same_on_two_ranks(root, tmp_path):
    alone = evaluate(tmp_path, root)
    for metrics in run_ranks(2, evaluate_here, tmp_path, root):
        assert metrics == pytest.approx(alone, rel=1e-6)
