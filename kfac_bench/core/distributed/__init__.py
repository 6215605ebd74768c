"""The exchange of tensors between ranks: torch.distributed, Horovod, DTensor, and ZeRO."""
