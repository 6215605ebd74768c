"""Which cases of a test are slow: `make test-all` runs them, `make test` does not."""

import pytest


def slow(*values, id=None):
    """Return a case that is left out of the quick run."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def quick_if(keep, cases):
    """Return the cases for ``parametrize``; those for which ``keep(case)`` is false are slow."""
    return [
        case if keep(case) else slow(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
