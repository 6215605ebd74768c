"""The options of :class:`KFAC` and of :class:`.EigenAdam`: each once, with all that is said of it.

The signatures and docstrings of both and the options of ``kfac-train`` are made of these tables.
The command line must start fast, so this file needs no torch.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from kfac_bench.core.options import Option, table
from kfac_bench.core.planning.budget import Choice
from kfac_bench.core.planning.plan import BALANCES, IDENTITY, METHODS, STRATEGIES
from kfac_bench.core.schedule import Doubling, Schedule, Schedules

if TYPE_CHECKING:
    import torch

MAX_DIM = 8192
"""Default of ``max_dim``."""
DEFAULT_SKIP = ("Norm", "Embedding")
"""Default of ``skip``: the papers precondition neither."""


class KFACOptions(TypedDict, total=False):
    """The keywords of :class:`KFAC` that are options of ``kfac-train`` as well.

    A *schedule* is a number, or a function from the step (0 is the first) to a number.
    """

    strategy: Annotated[
        str,
        Option(
            default="comm_opt",
            choices=STRATEGIES,
            meaning="who computes what on several ranks: comm_opt sends least in ordinary steps, "
            "mem_opt keeps fewer decompositions, owner_reduce needs least memory, hybrid_opt lies "
            "between comm_opt and mem_opt",
            details="""
                One process does not need this option. The page docs/explanation/strategies.md
                compares the strategies in time, memory and messages.

                * ``comm_opt``: every rank preconditions every layer. It needs most memory.
                * ``mem_opt``: one rank preconditions a layer and sends the result to the others.
                  It needs least memory of those that keep all factors.
                * ``layer_wise``: like ``mem_opt``, but layers go to ranks in turn, whatever their
                  size (Osawa et al. 2019).
                * ``hybrid_opt``: some ranks precondition a layer (KAISA); see
                  ``grad_worker_fraction``.
                * ``owner_reduce``: a factor is kept only on the rank that decomposes it.
                * ``local_factors``: factors are not sent at all. A rank computes the factors of
                  its layers from its own part of the batch, so results depend on the number of
                  ranks.
                """,
        ),
    ]
    grad_worker_fraction: Annotated[
        float | None,
        Option(
            default=None,
            above=0,
            at_most=1,
            meaning="share of the ranks that precondition a layer; None: 0.5 in hybrid_opt, one "
            "rank in owner_reduce and local_factors",
            details="""
                Only these three strategies use it. A larger share sends fewer gradients and needs
                more memory.
                """,
        ),
    ]
    colocate_factors: Annotated[
        bool | None,
        Option(
            default=None,
            meaning="let one rank decompose both factors of a layer; None: yes, except in comm_opt "
            "and for factors that block_size divides",
            details="""
                With ``inverse`` in ``owner_reduce`` and ``local_factors``, blocks go to one rank,
                too. Set True if an option needs both factors on one rank; K-FAC raises an error
                that says so. ``layer_wise`` gives layers to ranks in turn, with both factors.
                """,
        ),
    ]
    balance: Annotated[
        str,
        Option(
            default="compute",
            choices=BALANCES,
            meaning="what ranks get about equal shares of: compute (time) or memory (bytes)",
            details="""
                The time is that of the decompositions (core/planning/planner.py). ``layer_wise``
                gives layers to ranks in turn and balances nothing.
                """,
        ),
    ]
    overlap: Annotated[
        bool,
        Option(
            default=False,
            is_compared=True,
            meaning="send statistics while backward runs; this does not change the results",
            details="""
                Results are the same, bit by bit. Try True if messages take long. With
                ``state_dtype`` in half precision nothing is sent before :meth:`step`. With gradient
                accumulation, run all backwards of a step but the last inside :meth:`accumulate`
                (or inside DistributedDataParallel's ``no_sync``, if ``model`` is its wrapper).
                """,
        ),
    ]
    method: Annotated[
        str,
        Option(
            default="inverse",
            choices=(*METHODS, IDENTITY),
            meaning="how the damped inverse is computed: inverse (Cholesky inverses), eigen "
            "(eigendecompositions, as in the paper), ekfac (eigen with second moments of "
            "gradients, George et al.), eigen_adam (Adam in the eigenbasis, for "
            "optimizer=eigen_adam), identity (only the limits of the step)",
            details="""
                * ``inverse``: Cholesky inverses of A and G (eq. 9-10). The damping is added to each
                  factor.
                * ``eigen``: eigendecompositions of A and G (eq. 11-13). They take several times
                  longer, and preconditioning takes twice as many operations; the damping is added
                  to the product of the factors.
                * ``ekfac``: like ``eigen``, with eigenvalues replaced by second moments of the
                  gradients in the eigenbasis (George et al. 2018). They change at each factor
                  update, and a new decomposition turns them into its basis.
                * ``eigen_adam``: Adam in the eigenbasis of A and G, without damping and limits;
                  only with the optimizer
                  :class:`~kfac_bench.core.eigen_adam_optimizer.EigenAdam`. Build both with
                  :func:`kfac_bench.eigen_adam`. With ``early_updates`` the first intervals are
                  shorter: with both intervals of 40 steps, statistics are due at steps 0, 5, 10,
                  20, 40, 80 and so on. Decompositions follow at once, or in slices (see
                  ``spread``).
                * ``identity``: a control for experiments. A and G are identities, so only the
                  limits of the step remain.
                """,
        ),
    ]
    damping: Annotated[
        Schedule | None,
        Option(
            default=None,
            above=0,
            meaning="Tikhonov damping gamma, usually 1e-4 to 1e-1; None: for each layer the mean "
            "eigenvalue of its curvature",
            details="""
                The damping is added to the eigenvalues of G kron A.

                * None: the damping follows the scale of the loss and of the layer. ``inverse`` adds
                  the mean eigenvalue of A to A, and that of G to G. ``ekfac`` adds the mean of the
                  second moments.
                * A schedule of gamma > 0, the same for all layers, as in the papers.
                * A :class:`~kfac_bench.core.damping.LevenbergMarquardt`, which adapts gamma itself
                  (see :meth:`adapt_damping`).

                If you set gamma, it is the most important option: larger values are safer and make
                K-FAC more like the plain optimizer. Try powers of 10 from 1e-4 to 1e-1.
                """,
        ),
    ]
    factored_damping: Annotated[
        bool,
        Option(
            default=False,
            is_compared=True,
            meaning="split gamma between A and G in the ratio of their mean eigenvalues",
            details="""
                This is the pi of Martens & Grosse 2015, section 6.3: A gets pi sqrt(gamma), G gets
                sqrt(gamma) / pi. ``ekfac`` ignores it.
                """,
        ),
    ]
    trust_ratio: Annotated[
        float | None,
        Option(
            default=0.005,
            is_compared=True,
            above=0,
            meaning="largest step of a layer with K-FAC, as a share of the norm of its weights; "
            "None: no limit",
            details="""
                If the preconditioned gradient of a layer times the learning rate has a norm of more
                than this share, it is shrunk to it. The step of SGD thus stays in the neighbourhood
                that the curvature describes. The norm of the weights counts as at least the square
                root of their rows, so that weights of 0 can move. Momentum may add up to longer
                steps. Adam rescales the gradient, so with Adam the limit has little effect.
                """,
        ),
    ]
    kl_clip: Annotated[
        Schedule | None,
        Option(
            default=None,
            above=0,
            meaning="KL clip, kappa of eq. 16 of the paper, where 0.001 is usual; None: no clip",
            details="""
                It is a schedule of numbers above 0. The KL clip shrinks all preconditioned
                gradients if the step would change the model's predictions too much. With
                ``grafting`` the sum of eq. 16 is no change of predictions any more, and it grows
                with the model: set ``grafting=False`` too.
                """,
        ),
    ]
    grafting: Annotated[
        bool,
        Option(
            default=True,
            is_compared=True,
            meaning="scale each layer's preconditioned gradient so that its part along the "
            "gradient is the gradient, and limit the length of the rest",
            details="""
                The part across the gradient is shortened to at most 3 times the norm of the
                gradient; before optimizers that divide each element by its size, such as Adam, to
                half of this norm. A step then lowers the loss, to first order, as much as a step of
                the optimizer alone, and the usual learning rate stays right. Grafting to the *norm*
                of the gradient (Agarwal et al. 2020; Anil et al. 2020) makes shorter steps, which
                are slow at small rates. The limits of the step come after grafting. Set False to
                repeat a paper on K-FAC.
                """,
        ),
    ]
    update_freq: Annotated[
        Schedule,
        Option(
            default=100,
            at_least=1,
            meaning="steps between decompositions",
            details="""
                It is a schedule. Fewer steps follow the curvature better and cost more time.
                """,
        ),
    ]
    factor_update_freq: Annotated[
        Schedule,
        Option(
            default=10,
            at_least=1,
            meaning="steps between factor updates",
            details="It is a schedule. ``update_freq`` should be a multiple of it.",
        ),
    ]
    early_updates: Annotated[
        bool,
        Option(
            default=True,
            is_compared=True,
            meaning="before step update_freq, also decompose at a tenth of it, and at 2, 4 and 8 "
            "times this step",
            details="""
                The tenth is rounded up to a step that updates factors. By default these are steps
                10, 20, 40 and 80. With slices (see ``spread``) each slice follows within the steps
                until the next of these. The first decomposition has seen one batch only. In a model
                whose head starts at zero, that batch says nothing about the other layers.
                """,
        ),
    ]
    spread: Annotated[
        bool | None,
        Option(
            default=None,
            meaning="decompose in slices at different steps, so that no step is long; None: only "
            "if there is one rank, or with background",
            details="""
                Each factor is still decomposed every ``update_freq`` steps. False decomposes
                everything in one step, as the papers do; ranks then share the work.
                """,
        ),
    ]
    background: Annotated[
        bool,
        Option(
            default=False,
            is_compared=True,
            meaning="compute statistics and decompositions on a second core during training; K-FAC "
            "uses the decompositions some steps later",
            details="""
                Try True if a CPU core is free: steps become shorter, and none of them is long. On a
                GPU the thread uses a stream of its own (tested on one H100, not timed).

                * Statistics enter A and G in the same step as without the thread, with the same
                  bits.
                * Decompositions come into use late by a fixed number of steps, about the distance
                  of two slices (see ``spread``; all ranks spread). So results do not depend on the
                  speed of the thread: if a result is late, the step waits.
                * Until both factors of a layer have a decomposition, its gradient stays as it is,
                  except for the limits. The first decompositions come into use in steps 1 to 5.
                * The thread needs memory for copies of the factors of one slice. Inputs and
                  gradients of up to 8 calls of layers stay in memory until it has read them.
                * ``overlap`` and ``spread=False`` cannot be combined with it.
                """,
        ),
    ]
    factor_decay: Annotated[
        Schedule,
        Option(
            default=0.95,
            at_least=0,
            below=1,
            meaning="weight of the old factor in the running average",
            details="""
                It is a schedule; the default is that of the released code of the paper. The paper's
                equations 14-15 write xi for the weight of the new factor, that is 1 -
                ``factor_decay``, and print no value.
                """,
        ),
    ]
    factor_init: Annotated[
        str,
        Option(
            default="debiased",
            is_compared=True,
            choices=("debiased", "identity"),
            meaning="start of the running averages: the first statistic (debiased), or the "
            "identity as in the released code of the paper",
            details="""
                ``identity`` has no debiasing: after k updates the identity still has the weight
                ``factor_decay ** k``. Set it to repeat a paper.
                """,
        ),
    ]
    factor_convention: Annotated[
        str,
        Option(
            default="kfc",
            is_compared=True,
            choices=("kfc", "sc20", "kaisa"),
            meaning="how factors are scaled; if you copy a damping from a paper, set the paper's "
            "convention",
            details="""
                Papers scale differently, so the same damping means another algorithm; see
                :data:`~kfac_bench.core.kernels.gram.CONVENTIONS`.
                """,
        ),
    ]
    fisher: Annotated[
        str,
        Option(
            default="empirical",
            is_compared=True,
            choices=("empirical", "mc", "type2"),
            meaning="what G is made of: gradients of the loss (empirical), or gradients for labels "
            "from the model: one sample (mc) or all labels (type2)",
            details="""
                ``empirical`` costs nothing extra. ``type2`` takes the expectation over the labels
                (with random signs for tokens and pixels), with one backward per class, or per
                output of a ``gaussian`` or ``bernoulli`` likelihood. ``mc`` and ``type2`` need a
                call of :meth:`fisher_backward` in each step.
                """,
        ),
    ]
    weight_sharing: Annotated[
        str,
        Option(
            default="expand",
            is_compared=True,
            choices=("expand", "reduce"),
            meaning="how positions that share a weight count: as samples (expand), or combined "
            "first (reduce)",
            details="""
                Such positions are pixels and tokens. ``reduce`` averages a and sums g over them,
                which is faster (Eschenhagen et al. 2023).
                """,
        ),
    ]
    state_dtype: Annotated[
        "torch.dtype",
        Option(
            default="fp32",
            is_compared=True,
            choices=("fp32", "bf16", "fp16"),
            meaning="dtype in which factors and decompositions are kept and sent",
            details="""
                Pass ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``. The latter two
                halve the bytes. Sums, eigenvalues, damping and gradients stay in float32.
                """,
        ),
    ]
    skip: Annotated[
        Sequence[str],
        Option(
            default=DEFAULT_SKIP,
            meaning="regular expressions of layers that K-FAC leaves out, by name or class; []: "
            "none",
            details="""
                The optimizer trains these layers. The default skips normalization and embedding
                layers, as the papers do.
                """,
        ),
    ]
    max_dim: Annotated[
        int,
        Option(
            default=MAX_DIM,
            at_least=1,
            meaning="largest factor, in rows; K-FAC keeps only the diagonal of a larger one",
            details="The G of a vocabulary head would need gigabytes otherwise.",
        ),
    ]
    block_size: Annotated[
        int | None,
        Option(
            default=None,
            at_least=1,
            meaning="divide larger factors into diagonal blocks of at most this number of rows, "
            "which ranks decompose in parallel; None: never",
            details="""
                The fewest blocks are taken, of about equal size. A block of A has all kernel taps
                of its input channels, if ``block_size`` allows one channel. The rest of the factor
                counts as zero, and is neither computed nor kept nor sent. n/N blocks of N rows take
                about (N/n)^2 of the time of n rows, and the gradient workers of a layer share them.
                So try 512 to 2048 if ``report()`` or ``kfac-plan`` says that one factor bounds the
                decompositions. The step has another direction then, and training may need more
                steps. ``max_dim`` still makes a diagonal of what it limits. ``eigen_adam`` cannot
                be combined with it.
                """,
        ),
    ]
    max_overhead: Annotated[
        float | None,
        Option(
            default=None,
            is_compared=True,
            above=0,
            meaning="time per step that K-FAC aims to add, as a share of a step without K-FAC "
            "(0.25: a quarter more); K-FAC measures the first steps, then makes max_dim and "
            "block_size smaller and intervals longer if it must; None: no budget",
            details="""
                The time is an average over an interval. In the first 6 steps the optimizer works
                alone (EigenAdam as AdamW), while K-FAC measures it and the device. Then K-FAC makes
                the options ``max_dim``, ``block_size``, ``update_freq`` and ``factor_update_freq``
                only as much coarser as the budget demands; :attr:`choice` and :meth:`report` say
                what it chose. A choice follows from times, so a second run may choose differently;
                set these four options instead, to repeat a run. A resumed run keeps the choice of
                its state. Time that training waits for other ranks' messages counts only as their
                measured latency and bandwidth predict.
                """,
        ),
    ]


OPTIONS: Mapping[str, Option] = table(KFACOptions)
"""The options of KFAC, by name."""


class EigenAdamOptions(TypedDict, total=False):
    """The keywords of :class:`.EigenAdam` that AdamW does not have."""

    orthogonalize: Annotated[
        str,
        Option(
            default="linear",
            choices=("linear", "none"),
            meaning="layers whose updates are orthogonalized: linear (all linear layers but the "
            "last) or none",
            details="""
                Updates are orthogonalized as in Muon (Jordan et al. 2024). ``linear`` also leaves
                out layers with more than 8192 outputs (vocabulary heads), and has the
                hidden-to-hidden weights of recurrent modules.
                """,
        ),
    ]
    scale: Annotated[
        float,
        Option(
            default=3.0,
            above=0,
            meaning="factor of Adam's direction in the eigenbasis",
            details="""
                Steps in the eigenbasis may be longer than those of AdamW;
                docs/lab/eigen_adam.md shows how the default was chosen.
                """,
        ),
    ]
    orthogonal_scale: Annotated[
        float,
        Option(
            default=1.0,
            above=0,
            meaning="root mean square of an orthogonalized update at lr=1",
            details="This holds for an update whose singular values are all 1.",
        ),
    ]
    orthogonal_steps: Annotated[int, Option(default=3, at_least=1, meaning="Newton-Schulz steps")]
    update_clip: Annotated[
        float | None,
        Option(
            default=0.03,
            above=0,
            meaning="largest root mean square of a layer's update, times the root of its inputs; "
            "None: any",
            details="""
                The limit holds whatever the learning rate (update clipping, Shazeer & Stern 2018).
                1 / sqrt(inputs) is about the root mean square of the initial weights, so the
                default allows changes of a few percent per step. An embedding counts as having one
                input.
                """,
        ),
    ]
    decomposition: Annotated[
        str,
        Option(
            default="qr",
            choices=("qr", "eigh"),
            meaning="how eigenvectors are updated: one QR step from the last ones (qr), or eigh",
            details="With ``qr``, the first decomposition is ``eigh``.",
        ),
    ]


EIGEN_ADAM_OPTIONS: Mapping[str, Option] = table(EigenAdamOptions)
"""The options of EigenAdam, by name."""
EIGEN_ADAM_BETAS = (0.8, 0.95)
"""Default of ``betas`` of EigenAdam."""

PRESETS: Mapping[str, KFACOptions] = {
    "paper": {
        "method": "eigen",
        "damping": 1e-3,
        "trust_ratio": None,
        "kl_clip": 1e-3,
        "grafting": False,
        "early_updates": False,
        "spread": False,
        "factor_init": "identity",
        "factor_convention": "sc20",
    }
}
"""The options that each preset sets."""


def with_preset(given: KFACOptions, preset: str | None) -> KFACOptions:
    """Return the options that the user has given, and those of a preset that the user has not.

    Raises:
        ValueError: There is no such preset.
    """
    if preset is None:
        return given
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: choose one of {', '.join(PRESETS)}, or None")
    return PRESETS[preset] | given


def within(options: KFACOptions, choice: Choice) -> KFACOptions:
    """Return the options as ``max_overhead`` has changed them.

    Intervals that are functions of the step stay.
    """
    changed: KFACOptions = {"max_dim": choice.max_dim, "block_size": choice.block_size}
    if not callable(options["update_freq"]):
        changed["update_freq"] = choice.update_freq
    if not callable(options["factor_update_freq"]):
        changed["factor_update_freq"] = choice.factor_update_freq
    return options | changed


def schedules_of(options: KFACOptions, *, is_eigen_adam: bool) -> Schedules:
    """Return the schedules; with EigenAdam the first intervals may be shorter."""
    update_freq, factor_update_freq = options["update_freq"], options["factor_update_freq"]
    if is_eigen_adam and options["early_updates"]:
        # The eigenbasis changes most in the first steps.
        update_freq, factor_update_freq = (
            every if callable(every) else Doubling(every)
            for every in (update_freq, factor_update_freq)
        )
    return Schedules(
        options["damping"],
        options["kl_clip"],
        options["factor_decay"],
        update_freq,
        factor_update_freq,
        options["early_updates"],
    )


def unused_by_eigen_adam(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that are set, but that method eigen_adam has no use for.

    Adam's second moment sets the size of each step, so there is neither a damping nor a limit.
    """
    numbers = [n for n in ("damping", "kl_clip", "trust_ratio") if options[n] is not None]
    return numbers + [name for name in ("grafting", "factored_damping") if options[name]]


def state_dtypes() -> dict[str, "torch.dtype"]:
    """Return the dtypes of the option ``state_dtype``, by the names of its choices."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def defaults() -> KFACOptions:
    """Return the default of each option, as KFAC takes it."""
    values: Any = {name: option.default for name, option in OPTIONS.items()}
    values["state_dtype"] = state_dtypes()[values["state_dtype"]]
    return cast("KFACOptions", values)
