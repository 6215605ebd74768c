"""What KFAC refuses before it builds anything."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from kfac_bench import KFAC, eigen_adam
from kfac_bench.core import construction
from kfac_bench.core.damping import LevenbergMarquardt
from kfac_bench.core.distributed.collective import TorchCollective
from tests.support.distributed import run_ranks


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """An optimizer of a framework, with the real one inside."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


def test_lbfgs_is_refused_also_inside_wrappers():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    for _ in range(3):
        with pytest.raises(ValueError, match="LBFGS computes several gradients in a step"):
            KFAC(model, optimizer)
        optimizer = Wrapper(optimizer)


def refuse_fsdp1():
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    for wrapped in (model, nn.Sequential(nn.Linear(2, 2), model)):
        with pytest.raises(ValueError, match=r"FSDP1.*use FSDP2.*fully_shard\(model\)"):
            KFAC(wrapped, sgd(wrapped))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1_is_refused():
    run_ranks(2, refuse_fsdp1)


def refuse_groups_of_torch():
    for name in ("collective", "model_parallel"):
        for wrong in (torch.distributed.group.WORLD, TorchCollective):
            with pytest.raises(TypeError, match=rf"{name}=TorchCollective\(group\)"):
                KFAC(model := network(), sgd(model), **{name: wrong})


def test_a_group_of_torch_is_no_collective():
    run_ranks(2, refuse_groups_of_torch)


def test_parameters_are_no_model_and_a_name_is_no_optimizer():
    model = network()
    expected = r"class generator, expected a torch\.nn\.Module\. Pass .*: "
    with pytest.raises(TypeError, match=rf"{expected}KFAC\(model, optimizer\)$"):
        KFAC(model.parameters(), sgd(model))
    with pytest.raises(TypeError, match=rf"{expected}eigen_adam\(model\)$"):
        eigen_adam(model.parameters())
    with pytest.warns(FutureWarning, match="deprecated|not supported"):
        scripted = torch.jit.script(model)
    with pytest.raises(TypeError, match=r"compiled by torch\.jit.*pass the original model"):
        KFAC(scripted, sgd(model))
    for wrong in ("sgd", torch.optim.SGD):
        with pytest.raises(TypeError, match="expected an optimizer object: KFAC"):
            KFAC(model, wrong)


@pytest.mark.parametrize("saved", [[], [{}], [network().state_dict()], [{"steps": 3}]])
def test_only_the_state_of_a_preconditioner_is_loaded(saved):
    model = network()
    with pytest.raises(ValueError, match=r"pass what state_dict\(\)"):
        KFAC(model, sgd(model)).load_state_dict(*saved)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_weight_without_elements_is_left_to_the_optimizer():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(0, 3))
    kfac = KFAC(model, sgd(model))
    assert [layer.name for layer in kfac.report().layers] == ["0"]
    assert [(s.name, s.reason) for s in kfac.report().skipped] == [("1", "weight has no elements")]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_needs_a_batch_first():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: run a batch through"):
        KFAC(model, sgd(model))


def test_data_parallel_is_unwrapped():
    gradients = []
    for wrap in (nn.Module.train, nn.DataParallel):  # train() returns the model itself
        model = wrap(network())
        kfac = KFAC(model, sgd(model), kl_clip=None)
        assert [layer.name for layer in kfac.report().layers] == ["0", "2"]
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        F.cross_entropy(model(x), torch.arange(8) % 3).backward()
        kfac.step()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_data_parallel_on_several_devices_is_refused():
    model = nn.DataParallel(network())
    model.device_ids = [0, 1]
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        KFAC(model, sgd(model))


def test_a_model_without_layers_lists_what_was_skipped():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3), nn.Bilinear(2, 2, 2), frozen)
    with pytest.raises(ValueError, match="no layer to precondition") as raised:
        KFAC(model, sgd(model))
    assert str(raised.value).splitlines() == [
        "the model has no layer to precondition: K-FAC skips all modules",
        "  2 LayerNorm: skip pattern 'Norm' (0)",
        "  1 Bilinear: no layer class for Bilinear (add one with layer_types) (2)",
        "  1 Linear: weight is frozen (3)",
    ]


