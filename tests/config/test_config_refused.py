"""Bad input, of the command line or of experiment files, is one clear line."""

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kfac_bench import config
from kfac_bench.config import TrainConfig, compose
from kfac_bench.config.options import check_option, options
from kfac_bench.errors import UsageError
from tests.support.configs import DEFAULT, GROUPS, Own, refused

FUZZ = settings(max_examples=25, deadline=None, derandomize=True)

BAD = [
    # unknown names
    ("kfac.dampign=1", "kfac.dampign: no such option; did you mean kfac.damping?"),
    ("trainer.max_step=1", "trainer.max_step: no such option; did you mean trainer.max_steps?"),
    ("model=resnet21", "did you mean resnet20?"),
    ("trainr.max_steps=1", "trainr: no such option; did you mean trainer?"),
    ("expriment=x", "expriment: no such option; did you mean experiment?"),
    ("optimizer.beta1=0.5", "the chosen optimizer has no such option; only optimizer=adam|adamw|"),
    ("lr=0.1", "lr: no such option; did you mean optimizer.lr?"),
    ("max_dim=9", "max_dim: no such option; did you mean kfac.max_dim or optimizer.max_dim?"),
    ("trainer.epochs=9", "trainer.epochs: no such option; did you mean trainer.max_epochs?"),
    ("epochs=9", "epochs: no such option; did you mean trainer.max_epochs?"),
    ("seed.x=1", "seed"),
    ("model=resnet51", "model=resnet51: no such model; did you mean resnet50 or resnet56?"),
    ("model=foo", "bert_tiny, huggingface, lstm, maskrcnn_resnet50_fpn, maskrcnn_tiny, problem"),
    ("optimizer=sdg", "Choose one of adam, adamw"),
    ("kfac=inverse", "did you mean kfac.method=inverse? kfac= chooses one of comm_opt, eigen"),
    ("kfac=kaisa", "chooses one of comm_opt, eigen_adam, hybrid_opt, layer_wise, local_factors"),
    ("data=cifar", "did you mean cifar10?"),
    ("task=classify", "Choose one of classification, denoising, detection, language_model"),
    ("logger=wand", "Choose one of csv, none, tensorboard, wandb"),
    ("experiment=digits/resnett", "did you mean digits/resnet"),
    ("experiment=digits", "did you mean digits/autoencoder, digits/autoencoder_adam"),
    ("experiment=maskrcnn", "did you mean fig5bc_maskrcnn_convergence, table6_fig9a_maskrcnn_"),
    ("experiment=zzz", "experiment=zzz: no such experiment; kfac-train --help lists all "),
    ("+extra=1", "extra: no such option"),
    ("++kfac.extra=1", "kfac.extra: no such option"),
    ("+kfac.dampign=1", "kfac.dampign: no such option; did you mean kfac.damping?"),
    ("+trainer.extra.deep=1", "trainer.extra: no such option"),
    ("~model", "~model: options cannot be deleted; give a value, such as kfac=none"),
    ("~kfac.damping", "~kfac.damping: options cannot be deleted"),
    ("=x", "=x: an option has no name: write option=value"),
    # wrong type
    ("trainer.max_steps=abc", "trainer.max_steps=abc: expected a whole number"),
    ("seed=1.5", "seed=1.5: expected a whole number"),
    ("kfac.damping=yes", "kfac.damping=yes: expected a number"),
    ("seed=null", "seed=null: the option needs a value"),
    ("dry_run=maybe", "dry_run=maybe: expected true or false"),
    ("kfac.skip=abc", "kfac.skip=abc: expected a list, such as kfac.skip=[abc]"),
    ("trainer=3", "trainer: 3: expected lines with options below trainer:"),
    ("trainer=null", "trainer"),
    ("model.name=???", "name"),
    # out of range
    ("kfac.update_freq=-3", "kfac.update_freq=-3: must be at least 1"),
    ("kfac.update_freq=0", "kfac.update_freq=0: must be at least 1"),
    ("kfac.damping=0", "kfac.damping=0.0: must be above 0"),
    ("kfac.damping=-1e-3", "kfac.damping=-0.001: must be above 0"),
    ("kfac.damping=nan", "kfac.damping=nan: must be above 0"),
    ("kfac.damping=inf", "kfac.damping=inf: must be above 0"),
    ("kfac.damping=1e-400", "kfac.damping=0.0: must be above 0"),
    ("kfac.kl_clip=0", "kfac.kl_clip=0.0: must be above 0"),
    ("kfac.damping_decay=0", "kfac.damping_decay=0.0: must be above 0"),
    ("kfac.interval_growth=0", "kfac.interval_growth=0: must be at least 1"),
    ("kfac.factor_decay=1", "kfac.factor_decay=1.0: must be at least 0 and below 1"),
    ("kfac.grad_worker_fraction=1.5", "above 0 and at most 1"),
    ("optimizer.lr=nan", "optimizer.lr=nan: must be above 0"),
    ("optimizer.momentum=1", "optimizer.momentum=1.0: must be at least 0 and below 1"),
    ("seed=-1", "seed=-1: must be at least 0"),
    ("seed=4294967296", "seed=4294967296: must be at least 0 and below"),
    ("trainer.batch_size=0", "trainer.batch_size=0: must be at least 1"),
    ("trainer.target=nan", "trainer.target=nan"),
    ("kfac.method=qr", "kfac.method=qr: choose one of eigen, inverse"),
    ("kfac=eigen_adam", "kfac.method=eigen_adam with optimizer=sgd: another optimizer would"),
    ("kfac.factor_convention=x", "choose one of kfc, sc20, kaisa"),
    ("kfac.factor_init=zero", "choose one of debiased, identity"),
    ("kfac.fisher=exact", "kfac.fisher=exact: choose one of empirical, mc, type2"),
    ("kfac.weight_sharing=x", "choose one of expand, reduce"),
    ("kfac.state_dtype=fp8", "kfac.state_dtype=fp8: choose one of fp32, bf16, fp16"),
    ("kfac.max_dim=0", "kfac.max_dim=0: must be at least 1"),
    ("kfac.block_size=0", "kfac.block_size=0: must be at least 1"),
    ("kfac.block_size=many", "kfac.block_size=many: expected"),
    ("kfac.damping_freq=0", "kfac.damping_freq=0: must be at least 1"),
    ("kfac.spread=some", "kfac.spread=some: expected true or false"),
    ("trainer.precision=fp8", "trainer.precision=fp8: choose one of fp32, bf16, fp16"),
    ("trainer.accumulate=0", "trainer.accumulate=0: must be at least 1"),
    ("kfac.strategy=x", "choose one of comm_opt"),
    ("model.name=resnet51", "model.name=resnet51: choose one of autoencoder"),
    ("trainer.ema=2", "trainer.ema=2.0: must be above 0 and below 1 (decay of an exponential"),
    ("trainer.clip_grad_norm=-1", "trainer.clip_grad_norm=-1.0: must be above 0 (largest norm"),
    ("trainer.clip_grad_when=never", "choose one of before, after"),
    ("trainer.clip_grad_when=after", "has no effect without a limit: set trainer.clip_grad_norm"),
    ("data.mixup=-0.1", "data.mixup=-0.1: must be at least 0"),
    ("data.auto_augment=mixup", "choose one of randaugment, trivialaugment"),
    ("data.auto_augment=randaugment", "cifar100 or imagefolder or parquet or shards, not"),
    ("trainer.device=tpu", "choose one of auto, cpu, cuda"),
    ("model.name='a\nb'", "model.name="),
    ("kfac.skip=['(']", "kfac.skip"),
    # options that clash
    ("task=reconstruction", "model=resnet8 does not fit task=reconstruction"),
    ("kfac.update_freq=7", "must be a multiple of kfac.factor_update_freq=10"),
    ("kfac.update_freq=15", "must be a multiple of kfac.factor_update_freq=10"),
    ("trainer.target=92", "accuracy is a share of at most 1. For 92 % write trainer.target=0.92"),
    ("kfac.damping_decay=0.1", "has no effect without kfac.damping_decay_epochs: set both"),
    ("kfac.interval_growth=2", "has no effect without kfac.interval_growth_epochs"),
    ("kfac.damping_freq=9", "has no effect without kfac.adaptive_damping"),
    ("trainer.accumulate=257", "trainer.accumulate=257 is more than trainer.batch_size=256"),
    # options of Hydra itself
    ("hydra.run.dir=x", "options of Hydra itself have no effect. Use runs_dir=FOLDER and run_id="),
    ("++hydra.sweep.dir=x", "Use runs_dir=FOLDER"),
    ("hydra.verbose=true", "Use trainer.log_freq=1"),
    ("hydra.mode=MULTIRUN", "Use --multirun"),
    ("hydra/launcher=basic", "docs/how-to/slurm.md"),
    ("hydra/job_logging=disabled", "Use logger="),
    ("hydra/sweeper=optuna", "docs/how-to/tune.md"),
    ("+hydra/sweeper@hydra.sweeper=optuna", "docs/how-to/tune.md"),
    ("hydra.searchpath=[x]", "Use --config-dir DIR"),
    ("~hydra", "Remove it"),
    # loggers
    ("logger=[wandb,csv,wandb]", "names wandb twice"),
    ("logger=[none,csv]", "none means no logger"),
    ("logger=[wandb,cvs]", "logger=cvs: no such logger; did you mean csv?"),
    ("logger.name=none", "Use logger=none"),
    ("+logger=csv", "Use logger.csv=true to add a logger"),
    # what is not an override
    ("seed=1,2", "'seed=1,2': give one value, or add --multirun"),
    ("kfac=comm_opt,layer_wise", "add --multirun"),
    ("seed=range(3)", "--multirun"),
    ("data.root=/tmp/x,y", """quote it: "data.root='/tmp/x,y'\""""),
    ("data.root=/tmp/a(b)", """quote it: "data.root='/tmp/a(b)'\""""),
    (
        "data.root=/tmp/a=b",
        """'data.root=/tmp/a=b' is not an override: Hydra cannot read the value""",
    ),
    ("data.root=[a]", """got a list. If the value is a text, quote it: "data.root='[a]'\""""),
    ("data.root={a:1}", """got a dict. If the value is a text, quote it: "data.root='{a:1}'\""""),
    ("data.root=it's(", """quote it: 'data.root='"'"'it\\'"'"'s('"'"''"""),
    ("data.root=~/x", "Write data.root=$HOME/x"),
    ("'seed=1'", "is not an override: write option=value"),
    ("model =resnet8", "'model =resnet8' is not an override: write option=value"),
    ("trainer.max_steps={a:1}", "trainer.max_steps={'a': 1}: expected a whole number"),
    ("foo", "'foo' is not an override: write option=value"),
    ("", "'' is not an override: write option=value"),
    ("a b", "'a b' is not an override"),
    ("kfac.damping", "'kfac.damping' is not an override"),
    ("kfac.damping=[1", "'kfac.damping=[1' is not an override"),
    ("=3", "=3"),
    ("model=", "model="),
    ("model=[[]]", "model=[[]]"),
    ("kfac.damping=${nope}", "nope"),
    ("run_id=${oc.env:KFAC_BENCH_NO_SUCH}", "KFAC_BENCH_NO_SUCH"),
    ("data.root=a\x1b[31mb", "data.root"),
    ("data.root=demo", "data.root=demo: data=digits reads no folder. Remove data.root, or choose"),
]


