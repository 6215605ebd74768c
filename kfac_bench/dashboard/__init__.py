"""The W&B dashboard as code: what is on it (:mod:`.content`), how W&B gets it (:mod:`.views`)."""
