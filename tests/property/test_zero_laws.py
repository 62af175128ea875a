"""What is exactly 0 on every rank stays so, and what comes late is not lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import variants_of
from horovod_compress.engine.masks import Masks
from horovod_compress.engine.optimizer import held
from horovod_compress.engine.reducer import Next
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.saved.redistribute import redistributed
from horovod_compress.errors import MismatchError, StateError
from horovod_compress.schedule.plan import Plan
from tests.property.test_held_laws import Team
from tests.support.accelerator import everything_on_accelerator
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import slow
from tests.support.samples import Sample, samples

#: Rows that have a step of their own, and short ones that share it; a padding row in both kinds.
TENSORS = [spec("weight", 24, 96), spec("short", 24, 10), spec("bias", 70), spec("words", 12, 64), spec("few", 30, 8)]
PADDING = 3
WORLD = 2
Grads = list[dict[str, Tensor]]


def live(share: float) -> dict[str, Tensor]:
    """Return which elements have gradients; padding rows have none."""
    drawn = torch.Generator().manual_seed(7)
    found = {t.name: torch.rand(t.shape, generator=drawn) >= share for t in TENSORS}
    for name in ("words", "few"):
        found[name][:] = True
        found[name][PADDING] = False
    return found


def grads(kept: dict[str, Tensor], step: int) -> Grads:
    return [{n: g * kept[n] for n, g in mine.items()} for mine in random_grads(WORLD, TENSORS, seed=step)]


def moved(method: Any, share: float, steps: int, second_moment: str = "auto", **common: Any) -> tuple[int, float]:
    """Return how many elements without gradients have moved, and which share of the others."""
    kept = live(share)
    with Team(method, WORLD, 4, 20, second_moment, tensors=TENSORS, options=common) as team:
        start = team.weights()
        for step in range(steps):
            team.step(grads(kept, step))
        differ = {name: now != start[name] for name, now in team.weights().items()}
    dead = sum(int((differ[name] & ~kept[name]).sum()) for name in kept)
    return dead, sum(int(differ[n].sum()) for n in kept) / max(1, sum(int(kept[n].sum()) for n in kept))


def promises(sample: Sample) -> bool:
    """Return whether zeros stay zeros under Adam."""
    found = sample.codec().properties()
    return found.law.zeros or found.divides != "never"


def _slow(sample: Sample) -> list[Any]:
    """Let `make test` take the first sample of each method."""
    return [pytest.mark.slow] if sample.number else []


CASES = [pytest.param(s, id=s.name, marks=_slow(s)) for s in samples()]
#: Of what takes seconds, a method of each kind.
PROMISED = [pytest.param(s, id=s.name, marks=[] if s.quick else [pytest.mark.slow]) for s in samples() if promises(s)]


@pytest.mark.parametrize("sample", PROMISED)
def test_masked_elements_never_move(sample: Sample) -> None:
    dead, others = moved(sample.codec(), 0.8, 20)
    assert dead == 0 and others > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("sample", [s for s in samples() if promises(s)], ids=lambda s: s.name)
def test_masked_elements_never_move_in_long(sample: Sample, share: float) -> None:
    dead, others = moved(sample.codec(), share, 200)
    assert dead == 0 and others > 0.95


@pytest.mark.parametrize("method", ["marsit", "powersgd"])
def test_without_a_held_second_moment_they_do(method: str) -> None:
    """The control: nothing but what is held keeps these methods from it."""
    assert moved(method, 0.8, 8, second_moment="own", warmup_steps=0)[0] > 100


def with_masks(method: Any, share: float, steps: int, *, masked: bool) -> int:
    """Return how many weights that are 0 at first are not at last, under SGD; masked ones have gradients too."""
    kept = live(share)
    with Fleet(WORLD, TENSORS, method, verify_every=1) as fleet:
        drawn = random_grads(1, TENSORS, seed=1)[0]
        models = [{n: torch.nn.Parameter(w * kept[n]) for n, w in drawn.items()} for _ in range(WORLD)]
        masks = [Masks(r.kept, r.start.mask, m) for r, m in zip(fleet.reducers, models, strict=True)] if masked else []
        for step in range(steps):
            for mine in masks:
                mine.begin()
            given = random_grads(WORLD, TENSORS, seed=step) if masked else grads(kept, step)
            for model, results in zip(models, fleet.step(given), strict=True):
                for name, parameter in model.items():
                    parameter.data -= 0.01 * results[name]
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        assert all_same([{n: p.detach() for n, p in model.items()} for model in models])
        return sum(int((models[0][n] != 0)[~kept[n]].sum()) for n in kept)


@pytest.mark.parametrize("sample", CASES)
def test_masked_weights_stay_zero_with_every_method(sample: Sample) -> None:
    assert with_masks(sample.codec(), 0.8, 4, masked=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("sample", list(samples()), ids=lambda s: s.name)
def test_masked_weights_stay_zero_in_long(sample: Sample, share: float) -> None:
    assert with_masks(sample.codec(), share, 200, masked=True) == 0


#: The first sample of each method, and those that keep averages of errors: another form, which says it anew.
SAYING = [s for s in samples() if s.number == 0 or s.options.get("feedback") == "average"]


@pytest.mark.parametrize("sample", [pytest.param(s, id=s.name) for s in SAYING])
def test_a_method_says_rightly_whether_zeros_stay_zeros(sample: Sample) -> None:
    """Without masks and second moment, this is the method's own doing; where it says no, that is the control."""
    variants = variants_of(sample.codec())
    assert (with_masks(sample.codec(), 0.8, 4, masked=False) == 0) is all(v.properties().law.zeros for v in variants)


