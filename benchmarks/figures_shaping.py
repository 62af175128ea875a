"""Shows what shaped merging does: running sums of merged bits, and the spectrum of their noise.

    python benchmarks/figures_shaping.py --out docs/figures/noise-shaping.png

Four ranks' bits are merged by the kernels, step by step, as a ring and a fold do it; nothing is trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import COLOURS, dress, name_lines, new_figure, save_as
from horovod_compress import ops
from horovod_compress.ops.keys import Key

RANKS, STEPS, SHOWN, WORDS = 4, 2000, 200, 65
SHARE = 0.55  # of +1 among the signs
SLOW = 1 / 50  # of the step rate

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Merge = Callable[[list[Tensor], int], tuple[Tensor, Tensor | None]]  # bits, and those of zeros where there are any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/noise-shaping.png"), help=".png or .svg")
    draw(parser.parse_args().out)


def draw(path: Path) -> None:
    """Draw both panels."""
    bits = signs_of_ranks()
    mean: Floats = np.mean([unpacked([step[rank] for step in bits]) for rank in range(RANKS)], axis=0)
    merged = {name: values([merge(step, at) for at, step in enumerate(bits)]) for name, merge in merges().items()}
    figure, (left, right) = new_figure(
        "Shaped merging stays with the ranks' signs, and its noise is fast",
        f"{RANKS} ranks, {SHARE:.0%} of their signs are +1; {STEPS} steps of {64 * WORDS} elements",
        width=11.0,
        height=3.9,
        columns=2,
    )
    sums(left, mean, merged)
    spectra(right, mean, merged)
    figure.draw_without_rendering()
    for panel in (left, right):
        name_lines(panel)
    save_as(figure, path)


def signs_of_ranks() -> list[list[Tensor]]:
    """Return the words of every rank in every step."""
    drawn = np.random.default_rng(1).random((STEPS, RANKS, 64 * WORDS)) < SHARE
    words = np.packbits(drawn, axis=-1, bitorder="little").view(np.int64)
    return [list(torch.from_numpy(step)) for step in words]


def unpacked(words: list[Tensor]) -> Floats:
    """Return the signs by step and element."""
    bits = np.unpackbits(torch.stack(words).numpy().view(np.uint8), axis=-1, bitorder="little")
    return 2.0 * bits - 1.0


def values(merged: list[tuple[Tensor, Tensor | None]]) -> Floats:
    """Return the merged values by step and element."""
    signs = unpacked([ones for ones, _ in merged])
    zeros = [zeros for _, zeros in merged if zeros is not None]
    return np.where(unpacked(zeros) > 0, 0.0, signs) if zeros else signs


def merges() -> dict[str, Merge]:
    """Return how the bits of all ranks become one value, by name."""
    kept = {
        hop: [torch.zeros(WORDS, dtype=torch.int64) for _ in range(ops.count_rows(hop))] for hop in range(2, RANKS + 1)
    }
    whole, three = ([torch.zeros_like(row) for row in kept[RANKS]] for _ in range(2))

    def sampled(bits: list[Tensor], step: int) -> tuple[Tensor, None]:
        into = bits[0].clone()
        for hop in range(1, RANKS):
            ops.merge_bits(into, bits[hop], hop, 1, Key(1, step, 0, 0, hop))
        return into, None

    def ring(bits: list[Tensor], step: int) -> tuple[Tensor, None]:
        arrived = bits[0]
        for hop, rows in kept.items():
            mine = bits[hop - 1].clone()
            ops.shaped_merge(mine, arrived, rows, rows, hop)
            arrived = mine
        return arrived, None

    def fold(bits: list[Tensor], step: int) -> tuple[Tensor, None]:
        out = torch.empty_like(bits[0])
        ops.shaped_fold(bits, out, whole, whole)
        return out, None

    def ternary(bits: list[Tensor], step: int) -> tuple[Tensor, Tensor]:
        packed = torch.zeros(WORDS // ops.GROUP_WORDS * ops.PACKED_WORDS, dtype=torch.int64)
        ones, zeros = (torch.zeros(WORDS, dtype=torch.int64) for _ in range(2))
        ops.ternary_fold(bits, packed, three, three)
        ops.ternary_unpack(packed, ones, zeros)
        return ones, zeros

    return {"sampled": sampled, "shaped, ring": ring, "shaped, fold": fold, "shaped, three values": ternary}


def sums(panel: Any, mean: Floats, merged: dict[str, Floats]) -> None:
    """Draw the running sums of one element."""
    lines = {"the ranks' mean sign": mean, **merged}
    for colour, (name, signs) in zip(COLOURS, lines.items(), strict=False):
        panel.plot(np.cumsum(signs[:SHOWN, 0]), color=colour, label=name, linewidth=1.4)
    panel.set_xlabel("step")
    panel.set_ylabel("running sum of one element's bits")
    dress(panel)


def spectra(panel: Any, mean: Floats, merged: dict[str, Floats]) -> None:
    """Draw the power of the merged bits' noise by frequency."""
    panel.axvspan(1 / STEPS, SLOW, color="#eeeeee", zorder=0)
    for colour, (name, signs) in zip(COLOURS[1:], merged.items(), strict=False):
        power = (np.abs(np.fft.rfft(signs - mean, axis=0)[1:]) ** 2 / STEPS).mean(1)
        frequency = np.arange(1, len(power) + 1) / STEPS
        panel.plot(frequency, 10 * np.log10(power), color=colour, label=name, linewidth=1.0)
    panel.set_xscale("log")
    panel.set_xlabel("frequency, cycles a step (grey: slower than 50 steps)")
    panel.set_ylabel("power of the noise, dB")
    dress(panel)


if __name__ == "__main__":
    main()
