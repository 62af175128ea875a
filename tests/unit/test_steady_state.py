"""Gradients are reduced in their own memory and let go; counters and traces stay bounded."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.codecs.by_step import by_step, method
from horovod_compress.observe.metrics import PHASES, FlightRecorder, Metrics
from tests.support.local import Fleet, random_grads, spec

TENSORS = [spec("a", 300, 200), spec("b", 777), spec("c", 3)]


def test_results_are_the_gradients_themselves() -> None:
    with Fleet(2, TENSORS, "none") as fleet:
        for number in range(3):
            grads = random_grads(2, TENSORS, seed=number)
            addresses = [{name: grad.data_ptr() for name, grad in mine.items()} for mine in grads]
            step = fleet.offer(grads)
            for reducer, mine, at in zip(fleet.reducers, grads, addresses, strict=True):
                for name in mine:
                    result = reducer.result(fleet._index[name], step)
                    assert result is mine[name] and result.data_ptr() == at[name]


def test_a_reducer_lets_go_of_the_gradients() -> None:
    import gc
    import weakref

    with Fleet(2, TENSORS) as fleet:
        grads = random_grads(2, TENSORS)
        watch = [weakref.ref(grad) for mine in grads for grad in mine.values()]
        step = fleet.offer(grads)
        results = [r.result(fleet._index[name], step) for r in fleet.reducers for name in grads[0]]
        assert all(ref() is not None for ref in watch)
        del grads, results
        gc.collect()
        assert [ref() is None for ref in watch] == [True] * len(watch)


def test_counters() -> None:
    with Fleet(3, TENSORS, "none", schedule="layerwise", verify_every=2, exchange="ring") as fleet:
        for number in range(5):
            fleet.step(random_grads(3, TENSORS, seed=number))
        for reducer in fleet.reducers:
            assert reducer.wait_idle(5.0)
            found = reducer.metrics.document()
            assert found["steps"] == reducer.step == 5 and found["verified"] == 2 and found["nonfinite"] == 0
            count = sum(t.count for t in TENSORS)
            assert found["bytes_dense"] == round(5 * 8 * count * 2 / 3)
            assert found["bytes_sent"] > found["bytes_dense"]
            assert set(found["seconds"]) == set(PHASES)
            # A rank that is asked last may have its results by then.
            assert all(s > 0 for phase, s in found["seconds"].items() if phase != "wait")
        assert any(reducer.metrics.seconds["wait"] > 0 for reducer in fleet.reducers)


def test_time_is_counted_when_a_phase_fails() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError), metrics.timed("decode"):
        raise KeyError
    assert metrics.seconds["decode"] > 0
    with pytest.raises(KeyError), metrics.timed("no such phase"):
        pass


def test_the_recorder_is_bounded_and_speaks() -> None:
    recorder = FlightRecorder(4)
    assert recorder.last() == "the start of this compression"
    for step in range(10):
        recorder.note(step, 3, "hop", step)
    assert len(recorder.events) == 4 and recorder.last() == "hop 9 of bucket 3, step 9"
    recorder.note(10, 1, "decode")  # on another thread
    assert recorder.last() == "hop 9 of bucket 3, step 9"
    recorder.note(10, 1, "encode")
    assert recorder.last() == "encode of bucket 1, step 10"


def test_offers_that_do_not_fit_are_refused() -> None:
    from horovod_compress.errors import ConfigError

    with Fleet(1, [spec("a", 3), spec("b", 2)]) as fleet:
        reducer = fleet.reducers[0]
        with pytest.raises(ConfigError, match=r"gradient of a should be float32 of shape \(3,\), got torch.float32"):
            reducer.offer(0, torch.ones(4))
        with pytest.raises(ConfigError, match="float64"):
            reducer.offer(0, torch.ones(3, dtype=torch.float64))
        step = reducer.offer(0, torch.ones(3))
        again = torch.ones(3)
        with pytest.raises(ConfigError, match=r"a was offered twice in step 0.*a notebook cell ran twice"):
            reducer.offer(0, again)
        with pytest.raises(ConfigError, match=r"no gradient was offered in step 0 for 1 parameter\(s\): b"):
            reducer.result(0, step)
        reducer.offer(1, again[:2])  # what was refused may be freed, and its memory another gradient's
        assert torch.equal(reducer.result(0, step), torch.ones(3))


def test_kinds_of_rounds_share_memory() -> None:
    """The densities of a warm-up use the buffers of the largest; constants of other methods stay apart."""
    with Fleet(2, [spec("a", 40000)], "dgc", density=0.001, ramp_steps=8) as fleet:
        state = fleet.reducers[0].buckets[0]
        rounds = list(state.rounds.kinds.values())
        assert len(rounds) > 3
        for name in ("positions", "values"):
            assert len({r.work.local[name].untyped_storage().data_ptr() for r in rounds}) == 1
        assert len({frame.memory.data_ptr() for r in rounds for frame in r.inbox.frames.values()}) == 1
        capacities = [r.inbox.capacity for r in rounds]
        assert len(set(capacities)) == len(rounds) and max(capacities) == state.memory.inbox.capacity
        assert state.memory.scratch.numel() < 40000 * 0.25 * 8 + 256
    stages = by_step({0: method("signsgd", step_size=0.5), 2: method("signsgd", step_size=0.25)})
    with Fleet(2, [spec("a", 64)], stages) as fleet:
        found = [fleet.step([{"a": torch.ones(64)}] * 2)[0]["a"][0].item() for _ in range(4)]
    assert found == [0.5, 0.5, 0.25, 0.25]
