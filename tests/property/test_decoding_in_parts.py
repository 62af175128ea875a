"""The decoder, its errors, and what cannot be decoded in parts; tests/battery has what every method does."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.work import Work
from horovod_compress.engine.bucket import memory
from horovod_compress.engine.context import Worker
from horovod_compress.errors import ExchangeError
from horovod_compress.schedule.plan import Bucket, TensorSpec
from tests.battery.both_ways import TENSORS
from tests.support.local import Fleet, random_grads, spec
from tests.support.turns import decode_in_parts


def _work(codec: Codec, world: int) -> Work:
    offsets_from = Bucket(0, tuple(TensorSpec(t.name, t.shape, "float32") for t in TENSORS))
    layout = codec.layout(offsets_from, world)
    regions = {n: torch.zeros(c, dtype=d) for n, (d, c) in layout.regions.items()}
    local = {n: torch.zeros(c, dtype=d) for n, (d, c) in layout.local.items()}
    work = Work(offsets_from, world, [None] * len(TENSORS), regions=regions, local=local)
    codec.prepare(work)
    return work


def test_a_codec_that_cannot_decode_parts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_in_parts(monkeypatch)
    codec = registry.create("marsit")
    work = _work(codec, 2)
    layout = codec.layout(work.bucket, 2)
    assert memory.decoded_by_chunk(layout, work, [0, 1])
    assert memory.decoded_by_chunk(replace(layout, cutting=None), work, [0, 1]) == {}


def test_an_error_in_decoding_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod_compress.codecs.marsit import Marsit

    with Fleet(2, TENSORS, "marsit", full_precision_every=0, timeout=5.0) as fleet:
        fleet.step(random_grads(2, TENSORS))  # the control: it works before

        def fails(*_: object) -> None:
            raise ArithmeticError("no luck")

        monkeypatch.setattr(Marsit, "decode", fails)
        step = fleet.offer(random_grads(2, TENSORS))
        for reducer in fleet.reducers:
            with pytest.raises(ExchangeError, match=r"no luck|is gone|stopped"):
                reducer.result(0, step)


def test_a_failure_between_two_chunks_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts are decoded by then: nothing of that may get into a checkpoint."""
    from horovod_compress.engine.saved import checkpoint
    from horovod_compress.errors import PeerError
    from horovod_compress.exchange.transports.transport import Transport

    decode_in_parts(monkeypatch)
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

    options: dict[str, Any] = {
        "full_precision_every": 0,
        "exchange": "ring",
        "schedule": "layerwise",
        "min_elements": 0,
    }
    with Fleet(3, [spec("a", 64, 64), spec("b", 64, 64)], "marsit", wrap=wrap, timeout=10.0, **options) as fleet:
        fleet.step(random_grads(3, [spec("a", 64, 64), spec("b", 64, 64)]))
        assert checkpoint.save(fleet.reducers[1], fleet.methods)  # the control
        fails.set()
        step = fleet.offer(random_grads(3, [spec("a", 64, 64), spec("b", 64, 64)], seed=2))
        for reducer in fleet.reducers:
            with pytest.raises(ExchangeError):
                for index in range(2):
                    reducer.result(index, step)
            with pytest.raises(ExchangeError):
                checkpoint.save(reducer, fleet.methods)


def test_a_decoder_that_is_gone_keeps_nobody_waiting() -> None:
    decoder = Worker("test", lambda error: None)
    decoder.close(5.0)
    decoder.drain()
    assert not decoder.alive()


def test_what_nobody_wants_any_more_is_left_out() -> None:
    begun, go, done = threading.Event(), threading.Event(), []
    decoder = Worker("test", lambda error: None)
    decoder.put(lambda: (begun.set(), go.wait(5.0), done.append(1)))  # type: ignore[arg-type, return-value]
    decoder.put(lambda: done.append(2))
    begun.wait(5.0)
    decoder.leave_out()
    go.set()
    decoder.drain()
    assert done == [1]
    decoder.close(5.0)


def test_an_error_in_telling_an_error_does_not_end_the_decoder() -> None:
    decoder = Worker("test", lambda error: 1 // 0)  # type: ignore[arg-type, return-value]
    decoder.put(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    decoder.drain()
    assert decoder.alive()
    decoder.close(5.0)


def test_the_decoder_keeps_the_order_and_stops_at_an_error() -> None:
    done: list[int] = []
    errors: list[BaseException] = []
    decoder = Worker("test", errors.append)
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