# ---- a rare feature ----


def rare(step: int, every: int = 40, rank: int = 1) -> Grads:
    """Return gradients of which one column of the weight is 0, but once in so many steps and on one rank."""
    given = random_grads(WORLD, TENSORS, seed=step)
    for number, mine in enumerate(given):
        mine["weight"][:, 5] *= float(number == rank and step % every == 7)
    return given


def column(results: dict[str, Tensor]) -> Tensor:
    return results["weight"][:, 5].double()


@pytest.mark.parametrize(
    "method", ["marsit", "powersgd", *slow("onebit_adam", "ef_signsgd", "signsgd", "onebit", "signum")]
)
def test_a_rare_feature_is_delivered_within_one_interval(method: str) -> None:
    with Team(method, WORLD, 4, 20, tensors=TENSORS) as team:
        wanted, got = torch.zeros(24, dtype=torch.float64), torch.zeros(24, dtype=torch.float64)
        for step in range(25):
            given = rare(step)
            wanted += sum(column(mine) for mine in given) / WORLD
            got += column(team.step(given)[0])
            delivered = bool(got.any())
            assert delivered is (step >= 24), step  # the exact round after step 7
        waits = sum(r.kept.withholding.waiting()["weight"].view(24, 96)[:, 5].double() for r in team.fleet.reducers)
        assert torch.allclose(got + waits / WORLD, wanted, rtol=1e-6, atol=0)  # what bfloat16 rounded off waits
        assert torch.allclose(got, wanted, rtol=2.0**-8, atol=0)
        team.step(rare(25))
        assert not any(r.kept.withholding.waiting() for r in team.fleet.reducers)  # coded like any other from now on


def test_a_rare_feature_is_not_lost_over_many_intervals() -> None:
    with Team("marsit", WORLD, 4, 20, tensors=TENSORS) as team:
        wanted, got = torch.zeros(24, dtype=torch.float64), torch.zeros(24, dtype=torch.float64)
        for step in range(165):
            given = rare(step)
            wanted += sum(column(mine) for mine in given) / WORLD
            got += column(team.step(given)[0])
        divisors = team.fleet.reducers[0].buckets[0].memory.divisors
        index = team.fleet.plan.names().index("weight")
        rest = sum(column({"weight": (r["weight"] * divisors[index]).view(24, 96)}) for r in team.fleet.residuals())
        step_of = got.abs().max() / 4
        assert bool(((got + rest / WORLD - wanted).abs() < step_of).all())  # what merging keeps is less than a step


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_feature_that_begins_late_is_not_divided_by_the_square_of_its_sum(make: Any) -> None:
    """The sum of 15 gradients counted in V as if each of 20 steps had one like it: 4.5 times the root of what it is."""
    with Team("marsit", WORLD, 4, 20, tensors=TENSORS, make=make) as team:
        for step in range(25):
            given = random_grads(WORLD, TENSORS, seed=step)
            for mine in given:
                mine["weight"][:, 5] *= float(step >= 10)
            team.step(given)
        mine = team.held[0]
        assert mine is not None
        squares = mine.state_dict()["weight"]["moment"].mean(0)
        assert 0.2 < squares[5] / squares[6:].mean() < 2


