"""Measure ideas for more speed; docs/lab/what_was_tried.md has results and verdicts.

    python benchmarks/ideas.py [--rounds 11]

Each idea alternates with the code that it would replace, on one thread. The table shows medians in
milliseconds, their ratio, and the loss of accuracy if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_bench.core.kernels import linalg
from kfac_bench.core.kernels.gram import gram
from kfac_bench.core.kernels.patches import autocorrelation_moment_3x3, pad_input, patch_moment
from kfac_bench.core.kernels.transposed_patches import Geometry, transposed_moment, transposed_rows
from kfac_bench.core.layers.unrolled import UnrolledForward


def interleaved(rounds: int, old: Callable[[], object], new: Callable[[], object]) -> list[float]:
    """Return the medians of both functions in milliseconds."""
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for kept, run in zip(times, (old, new), strict=True):
            start = time.perf_counter()
            run()
            kept.append(1e3 * (time.perf_counter() - start))
    # The first round warms up.
    return [statistics.median(t[1:]) for t in times]


def one_by_one(function: Callable[..., object], calls: Sequence[tuple[Tensor, ...]]) -> None:
    """Call `function` with each tuple of arguments."""
    for arguments in calls:
        function(*arguments)


def as_one_batch(grads: Sequence[Tensor], a: Tensor, g: Tensor, values: Tensor) -> Tensor:
    """Precondition layers of one shape, whose decompositions already form one batch."""
    return linalg.precondition_eigen(torch.cat(list(grads)), a, g, values)


def row(name: str, times: Sequence[float], note: str = "") -> None:
    """Print one row of the table."""
    old, new = times
    print(f"| {name} | {old:.2f} | {new:.2f} | {new / old:.2f} | {note} |", flush=True)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((got - want).norm() / want.norm())


def drifting_factors(n: int) -> tuple[Tensor, Tensor]:
    """Return a running factor, and the factor 10 updates of weight 0.05 later.

    The eigenvalues fall as 1/k.
    """
    scale = torch.arange(1, n + 1).float().rsqrt()
    mix = torch.linalg.qr(torch.randn(n, n))[0]

    def statistic() -> Tensor:
        rows = torch.randn(2048, n) * scale @ mix
        return gram(rows.unsqueeze(0))[0] / 2048

    before = sum((statistic() for _ in range(10)), torch.zeros(n, n)) / 10
    after = before.clone()
    for _ in range(10):
        after.lerp_(statistic(), 0.05)
    return before, after


def warm_start(rounds: int) -> None:
    """Measure one orthogonal iteration from the old eigenvectors (as in SOAP) instead of eigh."""
    for n in (257, 577, 1025):
        before, after = drifting_factors(n)
        old = linalg.eigendecompose(before.unsqueeze(0))[1][0].flip(-1)

        def iterate(after: Tensor = after, old: Tensor = old) -> tuple[Tensor, Tensor]:
            q = torch.linalg.qr(after @ old)[0]
            return q, (q * (after @ q)).sum(0)

        times = interleaved(rounds, partial(linalg.eigendecompose, after.unsqueeze(0)), iterate)
        q, values = iterate()
        error = relative_error((q * values) @ q.mT, after)
        stale = ((old * (after @ old)).sum(0) * old) @ old.mT
        kept = relative_error(stale, after)
        note = f"error {error:.3f}; of the old eigenvectors with new values {kept:.3f}"
        row(f"warm start, n = {n}, for eigh", times, note)


def low_precision(rounds: int) -> None:
    """Measure factor products of bf16 rows instead of fp32 rows."""
    for rows, n in ((2048, 256), (2048, 1024), (32768, 144)):
        x = torch.randn(1, rows, n)
        half = x.bfloat16()
        times = interleaved(rounds, partial(gram, x), partial(torch.matmul, half.mT, half))
        error = relative_error((half.mT @ half).float(), gram(x))
        lowest = torch.linalg.eigvalsh((half.mT @ half).float() / rows)[0, 0]
        exact = torch.linalg.eigvalsh(gram(x) / rows)[0, 0]
        note = f"error {error:.4f}; smallest eigenvalue {lowest:.4f}, was {exact:.4f}"
        row(f"bf16 product of {rows} x {n} rows", times, note)


def subsample(rounds: int) -> None:
    """Measure half of the positions at each update against all positions at every second one."""
    n, rows, updates = 512, 2048, 20
    scale = torch.arange(1, n + 1).float().rsqrt()
    truth = torch.diag(scale**2)
    x = torch.randn(updates, rows, n) * scale
    times = interleaved(rounds, lambda: gram(x[:1]), lambda: gram(x[:1, ::2]))
    half = torch.stack([gram(x[i : i + 1, ::2])[0] for i in range(updates)]).sum(0)
    half = half / (updates * rows / 2)
    every_second = torch.stack([gram(x[i : i + 1])[0] for i in range(0, updates, 2)]).sum(0)
    every_second = every_second / (updates * rows / 2)
    note = (
        f"error of the average {relative_error(half, truth):.4f}; of all positions at every second "
        f"update, the same work: {relative_error(every_second, truth):.4f}"
    )
    row("every second position", times, note)


def batches(rounds: int) -> None:
    """Measure equal shapes in one batch instead of one after the other."""
    for layers, g, a in ((10, 16, 145), (10, 64, 577), (16, 256, 257)):
        grads = torch.randn(layers, g, a)
        qa, qg = torch.randn(layers, a, a), torch.randn(layers, g, g)
        values = torch.rand(layers, g, a) + 1

        single = list(zip(*(torch.split(t, 1) for t in (grads, qa, qg, values)), strict=True))
        times = interleaved(
            rounds,
            partial(one_by_one, linalg.precondition_eigen, single),
            partial(as_one_batch, torch.split(grads, 1), qa, qg, values),
        )
        row(f"precondition {layers} layers of {g} x {a} as one batch", times)
    for count, n in ((20, 64), (10, 145), (8, 257)):
        x = torch.randn(count, n, 2 * n)
        matrices = x @ x.mT
        times = interleaved(
            rounds,
            partial(one_by_one, linalg.eigendecompose, [(m,) for m in torch.split(matrices, 1)]),
            partial(linalg.eigendecompose, matrices),
        )
        row(f"eigendecompose {count} factors of {n} as one batch", times)


def convolution(rounds: int) -> None:
    """Measure A of a 3x3 convolution without patches against one product of all patches."""
    for n, c, size in ((128, 16, 32), (128, 32, 16), (128, 64, 8), (8, 256, 14), (8, 512, 7)):
        x = torch.randn(n, c, size, size)

        def patches(x: Tensor = x) -> Tensor:
            return patch_moment(pad_input(x, (1, 1, 1, 1), "zeros"), (3, 3), (1, 1), (1, 1))

        times = interleaved(rounds, patches, partial(autocorrelation_moment_3x3, x))
        error = relative_error(autocorrelation_moment_3x3(x), patches())
        row(f"autocorrelation of [{n}, {c}, {size}, {size}]", times, f"error {error:.0e}")


def transposed_convolution(rounds: int) -> None:
    """Measure A of transposed convolutions by phases against patches of the zero-stuffed input."""
    cases = ((128, 16, 4, 1, 32), (64, 32, 2, 0, 32), (64, 16, 3, 1, 31))
    for c, n, kernel, padding, size in cases:
        shape = Geometry(
            [kernel] * 2, [2] * 2, [padding] * 2, dilation=[1] * 2, groups=1, size=[size] * 2
        )
        x = torch.randn(n, c, 16, 16)

        def with_zeros(x: Tensor = x, shape: Geometry = shape) -> Tensor:
            spread = x.new_zeros(*x.shape[:2], 31, 31)
            spread[..., ::2, ::2] = x
            pad = shape.kernel[0] - 1 - shape.padding[0]
            return patch_moment(F.pad(spread, [pad] * 4), shape.kernel, (1, 1), (1, 1))

        layer = nn.ConvTranspose2d(c, c // 2, kernel, 2, padding, bias=False)
        output = layer(x.requires_grad_())
        g = torch.ones_like(output)

        def backward(
            output: Tensor = output, x: Tensor = x, layer: nn.Module = layer, g: Tensor = g
        ) -> object:
            inputs = [x, *layer.parameters()]
            return torch.autograd.grad(output, inputs, g, retain_graph=True)

        by_phases = partial(transposed_moment, x.detach(), shape)
        times = interleaved(rounds, partial(with_zeros, x.detach()), by_phases)
        rows = transposed_rows(x.detach(), shape).flatten(0, 2)
        error = relative_error(by_phases()[0], rows.mT @ rows)
        own = interleaved(rounds, backward, by_phases)
        note = f"error {error:.0e}; {own[1] / own[0]:.1f} times the layer's backward"
        row(f"{kernel}x{kernel} of stride 2, [{n}, {c}, 16, 16]", times, note)


def unrolled(rounds: int) -> None:
    """Measure forward and backward of recurrent modules in explicit steps instead of fused."""
    for kind, size, steps, samples in (
        (nn.LSTM, 256, 35, 20),
        (nn.LSTM, 650, 35, 20),
        (nn.GRU, 256, 35, 20),
        (nn.LSTM, 64, 100, 32),
    ):
        module, x = kind(size, size, 2), torch.randn(steps, samples, size)

        def train(module: nn.Module = module, x: Tensor = x) -> Tensor:
            output: Tensor = module(x)[0]
            torch.autograd.backward(output.sum())
            return output.detach()

        def train_unrolled(train: Callable[[], Tensor] = train) -> Tensor:
            with UnrolledForward():
                return train()

        times = interleaved(rounds, train, train_unrolled)
        note = f"error {relative_error(train_unrolled(), train()):.0e}"
        name = f"{kind.__name__}, two layers of {size}, {steps} steps of {samples} samples"
        row(f"unrolled {name}", times, note)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| idea | now, ms | idea, ms | ratio | accuracy |")
    print("| --- | ---: | ---: | ---: | --- |")
    for measure in (
        warm_start,
        low_precision,
        subsample,
        batches,
        convolution,
        transposed_convolution,
        unrolled,
    ):
        measure(rounds)


if __name__ == "__main__":
    main()
