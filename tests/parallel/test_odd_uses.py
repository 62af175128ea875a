"""Odd ways of use end as with the framework alone, or in an error that says what is wrong."""

from __future__ import annotations

import pytest

from tests.support.jobs import needs_front, run_ranks

WAYS = {"horovod": ["attached", "tokens"], "torch": ["plain", "ddp"]}
CLOSE = 2e-6

_GRAPH = {"plain": "has a graph of its own, as backward(create_graph=True) makes it"}
_CLOSURE = dict.fromkeys(WAYS["horovod"], "step(closure) would run its backward pass after the gradients were reduced")
_OF_ALL_RANKS = {"plain": "an error has ended a backward pass in the middle"}
#: What is refused with a method, and is not with the framework alone, or otherwise: by case and way.
REFUSED: dict[str, dict[str, str]] = {
    "create graph": _GRAPH,
    "double backward over create graph": _GRAPH,
    "complex numbers": dict.fromkeys(("attached", "tokens", "plain", "ddp"), "is complex64; supported are float32"),
    "an error in backward on all ranks": _OF_ALL_RANKS,
    "an error in backward on one rank": _OF_ALL_RANKS,
    "expanded gradients": dict.fromkeys(WAYS["horovod"], "has elements that share memory, as expand() makes them"),
    "one gradient of two": {"attached": "are in the same memory, in step 0", "tokens": "ConfigError"},
    "lbfgs": _CLOSURE,
    "closure of adam": _CLOSURE,
    "other type later": dict.fromkeys(("attached", "tokens", "plain"), "should be float32 of shape"),
    "sparse then dense": {
        "plain": "is dense, and an embedding with sparse=True has it as weight",
        **dict.fromkeys(WAYS["horovod"], "is dense, and was sparse before, on every rank"),
    },
    "dense then sparse": {"plain": "is sparse, and no embedding with sparse=True has it as weight"},
}


def is_error(found: str) -> bool:
    return " " in found  # else it is a hash of the weights


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("front", WAYS)
def test_nothing_goes_wrong_in_silence(front: str) -> None:
    needs_front(front)
    job = run_ranks(2, "odd_uses.py", timeout=600.0, front=front, arguments={"ways": WAYS[front]})
    reports = job.values()
    assert len(reports[0]) > 80
    for name in reports[0]:
        (case, way), found = name.split(" / "), [report[name] for report in reports]
        ours = {method: [one[method] for one in found] for method in ("none", "marsit")}
        if text := REFUSED.get(case, {}).get(way):
            assert all(text in said for method in ours.values() for said in method), (name, found)
        elif is_error(found[0]["alone"]):  # as it is with the framework alone, or it works
            assert all(len({said[:40] for said in method}) == 1 for method in ours.values()), (name, found)
        elif found[0]["alone"] == found[1]["alone"]:
            assert all(first == other for first, other in ours.values()) and found[0]["far"] < CLOSE, (name, found)
        else:  # the framework alone lets ranks train apart: no hook of it has seen these gradients
            agreed = ours["none"][0] == ours["none"][1]
            assert agreed or all(one["far"] == 0.0 for one in found), (name, found)
