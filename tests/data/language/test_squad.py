"""SQuAD v1.1: files, windows, answers and their metrics."""

import itertools
import json
import math
import re
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kfac_bench.data.base.order import Shard
from kfac_bench.data.demo import demo_language
from kfac_bench.data.language import squad, squad_windows, wordpiece
from kfac_bench.data.language.squad_windows import NO_CHARACTER
from kfac_bench.distributed.ranks import Ranks
from kfac_bench.errors import UsageError
from kfac_bench.tasks import language_tasks
from kfac_bench.tasks.language_tasks import QuestionAnswering, best_spans
from tests.cli.test_kfac_data import run
from tests.data.language.test_text import JSON, refused
from tests.support.distributed import run_ranks
from tests.support.language import LENGTH, made_up, make_squad, question, squad_file
from tests.support.runs import CPU, here

FUZZ = settings(max_examples=150, deadline=None, derandomize=True)
CUT = {"stride": 12, "question_length": 8}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_squad(tmp_path_factory.mktemp("data") / "squad")


@pytest.fixture(scope="module")
def data(root):
    return squad_windows.load(root, LENGTH, **CUT)


# ---- files ----


CONTEXT = "The otter sleeps in the den."


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (question("b", "Who?", ("otter", 5)), "the answer 'otter' is not at its offset 5"),
        (question("b", "Who?", ("otter", -24)), "not at its offset -24"),
        (question("b", "Who?", ("otter", 10**30)), "not at its offset"),
        (question("b", "Who?", ("", 4)), "an answer is empty"),
        (question("b", "Who?"), "it has no answer"),
        (question("b", " ", ("otter", 4)), "its text is empty"),
        (question("a", "Who?", ("otter", 4)), "an earlier question has this id"),
        (question("b", "\ud800?", ("otter", 4)), "half of a character"),
        (question("b", "Who?", ("otter", 4), ("den", 0)), "'den' is not at its offset 0"),
        (question("b", "Who?", (" ", 3)), "an answer is empty"),
    ],
)
def test_bad_questions_are_fatal_or_left_out_and_reported(capsys, tmp_path, entry, reason):
    good = question("a", "Where?", ("the den", 20))
    root = make_squad(tmp_path / "s", train=squad_file((CONTEXT, [good, entry])))
    said = refused(squad_windows.load, root, LENGTH, **CUT)
    assert "1 bad file or entry in" in said
    assert "train-v1.1.json: data[0].paragraphs[0].qas[1]" in said
    assert reason in said
    left = squad_windows.load(root, LENGTH, **CUT, on_error="skip")
    assert left.train_size == 1
    (fault,) = left.faults.take()
    assert reason in fault.reason
    code, out, _ = run(capsys, "verify", root)
    assert code == 1
    assert reason in out
    assert out.endswith("squad: 1 question in train, 11 questions in eval; 1 fault\n")


def test_a_split_without_a_good_question_is_refused(tmp_path):
    root = make_squad(tmp_path / "s", dev=squad_file((CONTEXT, [question("a", "Who?")])))
    said = refused(squad_windows.load, root, LENGTH, **CUT, on_error="skip")
    assert "dev-v1.1.json has no good question: " in said
    assert "id 'a': it has no answer (v1.1 has only questions that can be answered)" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a JSON file"),
        (b"\xff\xff", "not a JSON file"),
        (b"[" * 100_000, "not a JSON file"),
        (b"[]", "the file has no 'data'"),
        (b'{"data": {}}', "'data' is a dict, not a list"),
        (b'{"data": [3]}', "data[0] has no 'paragraphs'"),
        (b'{"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}', "'context' is a int"),
        (b'{"data": [{"paragraphs": [{"context": "c", "qas": [{}]}]}]}', "qas[0] has no 'answers'"),
        (
            b'{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "i", "question": "q", '
            b'"answers": [{"text": "c", "answer_start": true}]}]}]}]}',
            "'answer_start' is a bool, not a int",
        ),
    ],
)
def test_files_of_another_layout_are_refused(tmp_path, content, said):
    (tmp_path / "f.json").write_bytes(content)
    assert said in refused(squad.read, tmp_path / "f.json")