# ---- what waits ----


def waiting(method: str = "marsit", steps: int = 12, **common: Any) -> Team:
    """Return ranks with a feature that waits."""
    team = Team(method, WORLD, 4, 20, tensors=TENSORS, options=common)
    for step in range(steps):
        team.step(rare(step))
    return team


def waits(team: Team) -> list[dict[str, Tensor]]:
    return [reducer.kept.withholding.waiting() for reducer in team.fleet.reducers]


def test_a_round_that_is_not_finite_leaves_no_trace() -> None:
    with waiting() as team:
        before, spoilt = waits(team), rare(47)
        assert bool(before[1]["weight"].any()) and not bool(before[0]["weight"].any())
        spoilt[0]["bias"][3] = float("inf")
        results = team.exchange(spoilt)
        assert bool(results[0]["weight"].isnan().all()) and all(map(all_same, zip(before, waits(team), strict=True)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_withheld_value_that_is_not_finite_is_counted(value: float) -> None:
    with waiting() as team:
        before, spoilt = waits(team), rare(12)
        spoilt[1]["weight"][2, 5] = value
        results = team.exchange(spoilt)
        assert bool(results[0]["weight"].isnan().all()) and all(map(all_same, zip(before, waits(team), strict=True)))
        assert [reducer.metrics.nonfinite for reducer in team.fleet.reducers] == [1, 1]


def test_such_a_value_can_count_as_zero() -> None:
    with waiting(nonfinite="zero") as team:
        before, spoilt = waits(team), rare(12)
        spoilt[1]["weight"][2, 5] = float("nan")
        results = team.exchange(spoilt)
        assert bool(results[0]["weight"].isfinite().all()) and not bool(results[0]["weight"][:, 5].any())
        assert all(map(all_same, zip(before, waits(team), strict=True)))


def test_a_job_that_resumes_has_the_same_bits() -> None:
    with waiting() as team, Team("marsit", WORLD, 4, 20, tensors=TENSORS) as again:
        for old, new, optimizers, models in zip(
            zip(team.fleet.reducers, team.held, strict=True),
            zip(again.fleet.reducers, again.held, strict=True),
            zip(team.optimizers, again.optimizers, strict=True),
            zip(team.models, again.models, strict=True),
            strict=True,
        ):
            assert old[1] and new[1]
            saved = checkpoint.save(old[0], team.fleet.methods)
            assert bool(saved["waiting"]["weight"].any()) is (old[0].rank == 1)
            checkpoint.load(new[0], again.fleet.methods, saved, "restore")
            new[1].load_state_dict(old[1].state_dict(), old[1].due)
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            for name, parameter in models[1].items():
                parameter.data.copy_(models[0][name])
        for step in range(12, 30):
            assert all_same([team.step(rare(step))[0], again.step(rare(step))[0]]), step


def test_with_other_buckets_it_goes_with_its_tensor() -> None:
    with waiting() as team, waiting() as other:
        for reducer in other.fleet.reducers:
            reducer.replan(Plan.of([([tensor], 1) for tensor in reversed(TENSORS)]))
        for mine in other.held:
            assert mine
            held.begin([mine], 12)
        assert all(map(all_same, zip(waits(team), waits(other), strict=True)))


def test_other_ranks_are_dealt_the_mean_of_what_waits() -> None:
    with waiting() as team:
        states = [checkpoint.save(reducer, team.fleet.methods) for reducer in team.fleet.reducers]
        dealt = [redistributed(iter(states), rank, 3, set())["waiting"]["weight"] for rank in range(3)]
        mean = sum(state["waiting"]["weight"] for state in states) / WORLD
        assert all(torch.equal(one, mean) for one in dealt) and bool(mean.any())


def test_what_waits_for_nothing_that_is_held_is_sent_at_once() -> None:
    """A state may be loaded where nobody holds a second moment: gradients that wait are sent with the next ones."""
    with waiting() as team, Fleet(WORLD, TENSORS, "none") as plain:
        for reducer, state in zip(plain.reducers, waits(team), strict=True):
            reducer.kept.withholding.load(state)
        given = [{t.name: torch.zeros(t.shape) for t in TENSORS} for _ in range(WORLD)]
        want = sum(column({"weight": w["weight"].view(24, 96)}) for w in waits(team)) / WORLD
        assert torch.equal(column(plain.step(given)[0]), want) and bool(want.any())
        assert not column(plain.step(given)[0]).any()


@pytest.mark.parametrize("kinds", [["coded"], ["exact", "coded"], ["exact", "exact", "coded"]])
def test_what_exact_rounds_round_off_of_elements_that_are_no_longer_left_out_is_sent_later(kinds: list[Any]) -> None:
    """Ranks that have waited in opposite directions round off more than the mean of what waited."""
    with Fleet(WORLD, [spec("w", 4, 64)], "ef_signsgd") as fleet:
        for reducer, size in zip(fleet.reducers, (1000.3, -999.3), strict=True):
            reducer.kept.withholding.withhold({"w": torch.arange(4 * 64)})
            reducer.kept.withholding.load({"w": torch.full((4 * 64,), size)})
        got = torch.zeros(4 * 64)
        for kind in kinds:
            for reducer in fleet.reducers:
                reducer.kept.withholding.withhold({})
                reducer.buckets.choose(Next(kind))
            got += fleet.step([{"w": torch.zeros(4, 64)} for _ in range(WORLD)])[0]["w"].view(-1)
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        kept = sum(mine["w"] for mine in fleet.residuals()) / WORLD
        assert torch.allclose(got + kept, torch.tensor(0.5), atol=1e-3)
        assert not any(reducer.kept.withholding.waiting() for reducer in fleet.reducers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["coded", "exact"])
def test_what_waits_beside_a_gradient_that_counts_as_zero_is_sent_later(kind: Any, dtype: torch.dtype) -> None:
    """With the next round, though coded ones leave these elements out no longer."""
    with Fleet(WORLD, [spec("w", 4, 64, dtype=dtype)], "ef_signsgd", nonfinite="zero") as fleet:
        wide = torch.promote_types(dtype, torch.float32)
        for reducer in fleet.reducers:
            reducer.kept.withholding.load({"w": torch.full((4 * 64,), 0.5, dtype=wide)})
        got = torch.zeros(4 * 64, dtype=wide)
        for value, waiting in ((torch.nan, {"w": 1}), (0.0, {})):
            for reducer in fleet.reducers:
                reducer.buckets.choose(Next(kind))
            given = [{"w": torch.zeros(4, 64, dtype=dtype)} for _ in range(WORLD)]
            for mine in given:
                mine["w"][2, 5] = value
            got += fleet.step(given)[0]["w"].view(-1)
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
            for reducer in fleet.reducers:
                left = reducer.kept.withholding.waiting()
                assert {name: int(values.count_nonzero()) for name, values in left.items()} == waiting
        kept = sum(mine["w"] for mine in fleet.residuals()) / WORLD if kind == "coded" else 0.0
        assert torch.allclose(got + kept, torch.tensor(0.5, dtype=wide), atol=1e-3)


@pytest.mark.parametrize("kind", ["coded", "exact"])
def test_what_16_bits_cannot_hold_is_sent_over_several_rounds(kind: Any) -> None:
    with Fleet(WORLD, [spec("w", 4, 64, dtype=torch.float16)], "ef_signsgd") as fleet:
        for reducer in fleet.reducers:
            reducer.kept.withholding.load({"w": torch.full((4 * 64,), 1e5)})
        got = torch.zeros(4 * 64)
        for more in (True, True, True, False):  # 1e5 is a little more than three times what one sends
            for reducer in fleet.reducers:
                reducer.buckets.choose(Next(kind))
            given = [{"w": torch.zeros(4, 64, dtype=torch.float16)} for _ in range(WORLD)]
            got += fleet.step(given)[0]["w"].view(-1)
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
            assert all(bool(reducer.kept.withholding.waiting()) is more for reducer in fleet.reducers)
        kept = sum(mine["w"] for mine in fleet.residuals()) / WORLD if kind == "coded" else 0.0
        assert torch.allclose(got + kept, torch.tensor(1e5), rtol=1e-3)


@pytest.mark.parametrize("waits", [0.0, 0.3])
def test_of_elements_for_which_nothing_waits_nothing_is_kept_once_they_are_coded(waits: float) -> None:
    """After a resume nobody knows of them. The control: something waits, so what is rounded off is kept."""
    with Fleet(WORLD, [spec("w", 4, 64)], "ef_signsgd") as fleet:
        for reducer in fleet.reducers:
            reducer.kept.withholding.withhold({"w": torch.arange(4 * 64)})
            reducer.kept.withholding.load({"w": torch.full((4 * 64,), waits)})
            reducer.kept.withholding.withhold({})
            reducer.buckets.choose(Next("exact"))
        fleet.step([{"w": torch.full((4, 64), 1.001)} for _ in range(WORLD)])
        assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        assert all(bool(reducer.kept.withholding.waiting()) == bool(waits) for reducer in fleet.reducers)


def test_it_follows_the_scale_of_gradients_and_the_rate() -> None:
    with waiting() as team:
        reducer, before = team.fleet.reducers[1], waits(team)[1]["weight"]
        reducer.kept.scale(4.0)
        reducer.kept.scale_errors({"weight": 0.5, "bias": 3.0})
        assert torch.equal(waits(team)[1]["weight"], 2 * before)


@pytest.mark.parametrize("wrong", ["nan", "short", "unknown"])
def test_a_saved_state_that_does_not_fit_is_refused(wrong: str) -> None:
    with waiting() as team:
        reducer = team.fleet.reducers[1]
        state = checkpoint.save(reducer, team.fleet.methods)
        weight = state["waiting"]["weight"]
        parts = {"nan": {"weight": weight * float("nan")}, "short": {"weight": weight[1:]}, "unknown": {"w": weight}}
        with pytest.raises(StateError):
            checkpoint.check(reducer, team.fleet.methods, {**state, "waiting": parts[wrong]}, "restore")


# ---- means leave out what is withheld ----


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("marsit", {"full_precision_every": 0}),
        ("signsgd", {}),
        ("signum", {}),
        ("ef_signsgd", {}),
        ("onebit", {}),
        ("onebit_adam", {"block": 512}),
        ("onebit_adam", {"block": 512, "scale": "l2"}),
        ("terngrad", {}),
    ],
)
def test_a_scale_is_that_of_what_is_sent(method: str, options: dict[str, Any]) -> None:
    """A tensor of which half is withheld has the results of one that has only the rest."""
    few, many = spec("w", 4, 64), spec("w", 4, 128)
    index = (torch.arange(4 * 128) % 2 != 1).nonzero().view(-1)
    with Fleet(WORLD, [few], method, **options) as small, Fleet(WORLD, [many], method, **options) as large:
        for reducer in large.reducers:
            reducer.kept.withholding.withhold({"w": index})
        given = random_grads(WORLD, [few], seed=3)
        wide = []
        for mine in given:
            wide.append({"w": torch.zeros(4, 128)})
            wide[-1]["w"][:, 1::2] = mine["w"]
        want, got = small.step(given)[0]["w"], large.step(wide)[0]["w"]
        assert not got.view(-1)[index].any()
        if method == "terngrad":  # it draws, on a scale that is the same then
            want, got = want.abs().max(), got.abs().max()
            assert torch.allclose(got, want, rtol=0.5)
        elif method in ("ef_signsgd", "onebit") or options.get("scale"):
            assert torch.allclose(got[:, 1::2], want, rtol=1e-5)
        else:
            assert torch.allclose(got[:, 1::2].abs().amax(1), want.abs().amax(1), rtol=1e-5)


