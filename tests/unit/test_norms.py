"""What is handed back has the norm of the exact mean, and is otherwise what the method makes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_compress import ops
from horovod_compress.codecs.by_step import by_step, method
from horovod_compress.engine.bucket.withheld import LIVE, MASKED
from horovod_compress.engine.methods import per_layer
from horovod_compress.engine.norms import own_share
from horovod_compress.engine.optimizer.matching import Matching
from horovod_compress.engine.ratio import EVERY, FAR, FILLING, NEAR, SPREAD, check_state
from horovod_compress.engine.usual import BELOW, EMPTIED
from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.support.accelerator import FakeAccelerator, everything_on_accelerator
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import slow

SHAPES = [spec("a", 40, 100), spec("b", 333), spec("c", 64, 64)]
#: Four standard deviations of a norm from 256 counters.
CLOSE = 4 / math.sqrt(2 * 256)
#: Methods whose results are not of the mean's size, and options that bring this out.
CODED: list[Any] = [
    ("marsit", {"full_precision_every": 0}),
    ("topk", {"density": 0.05}),
    ("powersgd", {}),
    *slow(("signsgd", {}), ("qsgd", {"bits": 2}), ("sketch_fusion", {})),
]

Grads = list[dict[str, Tensor]]


def norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def mean(grads: Grads) -> dict[str, Tensor]:
    return {name: sum(mine[name] for mine in grads) / len(grads) for name in grads[0]}  # type: ignore[misc]


def fleet(method: Any, options: Mapping[str, Any], follow: Sequence[str] = ("a", "b", "c"), world: int = 3) -> Fleet:
    made = Fleet(world, SHAPES, method, schedule="layerwise", **options)
    for reducer in made.reducers:
        reducer.norms.follow(follow)
    return made


def stepped(ranks: Fleet, grads: Grads, **options: Any) -> list[dict[str, Tensor]]:
    for reducer in ranks.reducers:
        reducer.norms.begin(reducer.next_step())
    return ranks.step(grads, **options)


def run(ranks: Fleet, steps: range, scale: float = 1.0) -> list[tuple[Grads, list[dict[str, Tensor]], float]]:
    """Return for each step the gradients, the results of all ranks, and what they were handed back times."""
    found = []
    for step in steps:
        grads = random_grads(ranks.world, SHAPES, seed=step, scale=scale)
        results = stepped(ranks, grads)
        given = [reducer.norms.given for reducer in ranks.reducers]
        assert all(one is not None and one == given[0] for one in given)
        found.append((grads, results, given[0].factor))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(("method", "options"), CODED, ids=str)
def test_norm_is_that_of_the_mean_and_the_rest_as_the_method_makes_it(method: str, options: dict[str, Any]) -> None:
    with fleet(method, options) as matched, fleet(method, options, follow=()) as plain:
        ratios, control = [], []
        for (grads, results, factor), (_, made, one) in zip(
            run(matched, range(12)), run(plain, range(12)), strict=True
        ):
            assert one == 1.0
            assert all_same(results)
            for name, tensor in results[0].items():
                torch.testing.assert_close(tensor, made[0][name] * factor, rtol=3e-6, atol=1e-6)
            exact = norm(mean(grads))
            ratios.append(abs(math.log(norm(results[0]) / exact)))
            control.append(abs(math.log(norm(made[0]) / exact)))
        assert max(ratios) < CLOSE + NEAR, "as residuals fill, every step measures"
        assert sum(ratios) < sum(control) * 2 / 3


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_result_is_in_the_own_share_one_rank(world: int) -> None:
    for number in (0, 1, 63, 64, 65, 333, 4000):
        result = torch.arange(float(number)).view(1, number)
        shares = [own_share(result, rank, world) for rank in range(world)]
        assert torch.equal(torch.cat(shares), result.view(-1))
        assert max(share.numel() for share in shares) <= number / world + 2 * 64


@pytest.mark.parametrize(
    ("world", "options"), [(2, {}), (3, {}), (5, {}), (4, {"hosts": 2, "exchange": "hierarchical"})], ids=str
)
def test_shares_make_the_norm_of_the_results(world: int, options: dict[str, Any]) -> None:
    with fleet("marsit", {"full_precision_every": 0} | options, world=world) as ranks:
        for step in range(3):
            ((_, results, factor),) = run(ranks, range(step, step + 1))
            made = {reducer.norms._now.made for reducer in ranks.reducers}
            assert len(made) == 1
            torch.testing.assert_close(made.pop() * factor, norm(results[0]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("method", ["none", "fp16", "bf16"])
def test_what_is_exact_is_untouched(method: str) -> None:
    with fleet(method, {}) as matched, fleet(method, {}, follow=()) as plain:
        for (_, results, factor), (_, made, _) in zip(run(matched, range(7)), run(plain, range(7)), strict=True):
            assert factor == 1.0
            assert all(same_bits(results[0][name], made[0][name]) for name in made[0])
        sent = [ranks.reducers[0].metrics.bytes_sent for ranks in (matched, plain)]
        assert sent[0] == sent[1]


@pytest.mark.parametrize("knows", [True, False], ids=["usual", "first"])
@pytest.mark.parametrize("scale", [1e-18, 1e-25, 1e-39, 1e-40, 1e-41])
def test_a_step_of_next_to_nothing_loses_no_result_of_residuals(scale: float, knows: bool) -> None:
    """What waits comes out beside it, and the ratio is divided out again in float32."""
    with fleet("topk", {"density": 0.05}) as matched, fleet("topk", {"density": 0.05}, follow=()) as plain:
        run(matched, range(5))
        run(plain, range(5))
        for reducer in [] if knows else matched.reducers:
            reducer.norms.ratio.load({})
        ((_, results, factor),), ((_, made, _),) = (run(ranks, range(5, 6), scale) for ranks in (matched, plain))
        assert norm(made[0]) > 1.0
        for name, tensor in results[0].items():
            torch.testing.assert_close(tensor * torch.tensor(1 / factor), made[0][name], rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["marsit", "topk", "ef_signsgd", "onebit_adam"])
def test_clipping_limits_what_a_spike_has_left_in_residuals(method: str) -> None:
    """Results are as large as it was, and mean gradients are not: with their ratio, nothing would be clipped."""
    options = {"density": 0.05} if method == "topk" else {"full_precision_every": 0} if method == "marsit" else {}
    with fleet(method, options) as ranks:
        found = run(ranks, range(25))
        most = norm(mean(found[0][0]))  # what a program clips at
        usual = max(norm(results[0]) / factor for _, results, factor in found[5:])
        run(ranks, range(25, 26), 1000.0)
        after = run(ranks, range(26, 36))
        clipped = [norm(results[0]) / factor * min(1.0, most / norm(results[0])) for _, results, factor in after]
        assert max(clipped) < 2 * BELOW * usual
        _, results, factor = after[0]
        assert norm(results[0]) / factor > 20 * usual, "the control: it is there"


@pytest.mark.parametrize(
    ("method", "options"),
    [("topk", {"density": 0.05}), ("marsit", {"full_precision_every": 0, "step_size": 0.01}), ("signsgd", {})],
    ids=str,
)
def test_gradients_that_become_small_are_seen_as_they_are(method: str, options: dict[str, Any]) -> None:
    """Though results may stay as large as they were."""
    with fleet(method, options) as ranks:
        run(ranks, range(25))
        for grads, results, _ in run(ranks, range(25, 32), 0.1):
            assert abs(math.log(norm(results[0]) / norm(mean(grads)))) < CLOSE + NEAR


def test_another_method_begins_with_a_ratio_of_its_own() -> None:
    """One whose results are a hundred times as large is no spike."""
    small = method("marsit", full_precision_every=0, step_size=0.001)
    with fleet(by_step({0: small, 25: "onebit"}), {}) as ranks:
        run(ranks, range(26))  # the last of them sends what the first method has left
        for grads, results, _ in run(ranks, range(26, 32)):
            assert abs(math.log(norm(results[0]) / norm(mean(grads)))) < CLOSE + NEAR
        assert ranks.reducers[0].norms.ratio.usual.ratio < 1.0


def test_a_spike_is_remembered_over_a_round_that_empties_one_of_several_buckets() -> None:
    methods = per_layer({"a": method("marsit", full_precision_every=10), "*": method("topk", density=0.05)})
    with fleet(methods, {}) as ranks:
        found = run(ranks, range(25))
        most = norm(mean(found[0][0]))  # what a program clips at
        run(ranks, range(25, 26), 1000.0)
        for _, results, factor in run(ranks, range(26, 36)):  # 30 is such a round
            assert norm(results[0]) / factor * min(1.0, most / norm(results[0])) < 2 * BELOW * FAR * most


@pytest.mark.parametrize("times", [1.0, 1000.0])
def test_a_round_that_sends_all_that_a_spike_has_left_is_seen_as_large(times: float) -> None:
    """Not so what it sends of usual gradients."""
    with fleet(by_step({0: method("topk", density=0.05), 30: "none"}), {}) as ranks:
        run(ranks, range(25))
        let_be_late(ranks)
        run(ranks, range(25, 29))
        run(ranks, range(29, 30), times)
        ((grads, results, factor),) = run(ranks, range(30, 31))
        assert not ranks.reducers[0].norms.ratio.usual.large, "measured before the spike"
        if times == 1.0:
            assert abs(math.log(norm(results[0]) / norm(mean(grads)))) < CLOSE + NEAR
        else:
            assert norm(results[0]) / factor > EMPTIED * ranks.reducers[0].norms.ratio.usual.made
            assert factor == ranks.reducers[0].norms.ratio.usual.ratio / BELOW


def let_be_late(ranks: Fleet) -> None:
    """Let the training be so old that measurements are far apart."""
    for reducer in ranks.reducers:
        reducer.norms.ratio.steps, reducer.norms.ratio.filling = SPREAD * EVERY, FILLING * EVERY


def test_late_in_a_training_the_ratio_is_held_between_measurements() -> None:
    with fleet("marsit", {"full_precision_every": 0}) as ranks:
        run(ranks, range(2 * FILLING * EVERY))
        let_be_late(ranks)
        held, measured = 0, []
        for step in range(2 * FILLING * EVERY, 2 * FILLING * EVERY + 3 * EVERY):
            ((grads, results, factor),) = run(ranks, range(step, step + 1))
            norms = ranks.reducers[0].norms
            held += norms.holds_results
            if norms.ratio.age == 0:
                measured.append((step, norms.ratio.recent[-1]))
            assert factor != 1.0
            assert abs(math.log(norm(results[0]) / norm(mean(grads)))) < CLOSE + NEAR
        assert not held and len(measured) == 3 and measured[-1][0] - measured[0][0] == 2 * EVERY
        ratios = [ratio for _, ratio in measured]
        assert max(ratios) < 1.3 * min(ratios), "what was handed back times is taken out again"


@pytest.mark.parametrize("every", [4, 12])
def test_a_round_that_empties_residuals_is_measured_itself(every: int) -> None:
    """And so are those that follow, whose residuals fill again."""
    with fleet("marsit", {"full_precision_every": every}) as ranks:
        for step in range(2 * every + 3):
            if step and step % every == 0:
                let_be_late(ranks)
            ((grads, results, _),) = run(ranks, range(step, step + 1))
            if step % every < 4:
                assert abs(math.log(norm(results[0]) / norm(mean(grads)))) < CLOSE + NEAR


def test_a_gradient_that_did_not_come_fills_nothing() -> None:
    with fleet("marsit", {"full_precision_every": 0}) as ranks:
        for reducer in ranks.reducers:
            reducer.norms.begin(0)
        grads = [{n: g for n, g in mine.items() if n != "b"} for mine in random_grads(3, SHAPES, seed=0)]
        step = ranks.offer(grads)
        for reducer in ranks.reducers:
            reducer.skip(reducer.plan.names().index("b"))
        for reducer in ranks.reducers:
            reducer.settle(step)
            assert reducer.norms.state()["wait"] == ["a", "c"]


@pytest.mark.parametrize("spoilt", [(), ("a",)])
def test_each_bucket_fills_and_empties_by_itself(spoilt: Sequence[str]) -> None:
    """Also where another one is not finite in that step, and keeps what it had."""
    with fleet("topk", {"density": 0.05, "warmup_steps": 1}) as ranks:
        run(ranks, range(1))
        grads = random_grads(3, SHAPES, seed=1)
        for name in spoilt:
            grads[1][name].view(-1)[7] = float("inf")
        stepped(ranks, grads)
        assert all(reducer.norms.state()["wait"] == sorted({"a", "b", "c"} - {*spoilt}) for reducer in ranks.reducers)
        assert all(reducer.norms.ratio.steps == 1 for reducer in ranks.reducers), "exact steps do not count"


def test_what_a_plain_bucket_has_emptied_waits_no_longer() -> None:
    """Or a job that goes on from a checkpoint would take its exact results for coded ones."""
    with fleet("marsit", {"full_precision_every": 0}) as ranks:
        run(ranks, range(2))
        assert ranks.reducers[0].norms.state()["wait"] == ["a", "b", "c"]
        buckets = ranks.plan.buckets
        plain = Plan.of([(each.tensors, each.method, each.tensors[0].name == "b") for each in buckets])
        for reducer in ranks.reducers:
            reducer.replan(plain)
        run(ranks, range(2, 5))
        assert not ranks.reducers[0].kept.residuals()["b"].any()
        assert all(reducer.norms.state()["wait"] == ["a", "c"] for reducer in ranks.reducers)


def test_only_buckets_whose_optimizers_know_are_matched() -> None:
    options = {"full_precision_every": 0}
    with fleet("marsit", options, follow=("a",)) as some, fleet("marsit", options, follow=()) as plain:
        run(some, range(1)), run(plain, range(1))  # this one happens to have the right norm
        for (_, results, factor), (_, made, _) in zip(run(some, range(1, 4)), run(plain, range(1, 4)), strict=True):
            assert factor != 1.0 and not same_bits(results[0]["a"], made[0]["a"])
            assert all(same_bits(results[0][name], made[0][name]) for name in ("b", "c"))


def test_a_last_bucket_of_a_sparse_gradient_is_measured_without_it() -> None:
    """Nobody waits for that bucket, and it is the one after which ranks exchange what they have counted."""
    with fleet("qsgd", {"bits": 2}) as ranks:
        last = ranks.plan.buckets[-1].tensors[0].name
        for step in range(2 * EVERY):
            grads = random_grads(ranks.world, SHAPES, seed=step)
            sparse = step % 2 == 0  # in the first half, all steps hold their results until they have measured
            if step == EVERY:
                let_be_late(ranks)
            for reducer in ranks.reducers:
                reducer.norms.begin(reducer.next_step())
            given = [{n: g.clone() for n, g in mine.items() if not (sparse and n == last)} for mine in grads]
            number = ranks.offer(given)
            for reducer in ranks.reducers if sparse else ():
                reducer.skip(reducer.plan.names().index(last))
            for reducer, mine in zip(ranks.reducers, given, strict=True):
                for name in mine:
                    reducer.result(reducer.plan.names().index(name), number)
                assert reducer.settled()
            assert all_same(given)
            told = [reducer.norms.given for reducer in ranks.reducers]
            assert all(one is not None and one == told[0] for one in told)
            assert told[0].names == set(given[0]) and told[0].sound  # type: ignore[union-attr]
            exact = mean(grads)
            off = abs(math.log(norm(given[0]) / norm({name: exact[name] for name in given[0]})))
            assert off < 1.5 * CLOSE + NEAR


def test_masked_elements_are_in_no_norm() -> None:
    """Whatever gradients they have: weights that are pruned stay 0."""
    index, norms = torch.arange(0, 4000, 2), []
    kinds = torch.full((4000,), LIVE, dtype=torch.uint8).index_fill_(0, index, MASKED)
    for masks in (True, False):
        with fleet("marsit", {"full_precision_every": 0}) as ranks:
            for reducer in ranks.reducers if masks else ():
                reducer.kept.mask({"a": kinds}, {})
            for step in range(EVERY + 1):
                grads = random_grads(ranks.world, SHAPES, seed=step)
                for mine in grads:
                    mine["a"].view(-1)[index] *= 50
                results = stepped(ranks, grads)
                assert all_same(results) and bool(results[0]["a"].view(-1)[index].any()) is not masks
            norms.append((ranks.reducers[0].norms.ratio.norm, norm(mean(grads))))
            exact = mean(grads)
            exact["a"].view(-1)[index] = 0.0
            assert (abs(math.log(norms[-1][0] / norm(exact))) < 1.5 * CLOSE) is masks
    assert norms[1][0] > 5 * norms[0][0] and abs(math.log(norms[1][0] / norms[1][1])) < 1.5 * CLOSE, "the control"


def test_sums_have_the_norm_of_the_sum() -> None:
    with fleet("signsgd", {}) as ranks:
        for reducer in ranks.reducers:
            reducer.result_scale = 3.0
        for seed in range(7):
            grads = random_grads(ranks.world, SHAPES, seed=seed)
            results = stepped(ranks, grads)
            assert abs(math.log(norm(results[0]) / (3 * norm(mean(grads))))) < 1.5 * CLOSE + NEAR


def test_counters_do_not_depend_on_the_order_of_gradients() -> None:
    grads = random_grads(3, SHAPES, seed=5)
    found = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        with fleet("marsit", {"full_precision_every": 0}) as ranks:
            for reducer in ranks.reducers:
                reducer.norms.begin(reducer.next_step())
            step = ranks.offer([{n: g.clone() for n, g in mine.items()} for mine in grads], order)
            for reducer in ranks.reducers:
                reducer.settle(step)
            found.append(ranks.reducers[0].norms.ratio.value)
    assert found[0] == found[1] is not None


def test_a_frozen_tensor_that_waits_makes_no_bucket_a_coded_one() -> None:
    with Fleet(2, SHAPES, "marsit", schedule="single", full_precision_every=0) as ranks:
        for reducer in ranks.reducers:
            reducer.norms.follow(["a", "b", "c"])
        run(ranks, range(2))
        plain = Plan.of([(each.tensors, each.method, True) for each in ranks.plan.buckets])
        for reducer in ranks.reducers:
            reducer.replan(plain)
            reducer.freeze([reducer.plan.names().index("a")])
        for step in range(2, 5):
            for reducer in ranks.reducers:
                reducer.norms.begin(reducer.next_step())
                assert reducer.norms.holds_results is (step == 2), "what waits of the others is sent once"
            ranks.step(random_grads(2, SHAPES, seed=step))
        assert ranks.reducers[0].norms.state()["wait"] == ["a"]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    with fleet("marsit", {"full_precision_every": 0}) as ranks:
        run(ranks, range(EVERY))
        let_be_late(ranks)
        before = ranks.reducers[0].norms.ratio.state()
        grads = random_grads(3, SHAPES, seed=9)
        grads[1]["b"][7] = float("inf")
        stepped(ranks, grads)
        given, after = ranks.reducers[0].norms.given, ranks.reducers[0].norms.ratio.state()
        assert given is not None and not given.sound
        counters = dict.fromkeys(("age", "steps", "filling", "known"), 0)
        assert after | counters == before | counters
        assert run(ranks, range(10, 11))[0][2] == given.factor


def test_a_bucket_of_which_this_shard_has_no_row_is_measured_too() -> None:
    tensors = [spec("a", 40, 100), spec("b", 0, 7)]
    with Fleet(2, tensors, "topk", schedule="layerwise", min_elements=0) as ranks:
        for reducer in ranks.reducers:
            reducer.norms.follow(["a", "b"])
        for step in range(3):
            grads = random_grads(2, tensors, seed=step)
            assert all_same(stepped(ranks, grads))
        assert all(reducer.norms.given.factor > 1.0 for reducer in ranks.reducers)  # type: ignore[union-attr]


def test_one_rank_turns_it_off_for_all() -> None:
    with fleet("marsit", {"full_precision_every": 0}) as ranks:
        ranks.reducers[2].norms.vote_against()
        assert run(ranks, range(1))[0][2] == 1.0, "the first step measures, and votes"
        assert all(reducer.norms.ratio.off for reducer in ranks.reducers)
        assert all(factor == 1.0 for _, _, factor in run(ranks, range(1, 4)))


def test_resume_has_equal_bits() -> None:
    with fleet("marsit", {"full_precision_every": 0}) as whole, fleet("marsit", {"full_precision_every": 0}) as other:
        run(whole, range(7))
        let_be_late(whole)  # it is held; in the beginning, it would be measured anew anyway
        states = [
            (reducer.norms.ratio.state(), {n: r.clone() for n, r in reducer.kept.residuals().items()})
            for reducer in whole.reducers
        ]
        carries = [reducer.kept.carries() for reducer in whole.reducers]
        for reducer, (state, residuals), carry in zip(other.reducers, states, carries, strict=True):
            for name, kept in reducer.kept.residuals().items():
                kept.copy_(residuals[name])
            for name, kept in reducer.kept.carries().items():
                kept.copy_(carry[name])
            assert check_state(state)
            reducer.norms.resume(state)
            reducer.resume(7)
        for (_, results, factor), (_, again, same) in zip(
            run(whole, range(7, 13)), run(other, range(7, 13)), strict=True
        ):
            assert factor == same != 1.0
            assert all(same_bits(results[0][name], again[0][name]) for name in again[0])
        assert [reducer.norms.state() for reducer in whole.reducers] == [r.norms.state() for r in other.reducers]


def test_large_jobs_have_fewer_counters() -> None:
    """Every rank sends its counters to every other one."""
    tensors: list[TensorSpec] = [spec("a", 64)]
    sent = {}
    for world in (8, 9):
        with Fleet(world, tensors, "marsit", full_precision_every=0) as ranks:
            sent[world] = ranks.reducers[0].norms._number()
    assert sent[8] == 256 and sent[9] == 128


@pytest.mark.parametrize("timeline", [False, True])
def test_gradients_that_wait_for_the_last_one_are_folded_together(
    timeline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for each bucket, and the norm that ranks on a CPU find, to the bit."""
    tensors = [spec("a", 40, 100), spec("b", 333), spec("c", 64, 64)]
    grads = random_grads(2, tensors)
    for mine in grads:
        mine["c"] = mine["c"].t()  # not contiguous
    folded: list[int] = []
    sketch = ops.norm_sketch_all

    def counted(seen: Any, *given: Any, **more: Any) -> None:
        folded.append(len(seen))
        sketch(seen, *given, **more)

    def norm() -> float:
        with Fleet(2, tensors, "marsit", full_precision_every=0, schedule="size:25MB") as ranks:
            for reducer in ranks.reducers:
                reducer.norms.follow([tensor.name for tensor in tensors])
                reducer.metrics.trace = (lambda *_, **__: None) if timeline else None  # type: ignore[assignment]
                reducer.norms.begin(reducer.next_step())
            ranks.step([{name: grad.clone() for name, grad in mine.items()} for mine in grads])
            return ranks.reducers[0].norms.ratio.norm

    on_cpu = norm()
    monkeypatch.setattr(ops, "norm_sketch_all", counted)
    with everything_on_accelerator([FakeAccelerator() for _ in range(2)].pop):
        assert norm() == on_cpu > 0
    assert folded == [3, 3]