def places(node, found):
    for key, below in node.items() if isinstance(node, dict) else enumerate(node):
        found.append((node, key))
        if isinstance(below, dict | list):
            places(below, found)
    return found


@FUZZ
@given(where=st.integers(0, 500), value=JSON)
def test_a_file_with_any_value_is_read_or_refused(tmp_path_factory, root, where, value):
    tree = made_up(3)
    found = places(tree, [])
    node, key = found[where % len(found)]
    node[key] = value
    folder = tmp_path_factory.getbasetemp() / "fuzzed_squad"
    folder.mkdir(exist_ok=True)
    (folder / "train-v1.1.json").write_text(json.dumps(tree))
    (folder / "dev-v1.1.json").write_bytes((root / "dev-v1.1.json").read_bytes())
    (folder / "vocab.txt").write_bytes((root / "vocab.txt").read_bytes())
    try:
        data = squad_windows.load(folder, LENGTH, **CUT, on_error="skip")
    except UsageError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    batch = next(data.train(data.train_size, 0, 0, 0, Shard()))
    assert len(batch[1]) == data.train_size > 0


def test_bad_options_and_missing_files_are_refused(root, tmp_path):
    assert "leaves no room for a question" in refused(squad_windows.load, root, 22, **CUT)
    assert "cannot be read" in refused(squad.read, tmp_path / "none.json")
    (tmp_path / "vocab.txt").write_bytes((root / "vocab.txt").read_bytes())
    assert "train-v1.1.json: cannot be read" in refused(squad_windows.load, tmp_path, LENGTH, **CUT)
    (tmp_path / "vocab.txt").unlink()
    assert "Set data.vocabulary_file" in refused(squad_windows.load, tmp_path, LENGTH, **CUT)
    given_one = squad_windows.load(root, LENGTH, vocabulary_file=root / "vocab.txt", **CUT)
    assert given_one.num_classes == len(wordpiece.read(root / "vocab.txt"))


# ---- windows ----


def test_a_paragraph_that_fits_exactly_has_one_window(tmp_path):
    context, text = " ".join([CONTEXT] * 4), "Where?"
    entry = question("a", text, ("the den", 20))
    root = make_squad(tmp_path / "s", train=squad_file((context, [entry])))
    tokenizer = wordpiece.tokenizer(wordpiece.read(root / "vocab.txt"))
    tokens = [len(tokenizer.encode(x, add_special_tokens=False).ids) for x in (text, context)]
    length = 3 + sum(tokens)  # [CLS] and two [SEP]
    assert squad_windows.load(root, length, **CUT).train_size == 1
    assert squad_windows.load(root, length - 1, **CUT).train_size == 2


def test_windows_contain_the_question_and_cover_the_paragraph(root, data):
    vocabulary = wordpiece.read(root / "vocab.txt")
    tokenizer = wordpiece.tokenizer(vocabulary)
    cls, sep = vocabulary.special("[CLS]"), vocabulary.special("[SEP]")
    seen, several = {}, 0
    for inputs, spans, (number,), offsets in data.evaluate(1, Shard()):
        asked = data.eval_questions[number]
        words = tokenizer.encode(asked.text).ids[:8]
        count = int(inputs["attention_mask"].sum())
        ids = inputs["input_ids"][0, :count].tolist()
        assert ids[: len(words) + 2] == [cls, *words, sep]
        assert ids[-1] == sep
        inside = offsets[0, :, 0] != NO_CHARACTER
        assert torch.equal(inside.nonzero().flatten(), torch.arange(len(words) + 2, count - 1))
        types = inputs["token_type_ids"][0]
        assert torch.equal(types == 1, inside | (torch.arange(LENGTH) == count - 1))
        for token, (begin, end) in zip(ids, offsets[0].tolist(), strict=False):
            if begin != NO_CHARACTER:
                said = vocabulary.tokens[token].removeprefix("##")
                assert said in (asked.context[begin:end].lower(), "[UNK]")
        covered = seen.setdefault(int(number), set())
        new = set(offsets[0, inside, 0].tolist())
        several += bool(covered)
        if covered:
            assert covered & new, "windows overlap"
        covered |= new
        first, last = spans[0].tolist()
        if (first, last) != (0, 0):
            begin, end = offsets[0, first, 0], offsets[0, last, 1]
            answer = asked.answers[0]
            assert (begin, end) == (answer.start, answer.start + len(answer.text))
    assert several > 3
    for number, covered in seen.items():
        context = data.eval_questions[number].context
        encoded = tokenizer.encode(context)
        assert covered == {begin for begin, _ in encoded.offsets}


