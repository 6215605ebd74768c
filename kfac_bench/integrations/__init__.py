"""K-FAC in training frameworks, one module for each.

* :mod:`.huggingface`: a callback for the Trainer of transformers.
* :mod:`.lightning`: a callback for the Trainer of Lightning.
* :mod:`.accelerate`: one function for scripts with an Accelerator.

docs/how-to/training_frameworks.md shows how to use them. The frameworks are not dependencies of
kfac_bench: each module imports its own, and says what to install if the framework is missing.
"""
