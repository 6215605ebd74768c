"""K-FAC in the Trainer of Hugging Face's transformers: ``callbacks=[KFACCallback()]``.

docs/how-to/training_frameworks.md says how to use it and what is not supported.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_bench import torch_archive
from kfac_bench.core import KFAC
from kfac_bench.integrations.accelerate import check_engine
from kfac_bench.integrations.framework_state import load_whole_state, options_for, whole_state
from kfac_bench.whole_files import whole_file

try:
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        "kfac_bench.integrations.huggingface needs transformers and accelerate: "
        "pip install 'transformers>=5.17' 'accelerate>=1.10'"
    ) from error

FILE = "kfac.pt"
"""The file in a checkpoint of the Trainer that holds K-FAC's state."""


class KFACCallback(TrainerCallback):
    """Preconditions the gradients of a ``transformers.Trainer`` by K-FAC.

    The callback attaches K-FAC to the model and the optimizer when training begins, and removes
    K-FAC when training ends. Each checkpoint of the Trainer gets a file ``kfac.pt``.
    ``trainer.train(resume_from_checkpoint=...)`` then continues bit by bit.

    Example::

        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[KFACCallback()])
        trainer.train()

    Args:
        options: Keywords of :class:`~kfac_bench.core.preconditioner.KFAC`, for example
            ``damping=0.01``. With ``fisher="mc"`` or ``"type2"`` the callback itself sends the
            labels backward; it can do so for losses that are a cross entropy of ``logits``.

    Attributes:
        preconditioner: The KFAC of the last training, None before the first one.
    """

    def __init__(self, **options: Any) -> None:
        self.preconditioner: KFAC | None = None
        self._options = options
        self._labels_hook: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no KFAC: a KFAC belongs to one model."""
        return {**self.__dict__, "preconditioner": None, "_labels_hook": None}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Attach K-FAC, and load its state if training continues from a checkpoint.

        Raises:
            ValueError: The Trainer runs DeepSpeed or Megatron-LM, or copies the model to several
                GPUs of one process. Also as for ``KFAC``.
        """
        self._detach()  # an exception may have ended an earlier training
        self.preconditioner = None
        check_engine(AcceleratorState().distributed_type)
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer copies the model to {args.n_gpu} GPUs of one process (DataParallel), "
                f"where K-FAC cannot see it: start one process per GPU, torchrun --nproc-per-node "
                f"{args.n_gpu}, or set CUDA_VISIBLE_DEVICES to one GPU"
            )
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        keywords = options_for(optimizer.optimizer, self._options)
        preconditioner = KFAC(model, optimizer.optimizer, **keywords).attach(optimizer.scaler)
        preconditioner.in_optimizer_state = False  # the state is in a file of its own
        self.preconditioner = preconditioner
        if preconditioner.fisher != "empirical":
            self._labels_hook = send_labels(model, preconditioner)
        if state.global_step > 0:
            self._resume(preconditioner, args, state)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Write the state into the checkpoint that the Trainer has just saved."""
        # Nobody resumes from weights alone, nor from a trial of a hyperparameter search.
        if self.preconditioner is None or args.save_only_model or state.is_hyper_param_search:
            return
        saved = whole_state(self.preconditioner)  # all ranks take part
        if saved is None or not args.should_save:
            return
        with whole_file(_folder(args, state) / FILE) as temporary:
            torch.save(saved, temporary)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Remove all hooks from model and optimizer."""
        self._detach()

    def _detach(self) -> None:
        if self.preconditioner is not None:
            self.preconditioner.detach()
        if self._labels_hook is not None:
            self._labels_hook.remove()
            self._labels_hook = None

    def _resume(self, preconditioner: KFAC, args: TrainingArguments, state: TrainerState) -> None:
        """Load the state of the checkpoint that the Trainer has loaded.

        The Trainer does not tell callbacks which folder that was. The log in the folder shows it.
        """
        folders = [_folder(args, state)]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, Path(args.resume_from_checkpoint))
        for folder in folders:
            if (folder / FILE).exists() and _has_log(folder, state):
                with (folder / FILE).open("rb") as content:
                    torch_archive.check_archive(content)
                    saved = torch.load(content, map_location="cpu", weights_only=True)
                load_whole_state(preconditioner, saved)
                return
        warnings.warn(
            f"training continues at step {state.global_step}, but K-FAC starts with empty "
            f"statistics: {folders[0]} has no {FILE} of this run. If the checkpoint is in another "
            "folder, set TrainingArguments(resume_from_checkpoint=FOLDER) too",
            stacklevel=2,
        )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _has_log(folder: Path, state: TrainerState) -> bool:
    """Return whether the checkpoint in ``folder`` has the log of ``state``."""
    try:
        saved = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))[
            "log_history"
        ]
    except (OSError, ValueError, KeyError):
        return False
    # Texts are compared, because a NaN in a log is not equal to itself.
    return json.dumps(saved) == json.dumps(state.log_history)


IGNORED = -100
"""The label of positions that are not in the loss."""
SAME_POSITION = ("ForMaskedLM", "ForTokenClassification")
WHOLE_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
NEXT_POSITION = ("ForCausalLM",)


def send_labels(model: nn.Module, preconditioner: KFAC) -> RemovableHandle:
    """Call ``fisher_backward`` with the logits of each training forward of ``model``.

    The Trainer calls the model and ``backward`` itself. A forward hook sees the logits in between.

    Raises:
        ValueError: The loss of the model is not a cross entropy of its logits.
    """
    loss_type = getattr(model, "loss_type", None)
    if loss_type is None and type(model).__name__.endswith("LMHeadModel"):
        loss_type = "ForCausalLM"  # as GPT2LMHeadModel, whose name transformers does not recognize
    if loss_type not in SAME_POSITION + WHOLE_SAMPLE + NEXT_POSITION:
        raise _unsupported(preconditioner, f"loss_type={loss_type} of {type(model).__name__}")

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        labels, logits = kwargs.get("labels"), output["logits"]
        if labels is None:
            raise _unsupported(preconditioner, "a forward without the keyword labels")
        mask = _mask(preconditioner, loss_type, logits, labels)
        preconditioner.fisher_backward(logits, mask=mask)

    return model.register_forward_hook(hook, with_kwargs=True)


def _mask(preconditioner: KFAC, loss_type: str, logits: Tensor, labels: Tensor) -> Tensor | None:
    """Return the mask of the positions of ``logits`` that are in the loss; None: all."""
    is_class = labels.shape == logits.shape[:-1] and not labels.is_floating_point()
    if not is_class or logits.shape[-1] == 1 or (logits.ndim < 3 and loss_type not in WHOLE_SAMPLE):
        raise _unsupported(
            preconditioner,
            f"logits of shape {list(logits.shape)} with {labels.dtype} labels of "
            f"shape {list(labels.shape)}",
        )
    if loss_type in WHOLE_SAMPLE:
        return None
    if loss_type in NEXT_POSITION:
        labels = F.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return labels != IGNORED


def _unsupported(preconditioner: KFAC, what: str) -> ValueError:
    return ValueError(
        f"fisher={preconditioner.fisher}: the callback finds no cross entropy in {what}. "
        'Use fisher="empirical", or attach KFAC yourself and call fisher_backward in compute_loss'
    )
