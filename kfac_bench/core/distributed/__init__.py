"""How the ranks of K-FAC exchange tensors: collectives, Horovod, DTensor and DeepSpeed ZeRO."""