def test_uncompressed_steps_at_the_start_are_exact() -> None:
    with fleet("topk", {"density": 0.05, "warmup_steps": 4}) as ranks:
        found = run(ranks, range(6))
        assert all(factor == 1.0 for _, _, factor in found[:4])
        state = ranks.reducers[0].norms.state()
        assert state["wait"] == ["a", "b", "c"] and state["ratio"] > 0, "those after that are not"


def test_an_exact_round_ends_what_has_run_away_though_some_buckets_stay_coded() -> None:
    with fleet("signsgd", {}) as ranks:
        run(ranks, range(3))
        for reducer in ranks.reducers:
            reducer.norms.ratio.stale = True
            reducer.norms.begin(reducer.next_step(), exact=True)
        ranks.step(random_grads(ranks.world, SHAPES, seed=3))
        assert not any(reducer.norms.ratio.stale for reducer in ranks.reducers)


def test_float16_is_left_as_it_is() -> None:
    tensors = [spec("a", 40, 100, dtype=torch.float16)]
    with Fleet(2, tensors, "signsgd") as ranks:
        for reducer in ranks.reducers:
            reducer.norms.follow(["a"])
            reducer.norms.begin(0)
        ranks.step([{"a": torch.randn(40, 100).half()} for _ in range(2)])
        assert ranks.reducers[0].norms.given.names == frozenset()  # type: ignore[union-attr]


