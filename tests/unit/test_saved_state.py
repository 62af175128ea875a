"""A saved state is loaded whole or not at all: flipped bits are found, and what is malformed is refused in words."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.saved import checkpoint, checksums
from horovod_compress.errors import CorruptFrameError, HorovodCompressError, StateError
from horovod_compress.ops import hash64
from tests.battery.kept import kept, same
from tests.support.local import Fleet, random_grads, spec
from tests.support.marks import slow
from tests.support.states import resealed

WORLD = 2
TENSORS = [spec("a", 9, 30), spec("b", 70), spec("c", 5, dtype=torch.float64)]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("marsit", {"compensation": "global"}),
    ("dgc", {"density": 0.05}),
    ("powersgd", {"rank": 2}),
]
BAD = (
    None,
    3,
    -1,
    1.5,
    "x",
    b"x",
    [],
    {},
    [1],
    {"a": 1},
    {1: 2},
    object(),
    torch.zeros(3),
    float("nan"),
    1 << 80,
    True,
)


@pytest.fixture(params=[METHODS[0], *slow(*((method,) for method in METHODS[1:]))], ids=lambda given: given[0])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    method, options = request.param
    with Fleet(WORLD, TENSORS, method, schedule="layerwise", **options) as made:
        for seed in range(2):
            made.step(random_grads(WORLD, TENSORS, seed=seed))
        yield made


def through_a_file(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def refused(fleet: Fleet, state: Any) -> HorovodCompressError | None:
    """Try to load a state; return what it is refused with, having seen that nothing was changed."""
    before, reducer = kept(fleet), fleet.reducers[0]
    step = reducer.step
    try:
        checkpoint.load(reducer, fleet.methods, state, "restore")
    except (CorruptFrameError, StateError) as error:
        assert same(before, kept(fleet)) and reducer.step == step
        return error
    return None


def values(state: Any) -> list[int]:
    """Return hashes of everything in a state, to be compared."""
    found = [hash64(torch.frombuffer(bytearray(checksums.canonical(checksums.outline(state))), dtype=torch.uint8), 1)]
    return found + [hash64(checksums.raw(tensor), 1) for _, tensor in checksums.tensors(state)]


def test_flipped_bits_of_a_file_are_found(fleet: Fleet) -> None:
    """Where torch reads the file at all: no state is loaded that is not the one that was saved."""
    state = checkpoint.save(fleet.reducers[0], fleet.methods)
    data, picked = through_a_file(state), random.Random(7)
    refusals = loads = 0
    for _ in range(300):
        bit = picked.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            read = torch.load(io.BytesIO(bytes(changed)), weights_only=True)
        except Exception:
            continue  # torch has found it
        if refused(fleet, read):
            refusals += 1
        else:
            loads += 1  # the flip lies where nothing is read, such as the file's own padding
            assert values(read) == values(state)
    assert refusals > 20
    assert refused(fleet, torch.load(io.BytesIO(data), weights_only=True)) is None  # the control


def test_every_flipped_bit_of_a_tensor_is_found(fleet: Fleet) -> None:
    state = checkpoint.save(fleet.reducers[0], fleet.methods)
    for name, tensor in checksums.tensors(state):
        raw = tensor.view(-1).view(torch.uint8)
        for at in {0, raw.numel() // 2, raw.numel() - 1} if raw.numel() else ():
            for bit in range(8):
                raw[at] ^= 1 << bit
                assert refused(fleet, state), (name, at, bit)
                raw[at] ^= 1 << bit
    assert refused(fleet, state) is None


def places(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where anything is in a state: keys one after the other."""
    if path:
        yield path
    if isinstance(part, dict):
        for name in part:
            yield from places(part[name], (*path, name))
    elif isinstance(part, list):
        for index, value in enumerate(part[:2]):
            yield from places(value, (*path, index))