@pytest.mark.parametrize("method", ["marsit", "ef_signsgd", "onebit_adam", "powersgd"])
def test_an_accelerator_gives_the_same_bits(method: str) -> None:
    """There gradients are taken in together, and owners keep what they keep on the host."""

    def run() -> tuple[list[Grads], list[dict[str, Tensor]]]:
        results = []
        with Fleet(WORLD, TENSORS, method, verify_every=1) as fleet:
            for step in range(5):
                for reducer in fleet.reducers:
                    assert reducer.wait_idle(5.0)
                    reducer.kept.withholding.withhold({"weight": index, "few": index[:40]})
                    reducer.buckets.choose(Next("exact" if step == 3 else "coded"))
                results.append(fleet.step(random_grads(WORLD, TENSORS, seed=step)))
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
            return results, [reducer.kept.withholding.waiting() for reducer in fleet.reducers]

    index = torch.arange(0, 24 * 96, 5)
    here, left = run()
    with everything_on_accelerator():
        there, left_there = run()
    for results, others in zip(here, there, strict=True):
        assert all_same([*results, *others])
    assert bool(left[0]["weight"].any()) and all(map(all_same, zip(left, left_there, strict=True)))
    assert not here[0][0]["weight"].view(-1)[index].any() and bool(here[3][0]["weight"].view(-1)[index].all())


