"""Global-QSGD's laws, through the real reducer: unbiased, within its variance, on one scale for all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import check_world
from horovod_compress.codecs.work import Work
from horovod_compress.errors import ConfigError
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket, TensorSpec
from tests.support.chance import z
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec
from tests.support.marks import each_value, slow

STANDARD = {"dithering": "standard"}
EXPONENTIAL = {"dithering": "exponential"}
FORMS = [
    STANDARD | {"bits": 4},
    STANDARD | {"bits": 8},
    STANDARD | {"bits": 16},
    EXPONENTIAL | {"bits": 4},
    EXPONENTIAL | {"bits": 8},
]
PACKED = STANDARD | {"bits": 8, "levels": 31}
each_form = pytest.mark.parametrize(
    "form", [*FORMS, PACKED], ids=lambda form: "-".join(str(value) for value in form.values())
)
NORMS = ("max", 1, 2, 4)
MIXED = [(norm, across) for norm in NORMS for across in NORMS if norm != across]


def _samples(grads: list[Tensor], steps: int, copies: int = 1, **options: Any) -> Tensor:
    """Return results by sample and coordinate: each copy of the coordinates in each step is one."""
    found = []
    given = [{"w": grad.repeat(copies)} for grad in grads]
    tensors = [spec("w", copies * grads[0].numel(), dtype=grads[0].dtype)]
    with Fleet(len(grads), tensors, "global_qsgd", **{"block": 0} | options) as fleet:
        for _ in range(steps):
            results = fleet.step(given)
            assert all_same(results)
            found.append(results[0]["w"].view(copies, -1).double())
    return torch.cat(found)


@each_value
@each_form
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_unbiased(world: int, form: dict[str, Any]) -> None:
    grads = one_tensor(world, 256, seed=world)
    grads[0][:16] *= 1e-3
    samples = _samples(grads, steps=40, copies=64, **form)
    mean = torch.stack(grads).double().mean(0)
    sigma = samples.std(0) / math.sqrt(len(samples))
    # 16 random bits: a level of M-th of the largest is right to 2^-17 of itself; merges drop 2^-16.
    norm = float(torch.stack(grads).abs().max())
    # The empirical Bernstein bound: where a level is seldom drawn the sample says little of its variance.
    levels = ((1 << (form["bits"] - 1)) - 1) // world if form["dithering"] == "standard" else 4
    levels = form.get("levels", levels)
    seldom = 7 / 6 * z(256) ** 2 * (norm / levels) / len(samples)
    error = (samples.mean(0) - mean).abs()
    assert bool((error <= z(256) * sigma + seldom + 2.0**-15 * norm).all())
    assert float(sigma.max()) > 0


def test_the_bound_on_the_bias_is_tight_enough() -> None:
    """Rounding to the nearest level in place of a random one would be seen at once."""
    grad = one_tensor(1, 256, seed=1)
    samples = _samples(grad, steps=40, copies=64, **STANDARD)
    sigma = samples.std(0) / math.sqrt(len(samples))
    level = float(grad[0].abs().max()) / 127
    nearest = (grad[0].double() / level).round() * level
    usual = 7 / 6 * z(256) ** 2 * level / len(samples) + z(256) * sigma
    assert float(((nearest - grad[0].double()).abs() / usual).median()) > 3


@pytest.mark.parametrize(
    ("world", "bits"),
    [
        (1, 4),
        (3, 8),
        *slow((1, 8), (1, 16), (3, 4), (3, 16)),
        *slow(*((world, bits) for world in (2, 4) for bits in (4, 8, 16))),
    ],
)
def test_the_squared_error_of_standard_dithering_is_bounded(world: int, bits: int) -> None:
    """d N^2 / (4 s^2 M) is never passed, and is reached by numbers halfway between two levels."""
    count, levels = 2048, ((1 << (bits - 1)) - 1) // world
    ordinary = one_tensor(world, count, seed=2)
    halves = [torch.randint(0, levels, (count,)) + 0.5 for _ in range(world)]
    for half in halves:
        half[0] = levels
    for grads, least in ((ordinary, 0.0), (halves, 0.97)):
        norm = float(torch.stack(grads).abs().max())
        bound = count * norm**2 / (4 * levels**2 * world)
        samples = _samples(grads, steps=20, copies=10, **STANDARD, bits=bits)
        error = float(((samples - torch.stack(grads).double().mean(0)) ** 2).sum(1).mean())
        assert least * bound <= error <= 1.03 * bound


@pytest.mark.parametrize(("norm", "across"), [(2, "max"), *slow(("max", 2), (1, 4), (4, 1))])
def test_mixed_norms_are_unbiased_and_within_their_bound(norm: str | int, across: str | int) -> None:
    grads, options = one_tensor(3, 256, seed=9), {"norm": norm, "across": across, "bits": 8}
    samples = _samples(grads, steps=40, copies=64, **options)
    # Copies share one scale, that of all of them.
    bound = (
        registry.create("global_qsgd", block=0, **options)
        .properties()
        .law.error([g.double().repeat(64) for g in grads])
    )
    error = samples - torch.stack(grads).double().mean(0)
    assert bound is not None
    assert float((error**2).sum() / 40) <= 1.03 * bound
    level = math.sqrt(4 * bound / (64 * 256) / 3)  # of one rank's part in the mean
    seldom = 7 / 6 * z(256) ** 2 * 3 * level / len(samples)
    usual = z(256) * samples.std(0) / math.sqrt(len(samples))
    assert bool((error.mean(0).abs() <= usual + seldom + 2.0**-15 * 42 * level).all())


def _second_moment(world: int) -> tuple[float, float]:
    """Return (E|G|^2 / |x|^2 where all ranks hold x, E|G - mean|^2 where they do not)."""
    x = one_tensor(1, 4096, seed=3)[0]
    equal = _samples([x] * world, steps=6, copies=10, **EXPONENTIAL)
    others = one_tensor(world, 4096, seed=4)
    error = _samples(others, steps=6, copies=10, **EXPONENTIAL) - torch.stack(others).double().mean(0)
    return float((equal**2).sum(1).mean() / (x.double() ** 2).sum()), float((error**2).sum(1).mean())


@pytest.mark.parametrize("world", [4, *slow(2, 8, 16)])
def test_the_variance_of_exponential_dithering_grows_as_a_power_of_the_ranks(world: int) -> None:
    """A merge multiplies a second moment by 9/8 at most, and a tree has log2 M of them: M^0.17."""
    moment, variance = _second_moment(1)
    assert 1 < moment <= 9 / 8
    grown, spread = _second_moment(world)
    assert grown <= 1.01 * moment * world**0.17
    assert spread <= 1.01 * variance * world**0.17


def test_a_chain_of_merges_is_worse_than_a_tree() -> None:
    """Why the ring is refused: with 16 ranks a chain has 15 merges where the tree has 4."""
    count, ranks, headroom = 200_000, 16, 17
    x = one_tensor(1, count, seed=5)[0]
    norm = x.abs().max().view(1)

    def codes() -> list[Tensor]:
        made = [torch.zeros(count, dtype=torch.uint8) for _ in range(ranks)]
        for rank, own in enumerate(made):
            single.exponential_encode(x, norm, count, own, Key(1, 0, 0, rank), bits=8, headroom=headroom)
        return made

    def error(code: Tensor) -> float:
        out = torch.zeros(count)
        single.exponential_decode(code, norm, count, out, bits=8, headroom=headroom, scale=1 / ranks)
        return float(((out - x).double() ** 2).mean())

    chain, tree = codes(), codes()
    for rank in range(1, ranks):
        ops.exponential_merge(chain[0], chain[rank], Key(2, 0, 0, 0, hop=rank), bits=8)
    for step in (1, 2, 4, 8):
        for left in range(0, ranks, 2 * step):
            ops.exponential_merge(tree[left], tree[left + step], Key(3, step, 0, 0, hop=left), bits=8)
    assert error(chain[0]) > 1.5 * error(tree[0])


@pytest.mark.parametrize("kind", ["fixed", "same", "opposite"])
def test_exponential_merge_of_two_numbers_is_unbiased(kind: str) -> None:
    """Every distance of exponents, both signs: the mean of the merged numbers is their sum."""
    count, one = 400_000, torch.ones(1)
    for distance in range(12):
        for sign in {"fixed": [0], "same": [0, 128], "opposite": [128]}[kind]:
            a = torch.full((count,), 20, dtype=torch.uint8)
            b = torch.full((count,), (20 + distance) | sign, dtype=torch.uint8)
            if kind == "same":
                a |= sign
            ops.exponential_merge(a, b, Key(5, distance, 0, 0), bits=8)
            out = torch.zeros(count, dtype=torch.float64)
            single.exponential_decode(a, one.double(), count, out, bits=8, headroom=20, scale=1.0)
            first = -1.0 if kind == "same" and sign else 1.0
            expected = first + (-1.0 if sign else 1.0) * 2.0**-distance
            assert abs(float(out.mean()) - expected) <= z(36) * float(out.std()) / math.sqrt(count)


# ---- scales ----


@each_form
@pytest.mark.parametrize("world", [2, 3])
def test_the_scale_is_the_largest_magnitude_of_any_rank(world: int, form: dict[str, Any]) -> None:
    grads = one_tensor(world, 5000, seed=6)
    grads[-1][17] = -9.5
    with Fleet(world, [spec("w", 5000)], "global_qsgd", block=0, **form) as fleet:
        fleet.step([{"w": grad} for grad in grads])
        for reducer in fleet.reducers:
            assert reducer.buckets[0].round(0).work.local["scales"].tolist() == [9.5]


@pytest.mark.parametrize("power", [1, 2, 4])
@pytest.mark.parametrize("block", [0, 256])
def test_a_finite_norm_is_that_of_all_ranks_elements_together(power: int, block: int) -> None:
    grads = one_tensor(3, 1000, seed=7)
    with Fleet(3, [spec("w", 1000)], "global_qsgd", norm=power, block=block, bits=16) as fleet:
        results = fleet.step([{"w": grad} for grad in grads])
        assert all_same(results)
        found = [reducer.buckets[0].round(0).work.local["scales"] for reducer in fleet.reducers]
    pieces = torch.stack(grads).double().split(block or 1000, dim=1)
    expected = torch.stack([torch.linalg.vector_norm(piece, ord=power) for piece in pieces])
    assert all(torch.equal(mine, found[0]) for mine in found)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("norm", "across"), MIXED)
def test_a_mixed_norm_is_the_norm_over_ranks_of_the_ranks_norms(norm: str | int, across: str | int) -> None:
    grads = one_tensor(3, 1000, seed=7)
    grads[1] *= 3
    orders = [math.inf if order == "max" else order for order in (norm, across)]
    for block in (0, 256):
        options = {"norm": norm, "across": across, "block": block, "bits": 16}
        with Fleet(3, [spec("w", 1000)], "global_qsgd", **options) as fleet:
            assert all_same(fleet.step([{"w": grad} for grad in grads]))
            found = [reducer.buckets[0].round(0).work.local["scales"] for reducer in fleet.reducers]
        pieces = torch.stack(grads).double().split(block or 1000, dim=1)
        of_ranks = [torch.linalg.vector_norm(piece, ord=orders[0], dim=1) for piece in pieces]
        expected = torch.stack([torch.linalg.vector_norm(one, ord=orders[1]) for one in of_ranks])
        assert all(torch.equal(mine, found[0]) for mine in found)
        torch.testing.assert_close(found[0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["max", 1])
def test_a_power_of_a_ranks_norm_that_no_number_holds_counts_as_not_finite(norm: str | int) -> None:
    for size, fits in ((1e60, True), (1e80, False)):
        grads = [{"w": torch.full((4,), size, dtype=torch.float64)}] * 2
        options = {"norm": norm, "across": 4, "nonfinite": "propagate"}
        with Fleet(2, [spec("w", 4, dtype=torch.float64)], "global_qsgd", **options) as fleet:
            assert bool(fleet.step(grads)[0]["w"].isfinite().all()) is fits


@each_form
def test_blocks_keep_small_layers_apart_from_large_ones(form: dict[str, Any]) -> None:
    tensors = [spec("small", 1000), spec("large", 3000)]
    grads = random_grads(2, tensors, seed=8)
    for mine in grads:
        mine["small"] *= 1e-6
    mean = torch.stack([mine["small"] for mine in grads]).mean(0)
    errors = []
    for block in (256, 0):
        with Fleet(2, tensors, "global_qsgd", block=block, **form) as fleet:
            errors.append(float((fleet.step(grads)[0]["small"] - mean).abs().max()))
    assert errors[0] < 1e-5
    if form["dithering"] == "standard" and form["bits"] < 16:
        assert errors[1] == pytest.approx(float(mean.abs().max()), rel=0.01) or errors[1] > 1e-3


# ---- corners ----


@each_value
@each_form
@pytest.mark.parametrize("block", [0, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_corners(world: int, dtype: torch.dtype, block: int, form: dict[str, Any]) -> None:
    tensors = [spec(f"t{count}", count, dtype=dtype) for count in (0, 1, 3, 63, 65, 255, 257, 600)]
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps

    def step(fleet: Fleet, fill: float, spike: float | None = None) -> dict[str, Tensor]:
        grads = [{t.name: torch.full(t.shape, fill, dtype=dtype) for t in tensors} for _ in range(world)]
        if spike is not None:
            for mine in grads:
                mine["t600"][300] = spike
        results = fleet.step(grads)
        assert all_same(results)
        return results[0]

    with Fleet(world, tensors, "global_qsgd", block=block, schedule="single", **form) as fleet:
        for fill in (0.0, -0.0):
            assert all(not bool(found.any()) for found in step(fleet, fill).values())
        for fill in (1.5, -3.0, info.smallest_normal, 8 * tiny):
            for found in step(fleet, fill).values():
                # Equal numbers are all on the top level: the sum is exact where M is a power of two.
                exact = form["dithering"] == "standard" or world & (world - 1) == 0
                tolerance = 4 * info.eps * abs(fill) + 2 * tiny
                assert bool(found.isfinite().all())
                if exact:
                    assert float((found.double() - fill).abs().max() if found.numel() else 0) <= tolerance
        spike = step(fleet, 0.0, 1000.0)
        assert float(spike["t600"][300]) == pytest.approx(1000.0, rel=0.51)
        assert int(spike["t600"].count_nonzero()) == 1 and not bool(spike["t257"].any())


@pytest.mark.parametrize("exchange", ["auto", "ring", "fold"])
def test_a_sum_at_the_limit_does_not_overflow(exchange: str) -> None:
    """All ranks at the norm, with every width, as many ranks as there may be."""
    for bits, worlds in ((4, (2, 3, 4, 5, 7)), (8, (2, 3, 5))):
        for world in worlds:
            with Fleet(world, [spec("w", 500)], "global_qsgd", bits=bits, exchange=exchange) as fleet:
                for value in (2.0, -2.0):
                    found = fleet.step([{"w": torch.full((500,), value)}] * world)[0]["w"]
                    torch.testing.assert_close(found, torch.full((500,), value))


@each_value
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("block", "norm", "item"), [(0, "max", 4), (2048, "max", 4), (2048, 2, 8)])
def test_bytes_are_the_formula(block: int, norm: Any, item: int, world: int, form: dict[str, Any]) -> None:
    """The payload as in every ring or fold, and (M-1) frames of norms before it."""
    count = 64 * 12 * 50
    payload = count * form["bits"] // 8
    norms = item * (-(-count // block) if block else 1)
    exchange = "ring" if form["dithering"] == "standard" else "fold"
    options = dict(block=block, norm=norm, exchange=exchange, verify_every=0)
    with Fleet(world, [spec("a", count)], "global_qsgd", **options, **form) as fleet:
        fleet.step(random_grads(world, fleet.tensors))
        sent = 2 * (world - 1) * (payload // world + 64) + (world - 1) * (64 + 48 + 64 + norms)
        assert [r.metrics.document()["bytes_sent"] for r in fleet.reducers] == [sent] * world


def test_packed_codes_decode_to_the_same_bits_in_fewer_bytes() -> None:
    """The largest number of levels that sums have room for is what there is without the option, too."""
    count = 64 * 12 * 50
    tensors = [spec("a", count)]
    for world, bits, levels in ((2, 8, 63), (3, 8, 42), (4, 8, 31), (2, 4, 3), (4, 4, 1)):
        grads, found, sent = random_grads(world, tensors), [], []
        for options in ({}, {"levels": levels}):
            options |= {"bits": bits, "exchange": "fold", "verify_every": 0}
            with Fleet(world, tensors, "global_qsgd", **options) as fleet:
                results = fleet.step(grads)
                assert all_same(results)
                found.append(results[0]["a"])
                sent.append(fleet.reducers[0].metrics.document()["bytes_sent"])
        assert torch.equal(*found)
        width = levels.bit_length() + 1
        assert sent[0] - sent[1] == (world - 1) * count * (bits - width) // 8 // world > 0


def test_a_norm_beyond_float32_is_cut_at_its_largest_number() -> None:
    """The 1-norm of numbers near the largest: no element is beyond the scale, so results keep their law."""
    with Fleet(2, [spec("w", 100)], "global_qsgd", norm=1) as fleet:
        results = fleet.step([{"w": torch.full((100,), 3e38)}] * 2)
        assert all_same(results)
        torch.testing.assert_close(results[0]["w"], torch.full((100,), 3e38), rtol=0.02, atol=0.0)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dithering": "both"}, "dithering should be"),
        ({"bits": 5}, "bits should be 4, 8 or 16"),
        ({"bits": True}, "bits should be"),
        ({"bits": 16, "dithering": "exponential"}, "96 powers of two"),
        ({"norm": 3}, 'norm should be "max", 1, 2 or 4'),
        ({"norm": "l2"}, "norm should be"),
        ({"across": 3}, 'across should be "max", 1, 2 or 4'),
        ({"levels": 31, "dithering": "exponential"}, "levels is for"),
        ({"levels": 3, "bits": 16}, "from 3 to 8 with levels"),
        ({"levels": 128}, "levels should be from 1 to 127"),
        ({"levels": True}, "levels should be"),
        ({"block": 100}, "multiple of 256"),
        ({"block": -256}, "multiple of 256"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        registry.create("global_qsgd", **options)


def test_too_many_ranks_are_refused_with_what_to_choose() -> None:
    create = registry.create
    for world, advice in ((8, "bits=8"), (200, "bits=16"), (40_000, "exponential")):
        with pytest.raises(ConfigError, match=f"{world} ranks.*choose .*{advice}"):
            check_world(create("global_qsgd", bits=4), world)
    with pytest.raises(ConfigError, match="bits=16"):
        check_world(create("global_qsgd", bits=8), 128)
    check_world(create("global_qsgd", bits=4), 7)
    check_world(create("global_qsgd", bits=8), 127)
    check_world(create("global_qsgd", bits=4, dithering="exponential"), 64)
    with pytest.raises(ConfigError, match="at most 64 ranks, got 65; choose bits=8"):
        check_world(create("global_qsgd", bits=4, dithering="exponential"), 65)
    with pytest.raises(ConfigError, match="8 ranks"):
        Fleet(8, [spec("w", 10)], "global_qsgd", bits=4)


def test_sums_of_a_given_number_of_levels_have_to_fit() -> None:
    codec = registry.create("global_qsgd", levels=31)
    check_world(codec, 4)
    with pytest.raises(ConfigError, match=r"at most 4 ranks.*got 5; choose levels=25"):
        check_world(codec, 5)
    with pytest.raises(ConfigError, match="got 200; choose more bits"):
        check_world(codec, 200)


def test_a_norm_over_ranks_that_is_the_same_is_none() -> None:
    """So that ranks and checkpoints that mean the same agree."""
    assert registry.create("global_qsgd", norm=2, across=2) == registry.create("global_qsgd", norm=2)


@pytest.mark.parametrize("form", [EXPONENTIAL, PACKED])
def test_the_ring_is_refused_where_codes_do_not_add_on_the_way(form: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match='global_qsgd can be exchanged by fold only, got exchange="ring"'):
        Fleet(3, [spec("w", 10)], "global_qsgd", exchange="ring", **form)


@pytest.mark.parametrize(("norm", "roots"), [(2, 1), (4, 2)])
def test_roots_are_right_to_the_last_bit(norm: int, roots: int) -> None:
    """Scales decide what every rank decodes: a root that differs between machines would part the ranks."""
    codec = registry.create("global_qsgd", norm=norm).for_step(0)
    bucket = Bucket(0, (TensorSpec("a", (16384,), "float64"),))
    sums = torch.rand(16384, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    expected = sums.tolist()
    for _ in range(roots):
        expected = [math.sqrt(value) for value in expected]
    work = Work(bucket, 2, [None], shared={"norms": sums}, local={"scales": torch.empty_like(sums)})
    codec._make_scales(work)  # type: ignore[attr-defined]
    assert work.local["scales"].tolist() == expected
