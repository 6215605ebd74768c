"""Property tests: examples that Hypothesis makes."""

from hypothesis import HealthCheck, given, settings


def for_all(*strategies, **named):
    """Return ``given`` without a time limit: the machine may be busy."""
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return lambda test: slow(given(*strategies, **named)(test))
