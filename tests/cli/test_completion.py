"""Completion in bash: the candidates, and the function in a real bash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kfac_bench.cli import completion_command
from kfac_bench.cli.completion_command import candidates
from kfac_bench.config.conf_files import options_of


@pytest.mark.parametrize(
    ("line", "included", "excluded"),
    [
        ("kfac-train mo", {"model=", "model."}, {"data="}),
        ("kfac-train ", {"kfac=", "kfac.", "seed=", "trainer.", "problem=", "--cfg"}, {"--to"}),
        ("kfac-train model=vit optimizer=ad", {"optimizer=adam", "optimizer=adamw"}, {"adam"}),
        ("kfac-train kfac.damp", {"kfac.damping=", "kfac.damping_freq="}, {"kfac.skip="}),
        ("kfac-train kfac.fisher=", {"kfac.fisher=mc"}, {"kfac.fisher=true"}),
        ("kfac-train kfac.grafting=", {"kfac.grafting=true", "kfac.grafting=false"}, set()),
        ("kfac-train experiment=lgg/", {"experiment=lgg/unet_kfac"}, {"experiment=lgg"}),
        ("kfac-train experiment=kaisa_unet_lgg profile=", {"profile=smoke"}, set()),
        ("kfac-plan ", {"simulate", "world_size=", "model="}, {"--cfg"}),
        ("kfac-bench ", {"run", "list", "completion", "--version"}, {"model="}),
        ("kfac-bench run dem", {"demo"}, {"embedded"}),
        ("kfac-bench run demo --s", {"--seeds"}, {"--wave"}),
        ("kfac-bench run demo kfac=", {"kfac=none"}, set()),
        ("kfac-bench wandb ", {"upload"}, {"run"}),
        ("kfac-data make-demo c", {"cifar10", "coco"}, {"lgg"}),
        ("/some/where/kfac-data ver", {"verify"}, {"make-demo"}),
        ("kfac-train unknown.option=", set(), {"unknown.option=true"}),
        ("kfac-train", set(), {"model="}),
    ],
)
def test_candidates(line, included, excluded):
    found = set(candidates(line))
    assert found >= included
    assert not found & excluded
    assert all(candidate.startswith(line.rpartition(" ")[2]) for candidate in found)


@pytest.mark.parametrize("group", ["model", "data", "kfac", "experiment"])
def test_every_choice_of_a_group_is_a_candidate(group):
    assert candidates(f"kfac-train {group}=") == [f"{group}={c}" for c in options_of(group)]


def test_the_function_completes_in_a_real_bash(tmp_path):
    """The stand-in for kfac-bench in PATH calls this checkout and says what it imported."""
    code = (
        "import sys; from kfac_bench import cli\n"
        "try: cli.bench(sys.argv[1:])\n"
        "finally: print('torch' in sys.modules, file=open('torch', 'w'))\n"
    )
    (tmp_path / "call.py").write_text(code)
    script = tmp_path / "kfac-bench"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/call.py "$@"\n')
    script.chmod(0o755)
    bash = f"""{completion_command.SCRIPT}
        COMP_LINE="kfac-train seed=1 optimizer=la trailing"
        COMP_POINT=30 COMP_WORDBREAKS=" ="
        _kfac_bench_complete
        printf "%s\\n" "${{COMPREPLY[@]}}"
        complete -p kfac-data
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", bash],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(completion_command.__file__).parents[2]),
        },
        capture_output=True,
        text=True,
    )
    *found, registered = done.stdout.splitlines()
    assert (found, done.stderr) == (["lamb", "lars"], "")
    assert "-F _kfac_bench_complete kfac-data" in registered
    assert (tmp_path / "torch").read_text() == "False\n"