def test_nothing_is_withheld_where_nothing_is_zero() -> None:
    with Team("marsit", WORLD, 4, 20, tensors=TENSORS) as team:
        team.run(range(8))
        assert all(not s.memory.withheld.any for r in team.fleet.reducers for s in r.buckets)


def test_a_row_without_a_gradient_is_not_withheld_where_it_has_a_step_of_its_own() -> None:
    """A new word arrives at once."""
    kept = live(0.0)
    with Team("marsit", WORLD, 4, 20, tensors=TENSORS) as team:
        for step in range(8):
            team.step(grads(kept, step))
        (state,) = team.fleet.reducers[0].buckets
        names = [tensor.name for tensor in state.bucket.tensors]
        assert [names[position] for position in state.memory.withheld.index] == ["few"]  # rows that share a step
        kept["words"][PADDING] = True
        assert int(team.step(grads(kept, 8))[0]["words"][PADDING].count_nonzero()) > 10


def late_half(step: int) -> Grads:
    """Return gradients of which the first eight words have none, but one in a few coded steps, in half of its row."""
    given = random_grads(WORLD, TENSORS, seed=step)
    for rank, mine in enumerate(given):
        row = mine["words"][2].clone()
        mine["words"][:8] = 0
        mine["words"][2, :32] = row[:32] * float(8 <= step < 11 or (step == 24 and rank == 1))
    return given


