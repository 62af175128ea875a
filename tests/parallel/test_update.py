"""Update mode in real processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks, values_of
from tests.support.marks import slow
from tests.support.samples import Sample, samples

QUICK = (2, True)  # so many ranks, and the first sample of a method of each kind
ALL = [(2, False), (4, False)]
CASES = [
    *((QUICK, sample) for sample in samples(few=True)),
    *slow(*((job, sample) for job in ALL for sample in samples())),
]


@cache
def job(world: int, few: bool) -> list[dict[str, Any]]:
    return run_ranks(world, "update.py", timeout=300, arguments={"few": few}).reports


@pytest.fixture(params=[QUICK, *slow((ALL[1],))], ids=str)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return job(*request.param)


@pytest.mark.parametrize(
    ("found", "sample"), CASES, indirect=["found"], ids=lambda value: getattr(value, "name", str(value))
)
def test_ranks_differ_between_exchanges_and_agree_after_each(found, sample: Sample) -> None:
    name = f"{sample.method} {sample.number}"
    for mine in values_of(found, name):
        assert mine["verified"] and mine["moved"] > 1e-3
        warmup = 2 if name.startswith("marsit") and int(name.split()[1]) % 2 else 0  # Adam with marsit
        assert mine["alike"] == [step < warmup or (step - warmup) % 2 == 1 for step in range(8)]
        assert mine["lr"] == pytest.approx(1 / 4)  # counts local steps


def test_uncompressed_sgd_is_that_of_gradient_mode(found) -> None:
    assert all(far < 1e-6 for far in values_of(found, "as gradients"))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_resuming_between_exchanges_gives_the_same_bits(found, kind: str) -> None:
    assert all(values_of(found, f"resumed {kind}"))


def test_the_second_moment_is_shared_and_held(found) -> None:
    for mine in values_of(found, "second moment"):
        assert mine["shared"] and mine["own"] == len(found)
        # 3 warm-up steps, then exchanges 1, 2, ...; every 4th rebuilds.
        assert mine["moved"] == [True, True, *(exchange % 4 == 0 for exchange in range(1, 10))]


def test_one_bit_of_adams_direction_learns_what_adam_does(found) -> None:
    """1-bit Adam's all-reduce with a shared second moment makes at least 90 % of the progress."""
    for one, whole in zip(
        values_of(found, "adam learns with onebit_adam"), values_of(found, "adam learns with none"), strict=True
    ):
        assert whole[1] < 0.4 * whole[0]
        assert one[0] - one[1] > 0.9 * (whole[0] - whole[1])


def test_momentum_is_masked_where_updates_were_sent(found) -> None:
    for mine in values_of(found, "masked"):
        assert mine["True"] > 0 and mine["False"] == 0


@pytest.mark.parametrize("policy", ["propagate", "raise"])
def test_weights_that_are_not_finite_are_set_back_on_all_ranks(found, policy: str) -> None:
    for mine in values_of(found, f"not finite {policy}"):
        assert "not finite" in mine["error"]
        assert mine["from before"] == 0 and mine["alike"]


def test_a_gradient_of_the_warmup_that_is_not_finite_changes_nothing(found) -> None:
    for mine in values_of(found, "not finite in warm-up"):
        assert "NonFiniteError" in mine["error"] and "mean gradients" in mine["error"]
        assert mine["from before"] == 0 and mine["alike"]


def test_whatever_interrupts_an_exchange_leaves_the_last_common_weights(found) -> None:
    assert all(far == 0 for far in values_of(found, "interrupted"))


@pytest.mark.parametrize("method", ["marsit", "sparse_binary", "sketch_fusion"])
def test_odd_parameters(found, method: str) -> None:
    for mine in values_of(found, f"odd {method}"):
        assert mine["alike"] and all(loss < 10 for loss in mine["losses"])
        assert mine["moved"]["conv.weight"] > 0 and mine["moved"]["second.weight"] > 0
        assert mine["moved"]["frozen.weight"] == 0 == mine["moved"]["frozen.bias"]
        assert all(moved < 1.0 for moved in mine["moved"].values()), mine["moved"]


def test_a_gradient_scaler_that_skips_one_rank_keeps_the_ranks_together(found) -> None:
    for rank, mine in enumerate(values_of(found, "scaler")):
        assert mine["alike"] == [False, True] * 3 and mine["finite"]
        assert mine["scale"] == (4.0 if rank == 1 else 8.0)  # the control: it did skip


def test_loading_in_the_same_process(found) -> None:
    assert all(far == 0 for far in values_of(found, "rolled back"))


def test_flush(found) -> None:
    assert all(mine == [False, True, True] for mine in values_of(found, "flushed"))


def test_ranks_that_start_differently_are_told(found) -> None:
    for mine in values_of(found, "starts"):
        assert "MismatchError" in mine and "broadcast the parameters" in mine
    for mine in values_of(found, "options"):
        assert "ConfigError" in mine and "communication_delay is 1 on rank 0 and 2 on rank 1" in mine


def test_a_hook_that_clips_comes_before_ours(found) -> None:
    assert all(values_of(found, "clipped by a hook"))


def test_closures_and_hooks(found) -> None:
    for mine in values_of(found, "closure"):
        assert mine["calls"] == 3 and len(set(mine["losses"])) == 3


def test_what_cannot_work_is_refused(found) -> None:
    expected = ["plain optimizer", "at least 1", "for Adam and AdamW", "6 parameters of the compression",
                "that the compression was made with", "LBFGS", "serves one optimizer", "not saved by",
                "serves one optimizer", "before you create DistributedUpdateOptimizer",
                "does not support", "does not support", "has no meaning", "masked() leaves out"]  # fmt: skip
    for mine in values_of(found, "refusals"):
        assert len(mine) == len(expected)
        for text, part in zip(mine, expected, strict=True):
            assert part in text
