"""Decoding while chunks are still under way gives the same bits as decoding when all have arrived."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from horovod_compress import arrivals
from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec, Work
from horovod_compress.collectives import fold, ring
from horovod_compress.decoder import Decoder
from horovod_compress.errors import ExchangeError
from horovod_compress.plan import Bucket, TensorSpec
from tests.support.local import Fleet, random_grads, spec

# A long tensor among small ones; rows that are no multiple of a word; an empty tensor; a scalar.
TENSORS = [spec("a", 70, 336), spec("b", 5), spec("empty", 0), spec("c", 9001), spec("d", 40, 64), spec("e")]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("fp16", {}),
    ("marsit", {"full_precision_every": 3}),
    ("marsit", {"full_precision_every": 0, "step_size": "tensor", "compensation": "global"}),
    ("marsit", {"full_precision_every": 0, "step_size": 0.01, "compensation": "none"}),
    ("global_qsgd", {}),
    ("global_qsgd", {"bits": 4, "block": 256}),
    ("global_qsgd", {"bits": 16, "block": 0, "norm": 2}),
    ("global_qsgd", {"dithering": "exponential", "block": 512}),
    ("global_qsgd", {"dithering": "exponential", "bits": 4, "block": 0}),
]
EXCHANGES = [
    (method, options, exchange)
    for method, options in METHODS
    for exchange in ("ring", "fold")
    if exchange == "fold" or options.get("dithering") != "exponential"
]


def _run(world: int, method: str, options: dict[str, Any], exchange: str) -> tuple[list[Any], list[Any], bool]:
    """Return results and residuals of some steps, and whether anything was decoded in parts."""
    results, used = [], False
    with Fleet(world, TENSORS, method, exchange=exchange, schedule="single", min_elements=0, **options) as fleet:
        for number in range(4):
            grads = random_grads(world, TENSORS, seed=number)
            step = fleet.offer(grads)
            results.append([r.result(fleet._index[n], step).clone() for r in fleet.reducers for n in grads[0]])
        used = any(round_.parts for r in fleet.reducers for s in r.stations for round_ in s._rounds.values())
        residuals = [t.clone() for r in fleet.reducers for t in r.residuals().values()]
    return results, residuals, used


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method, options, exchange", EXCHANGES)
def test_parts_give_the_bits_of_the_whole(
    method: str, options: dict[str, Any], world: int, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, left, in_parts = _run(world, method, options, exchange)
    assert not in_parts
    monkeypatch.setattr(arrivals, "MIN_ELEMENTS", 0)
    results, residuals, in_parts = _run(world, method, options, exchange)
    assert in_parts
    for a, b in zip([*sum(results, []), *residuals], [*sum(whole, []), *left], strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def _work(codec: Codec, world: int) -> Work:
    offsets_from = Bucket(0, tuple(TensorSpec(t.name, t.shape, "float32") for t in TENSORS))
    regions = {n: torch.zeros(c, dtype=d) for n, (d, c) in codec.regions(offsets_from).items()}
    local = {n: torch.zeros(c, dtype=d) for n, (d, c) in codec.local(offsets_from).items()}
    work = Work(offsets_from, world, [None] * len(TENSORS), regions=regions, local=local)
    codec.prepare(work)
    return work


@pytest.mark.parametrize("collective", [ring, fold])
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("method, options", [("marsit", {}), ("global_qsgd", {"bits": 4, "block": 512})])
def test_parts_cover_every_element_once_and_come_late_enough(
    method: str, options: dict[str, Any], world: int, collective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MIN_ELEMENTS", 0)
    codec = registry.create(method, **options).variants()[0]
    work = _work(codec, world)
    for rank in range(world):
        order = collective.order(rank, world)
        assert sorted(order) == list(range(world))
        seen = [torch.zeros(t.count, dtype=torch.int64) for t in TENSORS]
        arrived: dict[str, set[int]] = {name: set() for name in work.regions}
        parts = arrivals.parts_by_chunk(codec, work, order)
        for chunk in order:
            for name, region in work.regions.items():
                arrived[name] |= set(range(*arrivals.chunk_bounds(region.numel(), chunk, world)))
            for part in parts.get(chunk, []):
                seen[part.position][part.start : part.stop] += 1
                for name, (low, high) in codec.needs(work, part.position, part.start, part.stop).items():
                    assert set(range(low, high)) <= arrived[name]
        assert all(bool((count == 1).all()) for count in seen)
        assert len(parts) > 1  # else nothing would overlap


def test_a_codec_that_cannot_decode_parts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MIN_ELEMENTS", 0)
    codec = registry.create("marsit")
    monkeypatch.setattr(type(codec), "granule", lambda self, tensor: None)
    assert arrivals.parts_by_chunk(codec, _work(codec, 2), [0, 1]) == {}


def test_values_that_are_not_finite_stop_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that were decoded early would have changed residuals that must stay."""
    monkeypatch.setattr(arrivals, "MIN_ELEMENTS", 0)
    with Fleet(3, TENSORS, "marsit", full_precision_every=0, schedule="single", min_elements=0) as fleet:
        fleet.step(random_grads(3, TENSORS, seed=1))
        before = [t.clone() for r in fleet.reducers for t in r.residuals().values()]
        assert any(bool(t.any()) for t in before)
        grads = random_grads(3, TENSORS, seed=2)
        grads[1]["c"][17] = float("nan")
        step = fleet.offer(grads)
        for reducer in fleet.reducers:
            for name in grads[0]:
                assert bool(reducer.result(fleet._index[name], step).isnan().all())
        after = [t for r in fleet.reducers for t in r.residuals().values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_error_in_decoding_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_compress.codecs.marsit import Marsit

    with Fleet(2, TENSORS, "marsit", full_precision_every=0, timeout=5.0) as fleet:
        fleet.step(random_grads(2, TENSORS))  # the control: it works before

        def fails(*_: object) -> None:
            raise ArithmeticError("no luck")

        monkeypatch.setattr(Marsit, "decode_part", fails)
        step = fleet.offer(random_grads(2, TENSORS))
        for reducer in fleet.reducers:
            with pytest.raises(ExchangeError, match="no luck|is gone|stopped"):
                reducer.result(0, step)


def test_a_failure_between_two_chunks_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts are decoded by then: nothing of that may get into a checkpoint."""
    from horovod_compress import checkpoint
    from horovod_compress.errors import PeerError
    from horovod_compress.transports.base import Transport

    monkeypatch.setattr(arrivals, "MIN_ELEMENTS", 0)
    fails = threading.Event()

    def wrap(transport: Transport) -> Transport:
        receive, count = transport.receive, 0

        def counting(data: torch.Tensor, frm: int) -> Any:
            nonlocal count
            count += fails.is_set()
            if count == 4:  # a ring of three has four hops, of one segment each: this is its last one
                raise PeerError(frm, False, "planted")
            return receive(data, frm)

        if transport.rank == 1:
            transport.receive = counting  # type: ignore[method-assign]
        return transport

    options: dict[str, Any] = {"full_precision_every": 0, "exchange": "ring", "schedule": "layerwise", "min_elements": 0}
    with Fleet(3, [spec("a", 64, 64), spec("b", 64, 64)], "marsit", wrap=wrap, timeout=10.0, **options) as fleet:
        fleet.step(random_grads(3, [spec("a", 64, 64), spec("b", 64, 64)]))
        assert checkpoint.save(fleet.reducers[1], registry.create("marsit"))  # the control
        fails.set()
        step = fleet.offer(random_grads(3, [spec("a", 64, 64), spec("b", 64, 64)], seed=2))
        for reducer in fleet.reducers:
            with pytest.raises(ExchangeError):
                for index in range(2):
                    reducer.result(index, step)
            with pytest.raises(ExchangeError):
                checkpoint.save(reducer, registry.create("marsit"))


def test_a_decoder_that_is_gone_keeps_nobody_waiting() -> None:
    decoder = Decoder(lambda error: None)
    decoder.close(5.0)
    decoder.drain()
    assert not decoder.alive()


def test_what_nobody_wants_any_more_is_left_out() -> None:
    begun, go, done = threading.Event(), threading.Event(), []
    decoder = Decoder(lambda error: None)
    decoder.put(lambda: (begun.set(), go.wait(5.0), done.append(1)))  # type: ignore[arg-type, return-value]
    decoder.put(lambda: done.append(2))
    begun.wait(5.0)
    decoder.leave_out()
    go.set()
    decoder.drain()
    assert done == [1]
    decoder.close(5.0)


def test_an_error_in_telling_an_error_does_not_end_the_decoder() -> None:
    decoder = Decoder(lambda error: 1 // 0)  # type: ignore[arg-type, return-value]
    decoder.put(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    decoder.drain()
    assert decoder.alive()
    decoder.close(5.0)


def test_the_decoder_keeps_the_order_and_stops_at_an_error() -> None:
    done: list[int] = []
    errors: list[BaseException] = []
    decoder = Decoder(errors.append)
    for number in range(100):
        decoder.put(lambda number=number: done.append(number))  # type: ignore[misc]
    decoder.drain()
    assert done == list(range(100)) and not errors
    decoder.put(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    decoder.put(lambda: done.append(-1))
    decoder.drain()  # comes back although a task failed
    assert done == list(range(100)) and isinstance(errors[0], ZeroDivisionError)
    decoder.close(5.0)
    decoder.close(5.0)
    assert not any(thread is decoder._thread for thread in threading.enumerate())