@pytest.mark.parametrize("method", ["onebit_adam", "marsit", "powersgd", *slow("ef_signsgd", "onebit")])
def test_what_is_withheld_only_after_it_was_coded_goes_out_with_the_next_exact_round(method: str) -> None:
    """A group that was wholly 0 has something in some places: others of it were given what their code rounds off."""
    with Team(method, WORLD, 4, 20, tensors=TENSORS) as team:
        wanted = got = torch.zeros(8, 64, dtype=torch.float64)
        fleet, index = team.fleet, team.fleet.plan.names().index("words")
        size = max(float(mine["words"][2].abs().max()) for step in range(8, 11) for mine in late_half(step))
        for step in range(46):
            given = late_half(step)
            wanted = wanted + sum(mine["words"][:8].double() for mine in given) / WORLD
            result = team.step(given)[0]["words"][:8].double()
            got = got + result
            assert float(result.abs().max()) <= 4 * size, step
            if step == 25:
                left_out = fleet.reducers[0].kept.withholding._unmoved["words"]
                assert len(left_out) == 8 * 64 - 32  # wholly zero groups may have both, too
                assert not bool(fleet.residuals()[0]["words"][left_out].any())
        waits = [reducer.kept.withholding.waiting().get("words") for reducer in fleet.reducers]
        left = sum(kept.view(-1, 64)[:8].double() for kept in waits if kept is not None)
        for reducer, kept in zip(fleet.reducers, fleet.residuals(), strict=True):
            state, position = reducer.buckets.where(index)
            divisor = state.memory.divisors.get(position, 1.0)
            left = left + (kept["words"].double() * divisor).view(-1, 64)[:8]
            if "server" in state.memory.state:
                kept_here = state.memory.state["server"][state.memory.span(position)]
                left = left + WORLD * (kept_here.double() * divisor).view(-1, 64)[:8]
        most = {"marsit": 0.5}.get(method, 2.0**-8)  # what merging keeps is less than a step; exact rounds round
        assert float((got + left / WORLD - wanted).abs().max()) < most * size
        assert float((got - wanted)[[0, 1, 3, 4, 5, 6, 7]].abs().max()) < 0.01 * size  # words that nobody has used