def test_an_answer_is_marked_in_the_windows_that_contain_all_of_it(tmp_path):
    words = [f"w{i % 10}" for i in range(45)]
    starts = [len(" ".join(words[:i])) + (i > 0) for i in range(45)]
    asked = [
        question(str(i), "where ?", (" ".join(words[i : i + 2]), starts[i])) for i in range(44)
    ]
    root = make_squad(tmp_path / "s", dev=squad_file((" ".join(words), asked)))
    data = squad_windows.load(root, LENGTH, **CUT)
    marked = set()
    for _, spans, (number,), offsets in data.evaluate(1, Shard()):
        answer = data.eval_questions[number].answers[0]
        begin, end = answer.start, answer.start + len(answer.text)
        there = {b for b, _ in offsets[0].tolist()}, {e for _, e in offsets[0].tolist()}
        first, last = spans[0].tolist()
        if begin in there[0] and end in there[1]:
            assert (offsets[0, first, 0], offsets[0, last, 1]) == (begin, end)
            marked.add(int(number))
        else:
            assert (first, last) == (0, 0)
    assert len(marked) == 44


def test_a_full_stop_behind_an_answer_is_no_part_of_it(tmp_path):
    entry = question("a", "Where?", ("the den", 20))
    root = make_squad(tmp_path / "s", dev=squad_file((CONTEXT, [entry])))
    _, spans, _, offsets = next(squad_windows.load(root, LENGTH, **CUT).evaluate(1, Shard()))
    first, last = spans[0].tolist()
    assert CONTEXT[offsets[0, first, 0] : offsets[0, last, 1]] == "the den"


def test_each_answer_is_complete_in_at_least_one_window(data):
    batches = list(data.train(1, 0, 0, 0, Shard()))
    marked = [b[1].tolist() != [[0, 0]] for b in batches]
    assert sum(marked) >= 30, "questions"
    assert not all(marked)


def test_batches_do_not_depend_on_ranks_or_the_start(data):
    whole = [b[0]["input_ids"] for b in data.train(6, 3, 1, 0, Shard())]
    parts = [[b[0]["input_ids"] for b in data.train(6, 3, 1, 0, Shard(r, 2))] for r in range(2)]
    for x, a, b in zip(whole, *parts, strict=True):
        assert torch.equal(x, torch.cat([a, b]))
    numbers = torch.cat([b[2] for r in range(3) for b in data.evaluate(4, Shard(r, 3))])
    assert numbers.tolist() == [n for b in data.evaluate(99, Shard()) for n in b[2].tolist()]
    empty = next(iter(data.train(2, 0, 0, 0, Shard(0, 2))))
    assert empty[1].shape == (1, 2)


# ---- figures ----


