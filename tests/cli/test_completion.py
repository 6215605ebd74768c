"""Completion in shells: the candidates, and the function in a real bash, zsh and fish."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kfac_bench.cli import setup_command
from kfac_bench.cli.bench_command import build_parser
from kfac_bench.cli.setup_command import SCRIPTS, candidates
from kfac_bench.config.conf_files import options_of


@pytest.mark.parametrize(
    ("line", "included", "excluded"),
    [
        ("kfac-train mo", {"model=", "model."}, {"data="}),
        ("kfac-train ", {"kfac=", "kfac.", "seed=", "trainer.", "problem=", "--cfg"}, {"--to"}),
        ("kfac-train fr", {"from="}, set()),
        ("kfac-train model=vit optimizer=ad", {"optimizer=adam", "optimizer=adamw"}, {"adam"}),
        ("kfac-train kfac.damp", {"kfac.damping=", "kfac.damping_freq="}, {"kfac.skip="}),
        ("kfac-train kfac.fisher=", {"kfac.fisher=mc"}, {"kfac.fisher=true"}),
        ("kfac-train kfac.grafting=", {"kfac.grafting=true", "kfac.grafting=false"}, set()),
        ("kfac-train experiment=lgg/", {"experiment=lgg/unet_kfac"}, {"experiment=lgg"}),
        ("kfac-train experiment=kaisa_unet_lgg profile=", {"profile=smoke"}, set()),
        ("kfac-plan ", {"simulate", "--world-size", "model="}, {"--cfg"}),
        ("kfac-plan s", {"simulate", "seed="}, {"--strategies"}),
        (
            "kfac-plan simulate ",
            {"--hardware", "--strategies", "--world-size", "model=", "problem=", "--help"},
            {"--layers", "simulate"},
        ),
        ("kfac-plan simulate --hardware t", {"two_cores"}, {"longhorn_v100"}),
        (
            "kfac-plan simulate --strategies ",
            {"sgd", "mem_opt", "hybrid_opt"},
            set(),
        ),
        (
            "kfac-plan simulate model=resnet50 --strategies sgd,",
            {"sgd,comm_opt"},
            {"sgd,sgd"},
        ),
        (
            "kfac-bench scaling ",
            {"--hardware", "--strategy", "--mode", "model=", "kfac.", "--help"},
            {"--strategies", "all"},
        ),
        ("kfac-bench scaling --hardware l", {"longhorn_v100"}, {"two_cores"}),
        (
            "kfac-bench scaling --strategy comm_opt,",
            {"comm_opt,layer_wise"},
            {"comm_opt,sgd", "comm_opt,comm_opt"},
        ),
        ("kfac-bench scaling model=resnet2", {"model=resnet20"}, set()),
        ("kfac-bench ", {"run", "list", "completion", "--version"}, {"model="}),
        ("kfac-bench run dem", {"demo"}, {"try"}),
        ("kfac-bench run demo --s", {"--seeds"}, {"--wave"}),
        ("kfac-bench run demo kfac=", {"kfac=none"}, set()),
        ("kfac-bench run demo --launcher s", {"slurm"}, set()),
        ("kfac-bench report all --profile s", {"smoke"}, {"seed="}),
        ("kfac-bench wandb ", {"upload"}, {"run"}),
        ("kfac-bench completion ", {"bash", "zsh", "fish"}, {"--line"}),
        ("kfac-data make-demo c", {"cifar10", "coco"}, {"lgg"}),
        ("/some/where/kfac-data ver", {"verify"}, {"make-demo"}),
        ("kfac-train unknown.option=", set(), {"unknown.option=true"}),
        ("kfac-train", set(), {"model="}),
    ],
)
def test_candidates(line, included, excluded):
    found = set(candidates(line, build_parser))
    assert found >= included
    assert not found & excluded
    assert all(candidate.startswith(line.rpartition(" ")[2]) for candidate in found)


@pytest.mark.parametrize("group", ["model", "data", "kfac", "experiment"])
def test_every_choice_of_a_group_is_a_candidate(group):
    assert candidates(f"kfac-train {group}=", build_parser) == [
        f"{group}={c}" for c in options_of(group)
    ]


@pytest.fixture
def here(tmp_path):
    """Return an environment whose kfac-bench calls this checkout, and notes what was imported."""
    code = (
        "import sys; from kfac_bench import cli\n"
        "try: cli.bench(sys.argv[1:])\n"
        f"finally: print('torch' in sys.modules, file=open('{tmp_path}/torch', 'w'))\n"
    )
    (tmp_path / "call.py").write_text(code)
    script = tmp_path / "kfac-bench"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/call.py "$@"\n')
    script.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(setup_command.__file__).parents[2]),
        "HOME": str(tmp_path),
    }


def needed(shell):
    """Return the path of the shell; without the shell the test is skipped."""
    return shutil.which(shell) or pytest.skip(f"no {shell}; Debian's package {shell} installs it")


def test_the_function_completes_in_a_real_bash(tmp_path, here):
    bash = f"""{SCRIPTS["bash"]}
        COMP_LINE="kfac-train seed=1 optimizer=la trailing"
        COMP_POINT=30 COMP_WORDBREAKS=" ="
        _kfac_bench_complete
        printf "%s\\n" "${{COMPREPLY[@]}}"
        complete -p kfac-data
    """
    command = ["bash", "--norc", "-c", bash]
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    *found, registered = done.stdout.splitlines()
    assert (found, done.stderr) == (["lamb", "lars"], "")
    assert "-F _kfac_bench_complete kfac-data" in registered
    assert (tmp_path / "torch").read_text() == "False\n"


def test_the_words_of_simulate_need_no_torch(tmp_path, here):
    command = ["kfac-bench", "completion", "--line", "kfac-plan simulate --strategies layer"]
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("layer_wise\n", "")
    assert (tmp_path / "torch").read_text() == "False\n"


def test_the_function_completes_in_a_real_fish(tmp_path, here):
    asked = f"{SCRIPTS['fish']}\ncomplete -C 'kfac-train seed=1 optimizer=la'"
    command = [needed("fish"), "--no-config", "-c", asked]
    done = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["optimizer=lamb", "optimizer=lars"], "")


@pytest.mark.slow
def test_the_function_completes_in_a_real_zsh(tmp_path, here):
    """The tab key completes "mode" to what two candidates share, and "optimizer=lam" to a word."""
    (tmp_path / ".zshrc").write_text(
        f"""PS1="ready> "
        {SCRIPTS["zsh"]}
        kfac-train() {{ print -r -- "took: $*;" }}
        """
    )
    here |= {"ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    ours, theirs = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    command = [needed("zsh"), "-d", "-i"]
    zsh = subprocess.Popen(command, cwd=tmp_path, env=here, start_new_session=True, **ends)
    os.close(theirs)

    def read_until(pattern):
        screen = ""
        while not (found := re.search(pattern, screen)):
            screen += os.read(ours, 4096).decode()
        return found[0]

    try:
        read_until("ready> ")
        os.write(ours, b"kfac-train mode\t=vit optimizer=lam\tseed=1\r")
        assert read_until("took: .*;") == "took: model=vit optimizer=lamb seed=1;"
    finally:
        zsh.kill()
        zsh.wait()
        os.close(ours)
