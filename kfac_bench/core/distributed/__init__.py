"""How ranks exchange tensors: torch.distributed, Horovod, DTensor, and gradients under ZeRO."""