def official(text):
    """Normalisation step by step, as the published description has it."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def brute_f1(answer, truth):
    ours, theirs = official(answer).split(), official(truth).split()
    left, same = list(theirs), 0
    for word in ours:
        if word in left:
            left.remove(word)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "f1"),
    [
        ("The Otter!", "otter", 1, 1),
        ("an otter", "the otter", 1, 1),
        ("theatre", "atre", 0, 0),
        ("otter", "otter den", 0, 2 / 3),
        ("otter otter", "otter", 0, 2 / 3),
        ("den otter", "otter den", 0, 1),
        ("the", "a", 1, 0),
        ("U.S.", "us", 1, 1),
        ("1,000", "1000", 1, 1),
        ("well-known", "well known", 0, 0),
        ("otter\u00a0den", "Otter\n den", 1, 1),
        ("", "otter", 0, 0),
    ],
)
def test_metrics_of_hand_made_cases(answer, truth, exact, f1):
    assert language_tasks.exact_match(answer, truth) == exact
    assert language_tasks.f1(answer, truth) == pytest.approx(f1)


WORDS = st.text(st.sampled_from("a an the Otter den. ,-!'xA\n\t"), max_size=20)


@FUZZ
@given(answer=WORDS, truth=WORDS)
def test_metrics_follow_their_definition(answer, truth):
    assert language_tasks.exact_match(answer, truth) == (official(answer) == official(truth))
    assert language_tasks.f1(answer, truth) == pytest.approx(brute_f1(answer, truth), abs=1e-12)


@FUZZ
@given(seed=st.integers(0, 10**6), length=st.integers(1, 9), most=st.integers(1, 12))
def test_the_best_span_has_the_highest_score_of_all_spans(seed, length, most):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, length, generator=generator)
    inside = torch.rand(3, length, generator=generator) < 0.7
    for i, (score, first, last) in enumerate(zip(*best_spans(logits, inside, most), strict=True)):
        all_ = {
            (s, e): (logits[i, 0, s] + logits[i, 1, e]).item()
            for s in range(length) for e in range(s, min(length, s + most))
            if inside[i, s] and inside[i, e]
        }  # fmt: skip
        if not all_:
            assert score == -math.inf
            continue
        assert (first.item(), last.item()) == max(all_, key=all_.get)
        assert score.item() == max(all_.values())


class Scores(nn.Module):
    """Logits by token id, so that windows of one question agree on a token."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))

    def forward(self, inputs):
        places = torch.arange(LENGTH) / 100
        return self.table[inputs["input_ids"]].transpose(1, 2) + places


def expected(data, task):
    """Figures from every span of every window, question by question."""
    best = {}
    for inputs, _, (number,), offsets in data.evaluate(1, Shard()):
        begins, ends = Scores()(inputs)[0]
        for s in range(LENGTH):
            for e in range(s, min(LENGTH, s + task.max_answer_tokens)):
                if offsets[0, s, 0] >= 0 and offsets[0, e, 0] >= 0:
                    new = (
                        (begins[s] + ends[e]).item(),
                        offsets[0, s, 0].item(),
                        offsets[0, e, 1].item(),
                    )
                    if int(number) not in best or new[0] > best[int(number)][0]:
                        best[int(number)] = new
    f1 = exact = 0.0
    for number, asked in enumerate(data.eval_questions):
        text = asked.context[best[number][1] : best[number][2]]
        f1 += max(brute_f1(text, a.text) for a in asked.answers)
        exact += max(official(text) == official(a.text) for a in asked.answers)
    return {"f1": 100 * f1 / len(best), "exact_match": 100 * exact / len(best)}


def evaluate_rank(root, shard_of):
    data = squad_windows.load(root, LENGTH, **CUT)
    backend = here() if shard_of is None else None
    ranks = Ranks(CPU) if backend is None else backend.ranks
    evaluation = QuestionAnswering(data.eval_questions, 4).evaluation()
    for batch in data.evaluate(3, Shard(ranks.rank, ranks.world_size)):
        evaluation.add(Scores(), batch)
    return evaluation.metrics(ranks), evaluation.texts()