@pytest.mark.parametrize("late", [True, False])
def test_a_row_of_a_pruned_layer_that_comes_to_life_keeps_its_zeros(late: bool) -> None:
    kept = live(0.5)
    mask = kept["weight"].clone()
    kept["weight"][4] &= not late
    with Team("marsit", WORLD, 4, 20, tensors=TENSORS) as team:
        start = team.weights()["weight"]
        for step in range(30):
            if step == 8:
                kept["weight"] = mask
            team.step(grads(kept, step))
        differ = team.weights()["weight"] != start
        assert bool(differ[4].any()) and torch.equal(differ, mask)


# ---- masks ----


def test_masks_follow_the_weights() -> None:
    with Fleet(1, [spec("w", 4, 4), spec("b", 4)], "none") as fleet:
        model = {"w": torch.nn.Parameter(torch.ones(4, 4)), "b": torch.nn.Parameter(torch.zeros(4))}
        masks, grad = (
            Masks(fleet.reducers[0].kept, fleet.reducers[0].start.mask, model),
            [{"w": torch.ones(4, 4), "b": torch.ones(4)}],
        )

        def sent() -> list[int]:
            masks.begin()
            found = fleet.step(grad)[0]
            assert fleet.reducers[0].wait_idle(5.0)
            return [int(found["w"].sum()), int(found["b"].sum())]

        assert sent() == [16, 4]  # a tensor that is 0 as a whole has not been pruned
        model["w"].data[0] = 0
        model["b"].data[:3] = 1
        assert sent() == [12, 4]
        model["w"].data[0, 0] = 1  # grown again
        model["b"].data[0] = 0
        assert sent() == [13, 3]
        saved, again = masks.state(), Masks(fleet.reducers[0].kept, fleet.reducers[0].start.mask, model)
        again.load(saved)
        masks = again
        assert sent() == [13, 3] and all(map(same_bits, saved["masks"].values(), again.state()["masks"].values()))


@pytest.mark.parametrize("method", ["ef_signsgd", "dgc"])
def test_nothing_is_kept_for_what_is_masked_from_now_on(method: str) -> None:
    """A method that has something to send of it would let it count in the scale of others."""
    tensors = [spec("w", 8, 16)]
    with Fleet(2, tensors, method) as fleet:
        models = [{"w": torch.nn.Parameter(torch.ones(8, 16))} for _ in range(2)]
        masks = [Masks(r.kept, r.start.mask, m) for r, m in zip(fleet.reducers, models, strict=True)]
        for step in range(4):
            if step == 3:
                for model in models:
                    model["w"].data[0, :5] = 0
            for mine in masks:
                mine.begin()
            kept = [kept["w"].view(8, 16)[0] for r in fleet.reducers for kept in r.kept.states().values()]
            assert all(bool(row[:5].any()) is (0 < step < 3) and bool(row[5:].any()) is (step > 0) for row in kept)
            fleet.step(random_grads(2, tensors, seed=step))
            assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)


def test_masks_that_differ_are_refused() -> None:
    tensors = [spec("w", 4, 4), spec("v", 4, 4)]
    with Fleet(2, tensors, "none") as fleet:
        models = [{t.name: torch.nn.Parameter(torch.ones(4, 4)) for t in tensors} for _ in range(2)]
        masks = [Masks(r.kept, r.start.mask, m) for r, m in zip(fleet.reducers, models, strict=True)]
        for step in range(2):
            models[0]["v"].data[0, step] = models[1]["v"].data[0, 2 * step] = 0
            for mine in masks:
                mine.begin()
            if not step:
                fleet.step(random_grads(2, tensors, seed=step))
                continue
            with pytest.raises(MismatchError, match=r"the masks of v differ between ranks, that of v on rank\(s\) 1"):
                fleet.step(random_grads(2, tensors, seed=step))


def test_a_mask_that_changes_on_one_rank_only_is_refused() -> None:
    with Fleet(2, [spec("w", 4, 4)], "none") as fleet:
        models = [{"w": torch.nn.Parameter(torch.ones(4, 4))} for _ in range(2)]
        masks = [Masks(r.kept, r.start.mask, m) for r, m in zip(fleet.reducers, models, strict=True)]
        for step in range(2):
            models[0]["w"].data[0] = 1 - step
            for mine in masks:
                mine.begin()
            if not step:
                fleet.step(random_grads(2, [spec("w", 4, 4)], seed=step))
                continue
            with pytest.raises(MismatchError, match="changed a mask"):
                fleet.step(random_grads(2, [spec("w", 4, 4)], seed=step), result_scale=1.0)  # all ranks wait at once
