"""What is pruned is in no payload, and what is left has the results of tensors that hold nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.buckets import Buckets
from horovod_compress.engine.kept import Kept
from horovod_compress.engine.masks import Masks
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.property.test_held_laws import Team
from tests.property.test_zero_laws import promises
from tests.support.accelerator import everything_on_accelerator
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.samples import Sample, samples

WORLD = 2
#: Rows that stay, ones that would be short, and no rows; the last one is not pruned.
TENSORS = [spec("weight", 48, 800), spec("short", 300, 40), spec("vector", 5000), spec("bias", 70)]
LEFT = 0.2
Grads = list[dict[str, Tensor]]


def drawn(left: float = LEFT, seed: int = 7) -> dict[str, Tensor]:
    """Return which weights are left."""
    generator = torch.Generator().manual_seed(seed)
    found = {t.name: torch.rand(t.shape, generator=generator) < left for t in TENSORS}
    found["bias"][:] = True
    return found


class Ranks(Fleet):
    """Ranks with masked weights."""

    def __init__(self, method: Any, left: Mapping[str, Tensor], world: int = WORLD, **options: Any) -> None:
        super().__init__(world, TENSORS, method, **options)
        self.models = [{t.name: torch.nn.Parameter(torch.ones(t.shape)) for t in TENSORS} for _ in range(world)]
        self.prune(left)
        self.masks = [Masks(r.kept, r.start.mask, m) for r, m in zip(self.reducers, self.models, strict=True)]

    def prune(self, left: Mapping[str, Tensor]) -> None:
        for model in self.models:
            for name, parameter in model.items():
                parameter.data = left[name].float()

    def step(self, grads: Sequence[Mapping[str, Tensor]], result_scale: float | None = None) -> list[dict[str, Tensor]]:
        for masks in self.masks:
            masks.begin()
        found = super().step(grads, result_scale)
        assert all(reducer.wait_idle(10.0) for reducer in self.reducers) and all_same(found)
        return found

    @property
    def shares(self) -> list[TensorSpec]:
        """What rounds see, in the order of the plan."""
        return [tensor for state in self.reducers[0].buckets for tensor in state.memory.bucket.tensors]

    def whole(self) -> list[dict[str, dict[str, Tensor]]]:
        return [{k: {n: t.clone() for n, t in of.items()} for k, of in r.kept.whole().items()} for r in self.reducers]


def sent(fleet: Fleet, grads: Grads) -> int:
    """Return the bytes that rank 0 sends in a step."""
    before = fleet.reducers[0].metrics.bytes_sent
    fleet.step(grads)
    assert all(reducer.wait_idle(10.0) for reducer in fleet.reducers)
    return fleet.reducers[0].metrics.bytes_sent - before


def own(fleet: Ranks) -> dict[str, Tensor]:
    """Return the indices of what rounds see, by name."""
    rest = fleet.reducers[0].buckets.rest
    return {t.name: rest[t.name].index if t.name in rest else torch.arange(t.count) for t in TENSORS}


def cut(fleet: Ranks, grads: Grads, left: Mapping[str, Tensor]) -> Grads:
    """Return the same gradients, of what rounds see only."""
    index, shapes = own(fleet), {t.name: t.shape for t in fleet.shares}
    return [{n: (g * left[n]).view(-1)[index[n]].view(shapes[n]) for n, g in mine.items()} for mine in grads]


#: Some rows, of whole step groups and blocks of all methods, never have a gradient.
EMBEDDING = [spec("embedding", 48, 512)]
USED = slice(16, None)


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(s, id=s.name, marks=[] if s.name.startswith("onebit_adam") and s.quick else [pytest.mark.slow])
        for s in samples()
        if promises(s)
    ],
)
def test_rows_without_gradients_do_not_move_where_others_are_pruned(sample: Sample) -> None:
    """Groups of what is left are not those of the tensor, whose zeros stayed zeros."""
    left = torch.rand(48, 512, generator=torch.Generator().manual_seed(7)) < LEFT
    with Team(sample.codec(), WORLD, 4, 20, "auto", tensors=EMBEDDING) as team:
        masks = [Masks(r.kept, r.start.mask, m) for r, m in zip(team.fleet.reducers, team.models, strict=True)]
        start = team.weights()["embedding"]
        for step in range(14):
            if step == 8:
                for model, optimizer in zip(team.models, team.optimizers, strict=True):
                    for parameter in model.values():
                        parameter.data *= left
                        optimizer.state[parameter]["exp_avg"] *= left
            for mine in masks:
                mine.begin()
            given = random_grads(WORLD, EMBEDDING, seed=step)
            for grads in given:
                grads["embedding"][: USED.start] = 0
            team.step(given)
        now = team.weights()["embedding"]
    assert torch.equal(now[: USED.start], (start * left)[: USED.start]) and not now[~left].any()
    assert float((now != start)[USED][left[USED]].float().mean()) > 0.9


def _slow(sample: Sample) -> list[Any]:
    quick = ("none", "marsit", "topk", "qsgd")
    return [] if sample.number == 0 and sample.name.split()[0] in quick else [pytest.mark.slow]


CASES = [pytest.param(s, id=s.name, marks=_slow(s)) for s in samples()]


def has_tables(sample: Sample) -> bool:
    with Fleet(1, TENSORS, sample.codec()) as fleet:
        return bool(fleet.reducers[0].kept.tables())


@pytest.mark.parametrize("sample", CASES)
def test_what_is_left_has_the_results_of_tensors_of_its_own(sample: Sample) -> None:
    left, options = drawn(), {"verify_every": 0}
    if has_tables(sample):
        pytest.skip("whole tensors are sent")
    with Ranks(sample.codec(), left, **options) as ranks:
        ranks.step(random_grads(WORLD, TENSORS, seed=0))
        shares, index = ranks.shares, own(ranks)
    for name, mask in left.items():
        mask.view(-1)[index[name]] = True  # what rows are filled up with is left, too
    with Ranks(sample.codec(), left, **options) as ranks, Fleet(WORLD, shares, sample.codec(), **options) as small:
        for step in range(4):
            given = random_grads(WORLD, TENSORS, seed=step)
            found = ranks.step(given)[0]
            assert [t.shape for t in ranks.shares] == [t.shape for t in shares]
            wanted = small.step(cut(ranks, given, left))[0]
            for name, index in own(ranks).items():
                assert same_bits(found[name].view(-1)[index], wanted[name].view(-1)), (name, step)
                assert not found[name].view(-1)[~left[name].view(-1)].any(), name
        for mine, other in zip(ranks.whole(), (r.kept.states() for r in small.reducers), strict=True):
            for kind, of in mine.items():
                for name, index in own(ranks).items():
                    if name in of:
                        assert same_bits(of[name][index], other[kind][name]), (kind, name)
                        assert not of[name][~left[name].view(-1)].any()


@pytest.mark.parametrize("sample", CASES)
def test_bytes_are_as_many_as_weights_are_left(sample: Sample) -> None:
    left, tables = drawn(), has_tables(sample)
    with Ranks(sample.codec(), left, verify_every=0) as ranks, Fleet(WORLD, TENSORS, sample.codec()) as plain:
        for seed in range(3):  # the first step compares masks
            given = random_grads(WORLD, TENSORS, seed=seed)
            pruned, whole = sent(ranks, given), sent(plain, given)
        seen, rows = {t.name: t.count for t in ranks.shares}, ranks.reducers[0].kept.rows()
    share = sum(seen.values()) / sum(t.count for t in TENSORS)
    if not tables:
        for tensor in TENSORS[:3]:  # exactly what is left, or rows that are as long as the longest one, at least 64
            number, row = int(left[tensor.name].sum()), rows[tensor.name]
            longest = max(64, *(int(of.sum()) for of in left[tensor.name].view(-1).split(row)))
            assert seen[tensor.name] == (number if row == tensor.count else tensor.count // row * longest)
    if tables:
        assert pruned == pytest.approx(whole, rel=0.25)  # of some methods, as many bytes as their values take
    else:
        assert pruned <= 1.05 * share * whole + 1500  # headers, and scales and levels of each tensor


@pytest.mark.parametrize("sample", CASES)
def test_without_zeros_nothing_is_different(sample: Sample) -> None:
    every = {t.name: torch.ones(t.shape, dtype=torch.bool) for t in TENSORS}
    common = {"verify_every": 0}
    with Ranks(sample.codec(), every, **common) as ranks, Fleet(WORLD, TENSORS, sample.codec(), **common) as plain:
        for seed in range(3):
            given = random_grads(WORLD, TENSORS, seed=seed)
            if seed < 2:
                assert all_same([ranks.step(given)[0], plain.step(given)[0]])
            else:
                assert sent(ranks, given) == sent(plain, given)


def test_rows_keep_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of a payload that holds masked elements too; a row of which nothing is left takes no room."""
    left, given = drawn(), random_grads(WORLD, TENSORS, seed=1)
    left["weight"][5] = left["weight"][11] = False
    for mine in given:
        mine["weight"] *= torch.arange(1, 49).view(-1, 1)  # rows that are not alike
    found = []
    for few in (0, 10):  # the first ones send all
        monkeypatch.setattr("horovod_compress.engine.masks._FEW", few)
        with Ranks("signsgd", left, verify_every=0) as ranks:
            found.append(ranks.step(given)[0]["weight"].abs().amax(dim=1))
            shape = ranks.shares[[t.name for t in ranks.shares].index("weight")].shape
    assert shape == (46, int(left["weight"].sum(dim=1).max()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)
    assert found[0].count_nonzero() == 46 and len(set(found[0].tolist())) == 47


def test_none_is_the_exact_mean_of_what_is_left() -> None:
    left = drawn()
    with Ranks("none", left) as ranks:
        given = random_grads(WORLD, TENSORS, seed=1)
        found = ranks.step(given)[0]
        for name, mask in left.items():
            mean = (given[0][name] + given[1][name]) / WORLD
            assert torch.equal(found[name], mean.where(mask, 0.0)), name


def test_what_is_pruned_is_not_looked_at() -> None:
    left = drawn()
    with Ranks("none", left) as ranks:
        ranks.step(random_grads(WORLD, TENSORS, seed=0))
        given = random_grads(WORLD, TENSORS, seed=1)
        gone = torch.ones(TENSORS[0].count, dtype=torch.bool)
        gone[own(ranks)["weight"]] = False
        given[1]["weight"].view(-1)[gone] = float("inf")
        assert all(bool(result.isfinite().all()) for result in ranks.step(given)[0].values())
        given = random_grads(WORLD, TENSORS, seed=2)
        given[1]["weight"].view(-1)[own(ranks)["weight"][0]] = float("inf")
        assert all(bool(result.isnan().all()) for result in ranks.step(given)[0].values())


def test_a_tensor_of_which_nothing_is_left() -> None:
    left = drawn()
    with Ranks("marsit", drawn(1.0)) as ranks:
        ranks.step(random_grads(WORLD, TENSORS, seed=0))
        left["short"][:] = False
        left["vector"][:] = False
        left["vector"][17] = True
        ranks.prune(left)
        found = ranks.step(random_grads(WORLD, TENSORS, seed=1))[0]
        assert not found["short"].any() and found["vector"].nonzero().tolist() == [[17]]


@pytest.mark.parametrize("method", ["ef_signsgd", "topk", "onebit_adam"])
def test_what_waits_follows_a_mask_that_changes(method: str) -> None:
    """Of what stays it is kept to the bit; of what is pruned it is dropped, and grown again it begins with 0."""
    left, later, back = drawn(0.5), drawn(0.5), drawn(0.5)
    for name in ("weight", "short", "vector"):
        later[name] &= drawn(0.5, seed=8)[name]
        back[name] = later[name] | drawn(0.1, seed=9)[name]
    with Ranks(method, left) as ranks:
        for step in range(3):
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
        stays = left
        for coming in (later, back):
            before = ranks.whole()
            ranks.prune(coming)
            for masks in ranks.masks:
                masks.begin()
            now = ranks.whole()
            stays = {name: stays[name] & mask for name, mask in coming.items()}
            for mine, was in zip(now, before, strict=True):
                assert mine.keys() == was.keys() and any(bool(t.any()) for of in mine.values() for t in of.values())
                for kind, of in mine.items():
                    for name, kept in of.items():
                        both = stays[name].view(-1)
                        assert same_bits(kept[both], was[kind][name][both]), (kind, name)
            ranks.step(random_grads(WORLD, TENSORS, seed=4))
            for of in (of for mine in ranks.whole() for of in mine.values()):
                assert not any(bool(kept[~coming[name].view(-1)].any()) for name, kept in of.items())
            stays = coming


def test_few_zeros_make_no_other_buckets() -> None:
    """Weights of 16 bits become 0 by chance: no bucket is made anew for each of them."""
    left = drawn()
    with Ranks("signsgd", left) as ranks:
        ranks.step(random_grads(WORLD, TENSORS, seed=0))
        rest, states = dict(ranks.reducers[0].buckets.rest), list(ranks.reducers[0].buckets)
        where = left["weight"].nonzero()[:100]
        left["weight"][where[:, 0], where[:, 1]] = False
        left["bias"][:3] = False
        ranks.prune(left)
        found = ranks.step(random_grads(WORLD, TENSORS, seed=1))[0]
        now = ranks.reducers[0].buckets
        assert all(now.rest[name] is index for name, index in rest.items()) and list(now) == states
        assert not found["weight"][~left["weight"]].any() and not found["bias"][:3].any()
        left["weight"][where[:, 0], where[:, 1]] = True
        left["weight"][~drawn(0.9, seed=3)["weight"]] = True  # grown again, where payloads had no room
        ranks.prune(left)
        assert bool(ranks.step(random_grads(WORLD, TENSORS, seed=2))[0]["weight"][left["weight"]].all())


@pytest.mark.parametrize("method", ["none", "marsit"])
def test_weights_that_are_zero_for_a_step_make_no_other_buckets(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As numbers of 16 bits are by chance: room that one of them asks for is taken from no other."""
    made, make = [], Buckets._make
    base = drawn(0.2)
    with Ranks(method, base) as ranks:
        monkeypatch.setattr(Buckets, "_make", lambda self, bucket: made.append(bucket) or make(self, bucket))
        for step in range(10):
            left = {name: each.clone() for name, each in base.items()}
            for name in ("weight", "vector"):
                live = base[name].nonzero()
                left[name][tuple(live[97 * step % len(live)])] = False
                grown = (~base[name]).nonzero()[0]
                left[name][tuple(grown)] = step == 4  # one of those that were gone, for a step
            ranks.prune(left)
            assert all_same(ranks.step(random_grads(WORLD, TENSORS, seed=step)))
    assert len(made) <= 2 * WORLD * len(TENSORS)


@pytest.mark.parametrize("where", ["_make", "put"])
def test_a_change_that_fails_is_tried_again_and_loses_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no memory for other buckets, or for what they keep."""
    left = drawn()
    with Ranks("topk", drawn(1.0)) as ranks:
        ranks.step(random_grads(WORLD, TENSORS, seed=0))
        before = ranks.whole()
        ranks.prune(left)
        with monkeypatch.context() as patch:
            patch.setattr(Buckets if where == "_make" else Kept, where, _no_memory)
            for masks in ranks.masks:
                with pytest.raises(MemoryError):
                    masks.begin()
        for mine, was in zip(ranks.whole(), before, strict=True):
            assert all(same_bits(mine[kind][name], was[kind][name]) for kind in was for name in was[kind])
        found = ranks.step(random_grads(WORLD, TENSORS, seed=1))
        assert all_same(found) and not found[0]["weight"][~left["weight"]].any()
        assert ranks.reducers[0].buckets.rest


def _no_memory(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize("method", ["marsit", "topk"])
def test_a_job_that_resumes_has_the_same_bits(method: str) -> None:
    left = drawn()
    with Ranks(method, left) as ranks, Ranks(method, left) as again:
        for step in range(6):
            if step == 3:  # what is pruned in between is left to the state
                left = {name: mask & drawn(0.93, seed=4)[name] for name, mask in left.items()}
                ranks.prune(left)
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
        again.prune(left)
        for old, new, masks, mine in zip(ranks.reducers, again.reducers, again.masks, ranks.masks, strict=True):
            saved = checkpoint.save(old, ranks.methods, mine.state())
            assert {t.name: t.count for t in TENSORS} == {n: r.numel() for n, r in saved["state"]["residual"].items()}
            checkpoint.check(new, again.methods, saved, "restore")
            masks.load(saved)
            checkpoint.restore(new, saved, "restore")
        for step in range(6, 10):
            given = random_grads(WORLD, TENSORS, seed=step)
            assert all_same([ranks.step(given)[0], again.step(given)[0]]), step
        assert [t.shape for t in ranks.shares] == [t.shape for t in again.shares]


def test_methods_know_which_tensors_sgd_moves_when_a_mask_changes() -> None:
    """Steps of `marsit` on two ranks are longer there. The control is a job in which no optimizer is known."""
    found, names = [], [t.name for t in TENSORS]
    for known, again in ((names, names), (names, None), ((), None)):
        with Ranks("marsit", {t.name: torch.ones(t.shape) for t in TENSORS}) as ranks:
            for reducer in ranks.reducers:
                reducer.buckets.set_linear(known)
            for step in range(4):
                if step == 2:
                    ranks.prune(drawn())
                    for masks, reducer in zip(ranks.masks, ranks.reducers, strict=True):
                        masks.begin()
                        if again:
                            reducer.buckets.set_linear(again)
                results = ranks.step(random_grads(WORLD, TENSORS, seed=step))
            found.append(results[0])
    assert all_same(found[:2]) and not all_same(found[1:])


@pytest.mark.parametrize("world", [1, 3])
def test_other_ranks_go_on_with_the_mean_of_what_waits(world: int) -> None:
    left = drawn()
    with Ranks("topk", left) as ranks, Ranks("topk", left, world) as others:
        for step in range(3):
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
        states = [
            checkpoint.save(reducer, ranks.methods, masks.state())
            for reducer, masks in zip(ranks.reducers, ranks.masks, strict=True)
        ]
        for rank, (reducer, masks) in enumerate(zip(others.reducers, others.masks, strict=True)):
            dealt = redistributed(iter(states), rank, world, ranks.methods.folded())
            masks.load(dealt)
            checkpoint.restore(reducer, dealt, "restore")
        for name in (tensor.name for tensor in TENSORS):
            was, now = (torch.stack([m["residual"][name] for m in each.whole()]).mean(0) for each in (ranks, others))
            assert bool(was.any()) and torch.allclose(was, now, rtol=1e-6, atol=1e-7), name
        assert all_same(others.step(random_grads(world, TENSORS, seed=3)))
        assert [t.shape for t in ranks.shares] == [t.shape for t in others.shares]


@pytest.mark.parametrize("first", ["bias", "weight"])
def test_buckets_that_a_mask_does_not_concern_go_on(first: str) -> None:
    """Whether the first one is among them or not: the exchange thread waits for it already."""
    tensors = sorted(TENSORS, key=lambda tensor: tensor.name != first)
    with Ranks("ef_signsgd", drawn(1.0), schedule="layerwise", min_elements=0) as ranks:
        for reducer in ranks.reducers:
            reducer.replan(Plan.of([([tensor], 1) for tensor in tensors]))
        ranks._index = {tensor.name: number for number, tensor in enumerate(tensors)}
        for step in range(3):
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
        before = list(ranks.reducers[0].buckets)
        ranks.prune(drawn())
        found = ranks.step(random_grads(WORLD, TENSORS, seed=3))[0]
        assert not found["weight"][~drawn()["weight"]].any()
        stayed = [old is new for old, new in zip(before, ranks.reducers[0].buckets, strict=True)]
        assert stayed == [tensor.name == "bias" for tensor in tensors]


def test_other_buckets_have_no_room_for_it_either() -> None:
    with Ranks("signsgd", drawn()) as ranks:
        ranks.step(random_grads(WORLD, TENSORS, seed=0))
        before, shapes = ranks.whole(), {t.name: t.shape for t in ranks.shares}
        for reducer in ranks.reducers:
            reducer.replan(Plan.of([([tensor], 1) for tensor in reversed(TENSORS)]))
        assert {t.name: t.shape for t in ranks.shares} == shapes
        for was, now in zip(before, ranks.whole(), strict=True):
            assert all(same_bits(was[kind][name], kept) for kind, of in now.items() for name, kept in of.items())


@pytest.mark.parametrize("method", ["marsit", "topk", "none"])
def test_on_a_device_bits_are_the_same(method: str) -> None:
    def run() -> list[list[dict[str, Tensor]]]:
        with Ranks(method, drawn(0.5)) as ranks:
            found = [ranks.step(random_grads(WORLD, TENSORS, seed=step)) for step in range(2)]
            ranks.prune(drawn(0.2))
            return found + [ranks.step(random_grads(WORLD, TENSORS, seed=step)) for step in range(2, 4)]

    here = run()
    with everything_on_accelerator():
        there = run()
    assert all(all_same([*mine, *other]) for mine, other in zip(here, there, strict=True))
