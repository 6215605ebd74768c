"""The soak test: a long run whose processes are watched from outside (`make soak`)."""
