"""The W&B dashboard as code: W&B gets the panels of runs (:mod:`.views`) and old runs."""