@pytest.mark.parametrize(("override", "fragment"), BAD, ids=[b[0] for b in BAD])
def test_bad_input_is_one_clear_line(override, fragment):
    assert fragment in refused([override])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hydra: {mode: MULTIRUN}", "mine.yaml:2: hydra.mode: options of Hydra itself have"),
        ("hydra:\n  run: {dir: x}", "Use runs_dir=FOLDER"),
        ("defaults: [override /hydra/sweeper: optuna]", "docs/how-to/tune.md"),
        ("defaults: [/model@hydra.job: unet]", "mine.yaml:2: /model@hydra.job: options of Hydra"),
        ("defaults: [override /logger: [csv, csv]]", "names csv twice"),
    ],
)
def test_an_experiment_file_has_no_options_of_hydra_itself(tmp_path, text, said):
    own = Own(tmp_path)
    own.write("mine", f"# @package _global_\n{text}\n")
    assert said in own.refused("experiment=mine")


def test_a_file_in_the_package_of_hydra_is_refused(tmp_path):
    own = Own(tmp_path)
    own.write("mine", "# @package hydra.run\ndir: x\n")
    assert "mine.yaml:1: hydra.run: options of Hydra itself" in own.refused("experiment=mine")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("trainer.watchdog_s", 1e12, "must be above 0 and at most 1000000000"),
        ("backend.timeout_s", 1e12, "must be above 0 and at most 1000000000"),
        pytest.param("seed", 10**400, "must be at least 0 and below 4294967296", id="seed"),
        pytest.param("trainer.max_steps", 10**400, "0...: must be at most 46116860", id="steps"),
        ("kfac.damping_decay", 1e308, "kfac.damping_decay=1e+308: must be at most 46116860"),
        ("optimizer.lr", 1e300, "optimizer.lr=1e+300: must be at most 46116860"),
    ],
)
def test_a_number_that_the_machine_cannot_hold_is_one_line(name, value, said):
    declared = {option: meta for option, _, meta in options(DEFAULT)}
    with pytest.raises(UsageError) as caught:
        check_option(name, value, declared[name])
    assert said in str(caught.value)


