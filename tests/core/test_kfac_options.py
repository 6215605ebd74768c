"""``help``, ``inspect.signature`` and type checkers see the tables of options."""

import inspect
import subprocess
import sys
import typing

import pytest
import torch

from kfac_bench.core import KFAC
from kfac_bench.core.eigen_adam_optimizer import EigenAdam
from kfac_bench.core.kfac_options import (
    EIGEN_ADAM_OPTIONS,
    OPTIONS,
    PRESETS,
    EigenAdamOptions,
    KFACOptions,
)
from kfac_bench.core.options import types


@pytest.mark.parametrize(
    ("owner", "options", "table"),
    [(KFAC, KFACOptions, OPTIONS), (EigenAdam, EigenAdamOptions, EIGEN_ADAM_OPTIONS)],
)
def test_the_signature_and_the_docstring_have_each_option(owner, options, table):
    parameters = inspect.signature(owner).parameters
    for name, kind in types(options).items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].annotation == kind
        default = torch.float32 if name == "state_dtype" else table[name].default
        assert parameters[name].default == default
        assert f"\n    {name}: " in owner.__doc__
        assert typing.get_type_hints(owner.__init__)[name] == kind
    assert "**options" not in str(inspect.signature(owner))
    assert "    options: " not in owner.__doc__


def test_a_text_of_several_paragraphs_keeps_its_lists():
    entry = OPTIONS["damping"].entry("damping", None)
    first, bullets, rest = entry.split("\n\n")
    assert first.startswith("damping: Tikhonov damping gamma, usually 1e-4 to 1e-1;")
    assert "Default: ``None``." in " ".join(first.split())
    assert bullets.count("\n    * ") == 2
    assert rest.startswith("    If you set gamma")


def test_an_unknown_keyword_is_refused_with_the_nearest_name():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"keyword argument 'dampning'\. Did you mean 'damping'"):
        KFAC(model, optimizer, dampning=0.1)
    with pytest.raises(TypeError, match=r"EigenAdam.*'scal'\. Did you mean 'scale'"):
        EigenAdam(model.parameters(), scal=2.0)


def test_a_preset_has_options_of_the_table():
    assert all(options.keys() <= OPTIONS.keys() for options in PRESETS.values())


def test_the_table_needs_no_torch():
    code = "import sys, kfac_bench.core.kfac_options; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
