"""Noise-shaped merging: over the steps nothing is lost, nothing is drawn, and what is noise is fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs.shared import signs
from horovod_compress.errors import ConfigError
from horovod_compress.exchange import torus
from horovod_compress.exchange.collective import chunk_bounds
from horovod_compress.ops.keys import Key
from horovod_compress.ops.reference import signs as ternary
from horovod_compress.ops.reference.signs import rounded_off
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import each_value, slow

_PLAIN = {"full_precision_every": 0, "compensation": "none", "step_size": 1.0, "merge": "shaped"}
#: The methods that merge so, with the collective, and the options that make of a result the merged signs.
METHODS = {
    "marsit ring": {"method": "marsit", "exchange": "ring", "levels": 2, **_PLAIN},
    "marsit fold": {"method": "marsit", "exchange": "fold", "levels": 2, **_PLAIN},
    "marsit fold, three levels": {"method": "marsit", "exchange": "fold", "levels": 3, **_PLAIN},
    "marsit torus": {"method": "marsit", "exchange": "torus", "levels": 2, **_PLAIN},
    "marsit ring, groups": {"method": "marsit", "exchange": "ring", "levels": 3, **_PLAIN},
    "signsgd fold": {"method": "signsgd", "step_size": 1.0, "merge": "shaped"},
    "signum fold": {"method": "signum", "beta": 0.0, "step_size": 1.0, "merge": "shaped"},
}
TENSORS = [spec("a", 7, 33), spec("b", 13), spec("c", 200), spec("d")]


STEPS = 1000


def _random(steps: int, ranks: int, count: int, seed: int) -> list[list[Tensor]]:
    """Return the words of every rank in every step."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**63), 2**63 - 1, (steps, ranks, count), generator=generator, dtype=torch.int64)
    return [list(step) for step in drawn]


def _signs(steps: list[Tensor]) -> np.ndarray:
    """Return the signs by step and element."""
    bits = np.unpackbits(torch.stack(steps).numpy().view(np.uint8), axis=-1, bitorder="little")
    return 2 * bits.astype(np.int64) - 1


def _sums(bits: list[list[Tensor]]) -> np.ndarray:
    """Return the sums over ranks of the signs."""
    return np.sum([_signs(list(mine)) for mine in zip(*bits, strict=True)], axis=0)


class _Merging:
    """Merges whole steps as one of the collectives does, without exchanging anything.

    Args:
        merge: "shaped" or "sampled", to signs; or "ternary", to three values.
    """

    def __init__(self, merge: str, collective: str, ranks: int, count: int) -> None:
        self._merge, self._ranks, self._step = merge, ranks, 0
        hops = range(2, ranks + 1) if collective == "ring" or merge == "sampled" else [ranks]
        self.kept = {hop: [torch.zeros(count, dtype=torch.int64) for _ in range(ops.count_rows(hop))] for hop in hops}
        self._folds = merge != "sampled" and collective == "fold"

    def __call__(self, bits: list[Tensor]) -> np.ndarray:
        """Return the merged values of one step."""
        self._step += 1
        p = bits[0].clone()
        if self._folds:
            rows = self.kept[self._ranks]
            if self._merge == "ternary":
                return _three_values(bits, rows)
            ops.shaped_fold(bits, p, rows, rows)
            return _signs([p])[0]
        for hop, rows in self.kept.items():
            mine = bits[hop - 1].clone()
            if self._merge == "shaped":
                ops.shaped_merge(mine, p, rows, rows, hop)
            else:
                ops.merge_bits(mine, p, 1, hop - 1, Key(1, self._step, 0, 0, hop))
            p = mine
        return _signs([p])[0]

    def left(self) -> np.ndarray:
        """Return what is kept, in whole signs; see that it is bounded."""
        if self._merge == "ternary":
            ((ranks, rows),) = self.kept.items()
            left = ternary.ternary_left_over(rows, ranks, 64 * rows[0].numel())
            assert (2 * abs(left) <= ranks).all()
            return left
        found = {hop: rounded_off(rows, hop) for hop, rows in self.kept.items()}
        assert all((abs(mine) <= hop).all() for hop, mine in found.items())
        return np.sum(list(found.values()), axis=0)


