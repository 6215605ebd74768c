"""``python -m tests.reliability.soak``: a long run whose processes are watched from outside."""
