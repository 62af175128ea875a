"""LoCo: averages of errors stay below half of a level, are kept in a byte, and are forgotten everywhere at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs import registry
from horovod_compress.engine.reducer import Reducer
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.errors import ConfigError, StateError
from tests.battery.kept import empty, kept, same
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.states import resealed

BLOCK, TOP = 64, 7
LOCO: dict[str, Any] = {"bits": 4, "block": BLOCK, "rounding": "nearest", "feedback": "average"}
COUNT = 640
#: Two levels apart by one: codes and errors are rounded to 2^-17 of a level, norms to 2^-23.
HALF = 0.5 * (1 + 2.0**-14)


METHODS = pytest.mark.parametrize(
    ("method", "options"),
    [
        ("qsgd", LOCO),
        ("qsgd", LOCO | {"residual_bits": 4, "bits": 8}),
        ("global_qsgd", {"bits": 8, "rounding": "nearest", "feedback": "average"}),
    ],
    ids=["qsgd", "8 bits", "global_qsgd"],
)


def decoded(records: Tensor, block: int = BLOCK) -> Tensor:
    """Return what is kept in records of 8 bits."""
    found = torch.empty(records.numel() // ops.qsgd_record_bytes(8, block) * block)
    ops.qsgd_decode_all([records], [found], bits=8, block=block, scale=1 / 127)
    return found


def errors_of(reducer: Reducer, block: int = BLOCK) -> Tensor:
    """Return the errors that a rank keeps of the elements of the only bucket."""
    assert reducer.wait_idle(5.0)
    (table,) = reducer.kept.tables().values()
    return decoded(table, block)[:COUNT]


def owned_by(reducer: Reducer) -> Tensor:
    """Return those that it keeps as an owner."""
    (carry,) = reducer.kept.carries().values()
    size = ops.qsgd_record_bytes(8, BLOCK)
    flat = carry.view(-1)
    return decoded(flat[: flat.numel() // (2 * ops.qsgd_record_bytes(4, BLOCK)) * size].clone())


# ---- the bound ----


def hard(step: int, errors: Tensor) -> Tensor:
    """Return a gradient that is rounded off by nearly half of a level, in the same direction in every step."""
    level = 2.0 ** (step // 5 % 4)
    grad = (0.49 * level - errors).view(-1, BLOCK)
    grad[:, 0] = TOP * level
    return grad.view(-1)


@pytest.mark.parametrize("beta", [0.0, 0.8, 0.99])
def test_an_error_is_at_most_half_of_the_largest_level_so_far(beta: float) -> None:
    world, largest, owned = 2, torch.zeros(COUNT // BLOCK), 0.0
    with Fleet(world, [spec("w", COUNT)], "qsgd", **LOCO, beta=beta) as fleet:
        for step in range(60):
            before = [errors_of(reducer) for reducer in fleet.reducers]
            given = [hard(step, mine) if step % 10 < 8 else torch.randn(COUNT) * 3 ** (step % 7) for mine in before]
            results = fleet.step([{"w": grad} for grad in given])
            assert all_same(results)
            for grad, mine, reducer in zip(given, before, fleet.reducers, strict=True):
                norms = (grad + mine).view(-1, BLOCK).abs().amax(1)
                largest = torch.maximum(largest, norms / TOP)
                found = errors_of(reducer).view(-1, BLOCK).abs().amax(1)
                assert bool((found <= HALF * largest).all())
                owned = max(owned, float(owned_by(reducer).abs().max() / largest.max()))
        assert 0.001 < owned <= 2 * HALF  # of the mean of what both ranks sent, which may be a level more


def test_errors_that_were_added_up_would_wind_up() -> None:
    """The control: with e = beta e + error, without (1 - beta), such gradients make several levels of a half."""
    averaged, added = torch.zeros(COUNT), torch.zeros(COUNT)
    for _ in range(60):
        for errors, share in ((averaged, 0.2), (added, 1.0)):
            x = hard(0, errors) + errors
            lost = x - x.round()
            errors.mul_(0.8).add_(lost * share)
    assert float(averaged.max()) < 0.5 and float(added.max()) > 2


def test_what_was_sent_is_what_was_given_but_for_the_last_error() -> None:
    """Sum of what a rank sent = sum of its gradients - e / (1 - beta), with what e itself is rounded by."""
    given = [torch.randn(COUNT, generator=torch.Generator().manual_seed(step)) for step in range(30)]
    with Fleet(1, [spec("w", COUNT)], "qsgd", **LOCO, beta=0.8, reset_every=0) as fleet:
        sent = sum(fleet.step([{"w": grad}])[0]["w"].double() for grad in given)
        waits = errors_of(fleet.reducers[0]).double() / (1 - 0.8)
    missing = sum(grad.double() for grad in given) - sent
    step_of_errors = waits.abs().max() / 127
    assert float((missing - waits).abs().max()) < 15 * float(step_of_errors)  # 30 roundings by half of it at most
    assert float(missing.abs().max()) > 30 * float(step_of_errors)  # the control


# ---- plain feedback ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beta_0_is_plain_feedback_to_the_bit(dtype: torch.dtype) -> None:
    """Records and errors are those of p = gradient + e, sent to the nearest level, and e = p - sent."""
    rule = {"bits": 4, "block": BLOCK, "norm": 0}
    errors = torch.zeros(10 * ops.qsgd_record_bytes(8, BLOCK), dtype=torch.uint8)
    for step in range(5):
        grad = torch.randn(COUNT, generator=torch.Generator().manual_seed(step), dtype=dtype)
        records, left = torch.empty(10 * ops.qsgd_record_bytes(4, BLOCK), dtype=torch.uint8), errors.clone()
        ops.loco_encode_all([grad], [errors], [records], [left], **rule, kept_bits=8, beta=0.0)
        old, sent = torch.empty(COUNT, dtype=dtype), torch.empty(COUNT, dtype=dtype)
        ops.qsgd_decode_all([errors], [old], bits=8, block=BLOCK, scale=1 / 127)
        plain, rest = torch.empty_like(records), torch.empty_like(left)
        p = grad + old
        ops.qsgd_encode_all([p], [plain], None, **rule)
        ops.qsgd_decode_all([plain], [sent], bits=4, block=BLOCK, scale=1 / TOP)
        ops.qsgd_encode_all([p - sent], [rest], None, bits=8, block=BLOCK, norm=0)
        assert torch.equal(records, plain)
        assert torch.equal(left, rest) or dtype is torch.float64  # whose norm is rounded up
        averaged = torch.empty_like(left)
        ops.loco_encode_all([grad], [errors], [records], [averaged], **rule, kept_bits=8, beta=0.5)
        assert not torch.equal(averaged, left)  # the control
        errors = left


# ---- one scale for all ranks ----


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 8, "levels": 25}], ids=["added", "packed"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_global_qsgd_averages_errors_alike(options: dict[str, Any], world: int) -> None:
    """e' = 0.8 e + 0.2 (p - what its own codes stand for), on the ranks' common levels; sums of codes are exact."""
    rule = {"block": 256, "rounding": "nearest", "feedback": "average", "reset_every": 4}
    levels, largest = options.get("levels", 127 // world), 0.0
    with Fleet(world, [spec("w", COUNT)], "global_qsgd", **options, **rule) as fleet:
        for step in range(6):
            kept = [errors_of(reducer, 256) * (step % 4 != 0) for reducer in fleet.reducers]
            given = [grads["w"] for grads in random_grads(world, fleet.tensors, seed=step)]
            results = fleet.step([{"w": grad} for grad in given], float(world))
            assert all_same(results)
            p = torch.stack([grad + errors for grad, errors in zip(given, kept, strict=True)])
            norms = torch.cat([part.abs().max().expand(part.shape[1]) for part in p.split(256, dim=1)])
            level = norms / levels
            sent = (p / level).round() * level
            torch.testing.assert_close(results[0]["w"], sent.sum(0), rtol=1e-4, atol=1e-4)
            largest = max(largest, float(level.max()))
            for reducer, errors, mine, was in zip(fleet.reducers, kept, p, sent, strict=True):
                wanted = 0.8 * errors + 0.2 * (mine - was)
                torch.testing.assert_close(errors_of(reducer, 256), wanted, rtol=0, atol=0.51 * largest / 2 / 127)
                assert float(wanted.abs().max()) > 0.05 * largest  # the control: zeros would not be close
            assert not fleet.reducers[0].kept.carries()
    assert largest > 0


# ---- a byte ----


def test_an_error_takes_a_byte() -> None:
    """And 4 for a block; owners keep as much of what is theirs."""
    with Fleet(4, [spec("a", 512 * 100), spec("b", 512 * 60)], "loco") as fleet:
        fleet.step(random_grads(4, fleet.tensors))
        for reducer in fleet.reducers:
            (table,), (carry,) = reducer.kept.tables().values(), reducer.kept.carries().values()
            assert not reducer.kept.states()
            assert table.nbytes == 160 * (512 + 4)
            assert carry.nbytes <= 1.02 * 512 * 160 / 4


# ---- tensors that are left out ----


@pytest.mark.parametrize("resets", [False, True])
def test_what_owners_keep_of_a_frozen_tensor_stays_until_a_reset(resets: bool) -> None:
    """Of the other tensor in its bucket it changes: the control."""
    half = COUNT // 2  # what one of two owners has
    tensors = [spec("frozen", half), spec("w", half)]
    with Fleet(2, tensors, "qsgd", **LOCO, reset_every=3 if resets else 0) as fleet:
        for step in range(3):
            fleet.step(random_grads(2, tensors, seed=step))
        before = [owned_by(reducer) for reducer in fleet.reducers]
        owner = fleet.plan.names().index("frozen")
        for reducer in fleet.reducers:
            reducer.freeze([owner])
        fleet.step(random_grads(2, tensors, seed=3))
        after = [owned_by(reducer) for reducer in fleet.reducers if reducer.wait_idle(5.0)]
        assert all(bool(mine.any()) for mine in before) and not torch.equal(after[1 - owner], before[1 - owner])
        assert torch.equal(after[owner], torch.zeros(half) if resets else before[owner])


# ---- reset ----


def test_every_tensor_is_reset_in_the_same_step() -> None:
    """In all buckets, owners included: the step is that of a job that begins there."""
    tensors = [spec("a", 300), spec("b", 500), spec("c", 64)]
    grads = [random_grads(2, tensors, seed=step) for step in range(8)]
    options = LOCO | {"reset_every": 4, "schedule": "layerwise"}
    with Fleet(2, tensors, "qsgd", **options) as whole, Fleet(2, tensors, "qsgd", **options) as late:
        found = [whole.step(mine) for mine in grads[:4]]
        late.resume(3)
        assert not _equal(late.step(grads[3])[0], found[3][0])  # the control
        empty(late)
        for step in (4, 5):
            assert _equal(late.step(grads[step])[0], whole.step(grads[step])[0])
        for fleet in (whole, late):
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        assert same(kept(whole), kept(late))


def run(fleet: Fleet, steps: range, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Step as a front does, which shows what it decodes with; return the last results."""
    found: list[dict[str, Tensor]] = []
    for step in steps:
        for reducer in fleet.reducers:
            assert reducer.wait_idle(5.0)
            reducer.kept.show(reducer.next_step(), {})
        grads = random_grads(fleet.world, fleet.tensors, seed=step)
        found = fleet.step([{name: grad * scale for name, grad in mine.items()} for mine in grads])
    return found


