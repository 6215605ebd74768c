"""The interface of every dataset: batches, their order, and processes that read ahead."""
