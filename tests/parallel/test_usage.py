"""Everything that Horovod's optimizer offers, on the stock and on the attached path."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import checks_of, run_ranks
from tests.support.marks import slow

WORLD = 3
COMPARED = [
    "groups",
    "two passes",
    "sum",
    "unused on some ranks",
    "clipping",
    "sparse",
    "left out, then cleared",
    "left out, then by hand",
    *slow(
        "left out, then cleared in place",
        "num_groups",
        "predivide",
        "two optimizers",
        "sparse_as_dense",
        "other hook order",
        "frozen",
    ),
]


#: For `make test-all`: each has a sibling with the same way through the code.
LATER = (
    "num_groups", "predivide", "two optimizers", "sparse_as_dense", "other hook order", "frozen", "float64",
    "left out, then cleared in place", "repeated none", "as if dense, to and fro", "flip, to and fro",
)  # fmt: skip
value = checks_of("usage.py", LATER, WORLD, timeout=240, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@pytest.mark.parametrize("name", COMPARED)
def test_works_as_with_horovod_alone(name: str) -> None:
    for mine in value(name):
        assert mine["same paths"] and mine["same ranks"]
        assert mine["none"] < 2e-6
        assert mine["marsit"] > 1e-5  # the control: one bit per element is not the mean
        assert mine["moved"] is None or mine["moved"] > 1e-4


@pytest.mark.parametrize(("name", "limit"), [*slow(("float64", 1e-14)), ("bfloat16", 0.0)])
def test_dtypes(name: str, limit: float) -> None:
    for mine in value(name):
        assert mine["same paths"] and mine["same ranks"] and mine["none"] <= limit


def test_a_closure_may_exchange_within_the_first_step() -> None:
    for paths in value("closure"):
        assert len(set(paths)) == 1
    assert value("closure")[0] == value("closure")[1]


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    assert value("no warnings") == [[]] * WORLD


def test_with_one_rank_it_is_torch_alone() -> None:
    (found,) = run_ranks(1, "one_rank.py").reports
    assert len(set(found["weights"].values())) == 1 and not found["told"]


def test_replaced_gradients_are_exchanged_and_that_is_said_once() -> None:
    for each in value("replaced"):
        for text, _ in each:
            assert "and they are not its results: these are exchanged" in text
    assert len({weights for each in value("replaced") for _, weights in each}) == 1


def test_states_may_be_broadcast_before_several_optimizers_are_attached() -> None:
    for each in value("broadcast first"):
        assert len(set(each)) == 1


def test_more_parameters_than_the_optimizer_has_are_refused_at_once() -> None:
    for text in value("more parameters"):
        assert "the compression was given" in text and "that the optimizer does not have" in text


@pytest.mark.parametrize("method", [*slow("none"), "marsit"])
def test_a_second_synchronize_changes_nothing(method: str) -> None:
    for stock, attached, usual in value(f"repeated {method}"):
        assert stock["wrong"] == attached["wrong"] == 0
        assert stock["weights"] == attached["weights"] == usual
        assert len(set(stock["ranks"])) == 1


@pytest.mark.parametrize("name", ["as if dense", *slow("as if dense, to and fro")])
def test_sparse_as_dense_compresses_what_a_dense_embedding_would(name: str) -> None:
    for mine in value(name):
        assert mine["none True"] < 1e-6 and mine["ef_signsgd True"] < 1e-6
        assert mine["ef_signsgd False"] > 1e-4  # the control: what Horovod reduces is not compressed


def test_zero_grad_with_and_without_none() -> None:
    assert all(len(set(mine)) == 1 for mine in value("zero_grad"))


def test_refusals_name_the_remedy() -> None:
    for text in value("adasum") + value("adasum attach"):
        assert text.startswith("ConfigError") and "Adasum" in text and "Average" in text
    for texts in value("uncalled"):
        assert all(
            text.startswith("ConfigError: ") and "write compression = hvc.Compression." in text for text in texts
        )
    for texts in value("no parameters"):
        for text, came in zip(texts, ("None", "the name 0, which is not a string"), strict=True):
            assert text.startswith("ConfigError: rank 1 cannot start: named_parameters should be") and came in text
    for text in value("foreign attach"):
        assert text.startswith("ConfigError") and "compression=compression" in text
    for text, hooks, wrapped_once in value("attach again"):
        assert text.startswith("ConfigError") and "second_moment" in text
        assert hooks[0] == hooks[1] > 0 and wrapped_once
    for texts in value("forgotten"):
        for text in texts:
            assert text.startswith("ConfigError") and "named_parameters" in text
    for text in value("made twice"):
        assert text.startswith("ConfigError") and "offered twice in step 0" in text
        assert "two distributed optimizers share this model or compression" in text


def test_attach_on_some_ranks_is_refused_on_all() -> None:
    for texts in value("attach on some"):
        for text, attached, tokens in zip(texts, ("1", "0, 2"), ("0, 2", "1"), strict=True):
            assert text.startswith(
                f"MismatchError: attach() was called on rank(s) {attached}, and not on rank(s) {tokens};"
            )


def test_attach_comes_before_the_first_backward_pass() -> None:
    for text, again in value("attach late"):
        assert text.startswith("ConfigError: call attach() before the first backward pass") and again == "accepted"


def test_the_lines_against_uneven_batches_stop_all_ranks_together() -> None:
    assert value("in step") == [2] * WORLD


def test_weights_that_differ_are_said_once_on_rank_0() -> None:
    assert value("weights alike") == [[[], [], []]] * WORLD
    for name, step, count in [("at first", 0, 1), ("clipped", 3, 6), ("loaded on one rank", 3, 1)]:
        first, *others = value(f"weights {name}")
        assert all(texts == [] for runs in others for texts in runs)
        for texts in first:
            assert len(texts) == 1, texts
            assert f"at the beginning of step {step}, in {count} of 6 parameters, the first of them" in texts[0], texts


def test_weights_are_compared_in_the_process_set() -> None:
    texts, *others = value("weights of a process set")
    assert others == [[]] * (WORLD - 1) and len(texts) == 1
    assert "the first of them 3.bias, by its hash: rank 0 = " in texts[0] and ", rank 1 = " in texts[0]


@pytest.mark.parametrize("name", ["flip", *slow("flip, to and fro")])
def test_a_flipped_bit_is_caught_in_the_same_step(name: str) -> None:
    for texts in value(name):
        for text, rank in zip(texts, (1, WORLD - 1), strict=True):
            assert text.startswith("MismatchError") and "after step 2" in text
            assert "bucket 3" in text and f"rank(s) {rank} differs" in text


def test_without_a_flip_nothing_is_caught() -> None:
    assert value("no flip") == ["accepted"] * WORLD


def test_what_nobody_refers_to_is_closed() -> None:
    for mine in value("dropped"):
        assert mine == [[True, []], [True, []]]


def test_a_compression_that_no_optimizer_was_given_is_mentioned_once() -> None:
    first, *others = value("unused")
    assert len(first) == 1 and "write hvd.DistributedOptimizer(..., compression=compression)" in first[0]
    assert others == [[]] * (WORLD - 1) and value("not unused") == [[]] * WORLD


def test_a_second_optimizer_that_is_not_attached_is_mentioned_once() -> None:
    (first, attached), *others = value("several told")
    assert len(first) == 1 and "second moment of 0.weight, 0.bias, nor to the norms" in first[0]
    assert "in one call, before the first backward pass: attach(first, second)" in first[0]
    assert attached == [] and others == [[[], []]] * (WORLD - 1)


def test_process_set() -> None:
    """Members agree among each other; the rank outside trains alone."""
    first = value("process set")[0]
    inside = [first["digests"][rank] for rank in first["members"]]
    outside = [d for rank, d in enumerate(first["digests"]) if rank not in first["members"]]
    assert inside[0] == inside[1]
    assert inside[0]["(None, False)"] == inside[0]["('none', True)"] == inside[0]["('none', False)"]
    assert inside[0]["('marsit', True)"] == inside[0]["('marsit', False)"] != inside[0]["('none', True)"]
    assert all(len(set(mine.values())) == 1 and mine != inside[0] for mine in outside)


@pytest.mark.parametrize("attach", [True, False])
def test_passes_after_a_failure_end_with_its_reason(attach: bool) -> None:
    """Not at Horovod's count of passes, which a hook that raised has left."""
    for texts in value(f"failed {attach}"):
        assert len(texts) == 4 and all(text.startswith("ExchangeError: rank ") for text in texts)