@METHODS
def test_a_state_that_was_loaded_goes_on_with_the_same_bits(method: str, options: dict[str, Any]) -> None:
    """Errors are each rank's own: ranks do not expect the same of the others."""
    tensors = [spec("a", COUNT), spec("b", 70)]
    with Fleet(2, tensors, method, **options) as whole:
        run(whole, range(3))
        assert all(reducer.wait_idle(5.0) for reducer in whole.reducers)
        states = [copy.deepcopy(checkpoint.save(reducer, whole.methods)) for reducer in whole.reducers]
        expected = run(whole, range(3, 6))
    for reset in (False, True):
        with Fleet(2, tensors, method, **options) as again:
            again.load(states, "reset" if reset else "restore")
            found = run(again, range(3, 6))
        equal = all(_equal(*both) for both in zip(found, expected, strict=True))
        assert equal is not reset  # the control: errors matter


@METHODS
def test_errors_follow_a_gradient_scaler(method: str, options: dict[str, Any]) -> None:
    """Gradients twice as large, and what is kept: results are twice as large, to the bit."""
    tensors = [spec("a", COUNT), spec("b", 70)]
    ends = []
    for factor, scaled in ((1.0, True), (2.0, True), (2.0, False)):
        with Fleet(2, tensors, method, **options) as fleet:
            run(fleet, range(3))
            for reducer in fleet.reducers if scaled else ():
                reducer.kept.scale(factor)
            ends.append(run(fleet, range(3, 6), factor))
    same_bits = [
        all(torch.equal(mine[name] * 2, other[name]) for mine, other in zip(ends[0], end, strict=True) for name in mine)
        for end in ends[1:]
    ]
    assert same_bits == [True, False]


