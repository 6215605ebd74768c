"""K-FAC in the Trainer of Hugging Face's transformers: ``callbacks=[KFACCallback()]``.

docs/how-to/training_frameworks.md says what the Trainer does in which order
and what is not supported.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from kfac_bench import torch_archive
from kfac_bench.core import KFAC
from kfac_bench.integrations.accelerate import check_engine
from kfac_bench.integrations.huggingface_labels import send_labels
from kfac_bench.integrations.method_options import options_for
from kfac_bench.integrations.whole_state import load_whole_state, whole_state
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
        saved = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    except (OSError, ValueError, KeyError):
        return False
    # Texts are compared, because a NaN in a log is not equal to itself.
    return json.dumps(saved) == json.dumps(state.log_history)