def changed_at(state: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    made = copy.deepcopy(state)
    part = made
    for name in path[:-1]:
        part = part[name]
    change(part, path[-1])
    return made


def odd_tensors(tensor: Tensor) -> list[Tensor]:
    wide = tensor.to(torch.float64 if tensor.dtype is torch.float32 else torch.float32)
    shaped = [tensor.flatten()[:-1], tensor.unsqueeze(0), torch.empty(0), tensor.to("meta"), wide]
    return [*shaped, tensor.to(torch.complex64), tensor.to_sparse() if tensor.numel() else tensor.to("meta")]


@pytest.mark.parametrize("anew", [False, *slow(True)], ids=["", "sealed anew"])
def test_malformed_states_are_refused_in_words(fleet: Fleet, anew: bool) -> None:
    """Any part, replaced by anything or left out; nothing else than our own errors comes, and nothing is changed.

    Args:
        anew: checksums are those of the malformed state, where it can have some, and refuse nothing.
    """
    state = checkpoint.save(fleet.reducers[0], fleet.methods, {"tuned": True, "scale": 2.0, "rates": [0.1]})

    def is_accepted(made: Any) -> bool:
        with contextlib.suppress(StateError):
            made = resealed(made) if anew else made
        return refused(fleet, made) is None

    tried = accepted = 0
    for path in places(state):
        good = state
        for name in path:
            good = good[name]
        candidates = [*BAD, *(odd_tensors(good) if isinstance(good, Tensor) and good.numel() else ())]
        for bad in candidates:
            if type(bad) is type(good) and not isinstance(bad, Tensor) and bad == good:
                continue
            made = changed_at(state, path, lambda part, name, bad=bad: part.__setitem__(name, bad))
            tried, accepted = tried + 1, accepted + is_accepted(made)
        made = changed_at(state, path, lambda part, name: part.__delitem__(name))
        tried, accepted = tried + 1, accepted + is_accepted(made)
    for whole in (*BAD, {"format": 3}):
        assert refused(fleet, whole)
    assert tried > 500
    assert bool(accepted) is anew  # another rate is no malformed one
    checkpoint.load(fleet.reducers[0], fleet.methods, state, "restore")  # the control


def test_a_refused_load_has_copied_nothing(fleet: Fleet) -> None:
    """The last tensor of all is sparse, or has no values; those before it are good, and not those of now."""
    state = checkpoint.save(fleet.reducers[0], fleet.methods)
    fleet.step(random_grads(WORLD, TENSORS, seed=9))
    kinds = [kind for kind in ("state", "tables") if state[kind]]
    for odd in (lambda t: t.to_sparse(), lambda t: t.to("meta"), lambda t: t[:-1]):
        made = copy.deepcopy(state)
        part = made[kinds[-1]] if kinds[-1] == "tables" else list(made["state"].values())[-1]
        part[list(part)[-1]] = odd(part[list(part)[-1]])
        assert refused(fleet, made)
    assert refused(fleet, state) is None


def test_states_without_checksums_and_of_other_formats_are_refused(fleet: Fleet) -> None:
    """The control: a state with checksums of its own loads."""
    state = checkpoint.save(fleet.reducers[0], fleet.methods)
    bare = {name: part for name, part in state.items() if name != checksums.KEY}
    assert isinstance(refused(fleet, bare), CorruptFrameError)
    for given in (bare, state):
        for number in (1, 2, 4, True, None):
            with pytest.raises(StateError, match="a different format"):
                checkpoint.load(fleet.reducers[0], fleet.methods, given | {"format": number}, "restore")
    before = kept(fleet)
    checkpoint.load(fleet.reducers[0], fleet.methods, resealed(bare), "restore")
    assert same(before, kept(fleet))


def test_every_flipped_bit_of_a_state_file_is_found(fleet: Fleet) -> None:
    state = {"x": torch.arange(5, dtype=torch.int16), "y": {"z": torch.zeros(0), "n": [1, None, 0.5, "text"]}}
    data = b"".join(checksums.parts(state))
    assert values(checksums.parse(bytearray(data))) == values(state)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFrameError):
            checksums.parse(changed)
    for size in range(len(data)):
        with pytest.raises(CorruptFrameError):
            checksums.parse(bytearray(data[:size]))
    with pytest.raises(CorruptFrameError):
        checksums.parse(bytearray(data + b"\0"))