def _three_values(bits: list[Tensor], rows: list[Tensor]) -> np.ndarray:
    """Fold signs to three values; return these."""
    words = bits[0].numel()
    packed = torch.zeros(words // ops.GROUP_WORDS * ops.PACKED_WORDS, dtype=torch.int64)
    ones, zeros = torch.zeros(words, dtype=torch.int64), torch.zeros(words, dtype=torch.int64)
    ops.ternary_fold(bits, packed, rows, rows)
    ops.ternary_unpack(packed, ones, zeros)
    return np.where(_signs([zeros])[0] > 0, 0, _signs([ones])[0])


@each_value
@pytest.mark.parametrize(("merge", "collective"), [("shaped", "ring"), ("shaped", "fold"), ("ternary", "fold")])
@pytest.mark.parametrize("ranks", [2, 5, 16, *slow(3, 4, *range(6, 16))])
def test_the_sum_of_what_is_merged_is_that_of_the_signs_but_for_what_is_kept(
    ranks: int, merge: str, collective: str
) -> None:
    """M p = the signs' sum + what was kept before and is not kept now, exactly, over 1,000 steps; it is bounded."""
    bits, merging = _random(STEPS, ranks, 5, seed=ranks), _Merging(merge, collective, ranks, 5)
    first, merged, left = merging.left(), [], []
    for step in bits:
        merged.append(merging(step))
        left.append(merging.left() if len(merged) % 50 == 0 else None)
    owed = np.cumsum(_sums(bits) - ranks * np.stack(merged), axis=0) + first
    assert sum(mine is not None and bool((owed[step] == mine).all()) for step, mine in enumerate(left)) == STEPS // 50
    assert abs(owed).max() >= ranks // 2 - 1  # there was something to keep


def _left(fleet: Fleet, exchange: str, levels: int) -> np.ndarray:
    """Return the sum over ranks of what they keep for every element of the payload."""
    (bucket,), world = fleet.plan.buckets, fleet.world
    record = {2: 1, 3: ops.GROUP_WORDS}[levels]
    words = -(-bucket.padded // 64 // record) * record
    total = np.zeros(64 * words, dtype=np.int64)
    for reducer in fleet.reducers:
        assert reducer.wait_idle(5.0)
        kept, *again = reducer.kept.carries().values()
        if exchange == "torus":
            total += _left_on_a_torus(reducer.rank, world, words, kept, *again)
            continue
        for chunk in range(world):
            first, last = chunk_bounds(words, chunk, world, record)
            hop = (reducer.rank - chunk) % world + 1
            if exchange == "fold" and chunk == reducer.rank:
                assert kept.shape[1] == last - first
                rows, count = list(kept), 64 * (last - first)
                mine = ternary.ternary_left_over(rows, world, count) if levels == 3 else rounded_off(rows, world)
                total[64 * first : 64 * last] += mine
            elif exchange == "ring":
                mine = rounded_off(list(kept[: ops.count_rows(hop), first:last]), hop) if hop > 1 else 0
                assert not kept[ops.count_rows(hop) :, first:last].any()
                total[64 * first : 64 * last] += mine
    return total[: bucket.padded]


def _left_on_a_torus(rank: int, world: int, words: int, kept: Tensor, again: Tensor | None = None) -> np.ndarray:
    """Return what one rank keeps in whole signs: a column merges payloads of as many ranks as a row has."""
    place = torus.of(world).place(rank, world)
    total = np.zeros(64 * words, dtype=np.int64)
    for chunk in range(world):
        (group, part), (first, last) = divmod(chunk, place.rows), chunk_bounds(words, chunk, world)
        hop = (place.column - group) % place.columns + 1
        if hop > 1:
            total[64 * first : 64 * last] += rounded_off(list(kept[: ops.count_rows(hop), first:last]), hop)
        begin, _ = chunk_bounds(words, place.chunk(place.column + 1, 0), world)
        hop = (place.row - part) % place.rows + 1
        if again is not None and group == (place.column + 1) % place.columns and hop > 1:
            here = slice(first - begin, last - begin)
            total[64 * first : 64 * last] += place.columns * rounded_off(list(again[: ops.count_rows(hop), here]), hop)
    return total


def _flat(fleet: Fleet, tensors: dict[str, Tensor]) -> np.ndarray:
    """Return signs where they lie in the payload; gaps are all zeros, which is minus."""
    (bucket,) = fleet.plan.buckets
    flat = np.full(bucket.padded, -1, dtype=np.int64)
    for offset, tensor in zip(bucket.offsets, bucket.tensors, strict=True):
        flat[offset : offset + tensor.count] = tensors[tensor.name].view(-1).sign().numpy()
    return flat


@pytest.mark.parametrize(
    ("name", "world"),
    [
        *((name, world) for name in METHODS for world in (2, 5)),
        *(("marsit torus", world) for world in (4, 6)),
        *slow(*((name, world) for name in METHODS for world in (3, 4, 16) if (name, world) != ("marsit torus", 4))),
    ],
)
def test_the_identity_through_the_exchange(world: int, name: str) -> None:
    """In every step, on every rank, with chunks of any length, none included."""
    with Fleet(world, TENSORS, **METHODS[name]) as fleet:
        exchange, levels = METHODS[name].get("exchange", "fold"), METHODS[name].get("levels", 2)
        before = _left(fleet, exchange, levels)
        for number in range(5):
            grads = random_grads(world, TENSORS, seed=number)
            results = fleet.step(grads)
            assert all_same(results)
            after = _left(fleet, exchange, levels)
            given = sum(_flat(fleet, mine) for mine in grads)
            assert (world * _flat(fleet, results[0]) == given + before - after).all()
            before = after
        assert before.any() or (world == 2 and "three" in name)  # two signs have three sums


@pytest.mark.parametrize(("world", "more"), [(2, 1.0), (3, 1.3)])
def test_two_ranks_pass_on_a_bit_where_others_pass_on_three_values(world: int, more: float) -> None:
    """Each knows its own sign, so the mean of two is known by where they differ."""
    tensors, sent = [spec("a", 64, 1000)], []
    for name in ("marsit fold", "marsit fold, three levels"):
        with Fleet(world, tensors, **METHODS[name], verify_every=0) as fleet:
            results = fleet.step(random_grads(world, tensors, seed=3))
            assert len(results[0]["a"].unique()) == (3 if "three" in name else 2)
            sent.append(fleet.reducers[0].metrics.bytes_sent)
    assert sent[1] / sent[0] == pytest.approx(more, rel=0.03)


@pytest.mark.parametrize("options", [{}, {"compensation": "global"}, {"step_size": "tensor", "zeros": "positive"}])
def test_of_two_ranks_results_and_residuals_are_those_of_three_values(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As owners pass them on, packed, among more ranks."""
    found = []
    for pair in (signs.PAIR, 0):
        monkeypatch.setattr(signs, "PAIR", pair)
        with Fleet(2, TENSORS, "marsit", full_precision_every=0, **options) as fleet:
            for number in range(5):
                grads = random_grads(2, TENSORS, seed=number)
                for mine in grads:
                    mine["c"][::3] = 0.0
                results = fleet.step(grads)
            assert all_same(results)
            found += [results[0], *fleet.residuals()]
    half = len(found) // 2
    assert all(same_bits(a[n], b[n]) for a, b in zip(found[:half], found[half:], strict=True) for n in a)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_drawn(name: str) -> None:
    runs = []
    for seed in (1, 2):
        with Fleet(4, TENSORS, seed=seed, **METHODS[name]) as fleet:
            runs.append([fleet.step(random_grads(4, TENSORS, seed=number))[0] for number in range(5)])
    assert all(same_bits(a[name], b[name]) for a, b in zip(*runs, strict=True) for name in a)


def _slow_power(merge: str, collective: str) -> float:
    """Return the power of the merged bits' noise, averaged over the frequencies below 1/50 of the step rate."""
    bits, merging = _random(STEPS, 4, 65, seed=1), _Merging(merge, collective, 4, 65)
    noise = np.stack([merging(step) for step in bits]) - _sums(bits) / 4
    power = np.abs(np.fft.rfft(noise, axis=0)[: STEPS // 50]) ** 2 / STEPS
    return float(power.mean())


@pytest.mark.parametrize(
    ("merge", "collective", "decibels"), [("shaped", "ring", 20), ("shaped", "fold", 25), ("ternary", "fold", 30)]
)
def test_slow_noise_is_far_below_that_of_the_sampled_bit(merge: str, collective: str, decibels: int) -> None:
    sampled, shaped = _slow_power("sampled", collective), _slow_power(merge, collective)
    assert abs(sampled - 3 / 4) < 0.02  # the variance of a fair bit of four random signs, at all frequencies
    assert 10 * np.log10(sampled / shaped) > decibels, (sampled, shaped)


@pytest.mark.parametrize(("exchange", "levels"), [("ring", 2), ("fold", 2), ("fold", 3)])
@pytest.mark.parametrize("world", [3, 4])
def test_with_own_residuals_nothing_is_lost(world: int, exchange: str, levels: int) -> None:
    """M times the results = the gradients - the residuals - the step times what merging keeps, over all steps."""
    options = {"step_size": 0.5, "compensation": "own", "zeros": "positive", "exchange": exchange, "levels": levels}
    with Fleet(world, [spec("w", 999)], **_PLAIN | options) as fleet:
        generator, owed = torch.Generator().manual_seed(1), np.zeros(999)
        for _ in range(20):
            # Multiples of 1/64 of moderate size: sums and differences of these are exact.
            grads = torch.randint(-64, 64, (world, 999), generator=generator).float() / 64
            result = fleet.step([{"w": grad} for grad in grads])[0]["w"]
            owed += (grads.sum(0) - world * result).numpy()
        waiting = np.sum([mine["w"].numpy() for mine in fleet.residuals()], axis=0)
        assert (owed == waiting + 0.5 * _left(fleet, exchange, levels)[:999]).all()


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"levels": 2}, 1.5),
        ({"levels": 2, "step_scale": 0.5}, 0.5),
        ({"levels": 2, "compensation": "none"}, 1.0),
        ({"merge": "sampled"}, 1.0),
        ({"levels": 3}, 1.5),
    ],
    ids=str,
)
def test_the_measured_step_is_so_many_means(options: dict, scale: float) -> None:
    grads = random_grads(3, [spec("w", 16, 300)])
    means = torch.stack([mine["w"].abs() for mine in grads]).mean(dim=(0, 2))
    with Fleet(3, [spec("w", 16, 300)], full_precision_every=0, **options) as fleet:
        found = fleet.step(grads)[0]["w"].abs()
    steps = (scale * means)[:, None].expand_as(found)
    zeros = found == 0
    assert bool(zeros.any()) == (options.get("levels") == 3)
    torch.testing.assert_close(found[~zeros], steps[~zeros], rtol=1e-5, atol=0)


@pytest.mark.parametrize("takes", ["linearly", "divided"])
def test_two_ranks_take_a_larger_step(takes: str) -> None:
    """With SGD and a held second moment; not where something is rounded off, or a scale was given."""
    tensors = [spec("w", 16, 300)]

    def found(world: int, takes: str = takes, **options: Any) -> Tensor:
        with Fleet(world, tensors, full_precision_every=0, **options) as fleet:
            for reducer in fleet.reducers:
                reducer.buckets.set_linear({"w"} if takes == "linearly" else ())
                reducer.buckets.divide_by({"w": torch.ones(4800)} if takes == "divided" else {})
            return fleet.step(random_grads(world, tensors))[0]["w"]

    assert same_bits(found(2), found(2, step_scale=1.8)) and not same_bits(found(2), found(2, step_scale=1.5))
    assert same_bits(found(2, takes=""), found(2, takes="", step_scale=1.5))
    assert same_bits(found(3), found(3, step_scale=1.5)) and not same_bits(found(3), found(3, step_scale=1.8))
    for exchange in ("ring", "torus"):
        assert same_bits(found(2, exchange=exchange), found(2, exchange=exchange, step_scale=1.5))
    assert same_bits(found(2, levels=2), found(2, levels=2, step_scale=1.5))
    assert same_bits(found(2, merge="sampled"), found(2, merge="sampled", step_scale=1.0))


@pytest.mark.parametrize("schedule", ["single", "layerwise"])
def test_a_step_does_not_depend_on_what_else_a_bucket_has(schedule: str) -> None:
    """One tensor is divided, SGD moves another, and of the third nothing is known."""
    tensors = [spec(name, 16, 300) for name in "abc"]
    found = []
    for scales in ({}, {"step_scale": 1.8}, {"step_scale": 1.5}):
        with Fleet(2, tensors, full_precision_every=0, schedule=schedule, **scales) as fleet:
            for reducer in fleet.reducers:
                reducer.buckets.divide_by({"a": torch.ones(4800)})
                reducer.buckets.set_linear({"b"})
            found.append(fleet.step(random_grads(2, tensors))[0])
    own, larger, other = found
    assert same_bits(own["a"], larger["a"]) and same_bits(own["b"], larger["b"]) and same_bits(own["c"], other["c"])
    assert not same_bits(own["c"], larger["c"])


@pytest.mark.parametrize(
    "options",
    [
        {"step_scale": 2.0},
        {"step_scale": 0.0},
        {"step_scale": 1.5, "step_size": 0.1},
        {"merge": "rounded"},
        {"levels": 4},
        {"levels": 3, "merge": "sampled"},
    ],
    ids=str,
)
def test_refused(options: dict) -> None:
    what = "levels" if "levels" in options else "merge" if "merge" in options else "step_scale"
    with pytest.raises(ConfigError, match=f"{what} should be|{what} applies to"):
        Fleet(2, [spec("w", 5)], **options)
