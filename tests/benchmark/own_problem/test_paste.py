"""The lines that kfac-bench try prints build what the run had, and train."""

import itertools

import pytest
import torch
from torch import nn

from kfac_bench.benchmark.own_problem import answer, study_input
from kfac_bench.benchmark.trials import overrides_of
from kfac_bench.config.problem_file import ProblemFile
from kfac_bench.core import KFAC
from kfac_bench.core.attachment import innermost
from kfac_bench.problem import Problem
from kfac_bench.tasks.problem_task import ProblemTask
from kfac_bench.training import build
from tests.support.configs import quick_load

BASE = ("model=autoencoder", "task=reconstruction", "logger=none")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def problem(likelihood="categorical", **options):
    examples = [(torch.zeros(6), 0)]
    loss = options.pop("loss", nn.CrossEntropyLoss())
    return Problem(
        model=model,
        train=examples,
        validation=examples,
        loss=loss,
        metric=loss,
        higher_is_better=False,
        likelihood=likelihood,
        **options,
    )


def configs(optimizer, *words):
    for settings in study_input.candidates(optimizer, has_likelihood=True):
        yield quick_load([*BASE, *words, *overrides_of(settings)])


def train(net, optimizer, kfac, step):
    """Train three steps; return the weights."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(32, 6, generator=generator)
        optimizer.zero_grad()
        output = net(x)
        if kfac is not None and kfac.fisher != "empirical":
            torch.manual_seed(2)
            kfac.fisher_backward(output, "categorical")
        nn.functional.cross_entropy(output, x.argmax(1) % 3).backward()
        step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def pasted(text):
    """Execute the lines as a user would; return the weights after three steps."""
    namespace = {"model": model()}
    exec(text, namespace)
    optimizer = namespace["optimizer"]
    assert isinstance(innermost(optimizer), torch.optim.Optimizer)
    return train(namespace["model"], optimizer, namespace.get("preconditioner"), optimizer.step)


def harness(config):
    """Return the weights after the same steps with the optimizer and K-FAC of the harness."""
    net = model()
    optimizer = build.build_optimizer(config.optimizer, net)
    kfac = build.build_kfac(config.kfac, net, optimizer)

    def step():
        if kfac is not None:
            kfac.step()
        optimizer.step()

    return train(net, optimizer, kfac, step)


@pytest.mark.parametrize("optimizer", study_input.choose(None))
def test_the_lines_train_as_the_run_did(optimizer):
    for config in itertools.islice(configs(optimizer), 3):
        text = answer.paste_lines(config, problem())
        torch.testing.assert_close(pasted(text), harness(config), rtol=1e-4, atol=1e-6)


def test_the_lines_have_the_words_of_the_user():
    words = ("optimizer.weight_decay=0.05", "kfac.skip=[Norm,head]", "kfac.state_dtype=bf16")
    for optimizer in ("kfac_adamw", "eigen_adam"):
        config = next(configs(optimizer, *words))
        text = answer.paste_lines(config)
        assert "weight_decay=0.05" in text
        assert "skip=['Norm', 'head']" in text
        assert "state_dtype=torch.bfloat16" in text
        torch.testing.assert_close(pasted(text), harness(config), rtol=1e-4, atol=1e-6)


def test_options_at_their_defaults_are_left_out():
    text = answer.paste_lines(next(configs("kfac_adamw")))
    assert text.splitlines()[-1] == ("KFAC(model, optimizer, update_freq=40).attach()")
    assert "eigen_adam(model, lr=0.01)" in answer.paste_lines(next(configs("eigen_adam")))
    assert answer.paste_lines(next(configs("muon"))) == (
        "from kfac_bench import muon\noptimizer = muon(model, lr=0.02, adam_lr=0.01)"
    )


def test_labels_that_are_drawn_need_a_line_in_the_loop():
    config = [*configs("kfac")][1]

    def line(**options):
        return answer.paste_lines(config, problem(**options)).splitlines()[-1]

    call = "#   preconditioner.fisher_backward(output, "
    assert line(likelihood="gaussian") == f'{call}"gaussian")'
    assert line(likelihood="gaussian", curvature=0.5) == f'{call}"gaussian", curvature=0.5)'
    assert line(likelihood="bernoulli") == f'{call}"bernoulli")'
    assert line() == f'{call}"categorical", dim=1)'

    def loss(model, batch):
        return model(batch).mean()

    assert line(loss=loss) == f'{call}"categorical")'


def test_the_arguments_of_drawn_labels_give_the_statistics_of_the_run():
    """Of a squared error, and of a cross entropy with the classes in dimension 1."""
    images = torch.randn(64, 3, 4, generator=torch.Generator().manual_seed(3))
    squared = problem("gaussian", loss=nn.MSELoss(), curvature=0.25)
    for own, targets in ((squared, images), (problem(), images.argmax(1))):
        factors = []
        for draw in (draw_as_pasted, draw_as_the_run):
            torch.manual_seed(0)
            net = nn.Conv1d(3, 3, 1)
            kfac = KFAC(net, torch.optim.SGD(net.parameters(), lr=0.1), fisher="type2")
            draw(kfac, own, net, (images, targets))
            own.loss(net(images), targets).backward()
            kfac.step()
            factors.append(kfac.state_dict()["layers"][""]["G"]["factor"])
        torch.testing.assert_close(*factors)


def draw_as_pasted(kfac, own, net, batch):
    (line,) = [
        x for x in answer.paste_lines([*configs("kfac")][1], own).splitlines() if "output" in x
    ]
    exec(line.removeprefix("#   "), {"preconditioner": kfac, "output": net(batch[0])})


def draw_as_the_run(kfac, own, net, batch):
    task = ProblemTask(ProblemFile("problem.py", "", own), has_parts=True)
    _, output = task.forward(net, batch)
    kfac.fisher_backward(output, task.likelihood, curvature=task.curvature)


def test_a_schedule_of_the_study_is_named():
    text = answer.paste_lines(next(configs("adamw")), words=["schedule=cosine", "data.workers=2"])
    assert text.splitlines()[-1] == (
        "# The runs had schedule=cosine: give your script the same schedule."
    )
