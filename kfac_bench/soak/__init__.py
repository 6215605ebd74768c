"""``kfac-bench soak``: a long run whose processes are watched from outside."""
