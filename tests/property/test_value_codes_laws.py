"""Values in codes, chunks, decay and senders against their rules, in plain NumPy once more; and the bytes of codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs.dgc import Dgc
from horovod_compress.codecs.shared.forms import value_form
from horovod_compress.codecs.spardl import SparDL
from horovod_compress.codecs.topk import TopK
from horovod_compress.errors import ConfigError
from horovod_compress.ops.reference import codebook as reference
from horovod_compress.schedule.plan import Bucket
from tests.property.test_sparse_methods_laws import kept_on, largest
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.marks import each_value

F64 = torch.float64
WORLD, COUNT = 3, 700
CODES = (2, 4, 8)


def decoded(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the nearest levels with the values' signs."""
    levels = torch.zeros(1 << bits - 1)
    ops.codebook_fit(torch.from_numpy(values), levels, bits=bits)
    middles = ((levels[1:] + levels[:-1]) / 2).numpy()
    found = levels.numpy().astype(np.float64)[np.searchsorted(middles, np.abs(values).astype(np.float32))]
    return np.sign(values) * found


def chosen(x: np.ndarray, density: float, chunk: int) -> np.ndarray:
    """Return where the largest of each chunk are."""
    parts = [(start, x[start : start + (chunk or x.size)]) for start in range(0, x.size, chunk or x.size)]
    return np.concatenate([start + largest(part, -(-round(density * 100) * part.size // 100)) for start, part in parts])


@pytest.mark.parametrize(
    "options",
    [{"value_bits": bits} for bits in CODES]
    + [{"chunk": 64}, {"residual_decay": 0.5}, {"average": "senders"}]
    + [{"value_bits": 2, "chunk": 64, "residual_decay": 0.75, "average": "senders"}],
    ids=str,
)
def test_the_rule(options: dict[str, Any]) -> None:
    senders = follow_the_rule(COUNT, 30, **options)
    assert senders >= {0, 1, 2}  # else the rules are the same


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    count=st.integers(1, 300),
    percent=st.integers(1, 100),
    bits=st.sampled_from([*CODES, 32]),
    chunk=st.sampled_from([0, 64, 128]),
    decay=st.floats(0.01, 1.0),
    average=st.sampled_from(["ranks", "senders"]),
)
def test_the_rule_with_any_options(count: int, percent: int, bits: int, chunk: int, decay: float, average: str) -> None:
    follow_the_rule(count, percent, value_bits=bits, chunk=chunk, residual_decay=decay, average=average)


def follow_the_rule(count: int, percent: int, **options: Any) -> set[float]:
    """Compare results and residuals with the rule; return how many ranks have sent an element."""
    bits, decay = options.get("value_bits", 32), options.get("residual_decay", 1.0)
    residuals, density = np.zeros((WORLD, count)), percent / 100
    with Fleet(WORLD, [spec("w", count, dtype=F64)], "topk", density=density, **options) as fleet:
        for step in range(4):
            grads = [grad.double() for grad in one_tensor(WORLD, count, seed=step)]
            total, senders = np.zeros(count), np.zeros(count)
            for rank, grad in enumerate(grads):
                x, sent = residuals[rank] + grad.numpy(), np.zeros(count)
                at = chosen(x, density, options.get("chunk", 0))
                codes = bits < 16 and (4 << bits - 1) + -(-at.size * bits // 8) < 8 * at.size  # else values are shorter
                sent[at] = decoded(x[at], bits) if codes else x[at]
                senders[at] += 1
                residuals[rank], total = decay * (x - sent), total + sent
            results = fleet.step([{"w": grad.clone()} for grad in grads])
            assert all_same(results)
            by = np.maximum(senders, 1) if options.get("average") == "senders" else WORLD
            assert np.allclose(results[0]["w"].numpy(), total / by, rtol=1e-12, atol=1e-14)
            for rank in range(WORLD):
                assert np.allclose(kept_on(fleet, rank)[:count], residuals[rank], rtol=1e-12, atol=1e-14)
    return set(senders)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50),
    repeated=st.integers(0, 2000),
    bits=st.sampled_from(CODES),
)
def test_levels_of_any_values_are_among_them_and_rise(values: list[float], repeated: int, bits: int) -> None:
    """Also of equal ones, of zeros, of subnormal and of huge ones, in the kernel as in its reference."""
    x = torch.tensor(values + values[:1] * repeated, dtype=torch.float32)
    levels, expected = (torch.full((1 << bits - 1,), 7.0) for _ in range(2))
    ops.codebook_fit(x, levels, bits=bits)
    reference.codebook_fit(x, expected, bits=bits)
    assert torch.equal(levels, expected)
    assert bool((levels.diff() >= 0).all())
    size = x.abs() if len(x) else torch.zeros(1)
    assert float(size.min()) <= float(levels[0]) and float(levels[-1]) <= float(size.max())


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("bits", [2, 16])
def test_the_rule_of_dgc(bits: int, masking: bool) -> None:
    """What rounding takes stays in v, and only there."""
    u, v, m = np.zeros((WORLD, COUNT)), np.zeros((WORLD, COUNT)), 0.75
    options = {"density": 0.05, "momentum": m, "masking": masking, "value_bits": bits}
    with Fleet(WORLD, [spec("w", COUNT, dtype=F64)], "dgc", **options) as fleet:
        for step in range(4):
            grads = [grad.double() for grad in one_tensor(WORLD, COUNT, seed=step)]
            total = np.zeros(COUNT)
            for rank, grad in enumerate(grads):
                u[rank] = m * u[rank] + grad.numpy()
                v[rank] += u[rank]
                at = largest(v[rank], 35)
                x = v[rank][at]
                sent = decoded(x, bits) if bits < 16 else torch.from_numpy(x).bfloat16().double().numpy()
                total[at] += sent
                v[rank][at] -= sent
                if masking:
                    u[rank][at] = 0
                assert np.abs(x - sent).max() > 0
            results = fleet.step([{"w": grad.clone()} for grad in grads])
            assert np.allclose(results[0]["w"].numpy(), total / WORLD, rtol=1e-12, atol=1e-13)
            for rank in range(WORLD):
                assert np.allclose(kept_on(fleet, rank, "momentum"), u[rank], rtol=1e-12, atol=1e-13)
                assert np.allclose(kept_on(fleet, rank), v[rank] + m * u[rank], rtol=1e-12, atol=1e-13)


def lost(method: str, world: int, dtype: torch.dtype, **options: Any) -> float:
    """Return what results and residuals lack of all that was given over four steps, relative to it."""
    tensors = [spec("w", 30, 40, dtype=dtype), spec("b", 11, dtype=dtype), spec("empty", 0, dtype=dtype)]
    given = {t.name: torch.zeros(t.shape, dtype=F64) for t in tensors}
    found = {t.name: torch.zeros(t.shape, dtype=F64) for t in tensors}
    with Fleet(world, tensors, method, **options) as fleet:
        for step in range(4):
            grads = random_grads(world, tensors, seed=step)
            for t in tensors:
                given[t.name] += sum(mine[t.name].double() for mine in grads)
            results = fleet.step(grads)
            assert all_same(results)
            for t in tensors:
                found[t.name] += world * results[0][t.name].double()
        for kept in fleet.residuals():
            for t in tensors:
                found[t.name] += kept[t.name].double().view(t.shape)
    return max(float((found[n] - given[n]).abs().max() / given[n].abs().max()) for n in ("w", "b"))


@each_value
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("method", ["topk", "spardl", "dgc"])
def test_nothing_is_lost_to_codes(method: str, world: int) -> None:
    more: dict[str, Any] = {"momentum": 0.0} if method == "dgc" else {}
    for bits in CODES:
        assert lost(method, world, torch.float32, density=0.3, value_bits=bits, **more) < 1e-5
        assert lost(method, world, F64, density=0.3, value_bits=bits, **more) < 1e-13
    if method == "topk":
        assert lost(method, world, F64, density=0.3, value_bits=2, chunk=64) < 1e-13
        # The control: what is meant to be lost is missed.
        assert lost(method, world, F64, density=0.3, value_bits=2, residual_decay=0.9) > 1e-3


# ---- bytes ---------------------------------------------------------------------------------------


def bits_sent(count: int, **options: Any) -> float:
    """Return the bits that an element takes, of what one rank wrote."""
    with Fleet(1, [spec("w", count)], "topk", **options) as fleet:
        fleet.step([{"w": torch.randn(count, generator=torch.Generator().manual_seed(1))}])
        return 8 * fleet.reducers[0].buckets[0].round(0).work.used / count


def test_two_bits_and_golomb_positions_take_less_than_0_15_bits_an_element() -> None:
    """SparseLoCo's deployed format has 12 bits for a position in a chunk of 4,096: 14/64 = 0.219 bits an element."""
    count = 1 << 20
    options = {"density": 1 / 64, "value_bits": 2}
    assert bits_sent(count, chunk=4096, **options) < 0.15 and bits_sent(count, **options) < 0.15
    assert 0.11 < bits_sent(count, density=1 / 64) - 32 / 64 < 0.12  # the positions: seven and a half bits each


def test_every_chunk_sends_the_same_number() -> None:
    grad = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    grad[:4096] *= 100
    for options, wanted in (({"chunk": 4096}, [64, 64, 29]), ({}, [157, 0, 0])):
        with Fleet(1, [spec("w", 10_000)], "topk", density=1 / 64, **options) as fleet:
            sent = fleet.step([{"w": grad.clone()}])[0]["w"] != 0
        assert [int(part.sum()) for part in sent.split(4096)] == wanted


def test_few_values_are_sent_whole() -> None:
    """Levels and codes would take as much."""
    bucket, wide = Bucket(0, (spec("w", 1),)), Bucket(0, (spec("w", 1, dtype=F64),))
    for bits, least in ((2, 3), (4, 10), (8, 171)):
        assert [value_form(bits, bucket, most) for most in (least - 1, least)] == ["full", f"codes{bits}"]
        assert value_form(bits, wide, least) == f"codes{bits}"
    with Fleet(2, [spec("w", 40)], "topk", density=0.1, value_bits=8) as fleet:
        fleet.step(random_grads(2, [spec("w", 40)]))
        x = fleet.residuals()[0]["w"]
        assert int((x == 0).sum()) == 4  # of what was sent nothing is left


def test_values_beyond_float32_are_not_finite() -> None:
    """Else they would wait forever."""
    for codec in (TopK(0.5, value_bits=4), Dgc(0.5, value_bits=4), SparDL(0.5, value_bits=4)):
        grads = [{"w": torch.full((200,), 1.0, dtype=F64)} for _ in range(2)]
        grads[1]["w"][7] = 1e300
        with Fleet(2, [spec("w", 200, dtype=F64)], codec) as fleet:
            assert fleet.step(grads)[0]["w"].isnan().all()
            grads = [{"w": torch.full((200,), 1.0, dtype=F64)} for _ in range(2)]
            assert fleet.step(grads)[0]["w"].isfinite().all()  # the control


# ---- options -------------------------------------------------------------------------------------

LED: dict[str, Any] = {"positions": "leader"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"value_bits": 3}, "value_bits should be"),
        ({"chunk": 32}, "chunk should be 0, for whole tensors, or in .64, 4096., got 32"),
        ({"chunk": True}, "chunk should be 0"),
        ({"chunk": 8192}, "chunk should be 0"),
        ({"residual_decay": 0}, "residual_decay should be a number above 0"),
        ({"average": "all"}, "average should be"),
        (LED | {"value_bits": 2}, "value_bits should be 32 .* which add|values add, got 2"),
        (LED | {"chunk": 64}, "chunk should be 0 with"),
        (LED | {"residual_decay": 0.9}, "use filter, not residual_decay"),
        (LED | {"average": "senders"}, "all ranks send every one"),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TopK(**options)


def test_what_a_sender_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """One of four ranks sends an element: its value, or a quarter of it; with a sum four times as much."""
    grads = [{"w": torch.zeros(100)} for _ in range(4)]
    grads[2]["w"][5] = 8
    for average, scale, wanted in (("senders", 1.0, 8), ("ranks", 1.0, 2), ("senders", 4.0, 32), ("ranks", 4.0, 8)):
        with Fleet(4, [spec("w", 100)], "topk", density=0.01, average=average) as fleet:
            found: Tensor = fleet.step([{"w": mine["w"].clone()} for mine in grads], scale)[0]["w"]
            assert found[5] == wanted and int((found != 0).sum()) == 1
