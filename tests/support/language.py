"""Small text and questions for tests, and options of a BERT that trains on them in a second."""

import json
import pydoc_data.topics

from kfac_bench.data.language import documents, prepare, wordpiece

LENGTH = 32
BERT = (
    *("model=bert_tiny", "model.hidden=16", "model.layers=1", "logger=none", "trainer.threads=1"),
    *(
        "data.workers=0",
        f"data.sequence_length={LENGTH}",
        "data.masked=0.3",
        "data.max_predictions=12",
    ),
    "trainer.batch_size=8",
    *("kfac.update_freq=4", "kfac.factor_update_freq=2", "kfac.skip=[Norm,Embedding,'^cls']"),
)
QA = (
    *(o for o in BERT if not o.startswith(("data.masked", "data.max_predictions"))),
    *("data=squad", "task=question_answering", "data.stride=12", "data.question_length=8"),
)


def topics(number=40):
    """Short and long ones, so that examples have few and many tokens."""
    texts = [t for _, t in sorted(pydoc_data.topics.topics.items()) if len(t) > 500]
    cut = [t[: 80 + 31 * (7 * i % number)] for i, t in enumerate(texts[:number])]
    return [documents.Document(f"topic {i}", t) for i, t in enumerate(cut)]


def make_text(root, lengths=(LENGTH,), **options):
    prepare.prepare(
        lambda: iter(topics()),
        root,
        **{"sequence_lengths": lengths, "vocabulary_size": 500, "eval_share": 0.3} | options,
    )
    return root


def question(identity, asked, *answers):
    """``answers`` are (text, offset)."""
    answers = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": identity, "question": asked, "answers": answers}


def squad_file(*paragraphs):
    """``paragraphs`` are (context, questions)."""
    made = [{"context": context, "qas": list(qas)} for context, qas in paragraphs]
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": made}]}


def made_up(number, first=0):
    """Questions about long and short paragraphs; the answer is one of their words or two."""
    paragraphs = []
    for i in range(first, first + number):
        words = [f"w{(i * 7 + j) % 23}" for j in range(6 + 11 * (i % 4))] + ["end."]
        context = " ".join(words)
        at = len(" ".join(words[: i % 5 + 1])) + 1
        text = " ".join(words[i % 5 + 1 :][: 1 + i % 2])
        more = [(words[0], 0)] if i % 3 == 0 else []
        paragraphs.append(
            (context, [question(f"q{i}", f"where is {words[1]} ?", (text, at), *more)])
        )
    return squad_file(*paragraphs)


def make_squad(root, train=None, dev=None):
    root.mkdir(exist_ok=True)
    files = {"train-v1.1.json": train or made_up(30), "dev-v1.1.json": dev or made_up(11, first=30)}
    for name, content in files.items():
        (root / name).write_text(json.dumps(content))
    contexts = [p["context"] for f in files.values() for a in f["data"] for p in a["paragraphs"]]
    asked = "where is ? " * 3
    wordpiece.write(wordpiece.train([asked, *contexts, *contexts], 300), root / "vocab.txt")
    return root


def gpt2_folder(path):
    """A folder with config.json of a GPT-2 of 96 tokens."""
    import transformers

    folder = path / "gpt2"
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 96}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(architectures=["GPT2LMHeadModel"], **sizes, **special)
    config.save_pretrained(folder)
    return folder