@METHODS
def test_another_number_of_ranks_begins_without_errors(method: str, options: dict[str, Any]) -> None:
    """They are codes, which do not add. The control takes them for numbers, whose mean is something else than 0."""
    tensors = [spec("a", COUNT), spec("b", 70)]
    with Fleet(2, tensors, method, **options) as fleet:
        run(fleet, range(3))
        assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        states = [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]
        coded = fleet.methods.coded()
    for names in (coded, ()):
        found = redistributed(states, 1, 3, (), names)
        assert found["tables"].keys() == states[0]["tables"].keys() and not found["carries"]
        assert any(bool(table.any()) for table in found["tables"].values()) is (names == ())


@METHODS
@pytest.mark.parametrize("part", ["tables", "carries"])
@pytest.mark.parametrize("norm", [torch.inf, torch.nan, 2.0**96, -1.0, 2.0**95])
def test_errors_that_no_step_has_left_are_refused(norm: float, part: str, method: str, options: dict[str, Any]) -> None:
    """The last one is the control. Nothing is changed."""
    with Fleet(2, [spec("a", COUNT)], method, **options) as fleet:
        run(fleet, range(2))
        assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        state = copy.deepcopy(checkpoint.save(fleet.reducers[0], fleet.methods))
        if not state[part]:
            assert method == "global_qsgd" and part == "carries"
            return
        (codes,) = state[part].values()
        size = ops.qsgd_record_bytes(options.get("residual_bits", 8), options.get("block", 256))
        codes.view(-1)[size : size + 4] = torch.tensor([norm]).view(torch.uint8)
        state, before = resealed(state), kept(fleet)
        if norm == 2.0**95:
            checkpoint.load(fleet.reducers[0], fleet.methods, state, "restore")
            return
        with pytest.raises(StateError, match=r"1 scale\(s\) in the codes of 0 "):
            checkpoint.load(fleet.reducers[0], fleet.methods, state, "restore")
        assert same(kept(fleet), before)


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rounding": "nearest"}, 'add feedback="average"'),
        ({"feedback": "average"}, 'needs rounding="nearest"'),
        ({"beta": 0.5}, 'beta is for feedback="average"'),
        ({"residual_bits": 4}, "residual_bits is for"),
        ({**LOCO, "coding": "elias"}, 'coding="packed"'),
        ({**LOCO, "beta": 1.0}, "beta should be"),
        ({**LOCO, "beta": "half"}, "beta should be"),
        ({**LOCO, "reset_every": -1}, "reset_every should be"),
        ({**LOCO, "residual_bits": 9}, "residual_bits should be"),
        ({"feedback": "plain"}, "feedback should be"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        registry.create("qsgd", **options)


def test_the_preset_is_what_the_paper_has() -> None:
    codec = registry.create("loco")
    assert codec == registry.create("qsgd", bits=4, rounding="nearest", feedback="average")
    assert (codec.beta, codec.reset_every, codec.residual_bits) == (0.8, 1024, 8)  # type: ignore[attr-defined]
    assert registry.create("loco", beta=0).beta == 0  # type: ignore[attr-defined]
