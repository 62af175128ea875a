"""The count sketch: its bits against the reference, and what its hashing promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.ops.keys import SKETCH, Key
from horovod_compress.ops.reference import linear as reference_sketch
from tests.support.marks import each_value, slow

from .support import FEW_DTYPES, LENGTHS, compare, differences, numbers, poison, tame, work

KEY = Key(seed=0x0123456789ABCDEF, step=7, bucket=3, rank=0, purpose=SKETCH)
SHAPES = ((1, 32), (3, 48), (5, 112), (5, 1072), (3, 16 * 211))
WORK = (torch.float32, torch.float64)
#: One test of a rare event out of a million may fail without cause; none does with these seeds.
SIGMAS = 5.0


def zeros(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(rows * columns, dtype=dtype)


def table_of(x: Tensor, rows: int, columns: int, key: Key = KEY, offset: int = 0) -> Tensor:
    table = zeros(rows, columns, work(x.dtype))
    ops.sketch_encode(x, None, table, rows, key, offset=offset)
    return table


def top(table: Tensor, rows: int, spans: list[tuple[int, int]], k: int) -> tuple[Tensor, Tensor]:
    positions, estimates = poison(k, torch.int64), poison(k, table.dtype)
    found = ops.sketch_top(table, rows, KEY, spans, k, positions, estimates)
    return positions[:found], estimates[:found]


def estimates_of(table: Tensor, rows: int, count: int, key: Key = KEY) -> Tensor:
    positions, estimates = poison(count, torch.int64), poison(count, table.dtype)
    found = ops.sketch_top(table, rows, key, [(0, count)], count, positions, estimates)
    return zeros(1, count, table.dtype).index_copy_(0, positions[:found], estimates[:found])


# ---- against the reference --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_encode(dtype: torch.dtype) -> None:
    kind = work(dtype)
    for count in LENGTHS:
        rows, columns = SHAPES[count % len(SHAPES)]
        grad, residual, momentum = numbers(count, dtype, count), numbers(count, kind, 1), numbers(count, kind, 2)
        offset = (0, 64, 3 * 64, 12_800)[count % 4]
        table = (zeros(rows, columns, kind), numbers(rows * columns, kind, 3))[count % 3 == 0]
        given = (residual, None)[count % 2], table, rows, KEY
        compare("sketch_encode", grad, *given, offset=offset, shift=count)
        if count % 3 == 0:
            rest = {"momentum": momentum, "factor": -0.3, "offset": offset}
            compare("sketch_encode", grad, *given, **rest, shift=count + 1)


@each_value
@pytest.mark.parametrize("dtype", WORK)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_top_and_clear(rows: int, columns: int, dtype: torch.dtype) -> None:
    for index, count in enumerate((0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 257, 1000, 4097)):
        nasty = numbers(rows * columns, dtype, count)
        few = torch.randint(-2, 3, (rows * columns,), generator=torch.Generator().manual_seed(count)).to(dtype)
        for table in (nasty, few, tame(rows * columns, dtype, count)):
            first = count // 2
            second = (first // 64 + 2) * 64
            spans = [(0, first), (second, 0), (second, count - first)]
            for k in {index % 2, count // 10, count // 2, count + 3}:
                given = (spans, k, poison(k, torch.int64), poison(k, dtype))
                compare("sketch_top", table, rows, KEY, *given, shift=index)
            positions = torch.randint(0, 1 << 31, (count,), generator=torch.Generator().manual_seed(1))
            compare("sketch_clear", table, rows, KEY, positions[: count // 9], shift=index)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_absorb(dtype: torch.dtype) -> None:
    kind = work(dtype)
    for count in LENGTHS:
        grad, residual, momentum = numbers(count, dtype, count), numbers(count, kind, 1), numbers(count, kind, 2)
        compare("absorb", grad, residual, shift=count)
        compare("absorb", grad, residual, momentum, 0.9, shift=count)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_what_is_sketched_is_what_is_absorbed(dtype: torch.dtype) -> None:
    kind, count = work(dtype), 1000
    grad, residual, momentum = tame(count, dtype, 1), tame(count, kind, 2), tame(count, kind, 3)
    table = zeros(3, 1072, kind)
    ops.sketch_encode(grad, residual, table, 3, KEY, momentum=momentum, factor=0.9)
    ops.absorb(grad, residual, momentum, 0.9)
    assert differences(table, table_of(residual, 3, 1072)) == 0
    assert grad.count_nonzero() == 0


def test_largest_positions() -> None:
    """The end of the largest bucket: positions and layers reach their limits."""
    end = 1 << 31
    for columns in (32, 16 * 251):
        compare("sketch_encode", tame(64, torch.float32, 1), None, zeros(5, columns), 5, KEY, offset=end - 64)
        table = tame(5 * columns, torch.float32, 2)
        given = ([(64, 100), (end - 128, 128)], 50, poison(50, torch.int64), poison(50, torch.float32))
        compare("sketch_top", table, 5, KEY, *given)


@each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16 * 20_011, 1072])
def test_threads_change_nothing(columns: int, dtype: torch.dtype) -> None:
    """Large enough to be shared: by layers with many columns, by rows with few."""
    count, k = 1_500_003, 5000
    x = tame(count, dtype, 1)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            table = table_of(x, 5, columns)
            positions, estimates = top(table, 5, [(0, 700_032), (700_032, 500_001)], k)
            cleared = table.clone()
            ops.sketch_clear(cleared, 5, KEY, positions)
            found.append((table, positions, estimates, cleared))
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        assert [differences(a, b) for a, b in zip(found[0], other, strict=True)] == [0] * 4
    if columns > 10_000 and dtype is torch.float32:
        expected = zeros(5, columns)
        reference_sketch.sketch_encode(x, None, expected, 5, KEY)
        assert differences(found[0][0], expected) == 0


def test_a_bucket_in_parts_is_the_bucket() -> None:
    x = tame(10_000, torch.float32, 1)
    for cut in (64, 1072 * 3 // 64 * 64, 6400):
        table = table_of(x[:cut], 5, 1072)
        ops.sketch_encode(x[cut:], None, table, 5, KEY, offset=cut)
        assert differences(table, table_of(x, 5, 1072)) == 0


# ---- the layout -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_layer_fills_every_cell_once(rows: int, columns: int) -> None:
    for layer in (0, 1, 7):
        offset = layer * columns * 4  # a multiple of 64 and of the layers' length
        table = table_of(torch.ones(columns), rows, columns, offset=offset)
        assert table.abs().unique().tolist() == [1.0]
        where = torch.arange(1, columns + 1, dtype=torch.float32)
        values = table_of(where, rows, columns, offset=offset).view(rows, columns).abs()
        assert all(torch.equal(row.sort().values, where) for row in values)


def test_linear() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-100, 101, (20_000,), generator=generator).float() for _ in range(2))
    assert differences(table_of(x, 5, 1072) + table_of(y, 5, 1072), table_of(x + y, 5, 1072)) == 0


def test_columns() -> None:
    assert [ops.sketch_columns(n) for n in (0, 31, 32, 47, 48, 79, 500_000)] == [32, 32, 32, 32, 48, 48, 499_984]
    assert ops.sketch_columns(1 << 33) == ops.sketch_columns(1 << 31) <= 1 << 31
    for target in range(32, 5000, 16):
        places = ops.sketch_columns(target) // 16
        assert 16 * places <= target and all(places % d for d in range(2, places))


@pytest.mark.slow
def test_unbiased_with_the_promised_variance() -> None:
    """For each row alone: E[est] = x_j and Var[est] <= (||x||^2 - x_j^2) / columns, over many keys."""
    columns, keys, count = 112, 2000, 1600
    x = tame(count, torch.float64, 1)
    x[5] = 12.0
    energy = float((x**2).sum())
    positions = np.arange(count)
    errors = np.zeros((keys, 5, count))
    for seed in range(keys):
        key = Key(seed=seed, step=1, bucket=0, rank=0, purpose=SKETCH)
        table = table_of(x, 5, columns, key).view(5, columns).numpy()
        where, negative = reference_sketch.cells(key, 5, columns, positions)
        errors[seed] = np.take_along_axis(table, where, 1) * np.where(negative, -1, 1) - x.numpy()
    promised = (energy - x.numpy() ** 2) / columns
    mean, square = errors.mean(0), (errors**2).mean(0)
    assert np.abs(mean / np.sqrt(promised / keys)).max() < SIGMAS + 0.5  # the largest of 8000
    # The spread of a mean of squares is what the squares themselves show.
    spread = (errors**2).std(0) / np.sqrt(keys)
    assert ((square - promised) / spread).max() < SIGMAS
    # Nor is it much less: elements of one layer never meet, all others do.
    layers = count / columns
    assert np.isclose(square.mean(), promised.mean() * (1 - 1 / layers), rtol=0.02)
    # Rows are independent: their errors at one element are uncorrelated.
    product = (errors[:, 0] * errors[:, 3]).mean(0) / promised
    assert abs(product.mean()) < SIGMAS / np.sqrt(keys)


def test_pairs_meet_as_seldom_as_promised() -> None:
    """Pairs in one block and layer never meet; all others with probability 1/columns.

    What is counted here is the layout of the reference, which the kernels are compared with above.
    """
    columns, draws = 48, 20_000
    layer = columns
    pairs = {
        "same block": (0, 5),
        "same layer, same lane": (3, 19),
        "next layer, same block there": (0, layer),
        "next layer, neighbouring block": (0, layer + 16),
        "next layer, another lane": (0, layer + 1),
        "far layer": (7, 40 * layer + 23),
        "two blocks that touch, of two layers": (layer - 1, layer),
    }
    positions = np.array([p for pair in pairs.values() for p in pair])
    # One table's layout for many keys at once: layers far apart draw afresh.
    jump = 41 * layer
    key = Key(seed=99, step=1, bucket=0, rank=0, purpose=SKETCH)
    shifted = (np.arange(draws)[:, None] * jump + positions).reshape(-1)
    where, negative = (a.reshape(5, draws, -1, 2) for a in reference_sketch.cells(key, 5, columns, shifted))
    met = (where[..., 0] == where[..., 1]).sum(1)
    agree = (negative[..., 0] == negative[..., 1]).sum(1)
    never = np.array([name.startswith("same") for name in pairs])
    assert (met[:, never] == 0).all()
    deviation = np.sqrt(draws / columns * (1 - 1 / columns))
    assert (np.abs(met[:, ~never] - draws / columns) < SIGMAS * deviation).all()
    assert (np.abs(agree - draws / 2) < SIGMAS * np.sqrt(draws) / 2).all()


# ---- the largest ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WORK)
def test_what_fits_is_found_exactly(dtype: torch.dtype) -> None:
    count, k = 100_000, 50
    generator = torch.Generator().manual_seed(4)
    chosen = torch.randperm(count, generator=generator)[:k].sort().values
    x = torch.zeros(count, dtype=dtype)
    x[chosen] = torch.randn(k, generator=generator, dtype=torch.float64).to(dtype)
    table = table_of(x, 5, ops.sketch_columns(50_000))
    positions, estimates = top(table, 5, [(0, count)], k)
    assert torch.equal(positions, chosen) and torch.equal(estimates, x[chosen])
    more, _ = top(table, 5, [(0, count)], 10 * k)
    assert set(chosen.tolist()) <= set(more.tolist())


def brute_force(estimates: Tensor, k: int) -> Tensor:
    order = torch.argsort(estimates.abs(), descending=True, stable=True)[:k]
    return order[estimates[order] != 0].sort().values


@pytest.mark.parametrize("rows", [3, *slow(1, 5)])
def test_top_is_brute_force_on_every_kind_of_table(rows: int) -> None:
    """Large enough that the sample and the limits of the candidates matter."""
    columns, count = 16 * 5003, 250_000
    generator = torch.Generator().manual_seed(rows)
    random = torch.randn(rows * columns, generator=generator)
    half = rows * columns // 2
    tables = {
        "random": random,
        "constant": torch.full_like(random, 0.5),
        "zero": torch.zeros_like(random),
        "few values": (random * 2).round(),
        "mostly zero": torch.where(random > 1.5, random, 0.0),
        "one sided": torch.cat([random[:half] * 1e-3, random[half:] * 1e3]),
        "subnormal": random * 1e-41,
    }
    for name, table in tables.items():
        estimates = estimates_of(table, rows, count)
        for k in (1, 250, 25_000, 230_000):
            positions, values = top(table, rows, [(0, count)], k)
            expected = brute_force(estimates, k)
            assert torch.equal(positions, expected), f"{name}, k = {k}"
            assert differences(values, estimates[expected]) == 0


def test_the_guess_may_be_wrong() -> None:
    """All large elements lie where the sample does not look, or only where it looks."""
    columns, count, stride = 16 * 100_003, 1_600_000, 25  # 100,000 blocks, of which 4000 are sampled
    for sampled in (False, True):
        x = torch.linspace(0.1, 1.0, count)
        blocks = x.view(-1, 16)
        if sampled:
            blocks[::stride] += 100
        else:
            blocks[1::stride] += 100
            blocks[2::stride] += 50
        table = table_of(x, 3, columns)  # one layer: estimates are exact
        for k in (20_000, 70_000, 150_000):
            positions, estimates = top(table, 3, [(0, count)], k)
            expected = brute_force(x, k)
            assert torch.equal(positions, expected) and torch.equal(estimates, x[expected])


def test_infinities_and_nan_come_first() -> None:
    """Whatever the sign and the payload of a NaN are."""
    count, columns = 3000, 16 * 211
    for nan_bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        x = tame(count, torch.float32, 1)
        table = table_of(x, 3, columns)
        where, _ = reference_sketch.cells(KEY, 3, columns, np.array([70, 90]))
        bits = table.view(torch.int32).view(3, columns)
        signed = nan_bits - (1 << 32) if nan_bits >> 31 else nan_bits
        for row in range(3):
            bits[row, where[row, 0]] = signed
            table.view(3, columns)[row, where[row, 1]] = float("inf")
        positions, estimates = top(table, 3, [(0, count)], 3)
        assert {70, 90} <= set(positions.tolist())
        assert estimates[positions == 70].isnan().all() and estimates[positions == 90].isinf().all()
        assert differences(estimates, estimates_of(table, 3, count)[positions]) == 0
        assert top(table, 3, [(0, count)], 1)[0].tolist() == [70]


def test_gaps_are_never_chosen() -> None:
    spans = [(0, 100), (128, 1), (192, 64), (640, 33)]
    inside = torch.cat([torch.arange(start, start + count) for start, count in spans])
    positions, estimates = top(tame(5 * 1072, torch.float32, 1), 5, spans, 1000)
    assert torch.equal(positions, inside) and (estimates != 0).all()
    assert top(tame(5 * 1072, torch.float32, 1), 5, [], 5)[0].numel() == 0


def test_clear_zeroes_what_it_touches() -> None:
    table = torch.ones(5 * 1072)
    positions = torch.tensor([3, 1_000_000, 3, 70_001])
    ops.sketch_clear(table, 5, KEY, positions)
    where, _ = reference_sketch.cells(KEY, 5, 1072, positions.numpy())
    expected = torch.ones(5, 1072)
    for row in range(5):
        expected[row, where[row]] = 0
    assert torch.equal(table.view(5, 1072), expected)
    assert estimates_of(table, 5, 4)[3] == 0


# ---- legality ---------------------------------------------------------------------------------


X, TABLE, POSITIONS = torch.ones(64), zeros(3, 48), torch.zeros(4, dtype=torch.int64)
SHARED = zeros(3, 96)
REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "rows": ("rows must be one of 1, 3, 5", lambda: ops.sketch_encode(X, None, TABLE, 2, KEY)),
    "places that are not prime": ("C prime", lambda: ops.sketch_encode(X, None, zeros(3, 64), 3, KEY)),
    "one place": ("C prime", lambda: ops.sketch_encode(X, None, zeros(3, 16), 3, KEY)),
    "half a place": ("C prime", lambda: ops.sketch_encode(X, None, zeros(3, 40), 3, KEY)),
    "no table": ("C prime", lambda: ops.sketch_encode(X, None, zeros(3, 0), 3, KEY)),
    "table of float64": ("table must be", lambda: ops.sketch_encode(X, None, TABLE.double(), 3, KEY)),
    "table of float16": ("table must be", lambda: ops.sketch_clear(TABLE.half(), 3, KEY, POSITIONS)),
    "table over gradient": ("overlap", lambda: ops.sketch_encode(SHARED[9:73], None, SHARED[:144], 3, KEY)),
    "table over momentum": (
        "overlap",
        lambda: ops.sketch_encode(X, None, SHARED[:144], 3, KEY, momentum=SHARED[9:73]),
    ),
    "short residual": ("residual must be", lambda: ops.sketch_encode(X, X[:63], TABLE, 3, KEY)),
    "momentum of float64": (
        "momentum must be",
        lambda: ops.sketch_encode(X, X, TABLE, 3, KEY, momentum=X.double()),
    ),
    "offset off the grid": ("multiple of 64", lambda: ops.sketch_encode(X, None, TABLE, 3, KEY, offset=32)),
    "negative offset": ("multiple of 64", lambda: ops.sketch_encode(X, None, TABLE, 3, KEY, offset=-64)),
    "past the end": (
        "elements must lie in",
        lambda: ops.sketch_encode(torch.ones(65), None, TABLE, 3, KEY, offset=(1 << 31) - 64),
    ),
    "factor without momentum": (
        "factor must be finite",
        lambda: ops.sketch_encode(X, None, TABLE, 3, KEY, factor=0.9),
    ),
    "factor that is not finite": (
        "factor must be finite",
        lambda: ops.absorb(X.clone(), X.clone(), X.clone(), float("inf")),
    ),
    "spans that overlap": (
        "spans must be",
        lambda: ops.sketch_top(TABLE, 3, KEY, [(0, 65), (64, 5)], 4, POSITIONS, X[:4]),
    ),
    "spans off the grid": (
        "spans must be",
        lambda: ops.sketch_top(TABLE, 3, KEY, [(0, 5), (16, 5)], 4, POSITIONS, X[:4]),
    ),
    "span past the end": (
        "spans must be",
        lambda: ops.sketch_top(TABLE, 3, KEY, [((1 << 31) - 64, 65)], 4, POSITIONS, X[:4]),
    ),
    "negative k": ("k must be", lambda: ops.sketch_top(TABLE, 3, KEY, [(0, 5)], -1, POSITIONS, X[:4])),
    "k of another size": (
        "positions must be",
        lambda: ops.sketch_top(TABLE, 3, KEY, [(0, 5)], 3, POSITIONS, X[:4]),
    ),
    "positions of int32": (
        "positions must be",
        lambda: ops.sketch_clear(TABLE, 3, KEY, POSITIONS.int()),
    ),
    "estimates of float64": (
        "estimates must be",
        lambda: ops.sketch_top(TABLE, 3, KEY, [(0, 5)], 4, POSITIONS, X[:4].double()),
    ),
    "estimates over table": (
        "overlap",
        lambda: ops.sketch_top(SHARED[:144], 3, KEY, [(0, 5)], 4, POSITIONS, SHARED[140:144]),
    ),
    "residual over gradient": ("overlap", lambda: ops.absorb(SHARED[:64], SHARED[63:127])),
    "momentum over residual": (
        "overlap",
        lambda: ops.absorb(SHARED[:64], SHARED[64:128], SHARED[65:129], 0.5),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    pattern, call = REFUSED[case]
    with pytest.raises(ValueError, match=pattern):
        call()


def test_nothing_to_do() -> None:
    table = TABLE.clone()
    assert ops.sketch_encode(X[:0], None, table, 3, KEY) == 0
    ops.sketch_clear(table, 3, KEY, POSITIONS[:0])
    ops.absorb(X[:0], X[:0].clone())
    assert table.count_nonzero() == 0
