"""The package that users install: the wheel, its commands, and how to cite it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import kfac_bench
from kfac_bench import cli
from kfac_bench.benchmark import slurm_jobs
from kfac_bench.config import compose
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TINY = (
    *("model=autoencoder", "model.hidden=[4]", "data=digits", "trainer.threads=1"),
    *("trainer.max_steps=2", "kfac.update_freq=2", "kfac.factor_update_freq=1", "run_id=r"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel of the checkout."""
    if not all(importlib.util.find_spec(module) for module in ("build", "hatchling")):
        pytest.skip("build and hatchling are not installed")
    folder = tmp_path_factory.mktemp("wheel")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_contains_conf_the_batch_scripts_and_the_report_template(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = next(n for n in names if n.endswith("entry_points.txt"))
        commands = archive.read(scripts).decode()
    ours = {f"kfac_bench/{p.relative_to(ROOT)}" for p in compose.CONF_DIR.rglob("*.yaml")}
    ours |= {f"kfac_bench/slurm/{p.name}" for p in (ROOT / "slurm").glob("*.sbatch")}
    assert "kfac_bench/conf/train.yaml" in ours
    page = {f"kfac_bench/report/{p.name}" for p in (ROOT / "kfac_bench/report").glob("*.[!p]*")}
    assert "kfac_bench/report/chart.js" in page
    assert names >= {"kfac_bench/__main__.py", "kfac_bench/slurm/common.sh", *page, *ours}
    assert not any(n.startswith(("tests/", "conf/", "slurm/")) for n in names)
    for name, target in PROJECT["scripts"].items():
        assert f"{name} = {target}" in commands


def test_links_of_the_readme_lead_to_the_public_address(wheel):
    """Package indexes show the README, whose relative links would lead nowhere."""
    from hatch_build import with_address

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]
    address, text = config["hooks"]["custom"]["public_address"], (ROOT / "README.md").read_text()
    assert metadata.endswith(with_address(text, address))
    assert ("Project-URL: Source" in metadata) == bool(address)
    assert with_address(text, "") == text
    set_text = with_address(text, "https://example.org/k")
    assert "![Validation" in set_text
    assert "](https://example.org/k/raw/main/docs/demo.svg)" in set_text
    assert "](https://example.org/k/blob/main/docs/tutorials/first_run.md)" in set_text
    assert "](docs/" not in set_text


@pytest.mark.slow
def test_an_installed_wheel_runs_all_commands_outside_the_repository(wheel, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = ["-m", "pip", "-q", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *pip, str(wheel)], check=True)
    # All other packages are taken from here; files that end in .pth, which would bring the
    # checkout along, have no effect in a folder that is named like this.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KFAC"))}

    def run(command, *words):
        done = subprocess.run(
            [str(environment / "bin" / command), *map(str, words)],
            cwd=tmp_path,
            env=clean | {"WANDB_MODE": "offline", "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, (command, words, done.stdout, done.stderr)
        return done.stdout

    where = run("python", "-c", "import kfac_bench; print(kfac_bench.__file__)")
    assert Path(where.strip()).is_relative_to(environment)
    assert run("kfac-train", "--version").strip() == kfac_bench.__version__
    run("kfac-train", *TINY)
    # No other command of this test reads conf/hardware.
    said = run("kfac-plan", "simulate", *TINY[:2], "--hardware=two_cores", "--world-size=2")
    assert "simulated: autoencoder on digits" in said
    assert "hardware two_cores" in said
    run("kfac-data", "make-demo", "cifar10", "cifar")
    assert "demo: " in run("kfac-bench", "list")
    run("kfac-bench", "compare", "runs/r", "--html", "page.html")
    run("kfac-bench", "slurm", "--to", "slurm")
    assert (tmp_path / "slurm" / "smoke.sbatch").is_file()
    assert (tmp_path / "page.html").is_file()


def slurm(*words):
    with pytest.raises(SystemExit) as stop:
        cli.bench(["slurm", *map(str, words)])
    return stop.value.code


def test_batch_scripts_are_copied_and_a_changed_script_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    shutil.copytree(ROOT / "slurm", source)
    names = {path.name for path in source.iterdir()} - {"site.sh"}
    (source / "logs").mkdir()
    (source / "site.sh").touch()
    monkeypatch.setattr(slurm_jobs, "SCRIPTS", source)
    assert slurm("--to", "slurm") == 0
    said = capsys.readouterr().out
    assert "sbatch slurm/smoke.sbatch" in said
    assert "KFAC_SLURM" not in said
    assert {p.name for p in Path("slurm").iterdir()} == names
    Path("slurm/common.sh").unlink()
    Path("slurm/squad.sbatch").write_text("mine")
    assert slurm("--to", "slurm") == 2
    assert "slurm/squad.sbatch is there and differs" in capsys.readouterr().err
    assert not Path("slurm/common.sh").exists(), "nothing is copied"
    assert slurm("--to", "elsewhere") == 0
    assert f"export KFAC_SLURM={tmp_path / 'elsewhere'}" in capsys.readouterr().out
    assert slurm("--to", "my folder") == 0
    said = capsys.readouterr().out
    assert f"export 'KFAC_SLURM={tmp_path / 'my folder'}'" in said
    assert "sbatch 'my folder/smoke.sbatch' experiment=" in said
    assert slurm("--to", "slurm/squad.sbatch/x") == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_file_is_read_in_the_encoding_of_the_locale():
    files = (ROOT / "kfac_bench").rglob("*.py")
    assert not [f for f in files if ".read_text()" in f.read_text(encoding="utf-8")]


def test_the_citation_names_the_software_and_both_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == [{"name": "kfac_bench developers"}] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]
    papers = {paper["doi"]: paper["year"] for paper in citation["references"]}
    assert papers == {"10.1109/TPDS.2022.3161187": 2022, "10.1145/3458817.3476152": 2021}


def test_the_version_is_in_one_place_and_in_the_changelog():
    """Also in results, which name the version that made them."""
    version = kfac_bench.__version__
    files = [*ROOT.glob("*.*"), *ROOT.glob("kfac_bench/**/*.py"), *ROOT.glob("docs/*.md")]
    files += [*ROOT.glob("docs/[!r]*/**/*.md"), *ROOT.glob("docs/reference/*.md")]
    holds = [path for path in files if path.is_file() and f'{version}"' in path.read_text()]
    assert holds == [ROOT / "kfac_bench" / "__init__.py"]
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_a_container_copies_all_that_the_package_is_built_from(name):
    text = (ROOT / "containers" / name).read_text()
    assert "Not built here" in text
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for file in (*included["targets"]["sdist"]["include"], "pyproject.toml", "constraints.txt"):
        assert file in text
        assert (ROOT / file).exists()
