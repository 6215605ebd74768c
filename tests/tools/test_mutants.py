"""The list of `make mutants` fits the code, and its runner tells noticed changes from survivors."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from kfac_bench.errors import UsageError
from tests.mutants import judge, rows
from tests.mutants.rows import ROOT, Mutant

MUTANTS = rows.load()


def test_each_old_text_occurs_once_and_the_change_is_a_change():
    assert len(MUTANTS) >= 120
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        changed = mutant.apply(text)
        assert changed != text
        compile(changed, mutant.file, "exec")  # a change that does not compile proves nothing


def test_the_tests_of_each_change_exist():
    for mutant in MUTANTS:
        for test in mutant.tests:
            path, name = ROOT / rows.file_of(test), test.partition("::")[2]
            assert path.exists(), f"{mutant}: {test}"
            assert not name or f"\ndef {name}(" in path.read_text(), f"{mutant}: {test}"


def test_an_old_text_that_is_gone_is_named():
    mutant = Mutant(Path("kfac_bench/errors.py"), "no such text", "", ("tests/core",))
    with pytest.raises(UsageError, match=r"kfac_bench/errors.py has .* 0 times .*'no such text'"):
        mutant.apply((ROOT / mutant.file).read_text())


def test_ctrl_c_ends_the_tests_that_run(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    def endless(tests, scratch):
        os.setsid()
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(60)

    monkeypatch.setattr(judge, "_run", endless)
    others = multiprocessing.active_children()  # of other tests of this process
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            judge.run_tests((), tmp_path, 30)
        assert set(multiprocessing.active_children()) <= set(others)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_the_runner_judges_in_a_copy(tmp_path):
    """One change that no test can notice, one that a test notices, and tests that take too long."""
    judge.copy_to(tmp_path)
    file, tests = Path("kfac_bench/output.py"), ("tests/test_it.py",)
    before = (ROOT / file).read_text()
    (tmp_path / "tests" / "test_it.py").write_text(
        "from kfac_bench.output import counted\n"
        "def test_it(): assert counted(2, 'file') == '2 files'\n"
    )
    (tmp_path / "tests" / "test_slow.py").write_text("import time\ndef test_it(): time.sleep(99)\n")
    first_line = before.splitlines()[0]
    changes = {
        (first_line, first_line.replace("a", "e", 1), tests): judge.SURVIVED,
        ("def counted(", "def miscounted(", tests): judge.NOTICED,
        (first_line, first_line, ("tests/test_slow.py",)): judge.TIMEOUT,
    }
    for change, outcome in changes.items():
        limit_s = 5 if outcome == judge.TIMEOUT else 30
        assert judge.judge(Mutant(file, *change), tmp_path, limit_s)[0] == outcome
        assert (tmp_path / file).read_text() == before
    assert (ROOT / file).read_text() == before
    with pytest.raises(UsageError, match="there are no tests"):
        judge.judge(Mutant(file, first_line, first_line, ("tests/none.py",)), tmp_path, 20)