def test_a_resumed_training_may_have_another_length() -> None:
    def states(total: int) -> list[dict[str, Any]]:
        with Fleet(WORLD, TENSORS, "marsit", total_steps=total) as fleet:
            fleet.step(random_grads(WORLD, TENSORS))
            return [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]

    with Fleet(WORLD, TENSORS, "marsit", total_steps=200) as fleet:
        for reducer, state in zip(fleet.reducers, states(100), strict=True):
            checkpoint.check(reducer, fleet.methods, state, "restore")
            checkpoint.restore(reducer, state, "restore")
        assert [reducer.next_step() for reducer in fleet.reducers] == [1] * WORLD


def test_resetting_is_proposed_only_where_the_second_moment_fits(fleet: Fleet) -> None:
    """It is restored with empty residuals too, so where it is of another parameter that leads to the next error."""
    kept = checkpoint.save(fleet.reducers[0], fleet.methods)
    waits = copy.deepcopy(kept) | {"waiting": {"d": torch.ones(5, dtype=torch.float64)}}
    for kind in kept["state"].values():
        kind["d"] = kind.pop("c")
    for state, told in (
        (kept, "only the state has one of 'd', only this job one of 'c'"),
        (waits, "in the saved state, gradients wait for d, which this job does not have"),
    ):
        for name, more in (("a", ', or pass residuals="reset"'), ("d", "")):
            with pytest.raises(StateError) as caught:
                checkpoint.load(fleet.reducers[0], fleet.methods, state | {"second_moment": {name: {}}}, "restore")
            assert str(caught.value).endswith(f"{told}; resume with the same model and min_elements={more}")


FREE = {"exchange": "ring", "nonfinite": "zero", "warmup_steps": 9, "total_steps": 50, "follow_lr": True}
#: What is changed, of which method, and what a refusal says, as docs/checkpoints.md has it.
CHANGES: list[tuple[str, dict[str, Any], str | None]] = [
    ("marsit", FREE, None),
    ("marsit", {"seed": 1}, "a different seed"),
    ("marsit", {"schedule": "single"}, None),
    ("powersgd", {"schedule": "single"}, "a different plan"),
    ("marsit", {"min_elements": 6}, "what has a residual: only the state has one of 'c', only this job one of nothing"),
    ("bf16", {"min_elements": 6}, None),
]


@pytest.mark.parametrize(("method", "changed", "told"), CHANGES)
def test_of_the_options_of_all_methods_only_the_seed_is_compared(
    method: str, changed: dict[str, Any], told: str | None
) -> None:
    """The others count where they change what is kept."""
    with Fleet(WORLD, TENSORS, method, schedule="layerwise") as before:
        before.step(random_grads(WORLD, TENSORS, seed=1))
        state = checkpoint.save(before.reducers[0], before.methods)
    with Fleet(WORLD, TENSORS, method, **{"schedule": "layerwise"} | changed) as after:
        if told is None:
            checkpoint.load(after.reducers[0], after.methods, state, "restore")
            assert after.reducers[0].step == 1
        else:
            with pytest.raises(StateError, match=re.escape(told)):
                checkpoint.load(after.reducers[0], after.methods, state, "restore")


def test_only_options_that_differ_are_told_and_none_is_no_missing_one() -> None:
    with Fleet(1, [spec("w", 100)], "topk", density=0.25) as now:
        state = checkpoint.save(now.reducers[0], now.methods, {})
        other = checksums.sealed(state | {"config": state["config"] | {"density": 0.125}})
        told = "a different configuration: expected {'density': 0.25}, got {'density': 0.125}; resume"
        with pytest.raises(StateError, match=re.escape(told)):
            checkpoint.load(now.reducers[0], now.methods, other, "restore")
        unknown = checksums.sealed(state | {"config": state["config"] | {"another": None}})
        with pytest.raises(StateError, match=re.escape("expected {}, got {'another': None}")):
            checkpoint.load(now.reducers[0], now.methods, unknown, "restore")