def test_metrics_use_the_best_answer_over_all_windows(root, data):
    task = QuestionAnswering(data.eval_questions, 4)
    figures, texts = evaluate_rank(root, Shard())
    assert figures == pytest.approx(expected(data, task))
    assert 0 < figures["f1"] < 100
    assert len(texts) == len(data.eval_questions)


@pytest.mark.slow
@pytest.mark.ranks
def test_metrics_are_the_same_if_two_ranks_share_a_question(root, data):
    numbers = [[int(n) for b in data.evaluate(3, Shard(r, 2)) for n in b[2]] for r in range(2)]
    assert numbers[0][-1] == numbers[1][0]
    alone = evaluate_rank(root, Shard())
    for found in run_ranks(2, evaluate_rank, root, None):
        assert found == alone


def test_a_question_without_an_answer_counts_0():
    asked = [
        squad.SquadQuestion(str(i), "?", "an otter", (squad.Answer("an otter", 0),))
        for i in range(4)
    ]
    evaluation = QuestionAnswering(asked).evaluation()
    evaluation.best[2] = (1.0, 0, 8)
    assert evaluation.metrics(Ranks(CPU)) == {"f1": 25.0, "exact_match": 25.0}


def test_of_equal_scores_the_earlier_and_shorter_answer_counts_in_any_order():
    asked = squad.SquadQuestion("0", "?", "an otter", (squad.Answer("an otter", 0),))
    windows = [torch.tensor([[place]]) for place in ([0, 2], [0, 8], [3, 8])]
    for order in itertools.permutations(windows):
        evaluation = QuestionAnswering([asked]).evaluation()
        for offsets in order:
            logits = torch.zeros(1, 2, 1)
            evaluation.add(nn.Identity(), (logits, None, torch.tensor([0]), offsets))
        assert evaluation.texts() == {0: "an"}


def test_the_worst_answers_are_shown(data):
    task = QuestionAnswering(data.eval_questions, 4)
    shown = task.show(Scores(), next(iter(data.evaluate(99, Shard()))), 9)
    scores = [float(p.caption.removeprefix("F1 ")) for p in shown]
    assert scores == sorted(scores)
    assert len(shown) == 9
    asked, true, predicted, context = shown[0].text.split("\n")
    (question_,) = [q for q in data.eval_questions if q.context == context]
    assert asked == question_.text
    assert question_.answers[0].text in true
    assert 100 * max(brute_f1(predicted.removeprefix("predicted: "), a.text)
                     for a in question_.answers) == pytest.approx(scores[0], abs=0.5)  # fmt: skip


def test_the_loss_is_the_mean_of_both_ends():
    logits = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    spans = torch.tensor([[1, 2], [0, 0], [4, 4]])
    loss, output = QuestionAnswering().forward(nn.Identity(), (logits, spans))
    by_hand = [-logits[i, k].softmax(0)[spans[i, k]].log() for i in range(3) for k in range(2)]
    assert loss.item() == pytest.approx(sum(x.item() for x in by_hand) / 6, rel=1e-6)
    assert output is logits


# ---- demo ----


@pytest.mark.slow
def test_the_demo_has_correct_answers_about_the_documentation(tmp_path):
    demo_language.make_squad(tmp_path)
    counts, faults = squad.scan(tmp_path)
    assert list(counts) == ["train", "eval"]
    assert not faults
    train, _ = squad.read(tmp_path / "train-v1.1.json")
    dev, _ = squad.read(tmp_path / "dev-v1.1.json")
    assert len(train) > 5000
    assert len(dev) > 300
    assert not {q.context for q in train} & {q.context for q in dev}
    asked = {q.text: q.answers[0].text for q in train + dev}
    assert asked["What does textwrap.dedent do?"].startswith("Remove any common leading whitespace")
    assert asked["What are the arguments of textwrap.indent?"] == "text, prefix, predicate"
    assert asked["Which module defines dedent?"] == "textwrap"
    assert "has questions already" in refused(demo_language.make_squad, tmp_path)
