"""Text of Parquet files: windows for language models, and examples with masked tokens."""

import pyarrow
import pytest
import torch
from pyarrow import parquet

from kfac_bench.data.base.dataset import fingerprint
from kfac_bench.data.base.order import Shard, epoch_order
from kfac_bench.data.language import table_text, wordpiece
from kfac_bench.data.language.table_text import TextTable
from kfac_bench.data.options import verify
from kfac_bench.record.events import Trained
from tests.data.base.test_tables import refused
from tests.support.language import BERT, LENGTH, topics
from tests.support.runs import of_kind, train

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "fish", "##es", "blue")
SEP, RED, FISH, ES, BLUE = 3, 5, 6, 7, 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kfac_bench"


def write(root, **splits):
    root.mkdir(exist_ok=True)
    for split, texts in splits.items():
        parquet.write_table(
            pyarrow.table({"n": range(len(texts)), "text": texts}), root / f"{split}.parquet"
        )
    return root


@pytest.fixture
def root(tmp_path):
    wordpiece.write(wordpiece.Vocabulary(WORDS), tmp_path / "vocab.txt")
    return write(tmp_path, train=["Red fishes", None, "", "blue"], test=["fish fish fish"])


def test_windows_are_the_tokens_of_all_documents_in_order(root):
    data = table_text.load_windows(TextTable(root, sequence_length=2))
    stream = [RED, FISH, ES, SEP, BLUE, SEP]
    assert (data.train_size, data.eval_size, data.num_classes) == (2, 1, len(WORDS))
    order = epoch_order(2, 0, 0).tolist()
    [batch] = data.train(2, 0, 0, 0, Shard())
    inputs, targets = data.prepare(batch)
    assert inputs.tolist() == [stream[2 * i : 2 * i + 2] for i in order]
    assert targets.tolist() == [stream[2 * i + 1 : 2 * i + 3] for i in order]
    [batch] = data.evaluate(2, Shard())
    assert data.prepare(batch)[0].tolist() == [[FISH, FISH]]
    assert data.tokens == WORDS
    assert "text is in the column text" in data.notes[0]
    assert data.notes[0].endswith("Training reads the split train, evaluation the split test")


def test_text_is_tokenized_once_and_again_if_it_or_an_option_changes(root, cache, capsys):
    def load(length=2):
        return fingerprint(table_text.load_windows(TextTable(root, sequence_length=length)))

    first = load()
    assert "is tokenized once, into" in capsys.readouterr().out
    assert load() == first
    assert capsys.readouterr().out == ""
    assert load(1) != first
    write(root, test=["blue blue blue"])
    assert load()["eval"] != first["eval"]
    assert load()["train"] == first["train"]


def test_one_split_is_divided_by_documents(tmp_path):
    root = write(tmp_path / "d", train=[document.text for document in topics()])
    table = TextTable(root, eval_share=0.3, sequence_length=16, vocabulary_size=400)
    data = table_text.load_windows(table)
    assert 0.1 < data.eval_size / (data.train_size + data.eval_size) < 0.5
    assert 200 < data.num_classes <= 400
    assert verify(root) == ("text_parquet: 40 rows, 0 of them empty", [])


def test_bad_columns_and_short_texts_are_refused(root):
    for options, said in (
        ({"column": "txt"}, "no such column; did you mean text? its columns are n, text"),
        ({"column": "n"}, "the column n has the type int64, but text is needed"),
        ({"eval_split": "dev"}, "no split dev; it has test, train"),
        ({"sequence_length": 100}, "has only 6 tokens for train, and a window has 101"),
    ):
        assert said in refused(table_text.load_windows, TextTable(root, **options))
    write(root, test=[7])
    said = refused(table_text.load_windows, TextTable(root, sequence_length=2))
    assert "test.parquet:row 0: the column text has an object of type int, but text is" in said


def test_a_transformer_trains_and_shows_words(tmp_path, root):
    write(root, train=["red fishes blue"] * 40)
    words = ("data=text_parquet", f"data.root={root}", "task=language_model", "model.width=8")
    more = ("model=transformer", "model.heads=2", "data.sequence_length=8", "trainer.batch_size=8")
    rest = ("logger=none", "trainer.threads=1", "trainer.max_steps=2", "trainer.log_freq=1")
    write(root, test=["red fishes blue"] * 5)
    status, path = train(tmp_path, *words, *more, *rest, "kfac.factor_update_freq=1", base=())
    assert (status, len(of_kind(path, Trained))) == ("finished", 2)
    shown = "".join(
        file.read_text() for file in path.rglob("*") if file.suffix in (".txt", ".jsonl")
    )
    assert "fishes" in shown


def test_bert_trains_on_masked_tokens(tmp_path):
    root = write(tmp_path / "d", train=[document.text for document in topics()])
    words = (
        "data=text_parquet",
        f"data.root={root}",
        "data.vocabulary_size=400",
        "data.eval_share=0.3",
    )
    status, path = train(
        tmp_path, *BERT, *words, "trainer.max_steps=2", "trainer.log_freq=1", base=()
    )
    assert (status, len(of_kind(path, Trained))) == ("finished", 2)
    table = TextTable(root, sequence_length=LENGTH, eval_share=0.3, vocabulary_size=400)
    data = table_text.load_masked(table, 0, 0.3, 12)
    inputs, labels, _ = next(data.train(4, 0, 0, 0, Shard()))
    assert inputs["input_ids"].shape == (4, LENGTH)
    assert (labels >= 0).any()
    assert torch.equal(next(data.train(4, 0, 0, 0, Shard()))[1], labels)