def test_model_and_task_must_fit():
    text = refused(["model=autoencoder", "task=classification"])
    assert "model=autoencoder does not fit task=classification" in text
    assert compose.load(["model=autoencoder"]).task.name == "reconstruction"


CLASHES = {
    "kfac.damping=0.001 kfac.damping_decay=1e18 kfac.damping_decay_epochs=[1,2,3]": (
        "kfac.damping_decay=1e+18 takes kfac.damping=0.001 to 1e51 in 3 epochs"
    ),
    "kfac.damping=0.001 kfac.damping_decay=1e-30 kfac.damping_decay_epochs=[1,2]": "to 1e-63 in 2",
    "kfac.interval_growth=1000000000 kfac.interval_growth_epochs=[1,2]": (
        "kfac.interval_growth=1000000000 makes intervals of more than 4611686018427387904 steps"
    ),
    "model=autoencoder data.mixup=0.2": "which task=reconstruction does not have: use task=classif",
    "model=maskrcnn_tiny data=coco task=detection trainer.compile=true": "does not fit task=detect",
    "trainer.compile=true trainer.checkpoint_activations=true": "set one of them to false",
    "trainer.compile=true backend=deepspeed": "trainer.compile=true does not fit backend=deepspeed",
    "trainer.ema=0.9 backend=fsdp2": "trainer.ema=0.9 does not fit backend=fsdp2, which cuts",
    "trainer.sync_batch_norm=true backend=horovod": "does not fit backend=horovod",
    "trainer.channels_last=true backend=horovod": "does not fit backend=horovod",
    "trainer.sync_batch_norm=true data.on_error=skip": "does not fit data.on_error=skip",
    "schedule=polynomial schedule.warmup_share=0.2 schedule.decay_until=0.1": "before the end of",
    "data=cifar10 data.augment=false data.auto_augment=randaugment": "not data.augment=false and",
}


