"""K-FAC in the Trainer of Lightning: ``callbacks=[KFACCallback()]``.

The module works with both import names, ``lightning.pytorch`` and ``pytorch_lightning``.
docs/how-to/training_frameworks.md says how to use it and what is not supported.
"""

import importlib
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from torch.optim import Optimizer

from kfac_bench.core import KFAC
from kfac_bench.integrations.framework_state import (
    keywords_type,
    load_whole_state,
    options_for,
    whole_state,
)

NAMES = ("lightning.pytorch", "pytorch_lightning")
ENGINES = ("DeepSpeedStrategy", "FSDPStrategy")
"""Strategies that keep the gradients to themselves."""
FINDERS = {"LearningRateFinder", "BatchSizeFinder"}
"""Callbacks that train for some steps in ``on_fit_start``, without all other callbacks."""


def _callback_class() -> Any:
    """Return the class of the name that the script has imported; Trainers take either class."""
    for name in sorted(NAMES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise ImportError(
        "kfac_bench.integrations.lightning needs Lightning: pip install 'lightning>=2.5'"
    )


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = _callback_class()


class KFACCallback(Callback):
    """Preconditions the gradients of a ``lightning.pytorch.Trainer`` by K-FAC.

    The callback attaches K-FAC to the model and the optimizer when fitting begins, and removes
    K-FAC when fitting ends. Checkpoints of the Trainer contain its state, so that
    ``trainer.fit(model, ckpt_path=...)`` continues bit by bit.

    Example::

        trainer = Trainer(max_epochs=5, callbacks=[KFACCallback()])
        trainer.fit(model, loader)

    With several optimizers, as in a GAN, pass one callback for each optimizer that uses K-FAC, such
    as ``KFACCallback(module="discriminator", optimizer_index=1)``.

    With ``fisher="mc"`` or ``"type2"``, call ``callback.preconditioner.fisher_backward(logits)``
    in ``training_step``.

    Args:
        module: Name of the submodule whose layers are preconditioned. The default is the whole
            LightningModule.
        optimizer_index: Position of the optimizer in what ``configure_optimizers`` returns.
        options: Keywords of :class:`~kfac_bench.core.preconditioner.KFAC`, for example
            ``damping=0.01``.

    Attributes:
        preconditioner: The KFAC of the last fit, None before the first one.
    """

    def __init__(self, *, module: str = "", optimizer_index: int = 0, **options: Any) -> None:
        self.preconditioner: KFAC | None = None
        self._module, self._optimizer_index = module, optimizer_index
        self._options = options
        self._attached_to: Optimizer | None = None
        self._loaded: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no KFAC: a KFAC belongs to one model."""
        return {**self.__dict__, "preconditioner": None, "_attached_to": None}

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint, unique if each callback has another module."""
        return self._generate_state_key(module=self._module) if self._module else "KFACCallback"

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Forget the last fit, before the Trainer loads a checkpoint."""
        self._loaded = None
        if stage == "fit":
            self._detach()
            self.preconditioner = None
            _put_before_finders(self, trainer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until training starts: the Trainer loads it before K-FAC is built."""
        self._loaded = state_dict

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Attach K-FAC to the model, which is on its device now, and to the optimizer.

        Raises:
            ValueError: The Trainer's strategy is DeepSpeed or FSDP, or the model's optimizers do
                not fit ``module`` and ``optimizer_index``. Also as for ``KFAC``.
        """
        self._attach(trainer, pl_module, self._optimizer(trainer))

    def _attach(
        self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer
    ) -> None:
        # The wrapper of DistributedDataParallel knows which backward is the last of a step.
        model = pl_module.get_submodule(self._module) if self._module else trainer.strategy.model
        assert model is not None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.preconditioner = KFAC(model, optimizer, **options_for(optimizer, self._options))
        self.preconditioner.attach(scaler)
        self._attached_to = optimizer
        self.preconditioner.in_optimizer_state = False  # the state is that of the callback

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Load the state, if training continues from a checkpoint.

        Something may have called ``configure_optimizers`` again after ``on_fit_start``.
        """
        if (optimizer := self._optimizer(trainer)) is not self._attached_to:
            self._detach()
            self._attach(trainer, pl_module, optimizer)
        assert self.preconditioner is not None
        if self._loaded is not None:
            load_whole_state(self.preconditioner, self._loaded)
        elif trainer.global_step > 0:
            why = f"{trainer.ckpt_path} has no state of {self.state_key}"
            if trainer.ckpt_path is None:
                why = "fit() without ckpt_path builds optimizer and K-FAC again"
            warnings.warn(
                f"training continues at step {trainer.global_step}, but K-FAC starts with empty "
                f"statistics: {why}",
                stacklevel=2,
            )
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; all ranks call it, and rank 0 saves what it gets."""
        return {} if self.preconditioner is None else whole_state(self.preconditioner) or {}

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Remove all hooks from model and optimizer, also after a search of a finder."""
        self._detach()

    def on_exception(
        self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException
    ) -> None:
        """Remove all hooks, so that the model can be trained again."""
        self._detach()

    def _optimizer(self, trainer: "Trainer") -> Optimizer:
        strategy = type(trainer.strategy).__name__
        if strategy in ENGINES:
            raise ValueError(
                f"{strategy} keeps the gradients to itself, so K-FAC cannot precondition them: "
                'use strategy="ddp", or a script without Lightning (docs/how-to/several_ranks.md)'
            )
        optimizers = trainer.optimizers
        if len(optimizers) > 1 and not self._module:
            raise ValueError(
                f"the model has {len(optimizers)} optimizers: pass one callback for each optimizer "
                'that uses K-FAC, such as KFACCallback(module="generator", optimizer_index=0)'
            )
        if self._optimizer_index >= len(optimizers):
            raise ValueError(
                f"optimizer_index={self._optimizer_index}: the model has {len(optimizers)} "
                "optimizers, counted from 0"
            )
        return optimizers[self._optimizer_index]

    def _detach(self) -> None:
        self._attached_to = None
        if self.preconditioner is not None:
            self.preconditioner.detach()


def _put_before_finders(callback: KFACCallback, trainer: Any) -> None:
    """Let a finder train with K-FAC, whose hooks stay while the finder removes all callbacks."""
    kinds = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}
    if kinds & FINDERS:
        trainer.callbacks = [callback, *(c for c in trainer.callbacks if c is not callback)]


# LightningCLI offers the keywords that it finds here.
KFACCallback.__init__.__annotations__["options"] = Unpack[keywords_type()]