def test_the_list_of_skipped_modules_is_short():
    kinds = [type(f"Norm{i}", (nn.LayerNorm,), {}) for i in range(14)]
    model = nn.Sequential(*[kind(3) for kind in kinds])
    with pytest.raises(ValueError, match="no layer to precondition") as raised:
        KFAC(model, sgd(model))
    rows = str(raised.value).splitlines()
    assert len(rows) == 12
    assert rows[-1] == "  and 4 other kinds"
    bare = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match="no module of it has parameters"):
        KFAC(bare, sgd(network()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": "head"}, r"skip='head': give a list of patterns, such as skip=\['head'\]"),
        ({"skip": ["head("]}, r"skip: 'head\(' is no regular expression: missing \)"),
        ({"damping": "auto"}, "damping='auto' at step 0: must be a number, or a function"),
        ({"max_dim": None}, "max_dim=None: must be a whole number of at least 1$"),
        ({"max_dim": 0}, "max_dim=0: must be"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    """The letters of a text are patterns, too: they would leave out nearly all layers."""
    model = network()
    with pytest.raises(ValueError, match=said):
        KFAC(model, sgd(model), **options)


def test_limits_of_the_step_need_a_learning_rate():
    """Adafactor of transformers has none by default."""
    model = network()
    optimizer = sgd(model)
    kfac = KFAC(model, optimizer)
    optimizer.param_groups[0]["lr"] = None
    model(torch.randn(8, 6)).square().mean().backward()
    with pytest.raises(ValueError, match="SGD has no lr, but K-FAC needs"):
        kfac.step()


COMPARED = {
    "damping": LevenbergMarquardt(interval=2),
    "trust_ratio": 0.5,
    "kl_clip": 0.5,
    "factored_damping": True,
    "grafting": False,
    "early_updates": False,
    "background": True,
    "overlap": True,
    "factor_init": "identity",
    "factor_convention": "kaisa",
    "fisher": "mc",
    "weight_sharing": "reduce",
    "state_dtype": torch.float16,
}
"""Options that do not change the plan, each with another value than in the test."""


@pytest.mark.parametrize("name", COMPARED)
def test_ranks_compare_an_option_that_the_plan_does_not_contain(monkeypatch, name):
    compared, plans = [], []
    monkeypatch.setattr(
        construction, "check_same_on_all_ranks", lambda _, what, __: compared.append(what)
    )
    options = {"damping": LevenbergMarquardt(), "state_dtype": torch.bfloat16}
    for each in (options, options | {name: COMPARED[name]}):
        model = network()
        plans.append(KFAC(model, sgd(model), **each).plan.digest())
    assert plans[0] == plans[1]
    assert compared[0] != compared[1]


PAPER = {
    "method": "eigen",
    "damping": 0.001,
    "trust_ratio": None,
    "kl_clip": 0.001,
    "grafting": False,
    "early_updates": False,
    "spread": False,
    "factor_init": "identity",
    "factor_convention": "sc20",
}
"""What preset="paper" means. A change would change the results of its users."""


def preconditioned(**options):
    """All gradients after two steps with other data."""
    model = network()
    kfac = KFAC(model, sgd(model), factor_update_freq=1, update_freq=1, **options)
    for seed in range(2):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        kfac.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_the_preset_of_the_paper_is_its_options_and_other_keywords_win():
    assert torch.equal(preconditioned(preset="paper"), preconditioned(**PAPER))
    # The value that the user gives is the default without a preset.
    got = preconditioned(preset="paper", grafting=True)
    assert torch.equal(got, preconditioned(**PAPER | {"grafting": True}))
    assert not torch.allclose(got, preconditioned(preset="paper"))


def test_an_unknown_preset_is_refused():
    model = network()
    with pytest.raises(ValueError, match="preset='papers': choose one of paper, or None"):
        KFAC(model, sgd(model), preset="papers")


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_trust_ratio_is_above_0_and_finite(ratio):
    model = network()
    with pytest.raises(ValueError, match=f"trust_ratio={ratio}: must be above 0 and finite"):
        KFAC(model, sgd(model), trust_ratio=ratio)


@pytest.mark.parametrize("fraction", ["0.3", 1.5, 0])
def test_a_fraction_is_a_number_above_0_and_at_most_1(fraction):
    model = network()
    with pytest.raises(ValueError, match=f"fraction={fraction!r}: must be above 0 and at most 1"):
        KFAC(model, sgd(model), strategy="hybrid_opt", grad_worker_fraction=fraction)
    with pytest.raises(ValueError, match=r"trust_ratio='0\.3': must be above 0 and finite"):
        KFAC(model, sgd(model), trust_ratio="0.3")


def test_a_fraction_without_a_strategy_that_has_one_is_refused():
    model = network()
    with pytest.raises(ValueError, match=r"0\.5 has no effect with strategy=comm_opt.*hybrid_opt"):
        KFAC(model, sgd(model), grad_worker_fraction=0.5)
    KFAC(model, sgd(model), grad_worker_fraction=1, strategy="hybrid_opt").detach()
