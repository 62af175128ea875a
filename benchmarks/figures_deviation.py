"""Shows how far results are from the exact mean over 2 to 64 ranks: signs taken anew at every hop, and Marsit's merges.

    python benchmarks/figures_deviation.py --out docs/figures/deviation.png

Gradients are a common part and noise of each rank, both of standard deviation 1, so half of a gradient is noise.
Nothing is trained, and there are no residuals: this is what summing does, and nothing else. Marsit's bits are merged by
the kernels, as in a ring and by owners. Cascading compression is what a ring does that decodes, adds and compresses at
every hop, with the mean magnitude as the size of a sign, or with signs drawn so that each hop alone is unbiased (SSDM).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import COLOURS, dress, name_lines, new_figure, save_as
from horovod_compress import ops
from horovod_compress.ops.keys import Key

RANKS, ROUNDS, WORDS = (2, 4, 8, 16, 32, 64), 64, 160
MOST = 1e20  # that the picture shows

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Aggregate = Callable[[Floats, int], Floats]  # gradients by rank, and the round, to their mean or what stands for it

MEAN_SIGN, DRAWN = "cascading, sign of mean size", "cascading, drawn sign"
SAMPLED, RING, OWNERS = "Marsit, sampled", "Marsit, shaped, ring", "Marsit, shaped, owners"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/deviation.png"), help=".png or .svg")
    draw(parser.parse_args().out)


# ---- aggregates -------------------------------------------------------------------------------


def aggregates(ranks: int, words: int) -> dict[str, Aggregate]:
    """Return the ways to aggregate, by name; each remembers what it keeps between rounds."""
    zeros = [torch.zeros(words, dtype=torch.int64) for _ in range(2)]
    hops = {hop: [torch.zeros_like(zeros[0]) for _ in range(ops.count_rows(hop))] for hop in range(2, ranks + 1)}
    owned = [torch.zeros_like(zeros[0]) for _ in range(ops.count_rows(ranks))]

    def sampled(grads: Floats, step: int) -> Floats:
        first, *others = packed(grads)
        for hop, bits in enumerate(others, 1):
            ops.merge_bits(first, bits, hop, 1, Key(1, step, 0, 0, hop))
        return size(grads) * unpacked(first)

    def ring(grads: Floats, step: int) -> Floats:
        arrived, *others = packed(grads)
        for (hop, rows), mine in zip(hops.items(), others, strict=True):
            ops.shaped_merge(mine, arrived, rows, rows, hop)
            arrived = mine
        return size(grads) * unpacked(arrived)

    def owners(grads: Floats, step: int) -> Floats:
        out = torch.zeros(words // ops.GROUP_WORDS * ops.PACKED_WORDS, dtype=torch.int64)
        ops.ternary_fold(packed(grads), out, owned, owned)
        ops.ternary_unpack(out, *zeros)
        return size(grads) * np.where(unpacked(zeros[1]) > 0, 0.0, unpacked(zeros[0]))

    return {MEAN_SIGN: cascading(mean_sign), DRAWN: cascading(drawn_sign), SAMPLED: sampled, RING: ring, OWNERS: owners}


def cascading(compress: Callable[[Floats, np.random.Generator], Floats]) -> Aggregate:
    """Return a ring that compresses the partial sum at every hop."""

    def aggregate(grads: Floats, step: int) -> Floats:
        generator, total = np.random.default_rng([2, step]), np.zeros_like(grads[0])
        for grad in grads:
            total = compress(total + grad, generator)
        return total / len(grads)

    return aggregate


def mean_sign(x: Floats, generator: np.random.Generator) -> Floats:
    """Return the signs of x, times the mean of its magnitudes."""
    return np.abs(x).mean() * np.where(x >= 0, 1.0, -1.0)


def drawn_sign(x: Floats, generator: np.random.Generator) -> Floats:
    """Return signs drawn so that they are x on average, times its norm."""
    norm = np.linalg.norm(x)
    return norm * np.where(generator.random(len(x)) < 0.5 + x / (2 * norm), 1.0, -1.0)


def packed(grads: Floats) -> list[Tensor]:
    """Return the words of every rank's signs."""
    words = np.packbits(grads >= 0, axis=-1, bitorder="little").view(np.int64)
    return [mine.clone() for mine in torch.from_numpy(words)]


def unpacked(words: Tensor) -> Floats:
    """Return signs as numbers."""
    return 2.0 * np.unpackbits(words.numpy().view(np.uint8), bitorder="little") - 1.0


def size(grads: Floats) -> float:
    """Return Marsit's measured step."""
    return float(np.abs(grads).mean())


# ---- deviations -------------------------------------------------------------------------------


def deviations(ranks: int, rounds: int = ROUNDS, words: int = WORDS) -> dict[str, tuple[float, float]]:
    """Return how far results are from the exact mean, as a share of its norm.

    Returns:
        By name, the mean deviation of one round, and the deviation of the mean of all rounds.
    """
    generator = np.random.default_rng(ranks)
    common, ways = generator.standard_normal(64 * words), aggregates(ranks, words)
    exact = np.zeros(64 * words)
    sums = {name: np.zeros(64 * words) for name in ways}
    single = dict.fromkeys(ways, 0.0)
    for step in range(rounds):
        grads = common + generator.standard_normal((ranks, 64 * words))
        mean: Floats = grads.mean(axis=0)
        exact += mean
        for name, aggregate in ways.items():
            found = aggregate(grads, step)
            sums[name] += found
            single[name] += away(found, mean) / rounds
    return {name: (single[name], away(sums[name], exact)) for name in ways}


def away(found: Floats, exact: Floats) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


# ---- the picture ------------------------------------------------------------------------------


def draw(path: Path, ranks: Sequence[int] = RANKS, rounds: int = ROUNDS, words: int = WORDS) -> None:
    """Draw both panels."""
    found = [deviations(number, rounds, words) for number in ranks]
    figure, (left, right) = new_figure(
        "Signs taken anew at every hop drift away; Marsit's merges do not",
        f"distance from the exact mean over ranks, as a share of its norm; {64 * words} elements; a rank's gradient "
        "is a common part plus as much independent noise",
        width=12.0,
        height=3.9,
        columns=2,
    )
    lines(left, ranks, found, [DRAWN, SAMPLED, OWNERS], 0)
    left.set_yscale("log")
    left.set_ylim(0.02, MOST)
    left.set_ylabel("deviation of one round")
    lines(right, ranks, found, [MEAN_SIGN, SAMPLED, RING, OWNERS], 1)
    right.set_ylim(0.0)
    right.set_ylabel(f"deviation of the mean of {rounds} rounds")
    figure.draw_without_rendering()
    for panel in (left, right):
        name_lines(panel)
    save_as(figure, path)


def lines(
    panel: Any, ranks: Sequence[int], found: Sequence[dict[str, tuple[float, float]]], names: Sequence[str], which: int
) -> None:
    for name in names:
        points = [(number, one[name][which]) for number, one in zip(ranks, found, strict=True)]
        points = [(x, y) for x, y in points if y < MOST]
        colour = COLOURS[1 + [MEAN_SIGN, DRAWN, SAMPLED, RING, OWNERS].index(name)]
        panel.plot(*zip(*points, strict=True), color=colour, label=name, marker="o", markersize=3, linewidth=1.4)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(ranks), [str(number) for number in ranks])
    panel.set_xlabel("ranks")
    dress(panel)


if __name__ == "__main__":
    main()
