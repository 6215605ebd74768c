"""Networks of transformers from a folder: three kinds, their weights, and what is refused."""

import json

import pytest
import torch
import transformers

from kfac_bench import cli
from kfac_bench.data.language.wordpiece import PAD
from kfac_bench.errors import UsageError
from kfac_bench.models import huggingface
from kfac_bench.models.library_options import HuggingFaceConfig
from kfac_bench.record.events import Evaluated
from kfac_bench.tasks.language_tasks import Pretraining
from kfac_bench.training import weights
from tests.support.language import gpt2_folder
from tests.support.runs import of_kind, train

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def gpt2(tmp_path):
    return gpt2_folder(tmp_path)


def build(folder, head="auto", shape=(16,), num_classes=96, task="language_model"):
    config = HuggingFaceConfig("huggingface", path=str(folder), head=head)
    return config.build(shape, num_classes, task)


def save(network, folder):
    network.save_pretrained(folder)
    return folder


def test_a_run_with_kfac_goes_on_where_it_stopped(tmp_path, gpt2):
    base = ("model=huggingface", f"model.path={gpt2}", "data.sequence_length=16", "logger=none")
    base = (*base, "trainer.threads=1", "trainer.batch_size=8", "trainer.predictions=0", "run_id=r")
    status, path = train(tmp_path, "trainer.max_steps=2", base=base)
    assert (status, train(tmp_path, "trainer.max_steps=3", base=base)[1]) == ("finished", path)
    assert of_kind(path, Evaluated)[-1].step == 3


def test_the_weights_of_the_folder_are_loaded(gpt2):
    saved = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(gpt2))
    save(saved, gpt2)
    model = build(gpt2)
    config = HuggingFaceConfig("huggingface", path=str(gpt2))
    (line,) = weights.load(model, config)
    assert "new" not in line
    tokens = torch.randint(96, (2, 16))
    torch.testing.assert_close(model.eval()(tokens), saved.eval()(tokens).logits)
    other = build(gpt2, num_classes=50)
    (line,) = weights.load(other, config)
    assert "new, because the weights have none of this size: transformer.wte.weight" in line
    assert other(tokens % 50).shape == (2, 16, 50)


def test_a_masked_network_learns_masked_tokens_without_next_sentences(tmp_path):
    config = transformers.RobertaConfig(**SIZES, intermediate_size=16, max_position_embeddings=40)
    config.architectures = ["RobertaForMaskedLM"]
    config.save_pretrained(tmp_path)
    model = build(tmp_path, shape=(32,), num_classes=50, task="pretraining").eval()
    # RoBERTa's own padding has the id 1, which is [UNK] in our vocabularies.
    assert model.network.get_input_embeddings().padding_idx == PAD
    ids = torch.randint(5, 50, (3, 32))
    positions = torch.tensor([[1, 4], [2, 3], [5, 0]])
    labels = torch.tensor([[7, 8], [9, 6], [5, -100]])
    inputs = {"input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": ids > 0}
    batch = (inputs | {"positions": positions}, labels, torch.tensor([0, 1, 0]))
    task = Pretraining()
    logits = model.network(ids).logits.detach().log_softmax(-1)
    losses = [
        [-logits[i, positions[i, p], labels[i, p].clamp(0)] for p in (0, 1)] for i in range(3)
    ]
    means = [(losses[0][0] + losses[0][1]) / 2, (losses[1][0] + losses[1][1]) / 2, losses[2][0]]
    torch.testing.assert_close(task.forward(model, batch)[0], sum(means) / 3)
    metrics = task.metrics(task.totals(model, batch))
    assert set(metrics) == {"masked_lm_loss", "masked_lm_accuracy", "loss"}
    assert metrics["loss"] == pytest.approx(float(sum(means) / 3), rel=1e-5)
    assert task.show(model, batch, 1)[0].caption.startswith("masked-token loss")


def test_a_masked_network_of_a_single_token_type_reads_two_segments(tmp_path):
    config = transformers.RobertaConfig(**SIZES, intermediate_size=16, type_vocab_size=1)
    config.save_pretrained(tmp_path)
    model = build(tmp_path, "masked", shape=(8,), num_classes=50, task="pretraining").eval()
    ids, types = torch.arange(5, 13)[None], torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    inputs = {"input_ids": ids, "token_type_ids": types, "attention_mask": ids > 0}
    logits, _ = model(inputs | {"positions": torch.tensor([[1, 6]])})
    torch.testing.assert_close(logits[0], model.network(ids).logits[0, [1, 6]])


def test_a_language_model_sees_no_later_token_and_learns_all_tokens(tmp_path):
    config = transformers.BertConfig(**SIZES, intermediate_size=16, pad_token_id=0)
    config.save_pretrained(tmp_path)
    model = build(tmp_path, "causal").eval()
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    tokens[1, 8:] = 5
    first, other = model(tokens)
    torch.testing.assert_close(first[:8], other[:8])
    embedding = model.network.get_input_embeddings()
    embedding(tokens).sum().backward()
    assert embedding.weight.grad[0].tolist() == [24.0] * 16  # token 0 is the padding of the file
    transformers.XLMConfig(emb_dim=16, n_layers=1, n_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="the network is not causal"):
        build(tmp_path, "causal")


def test_a_classifier_reads_padded_texts(gpt2):
    model = build(gpt2, "classifier", num_classes=4, task="classification")
    assert model(torch.randint(1, 96, (3, 16))).shape == (3, 4)


def test_a_dry_run_needs_no_values(gpt2):
    with torch.device("meta"):
        model = build(gpt2)
        assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 96)


def test_a_masked_network_has_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = transformers.RobertaConfig(**SIZES, intermediate_size=16)
    config.save_pretrained(tmp_path)
    words = ["model=huggingface", f"model.path={tmp_path}", "task=pretraining", "data=text"]
    with pytest.raises(SystemExit):
        cli.plan([*words, "data.sequence_length=32"])
    assert "K-FAC covers 7 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        ({}, {"task": "pretraining"}, "a causal network does not fit task=pretraining"),
        ({}, {"head": "masked"}, "model.head=masked: a masked network does not fit"),
        ({}, {"shape": (1, 8, 8)}, r"reads text, but an example has the shape \[1, 8, 8\]"),
        ({}, {"shape": (65,)}, "fails on 65 tokens; try a smaller data.sequence_length"),
        ({"model_type": "none_such", "auto_map": {}}, {}, "cannot be built"),
        ({"model_type": "vit"}, {}, "transformers has no causal network of model_type vit"),
        ({"quantization_config": {}}, {}, "networks with quantization_config cannot"),
        ({"architectures": 3}, {}, "not a configuration of transformers"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(gpt2, change, arguments, said):
    content = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UsageError, match=said) as caught:
        build(gpt2, **arguments)
    assert "\n" not in str(caught.value)


def test_code_of_the_folder_does_not_run(gpt2):
    content = json.loads((gpt2 / "config.json").read_text())
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (gpt2 / "config.json").write_text(json.dumps(content | {"model_type": "new", "auto_map": code}))
    (gpt2 / "evil.py").write_text(f"open({str(gpt2 / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match="cannot be built"):
        build(gpt2)
    assert not (gpt2 / "ran").exists()


def test_weights_that_cannot_be_read_are_one_line(gpt2):
    model = build(gpt2)
    (gpt2 / "pytorch_model.bin").write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="safetensors, not from pytorch_model"):
        huggingface.load_weights(model, gpt2)
    (gpt2 / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UsageError, match="its weights cannot be read"):
        huggingface.load_weights(model, gpt2)
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        build(gpt2 / "nowhere")