@pytest.mark.parametrize("words", CLASHES)
def test_options_of_training_that_clash(words):
    assert CLASHES[words] in refused(words.split())


def test_a_task_that_smooths_no_labels_refuses_the_option():
    text = refused(["model=autoencoder", "task.label_smoothing=0.1"])
    assert "task.label_smoothing=0.1 has no effect on task=reconstruction" in text


def test_ekfac_and_a_damping_of_the_factors_clash():
    said = ["kfac.method=ekfac", "kfac.factored_damping=true"]
    assert "kfac.factored_damping=true does not fit kfac.method=ekfac" in refused(said)
    compose.load([*said, "kfac=none"])  # of no matter
    compose.load(["kfac.method=inverse", "kfac.factored_damping=true"])


@pytest.mark.parametrize(
    ("said", "fragment"),
    [
        ("kfac=none", "optimizer=eigen_adam with kfac=none: the optimizer needs K-FAC's factors"),
        ("kfac=comm_opt", "optimizer=eigen_adam with kfac.method=inverse: the optimizer needs"),
        ("kfac.damping=0.1", "kfac.method=eigen_adam has no use for damping, because Adam's"),
        ("kfac.kl_clip=0.1", "the size of each step; write kfac.kl_clip=null"),
        ("kfac.block_size=9", "kfac.block_size=9 does not fit kfac.method=eigen_adam"),
        ("kfac.grafting=true", "has no use for grafting, because Adam's second moment sets"),
        ("kfac.adaptive_damping=true", "write kfac.adaptive_damping=false"),
        ("optimizer.orthogonalize=all", "optimizer.orthogonalize=all: choose one of linear, none"),
        ("optimizer.orthogonal_scale=0", "optimizer.orthogonal_scale=0.0: must be above 0"),
    ],
)
def test_what_means_nothing_with_eigen_adam(said, fragment):
    assert fragment in refused(["optimizer=eigen_adam", said])


