"""The simulator: seconds of a training step on ranks that you do not have.

:mod:`.hardware` times one message and one piece of work. :mod:`.step` runs a plan with them, and
:mod:`.sweep` does so for many numbers of ranks and strategies. These three do not import torch.
:mod:`.conduct` says how an implementation uses the machine, and :mod:`.calibration` fits what no
data sheet states.
"""
