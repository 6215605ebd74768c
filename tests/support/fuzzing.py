"""What fuzz tests share: valid input, spoilt in small ways; and what may come of reading it.

Each test has its share of examples; ``pytest --hypothesis-profile=long`` takes 200 times as many,
other ones each time.
"""

import copy
import json
import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from kfac_bench.errors import UsageError

DEEP = {
    **{f"deep list {n}": "[" * n + "]" * n for n in (900, 100_000)},
    **{f"deep object {n}": '{"a":' * n + "1" + "}" * n for n in (900, 100_000)},
}
"""JSON nested as deeply as Python's own stack, and more; texts stand for it."""


def fuzz(examples):
    """As ``@settings``: that many examples, the same each time; of the long profile, more."""
    times = max(1, settings().max_examples // 100)
    return settings(
        max_examples=examples * times,
        derandomize=times == 1,
        database=None,
        deadline=None,
        phases=[Phase.generate] if times == 1 else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def refused_or(read):
    """Return what ``read`` returns, or None where it was refused in one line."""
    found, said = None, "read"
    try:
        found = read()
    except UsageError as error:
        said = str(error)
    assert said.strip()
    assert "\n" not in said
    return found


NUMBERS = st.sampled_from(
    [
        *(0, -1, 1, 7, 2**31, -(2**31), 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320),
        *(float("nan"), float("inf"), float("-inf")),
    ]
)
TEXTS = st.sampled_from(
    [
        *("", " ", "\n", "\x00", "\x1b[31m", "\ud800", "\u202e", "<script>alert(1)</script>"),
        *("../../etc/passwd", "/dev/zero", "${x}", "$(touch x)", "1e9", "nan", "null", "a" * 5000),
        *("]]>", "|", "[red]", "%s%n", "\u0130\ufb01\U0001f600", "-", "--help", "{{7*7}}"),
        *("javascript:alert(1)", '" onload="alert(1)'),
    ]
) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS | st.integers() | st.floats()
VALUES = (
    LEAVES
    | st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
        max_leaves=8,
    )
    | st.sampled_from(list(DEEP))
)


def _places(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from _places(value, (*path, key))
        else:
            yield (*path, key)


@st.composite
def spoilt(draw, tree):
    """``tree`` of dicts, lists and leaves; one to three places are changed, dropped or doubled."""
    made = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(made, dict | list) or not made:
            return made
        path = draw(st.sampled_from(list(_places(made))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(VALUES)
            continue
        node = made
        for key in path[:-1]:
            node = node[key]
        what = draw(st.sampled_from(["change", "change", "drop", "double", "rename"]))
        if what == "change":
            node[path[-1]] = draw(VALUES)
        elif what == "drop":
            del node[path[-1]]
        elif what == "double" and isinstance(node, list):
            node.insert(0, copy.copy(node[path[-1]]))
        elif isinstance(node, dict):
            node[draw(TEXTS)] = node.pop(path[-1]) if what == "rename" else node[path[-1]]
    return made


def as_json(tree):
    """As Python writes it, NaN and halves of characters included; however deep."""
    text = json.dumps(tree)
    for name, nested in DEEP.items():
        text = text.replace(f'"{name}"', nested)
    return text


DAMAGES = ("flip", "flip", "set", "zero", "cut", "twice", "end", "noise")


@st.composite
def damaged(draw, content):
    """``content``, bytes: some flipped, a part zeroed, cut out, put in twice, or the end gone."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        if not made:
            break
        at = draw(st.integers(0, len(made) - 1))
        length = draw(st.sampled_from([1, 2, 4, 16, 512, 4096]))
        match draw(st.sampled_from(DAMAGES)):
            case "flip":
                made[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                made[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0x2E]))
            case "zero":
                made[at : at + length] = bytes(len(made[at : at + length]))
            case "cut":
                del made[at : at + length]
            case "twice":
                made[at:at] = made[at : at + length]
            case "end":
                del made[at:]
            case "noise":
                seed = draw(st.integers(0, 2**16))
                made[at : at + length] = random.Random(seed).randbytes(length)
    return bytes(made)