@pytest.mark.parametrize("milestones", ["[0,5]", "[-1]", "[5,5]", "[5,3]", "[1e308]"])
def test_milestones_are_above_0_and_rise(milestones):
    said = refused(["schedule=step", f"schedule.milestones={milestones}"])
    assert "schedule.milestones=" in said
    assert "must be epochs above 0 in rising order" in said


def test_a_warmup_has_a_limit_that_is_a_whole_number_of_steps():
    said = refused(["schedule.warmup_epochs=1e308"])
    assert said.startswith("schedule.warmup_epochs=1e+308: must be at least 0 and at most 10000000")


@pytest.mark.parametrize("name", ["damping_decay_epochs", "interval_growth_epochs"])
@pytest.mark.parametrize("epochs", ["[0,5]", "[5,3]", "[1e308]"])
def test_epochs_of_changes_are_above_0_and_rise(name, epochs):
    said = refused(["kfac.damping=0.1", f"kfac.{name}={epochs}"])
    assert f"kfac.{name}=" in said
    assert "must be epochs above 0 in rising order" in said


def test_only_a_number_as_damping_decays_at_epochs():
    epochs = "kfac.damping_decay_epochs=[4]"
    assert "follows the mean eigenvalues: set kfac.damping to a number" in refused([epochs])
    adapts = ["kfac.damping=0.1", "kfac.adaptive_damping=true"]
    assert "a damping that adapts itself" in refused([epochs, *adapts])
    compose.load([epochs, "kfac=none"])


@pytest.mark.parametrize("model", ["model=transformer", "model=bert_tiny"])
def test_an_adaptive_damping_does_not_fit_a_mean_over_tokens(model):
    said = [model, "kfac.damping=0.1", "kfac.adaptive_damping=true"]
    assert "a mean over the tokens of each example: use kfac.damping." in refused(said)
    compose.load([*said, "kfac=none"])


def test_a_misspelt_option_suggests_an_option_of_the_chosen_optimizer():
    text = refused(["optimizer=adam", "optimizer.beta_1=0.5"])
    assert "did you mean optimizer.beta1?" in text


