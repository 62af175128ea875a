"""QSGD, TernGrad and natural compression through the real reducer: unbiased, within their variance, rightly sized."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec, check_world
from horovod_compress.codecs.work import Part
from horovod_compress.errors import ConfigError, CorruptFrameError
from horovod_compress.ops.keys import Key
from tests.support.chance import z
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.marks import each_value, slow
from tests.support.sections import elias_encode

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qsgd 8": ("qsgd", {"bits": 8}),
    "qsgd 4": ("qsgd", {"bits": 4, "block": 64}),
    "qsgd 3 norm 2": ("qsgd", {"bits": 3, "block": 64, "norm": 2}),
    "qsgd 4 elias": ("qsgd", {"bits": 4, "norm": 2, "coding": "elias"}),
    "terngrad 4": ("terngrad", {"clip": 0, "bits": 4}),
    "terngrad 16": ("terngrad", {"clip": 0, "bits": 16}),
    "natural": ("natural", {}),
    "natural 2": ("natural", {"mantissa": 2}),
}
each_form = pytest.mark.parametrize("form", FORMS)


def _samples(form: str, grads: list[Tensor], steps: int, copies: int = 1, **more: Any) -> Tensor:
    """Return results by sample and coordinate: each copy of the coordinates in each step is one."""
    method, options = FORMS[form]
    found = []
    given = [{"w": grad.repeat(copies)} for grad in grads]
    with Fleet(
        len(grads), [spec("w", copies * grads[0].numel(), dtype=grads[0].dtype)], method, **options | more
    ) as fleet:
        for _ in range(steps):
            results = fleet.step(given)
            assert all_same(results)
            found.append(results[0]["w"].view(copies, -1).double())
    return torch.cat(found)


# ---- the expectation ----


@each_value
@each_form
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_unbiased(form: str, world: int) -> None:
    grads = one_tensor(world, 256, seed=world)
    grads[0][:16] *= 1e-3
    samples = _samples(form, grads, steps=40, copies=64)
    mean = torch.stack(grads).double().mean(0)
    sigma = samples.std(0) / math.sqrt(len(samples))
    # The empirical Bernstein bound: where a level is seldom drawn the sample says little of its variance.
    largest = float(torch.stack(grads).abs().max()) * (8 if "norm 2" in form or "elias" in form else 1)
    seldom = 7 / 6 * z(256) ** 2 * largest / len(samples)
    error = (samples.mean(0) - mean).abs()
    assert bool((error <= z(256) * sigma + seldom + 2.0**-15 * largest).all())
    assert float(sigma.max()) > 0


def test_float64_is_unbiased_beyond_the_digits_of_the_norm() -> None:
    """The float32 norm of a float64 block is rounded up: nothing is cut off."""
    x = torch.full((64,), 1 / 3, dtype=torch.float64)
    found = _samples("qsgd 8", [x], steps=1, copies=64)
    assert float((found - 1 / 3).abs().max()) < 1e-2 and abs(float(found.mean()) - 1 / 3) < 1e-6


# ---- the error ----


def _error(form: str, grads: list[Tensor], steps: int = 20, **more: Any) -> float:
    mean = torch.stack(grads).double().mean(0)
    return float(((_samples(form, grads, steps, copies=10, **more) - mean) ** 2).sum(1).mean())


def _bound(codec: Codec, x: list[Tensor]) -> float | None:
    error = codec.properties().law.error
    assert error is not None
    return error(x)


@pytest.mark.parametrize("form", ["qsgd 8", "qsgd 3 norm 2", "qsgd 4 elias"])
def test_one_quantisation_is_in_the_class_of_the_paper(form: str) -> None:
    """E |Q(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2 for blocks of d elements."""
    _, options = FORMS[form]
    block, levels = options.get("block", 512), (1 << options["bits"] - 1) - 1
    x = one_tensor(1, 2048, seed=2)[0]
    share = min(block / levels**2, math.sqrt(block) / levels)
    assert _error(form, [x]) <= 1.03 * share * float(x.double().square().sum())


@each_value
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("form", ["qsgd 8", "qsgd 4", "qsgd 4 elias"])
def test_the_bound_is_reached_by_numbers_between_two_levels(form: str, world: int) -> None:
    """A block of halves of levels: the first rounding has the largest error there is."""
    method, options = FORMS[form]
    block, levels = options.get("block", 512), (1 << options["bits"] - 1) - 1
    half = torch.randint(0, levels, (4 * block,)) + 0.5
    half[::block] = levels
    grads, more = [half] * world, {"norm": "max"}
    bound = _bound(registry.create(method, **options | more), [grad.double() for grad in grads])
    error = _error(form, grads, **more)
    assert bound is not None and error <= 1.03 * bound
    assert error >= (0.97 if world == 1 or "elias" in form else 0.6) * bound


@pytest.mark.parametrize("world", [2, *slow(1, 4)])
@pytest.mark.parametrize(
    ("form", "most", "at", "usual"), [("natural", 1 / 8, 4 / 3, 0.082), ("natural 2", 1 / 80, 10 / 9, 0.0056)]
)
def test_natural_compression_is_in_the_class_of_its_mantissa(
    world: int, form: str, most: float, at: float, usual: float
) -> None:
    """A rounding adds at most a share of the square, and as much for numbers at the worst place behind a power of 2."""
    count, (method, options) = 4096, FORMS[form]
    worst = torch.exp2(torch.randint(-20, 0, (count,)).float()) * at
    for grads, least in ((one_tensor(world, count, seed=3), 0.0), ([worst] * world, 0.97)):
        exact = [grad.double() for grad in grads]
        bound = _bound(registry.create(method, **options), exact)
        error = _error(form, grads, steps=30)
        assert error <= 1.03 * bound
        if world == 1:
            assert error >= least * bound
            assert bound == pytest.approx(float(exact[0].square().sum()) * most)
    # Normal numbers have a smaller share.
    normal = one_tensor(1, count, seed=3)
    share = _error(form, normal, steps=30) / float(normal[0].double().square().sum())
    assert share == pytest.approx(usual, rel=0.1)


@pytest.mark.parametrize(
    ("world", "clip"), [(2, 2.5), *slow((1, 0), (1, 2.5), (1, 1.5), (2, 0), (2, 1.5), (4, 0), (4, 2.5), (4, 1.5))]
)
def test_the_error_of_terngrad_is_known(world: int, clip: float) -> None:
    """(s |c|_1 - |c|^2) / M^2 from each rank, and what clipping took from the mean."""
    grads = one_tensor(world, 2048, seed=4)
    exact = [grad.double() for grad in grads]
    kept = [x.clamp(-(b := clip * float(x.square().mean().sqrt())), b) if clip else x for x in exact]
    scale = max(float(c.abs().max()) for c in kept)
    due = sum(scale * float(c.abs().sum()) - float(c.square().sum()) for c in kept) / world**2
    due += float((torch.stack(kept) - torch.stack(exact)).mean(0).square().sum())
    assert _error("terngrad 16", grads, clip=clip, steps=40) == pytest.approx(due, rel=0.03)
    bound = _bound(registry.create("terngrad", clip=clip), exact)
    assert bound is not None and due <= bound <= 4 * due


# ---- clipping and scales ----


def test_terngrad_is_unbiased_with_respect_to_the_clipped_value() -> None:
    world = 2
    grads = one_tensor(world, 256, seed=5)
    grads[0][:4] = 8.0
    clipped = []
    for grad in grads:
        bound = 2.5 * float(grad.double().square().mean().sqrt())
        clipped.append(grad.double().clamp(-bound, bound))
    assert float(clipped[0].max()) < 8.0
    found = _samples("terngrad 16", grads, steps=20, copies=50, clip=2.5)
    error = (found.mean(0) - torch.stack(clipped).mean(0)).abs()
    assert bool((error <= z(256) * found.std(0) / math.sqrt(len(found)) + 1e-3).all())


def test_the_scale_of_terngrad_is_that_of_all_ranks_for_each_tensor() -> None:
    tensors = [spec("a", 300), spec("b", 70), spec("c")]
    grads = random_grads(3, tensors, seed=6)
    grads[1]["b"] *= 100
    with Fleet(3, tensors, "terngrad", schedule="single") as fleet:
        fleet.step(grads)
        names = [t.name for t in fleet.plan.buckets[0].tensors]
        for reducer in fleet.reducers:
            scales = dict(zip(names, reducer.buckets[0].round(0).work.local["scales"].tolist(), strict=True))
            for name in names:
                own = [m[name].double() for m in grads]
                due = max(min(float(x.abs().max()), 2.5 * float(x.square().mean().sqrt())) for x in own)
                assert scales[name] == pytest.approx(due, rel=1e-6)


def test_a_tensor_of_few_elements_is_never_clipped() -> None:
    """2.5 times the root of the mean square is above the largest of up to 6 elements."""
    for count in range(1, 7):
        x = torch.zeros(count)
        x[0] = 4.0
        with Fleet(2, [spec("w", count)], "terngrad") as fleet:
            assert torch.equal(fleet.step([{"w": x}] * 2)[0]["w"], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_natural_compression_keeps_powers_of_two(dtype: torch.dtype) -> None:
    x = torch.tensor([2.0**-e for e in range(14)] + [-(2.0**-e) for e in range(14)] + [0.0], dtype=dtype)
    for world in (1, 2, 4):
        for factor in (1.0, 2.0**-3, 4.0):
            for mantissa in (0, 2):
                with Fleet(world, [spec("w", x.numel(), dtype=dtype)], "natural", mantissa=mantissa) as fleet:
                    found = fleet.step([{"w": x * factor}] * world)[0]["w"]
                    assert torch.equal(found, x * factor)


def test_natural_compression_never_overflows() -> None:
    """Where the next power of two is above the largest number, the largest gradient is the scale itself."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        most = torch.finfo(dtype).max
        x = torch.tensor([most, -most, most / 3, 1.0], dtype=dtype)
        for world in (1, 2, 3, 5):
            for mantissa in (0, 2):
                with Fleet(world, [spec("w", 4, dtype=dtype)], "natural", mantissa=mantissa) as fleet:
                    for _ in range(5):
                        found = fleet.step([{"w": x}] * world)[0]["w"]
                        assert bool(found.isfinite().all()) and all_same([{"w": found}])


# ---- corners ----


@each_value
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_corners(form: str, world: int, dtype: torch.dtype) -> None:
    """Zeros stay zero; where all numbers are the largest one they are exact."""
    method, options = FORMS[form]
    tensors = [spec(f"t{count}", count, dtype=dtype) for count in (0, 1, 3, 63, 65, 255, 257, 600)]
    info = torch.finfo(dtype)
    with Fleet(
        world, tensors, method, schedule="single", **options | {"norm": "max"} if method == "qsgd" else options
    ) as fleet:
        for fill in (0.0, -0.0, 2.0, -0.25):
            grads = [{t.name: torch.full(t.shape, fill, dtype=dtype) for t in tensors} for _ in range(world)]
            results = fleet.step(grads)
            assert all_same(results)
            for found in results[0].values():
                wrong = (found.double() - fill).abs().max() if found.numel() else torch.zeros(())
                assert float(wrong) <= 8 * max(info.eps, 2.0**-23) * abs(fill)
                assert fill != 0 or not bool(found.any())


def test_blocks_keep_small_layers_apart_from_large_ones() -> None:
    tensors = [spec("small", 1000), spec("large", 3000)]
    grads = random_grads(2, tensors, seed=8)
    for mine in grads:
        mine["small"] *= 1e-6
    mean = torch.stack([mine["small"] for mine in grads]).mean(0)
    for coding in ("packed", "elias"):
        with Fleet(2, tensors, "qsgd", coding=coding) as fleet:
            assert float((fleet.step(grads)[0]["small"] - mean).abs().max()) < 1e-7


# ---- bytes ----


@pytest.mark.parametrize("world", [3, *slow(2, 4)])
def test_bytes_are_the_formula(world: int) -> None:
    """Records, or codes and one norm for each tensor or bucket."""
    count = 512 * 12 * 10
    agree = (world - 1) * (64 + 48)

    def sent(method: str, **options: Any) -> list[int]:
        with Fleet(world, [spec("a", count)], method, verify_every=0, **options) as fleet:
            fleet.step(random_grads(world, fleet.tensors))
            return [r.metrics.document()["bytes_sent"] - agree for r in fleet.reducers]

    for bits in range(2, 9):
        payload = count // 512 * (4 + 512 * bits // 8)
        assert sent("qsgd", bits=bits) == [2 * (world - 1) * (payload // world + 64)] * world
    for bits in (4, 8, 16):
        due = 2 * (world - 1) * (count * bits // 8 // world + 64) + (world - 1) * (64 + 4)
        assert sent("terngrad", bits=bits, exchange="ring") == [due] * world
    due = 2 * (world - 1) * (count // world + 64) + (world - 1) * (64 + 4)
    assert sent("natural") == [due] * world


@pytest.mark.parametrize(("bits", "block"), [(2, 512), (3, 512), (4, 512), (4, 2048), (5, 1024)])
def test_elias_codes_are_as_short_as_the_paper_says(bits: int, block: int) -> None:
    """At most (3 + 1.5 log2(2 (s^2 + d) / (s (s + sqrt d)))) s (s + sqrt d) bits and 32 for the norm of d elements."""
    count, s, d = 64 * block, (1 << bits - 1) - 1, block
    x = one_tensor(1, count, seed=9)[0]
    out = torch.zeros(ops.elias_bound(count, bits=bits, block=block), dtype=torch.uint8)
    used, _ = elias_encode(x, out, Key(1, 0, 0, 0), bits=bits, block=block, norm=2)
    most = (3 + 1.5 * math.log2(2 * (s * s + d) / (s * (s + math.sqrt(d))))) * s * (s + math.sqrt(d)) + 32
    directory = 32 * -(-count // 8192) + 8 * -(-count // 8192)
    assert 8 * used <= most * count / d + directory
    assert 8 * used > 0.1 * most * count / d


# ---- refusals ----


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("qsgd", {"bits": 1}, "bits should be a whole number from 2 to 8"),
        ("qsgd", {"bits": 9}, "bits should be"),
        ("qsgd", {"bits": True}, "bits should be"),
        ("qsgd", {"block": 100}, "multiple of 64"),
        ("qsgd", {"block": 0}, "multiple of 64"),
        ("qsgd", {"block": 16384}, "at most 8192"),
        ("qsgd", {"norm": 1}, 'norm should be "max" or 2'),
        ("qsgd", {"norm": "l2"}, "norm should be"),
        ("qsgd", {"coding": "huffman"}, 'coding should be "packed" or "elias"'),
        ("terngrad", {"bits": 2}, "bits should be 4, 8 or 16"),
        ("terngrad", {"clip": 0.5}, "clip should be 0 for no limit"),
        ("terngrad", {"clip": math.nan}, "clip should be"),
        ("terngrad", {"clip": "2.5"}, "clip should be"),
        ("natural", {"bits": 8}, "natural has no option 'bits'"),
        ("natural", {"mantissa": 1}, "mantissa should be 0 or 2"),
    ],
)
def test_options_that_are_refused(method: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        registry.create(method, **options)


def test_too_many_ranks_are_refused_with_what_to_choose() -> None:
    for bits, world, advice in ((4, 8, "bits=8"), (4, 200, "bits=16"), (8, 128, "bits=16"), (16, 32768, "no width")):
        with pytest.raises(ConfigError, match=f"got {world}; .*{advice}"):
            check_world(registry.create("terngrad", bits=bits), world)
        check_world(registry.create("terngrad", bits=bits), (1 << bits - 1) - 1)


def test_the_ring_is_refused_where_payloads_are_averaged() -> None:
    for method, options in (("qsgd", {}), ("natural", {}), ("qsgd", {"coding": "elias"})):
        with pytest.raises(ConfigError, match=r"by (fold|gather) only"):
            Fleet(3, [spec("w", 10)], method, exchange="ring", **options)


def test_elias_codes_that_are_not_such_are_an_error() -> None:
    codec = registry.create("qsgd", coding="elias").for_step(0)
    with Fleet(2, [spec("w", 700)], codec, verify_every=0) as fleet:
        fleet.step(random_grads(2, fleet.tensors))
        work = fleet.reducers[0].buckets[0].round(0).work
        work.gathered[1] = work.gathered[1].clone()
        work.gathered[1][4 + 4 + 8 :] = 0
        work.grads[0] = torch.zeros(700)
        with pytest.raises(CorruptFrameError, match=r"malformed range.* of Elias codes for w"):
            codec.decode(work, [Part(0, 0, 700)], Key(0, 0, 0, 0), 1.0)
