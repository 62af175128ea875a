"""PowerSGD against its rule: written down a second time, and as laws."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.powersgd import PowerSgd
from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import ConfigError
from horovod_compress.ops.keys import FACTOR, Key
from horovod_compress.ops.reference.numbers import random_words
from tests.support.local import Fleet, all_same, one_tensor, random_grads, same_bits, spec

F64 = torch.float64
ROWS, COLUMNS = 30, 50
TENSOR = [spec("a", ROWS, COLUMNS, dtype=F64)]


def _matrices(world: int, seed: int, rank: int | None = None) -> list[Tensor]:
    """Return a matrix per rank, of full rank or of a given one with the same columns on all ranks."""
    if rank is None:
        return [x.view(ROWS, COLUMNS) for x in one_tensor(world, ROWS * COLUMNS, seed, F64)]
    left = one_tensor(1, ROWS * rank, 99, F64)[0].view(ROWS, rank)
    return [left @ x.view(rank, COLUMNS) for x in one_tensor(world, rank * COLUMNS, seed, F64)]


def _drawn(seed: int, step: int, count: int) -> np.ndarray:
    """Return the numbers that a factor begins with."""
    words = random_words(Key(seed, step, 0, 0, purpose=FACTOR), 0, -(-count // 2))
    return (words.view("<i4")[:count] >> 8) * 2.0**-23


def _by_the_paper(x: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the result for all ranks' X, (ranks, rows, columns), and the next Q: algorithm 1, with NumPy's QR."""
    p, _ = np.linalg.qr((x @ q).mean(0))
    q = (x.transpose(0, 2, 1) @ p).mean(0)
    return p @ q.T, q


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 4])
def test_steps_are_those_of_the_paper(world: int, rank: int) -> None:
    """An independent implementation with another orthonormalisation: the product does not depend on it."""
    q = _drawn(0, 0, rank * COLUMNS).reshape(rank, COLUMNS).T
    residuals = np.zeros((world, ROWS, COLUMNS))
    with Fleet(world, TENSOR, "powersgd", rank=rank) as fleet:
        for step in range(6):
            grads = _matrices(world, step)
            results = fleet.step([{"a": grad} for grad in grads])
            x = np.stack([grad.numpy() for grad in grads]) + residuals
            wanted, q = _by_the_paper(x, q)
            residuals = x - wanted
            assert all_same(results)
            assert np.allclose(results[0]["a"].numpy(), wanted, rtol=1e-9, atol=1e-9)
            for kept, mine in zip(fleet.residuals(), residuals, strict=True):
                assert np.allclose(kept["a"].view(ROWS, COLUMNS).numpy(), mine, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_linear(error_feedback: bool) -> None:
    """Four ranks do what one does with their mean gradient."""
    options: dict[str, Any] = {"rank": 2, "error_feedback": error_feedback}
    with Fleet(4, TENSOR, "powersgd", **options) as many, Fleet(1, TENSOR, "powersgd", **options) as one:
        for step in range(5):
            grads = _matrices(4, step)
            theirs = many.step([{"a": grad} for grad in grads])[0]["a"]
            mine = one.step([{"a": torch.stack(grads).mean(0)}])[0]["a"]
            assert torch.allclose(theirs, mine, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [1, 3])
def test_exact_where_the_rank_suffices(rank: int) -> None:
    """The second step knows the rows that the first one met; with fewer components the sum is not exact."""
    for components, exact in ((rank, True), (rank + 1, True), (rank - 1, False)):
        if not components:
            continue
        with Fleet(2, TENSOR, "powersgd", rank=components, error_feedback=False) as fleet:
            for _ in range(3):
                grads = _matrices(2, 7, rank)
                result = fleet.step([{"a": grad} for grad in grads])[0]["a"]
                assert bool(result.isfinite().all())
            assert torch.allclose(result, torch.stack(grads).mean(0), atol=1e-9) == exact


def test_the_start_of_the_step_before_comes_nearer() -> None:
    """On one matrix, again and again, the error comes down to that of the best product of this rank."""
    (grad,) = _matrices(1, 5)
    values = torch.linalg.svdvals(grad)
    best = float(values[4:].square().sum())
    with Fleet(1, TENSOR, "powersgd", error_feedback=False) as fleet:
        found = [float((fleet.step([{"a": grad}])[0]["a"] - grad).square().sum()) for _ in range(80)]
    assert all(later <= before * (1 + 1e-12) for before, later in pairwise(found))
    assert found[0] > 1.1 * best and best * (1 - 1e-9) <= found[-1] < 1.02 * best


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_contractive_and_conserving(dtype: torch.dtype) -> None:
    """One rank keeps |X|^2 - |P^T X|^2; over the steps nothing is lost."""
    tensor, total = spec("a", ROWS, COLUMNS, dtype=dtype), torch.zeros(ROWS, COLUMNS, dtype=F64)
    with Fleet(3, [tensor], "powersgd") as fleet:
        for step in range(20):
            grads = [x.view(ROWS, COLUMNS) for x in one_tensor(3, ROWS * COLUMNS, step, dtype)]
            before = [kept["a"].double().view(ROWS, COLUMNS) for kept in fleet.residuals()]
            result = fleet.step([{"a": grad} for grad in grads])[0]["a"].double()
            mean = torch.stack([g.double() + e for g, e in zip(grads, before, strict=True)]).mean(0)
            left = torch.stack([kept["a"].double().view(ROWS, COLUMNS) for kept in fleet.residuals()]).mean(0)
            whole, lost, sent = (float(matrix.square().sum()) for matrix in (mean, left, result))
            assert lost <= whole * (1 + 1e-5) and lost + sent == pytest.approx(whole, rel=1e-4)
            total += torch.stack(grads).double().mean(0) - result
    assert torch.allclose(total, left, atol=1e-4 if dtype is torch.float32 else 1e-9)


def test_what_travels_as_it_is() -> None:
    tensors = [spec("long", 900), spec("small", 3, 4), spec("one"), spec("thin", 40, 2), spec("cube", 8, 5, 9)]
    codec = PowerSgd(rank=2)
    assert [codec.rank_of(tensor) for tensor in tensors] == [0, 0, 0, 0, 2]
    with Fleet(2, tensors, codec) as fleet:
        layout = codec.layout(fleet.plan.buckets[0], 2)
        assert layout.regions["right"][1] == 2 * 45 and layout.regions["values"][1] == 900 + 12 + 1 + 80
        assert layout.preludes[0]["left"][1] == 2 * 8
        grads = random_grads(2, tensors)
        result = fleet.step(grads)[0]
        for tensor in tensors[:-1]:
            assert torch.allclose(result[tensor.name], (grads[0][tensor.name] + grads[1][tensor.name]) / 2)
        assert not torch.allclose(result["cube"], (grads[0]["cube"] + grads[1]["cube"]) / 2, atol=0.1)


def test_a_gradient_of_zeros_does_not_end_it() -> None:
    """Columns that became zero are drawn anew, others stay."""
    with Fleet(2, TENSOR, "powersgd", rank=2) as fleet:
        for grads in ([torch.zeros(ROWS, COLUMNS, dtype=F64)] * 2, _matrices(2, 1, 1), _matrices(2, 2)):
            result = fleet.step([{"a": grad} for grad in grads])[0]["a"]
        assert int(torch.linalg.matrix_rank(result)) == 2


@pytest.mark.parametrize("size", [1e-42, 1e-25, 1e25])
def test_small_and_large_gradients(size: float) -> None:
    """Products of a gradient with what was made of one would leave the range of float32."""
    with Fleet(2, [spec("a", ROWS, COLUMNS)], "powersgd", rank=2, error_feedback=False) as fleet:
        for _ in range(4):
            grads = [(x * size).float() for x in _matrices(2, 7, 2)]
            result = fleet.step([{"a": grad} for grad in grads])[0]["a"].double() / size
        assert torch.allclose(result, torch.stack(grads).double().mean(0) / size, atol=0.1 if size < 1e-38 else 1e-4)


def test_the_factor_is_saved_and_the_same_everywhere() -> None:
    with Fleet(2, TENSOR, "powersgd") as fleet:
        for step in range(3):
            fleet.step([{"a": grad} for grad in _matrices(2, step)])
        tables = [reducer.kept.tables()["0 factor"] for reducer in fleet.reducers]
        assert same_bits(tables[0], tables[1]) and bool(tables[0].any())
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        wanted = fleet.step([{"a": grad} for grad in _matrices(2, 9)])
    for forget, same in ((False, True), (True, False)):
        with Fleet(2, TENSOR, "powersgd") as fleet:
            for reducer, state in zip(fleet.reducers, states, strict=True):
                checkpoint.load(reducer, fleet.methods, state, "restore")
                if forget:  # the control
                    reducer.kept.tables()["0 factor"].zero_()
            found = fleet.step([{"a": grad} for grad in _matrices(2, 9)])
            assert same_bits(found[0]["a"], wanted[0]["a"]) == same


def test_torchs_own_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with Fleet(2, TENSOR, "powersgd") as fleet:
        fleet.step([{"a": grad} for grad in _matrices(2, 1)])
    assert torch.equal(before, torch.get_rng_state())


def test_the_seed_decides_the_start() -> None:
    found = []
    for seed in (1, 1, 2):
        with Fleet(2, TENSOR, "powersgd", seed=seed) as fleet:
            found.append(fleet.step([{"a": grad} for grad in _matrices(2, 1)])[0]["a"])
    assert same_bits(found[0], found[1]) and not same_bits(found[0], found[2])


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": True}, {"rank": 1.5}, {"error_feedback": 1}])
def test_options(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PowerSgd(**options)


@pytest.mark.parametrize("result_scale", [1.0, 3.0])
def test_what_float16_cannot_hold_stays(result_scale: float) -> None:
    """1e5 in every element, of which half waited: what a result leaves behind comes in the steps after, sums too."""
    world, total = 3, torch.zeros(16, 40, dtype=torch.float64)
    with Fleet(world, [spec("w", 16, 40, dtype=torch.float16)], "powersgd", rank=1) as fleet:
        for reducer in fleet.reducers:
            reducer.buckets[0].memory.state["residual"].fill_(50000.0)
            reducer.result_scale = result_scale
        for value in (50000.0, 0.0, 0.0, 0.0, 0.0, 0.0):
            results = fleet.step([{"w": torch.full((16, 40), value).half()} for _ in range(world)])
            assert all_same(results) and bool(results[0]["w"].isfinite().all())
            total += results[0]["w"].double()
    assert torch.allclose(total, torch.full_like(total, result_scale * 100000.0), rtol=1e-3)