def matched(world: int = 2) -> tuple[Fleet, list[dict[str, nn.Parameter]], list[Matching]]:
    """Return ranks whose optimizers take the ratio out again."""
    ranks = Fleet(world, SHAPES, "qsgd", bits=2, schedule="layerwise")
    models = [{tensor.name: nn.Parameter(torch.zeros(tensor.shape)) for tensor in SHAPES} for _ in range(world)]
    optimizers = [torch.optim.SGD(model.values(), lr=0.1) for model in models]
    made = [
        Matching(optimizer, reducer, model, lambda: 1.0)
        for optimizer, reducer, model in zip(optimizers, ranks.reducers, models, strict=True)
    ]
    return ranks, models, made


def exchanged(ranks: Fleet, models: Sequence[dict[str, nn.Parameter]], made: Sequence[Matching], seed: int) -> None:
    for one in made:
        one.begin()
    results = stepped(ranks, random_grads(ranks.world, SHAPES, seed=seed))
    for model, mine in zip(models, results, strict=True):
        for name, parameter in model.items():
            parameter.grad = mine[name]


def test_gradients_that_a_program_has_cleared_are_left_out() -> None:
    ranks, models, made = matched()
    with ranks:
        for seed in range(3):
            exchanged(ranks, models, made, seed)
            before = {name: parameter.grad for name, parameter in models[0].items()}
            kept = {name: grad.clone() for name, grad in before.items() if grad is not None}
            for model in models:
                model["b"].grad = None
                if seed == 2:
                    model["a"].grad = model["c"].grad = None
            for one in made:
                one.take_out()
            factor = ranks.reducers[0].norms.given.factor  # type: ignore[union-attr]
            assert factor != 1.0
            if seed < 2:
                torch.testing.assert_close(models[0]["a"].grad, kept["a"] / factor)


