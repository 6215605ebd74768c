"""What the trainer asks of every dataset: batches, their order, and processes that read ahead."""
