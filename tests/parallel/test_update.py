"""Update mode in real processes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.codecs import registry
from tests.support.jobs import run_ranks

METHODS = [f"{name} {number}" for name in registry.available() for number in range(len(registry.codec_class(name).samples))]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, "update.py", timeout=110).reports


def value(found: list[dict[str, Any]], name: str) -> list[Any]:
    errors = [report[name].get("traceback") for report in found]
    assert not any(errors), next(filter(None, errors))
    return [report[name]["value"] for report in found]


@pytest.mark.parametrize("name", METHODS)
def test_ranks_differ_between_exchanges_and_agree_after_each(found, name: str) -> None:
    for mine in value(found, name):
        assert mine["verified"] and mine["moved"] > 1e-3
        warmup = 2 if name.startswith("marsit") and int(name.split()[1]) % 2 else 0  # Adam with marsit
        assert mine["alike"] == [step < warmup or (step - warmup) % 2 == 1 for step in range(8)]
        assert mine["lr"] == pytest.approx((0.01 if int(name.split()[1]) % 2 else 0.05) / 4)  # counts local steps


def test_uncompressed_sgd_is_that_of_gradient_mode(found) -> None:
    assert all(far < 1e-6 for far in value(found, "as gradients"))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_resuming_between_exchanges_gives_the_same_bits(found, kind: str) -> None:
    assert all(value(found, f"resumed {kind}"))


def test_the_second_moment_is_shared_and_held(found) -> None:
    for mine in value(found, "second moment"):
        assert mine["shared"] and mine["own"] == len(found)
        # 3 warm-up steps, then exchanges 1, 2, ...; every 4th rebuilds.
        assert mine["moved"] == [True, True, *(exchange % 4 == 0 for exchange in range(1, 10))]


def test_momentum_is_masked_where_updates_were_sent(found) -> None:
    for mine in value(found, "masked"):
        assert mine["True"] > 0 and mine["False"] == 0


@pytest.mark.parametrize("policy", ["propagate", "raise"])
def test_weights_that_are_not_finite_are_set_back_on_all_ranks(found, policy: str) -> None:
    for mine in value(found, f"not finite {policy}"):
        assert "not finite" in mine["error"]
        assert mine["from before"] == 0 and mine["alike"]


def test_what_cannot_work_is_refused(found) -> None:
    expected = ["plain optimizer", "at least 1", "for Adam and AdamW", "6 parameters of the compression", "that the compression was made with",
                "serves one optimizer", "not saved by", "serves one optimizer"]  # fmt: skip
    for mine in value(found, "refusals"):
        assert len(mine) == len(expected)
        for text, part in zip(mine, expected):
            assert part in text