@pytest.mark.parametrize(("unused", "off"), [((3,), False), ((2, 4, 6, 8), True)])
def test_one_step_that_a_program_skips_is_no_habit(unused: tuple[int, ...], off: bool) -> None:
    """Where the gradients stay, four of eight exchanges on top of earlier ones are."""
    ranks, models, made = matched()
    with ranks:
        for seed in range(8 + 2 * EVERY):  # ranks vote in steps that measure
            exchanged(ranks, models, made, seed)
            if seed not in unused:
                for one in made:
                    one.take_out()
        assert all(reducer.norms.ratio.off is off for reducer in ranks.reducers)


@pytest.mark.parametrize("saved", range(1, 8))
def test_a_resume_knows_what_came_upon_earlier_results(saved: int) -> None:
    """Gradients stay, and every second exchange is used: ranks vote at the same step, resumed or not."""

    def play(ranks: Fleet, models: Sequence[dict[str, nn.Parameter]], made: Sequence[Matching], step: int) -> bool:
        for half in range(2):
            exchanged(ranks, models, made, 2 * step + half)
        for one in made:
            one.take_out()
        return ranks.reducers[0].norms.ratio.off

    whole, resumed = matched(), matched()
    with whole[0], resumed[0]:
        for step in range(saved):
            play(*whole, step)
        (ranks, models, made), (before, others, theirs) = resumed, whole
        for at, reducer in enumerate(ranks.reducers):
            reducer.resume(before.reducers[at].step)
            reducer.norms.resume(copy.deepcopy(before.reducers[at].norms.state()))
            made[at].load(copy.deepcopy(theirs[at].state()))
            for name, parameter in models[at].items():
                parameter.grad = copy.deepcopy(others[at][name].grad)
        then = range(saved, saved + EVERY)
        off = [play(*whole, step) for step in then]
        assert off == [play(*resumed, step) for step in then]
        assert off[-1] and (saved > 1 or not off[0]), "the control: they vote, and not at once"


def test_what_was_added_to_is_known_also_by_a_group_that_was_added_behind_a_load() -> None:
    """What is saved goes by the first name, which may be one of that group's."""
    weights = {name: nn.Parameter(torch.zeros(8)) for name in "ab"}
    with Fleet(1, [spec(name, 8) for name in weights], "qsgd", bits=2) as ranks:
        optimizer = torch.optim.SGD([weights["b"]], lr=0.1)
        made = Matching(optimizer, ranks.reducers[0], weights, lambda: 1.0)
        made.load({"a": [True]})
        assert made.state() == {}
        optimizer.add_param_group({"params": [weights["a"]]})
        made.load({"a": [True]})  # again, at the first gradient
        assert made.state() in ({"a": [True]}, {"b": [True]})