HEAD = "# @package _global_\n"
BAD_FILES = {
    "syntax": (HEAD + "trainer:\n  max_steps: 5\n bad: [1\n", 4, "not valid YAML"),
    "tab": (HEAD + "trainer:\n\tmax_steps: 5\n", 3, "not valid YAML"),
    "unclosed": (HEAD + "kfac: {damping: 1\n", 3, "not valid YAML"),
    "twice": (HEAD + "trainer:\n  max_steps: 5\n  max_steps: 6\n", 4, "duplicate key max_steps"),
    "misspelt": (
        HEAD + "trainer:\n  max_steps: 5\n  max_stpes: 7\n",
        4,
        "trainer.max_stpes: no such option; did you mean trainer.max_steps?",
    ),
    "section": (HEAD + "seed: 1\ntriner:\n  max_steps: 5\n", 3, "triner: no such option"),
    "after_defaults": (
        HEAD + "defaults:\n  - override /kfac: none\n  - _self_\nkfac:\n  dampng: 7\n",
        6,
        "kfac.dampng: no such option; did you mean kfac.damping?",
    ),
    "type": (
        HEAD + "trainer:\n  max_steps: 5\n  batch_size: many\n",
        4,
        "trainer.batch_size=many: expected a whole number",
    ),
    "flow": (HEAD + "seed: 1\ntrainer: {max_steps: 5, target: high}\n", 3, "expected a number"),
    "group": (HEAD + "defaults:\n  - override /optimzer: sgd\n", 3, "did you mean optimizer?"),
    "choice": (HEAD + "defaults:\n  - override /optimizer: sdg\n", None, "did you mean sgd?"),
    "parent": (HEAD + "defaults:\n  - digits/resnett\n", None, "digits/resnett"),
    "range": (HEAD + "trainer:\n  batch_size: 0\n", None, "trainer.batch_size=0: must be"),
    "null_section": (HEAD + "seed: 1\ntrainer: null\n", 3, "trainer"),
    "list_section": (HEAD + "trainer: [1, 2]\n", None, "trainer: [1, 2]: expected lines"),
    "interpolation": (HEAD + "trainer:\n  max_steps: ${nope}\n", None, "nope"),
    "bytes": (b"# @package _global_\n# caf\xe9\nseed: 1\n", None, "bytes.yaml"),
    "nul": (HEAD + "seed: \x00\n", None, "nul.yaml"),
    "no_mapping": ("false\n", None, "experiment=no_mapping"),
    "no_package": ("trainer:\n  max_steps: 5\n", None, "# @package _global_"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_experiment_files_name_file_and_line(tmp_path, name):
    own = Own(tmp_path / "my_conf")
    text, line, fragment = BAD_FILES[name]
    file = own.write(name, text)
    said = own.refused(f"experiment={name}")
    assert fragment in said
    if line is not None:
        assert said.startswith(f"{file}:{line}: ")


# ---- anything at all ----

NAMES = [name for name, _, _ in config.options(DEFAULT)]
KEYS = st.sampled_from(
    [*NAMES, *GROUPS, "experiment", "trainer", "model.hidden", "optimizer.beta1", "hydra.job.name"]
)
VALUES = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "?",
            "~",
            "*",
            "&",
            "!",
            "%",
            "@",
            "`",
            "|",
            ">",
            "/",
            "null",
            "???",
            "nan",
            "-inf",
            "1e999",
            "true",
            "[]",
            "{}",
            "[[1]]",
            "''",
            "{a: 1}",
            "[null]",
            "1,2",
            "range(2)",
            "${seed}",
            "${nope}",
            "${trainer}",
            "${oc.env:X}",
            '"\n"',
            "'a\nb'",
            "é",
            "none",
            "sgd",
            "resnet8",
            "../x",
            "0x1f",
            "1_000",
        ]
    ),
)
SIGNS = st.sampled_from(["", "", "", "", "+", "++", "~"])
OVERRIDES = st.builds(lambda sign, key, value: f"{sign}{key}={value}", SIGNS, KEYS, VALUES)


def composes_or_is_refused(overrides, config_dir=None):
    said = None
    try:
        found = compose.load(overrides, config_dir)
    except UsageError as error:
        said = str(error)
    if said is None:
        assert isinstance(found, TrainConfig)
        compose.to_yaml(found)
    else:
        assert len(said.splitlines()) == 1, repr(said)


@FUZZ
@given(st.lists(st.text(max_size=20), min_size=1, max_size=2))
def test_arbitrary_text_composes_or_is_refused(overrides):
    composes_or_is_refused(overrides)


@pytest.mark.slow
@FUZZ
@given(st.lists(OVERRIDES, min_size=1, max_size=3))
@example(["kfac={}", "seed=${trainer}"])
@example(["model.name='\n'"])
@example(["trainer=${trainer}"])
def test_arbitrary_values_of_real_options_compose_or_are_refused(overrides):
    composes_or_is_refused(overrides)


TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["trainer", "max_steps", "kfac", "seed", "defaults", "x", "", "hydra"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(FUZZ, max_examples=15)
@given(TREES)
def test_arbitrary_experiment_files_compose_or_are_refused(tmp_path_factory, tree):
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    (folder / "experiment" / "any.yaml").write_text(HEAD + yaml.safe_dump(tree))
    composes_or_is_refused(["experiment=any"], folder)


def test_nesterov_needs_momentum():
    text = refused(["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"])
    assert "optimizer.nesterov=true with optimizer.momentum=0: it is a variant of momentum" in text


def test_an_experiment_with_options_of_another_optimizer_says_so():
    text = refused(["experiment=digits/autoencoder_kfac", "optimizer=adam"])
    assert "optimizer.momentum: the chosen optimizer has no such option" in text
    assert "The file is meant for its own optimizer: leave out optimizer=" in text
