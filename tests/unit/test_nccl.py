"""The link between GPUs: what ends a wait, who may use it, and many ranks on one communicator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Codec
from horovod_compress.codecs.registry import create
from horovod_compress.codecs.work import Work
from horovod_compress.engine.agreement.handshake import Document
from horovod_compress.engine.bucket.round import CodecReduction, Round
from horovod_compress.engine.job import Gathering
from horovod_compress.errors import ConfigError, ExchangeError, PeerError
from horovod_compress.exchange import device
from horovod_compress.exchange.choose import Choose
from horovod_compress.exchange.device import Deadline, Device
from horovod_compress.exchange.transports import gloo
from horovod_compress.exchange.transports.nccl import NcclTransport, connect, why_not
from horovod_compress.exchange.transports.transport import Broken, NcclLink, Transfer
from horovod_compress.exchange.wire import NonFiniteCount
from horovod_compress.ops.keys import Key
from horovod_compress.options import Options
from horovod_compress.schedule.plan import Bucket, TensorSpec
from tests.support import nccl
from tests.support.connected import connected
from tests.support.local import Fleet, random_grads, spec
from tests.support.marks import slow
from tests.support.turns import BucketState, put, turn_of

IDENTITY = (0,) * 128
TENSORS = [spec("a", 70, 336), spec("b", 5), spec("c", 9001)]
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason="needs CuPy"),
]


# ---- waiting ------------------------------------------------------------------------------------


class Endless(Device):
    """A device on which nothing ends."""

    def is_done(self, event: object) -> bool:
        return False


def a_link(where: Device | None = None, **rest: Any) -> tuple[NcclLink, nccl.Communicator]:
    library = nccl.World(3).library()
    communicator = library.NcclCommunicator(3, IDENTITY, 1)
    return NcclLink(library, communicator, where or Device(), 1, 3, **rest), communicator


def test_a_transfer_that_is_done_needs_no_time() -> None:
    a_link()[0].finish(Deadline(0.0))


def test_a_transfer_that_does_not_end_is_late() -> None:
    link, _ = a_link(Endless())
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        link.finish(Deadline(0.2))
    assert 0.2 <= time.monotonic() - began < 5.0
    assert (caught.value.peer, caught.value.late) == (0, True)


def lost(noted: bool = False) -> Broken:
    broken = Broken()
    broken.noted = noted
    broken.set()
    return broken


@pytest.mark.parametrize("peer", [0, *slow(2)])
def test_a_lost_peer_ends_a_wait_before_its_deadline(peer: int) -> None:
    link, _ = a_link(Endless(), broken={0: Broken(), 2: Broken()} | {peer: lost()})
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        link.finish(Deadline(30.0))
    assert 0.9 <= time.monotonic() - began < 3.0
    assert (caught.value.peer, caught.value.late) == (peer, False)


def test_a_peer_that_aborted_has_nothing_more_to_send() -> None:
    link, _ = a_link(Endless(), broken={0: lost(), 2: lost(noted=True)})
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        link.finish(Deadline(30.0))
    assert time.monotonic() - began < 0.8 and caught.value.peer == 2


def test_only_so_many_transfers_are_queued_at_a_time() -> None:
    class Counting(Device):
        """A device that ends its oldest transfer when somebody waits."""

        queued = ended = most = 0
        stands = False

        def record_event(self) -> int:
            self.queued += 1
            self.most = max(self.most, self.queued - self.ended)
            return self.queued

        def is_done(self, event: int) -> bool:
            self.ended += self.ended < event and not self.stands
            return self.ended >= event

    where = Counting()
    link, _ = a_link(where)
    link.run((Transfer() for _ in range(300)), Deadline(30.0))
    assert (where.queued, where.most) == (300, 64)
    where.stands, began = True, time.monotonic()
    with pytest.raises(PeerError, match="did not end") as caught:
        link.run((Transfer() for _ in range(300)), Deadline(0.2))
    assert caught.value.late and time.monotonic() - began < 2.0 and where.queued == 364


def test_a_neighbour_that_closed_may_have_sent_all() -> None:
    class Slow(Device):
        looks = 0

        def is_done(self, event: object) -> bool:
            self.looks += 1
            return self.looks > 5

    a_link(Slow(), broken={0: lost()})[0].finish(Deadline(30.0))


def test_an_error_of_nccl_ends_a_wait() -> None:
    link, communicator = a_link(Endless())
    communicator._library.world.broken.set()
    with pytest.raises(PeerError, match="NCCL: NCCL_ERROR_SYSTEM_ERROR"):
        link.finish(Deadline(30.0))


def test_an_aborted_link_refuses_everything() -> None:
    link, communicator = a_link(Endless())
    link.abort()
    link.abort()
    assert communicator.aborted
    data = torch.zeros(4, dtype=torch.uint8)
    for use in (lambda: link.finish(Deadline(30.0)), lambda: link.run([Transfer(sends=[(data, 0)])], Deadline(30.0))):
        with pytest.raises(PeerError, match="aborted or closed"):
            use()


def test_a_rank_that_fails_ends_the_exchanges_of_all() -> None:
    shared = nccl.World(3)

    def wrap(tokens: Any) -> NcclTransport:
        library = shared.library()
        link = NcclLink(library, library.NcclCommunicator(3, IDENTITY, tokens.rank), Device(), tokens.rank, 3)
        if tokens.rank == 2:

            def refuse() -> None:
                raise nccl.NcclError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: no luck")

            library.groupStart = refuse
        return NcclTransport(tokens, link)

    devices = lambda transport: lambda name: transport.link.where  # noqa: E731
    with Fleet(3, TENSORS, "marsit", timeout=5.0, wrap=wrap, devices=devices) as fleet:
        step = fleet.offer(random_grads(3, TENSORS))
        for reducer in fleet.reducers:
            with pytest.raises(ExchangeError, match=r"no luck|has aborted|is gone|stopped"):
                reducer.result(0, step)


# ---- joining ------------------------------------------------------------------------------------


def test_joining_has_a_bound() -> None:
    made = nccl.Communicator(nccl.World(3).library(), 1)
    library = SimpleNamespace(NcclCommunicator=lambda *_: threading.Event().wait(2.0) or made)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match=r"not all of 3 ranks joined NCCL's communicator within 0.2 s"):
        connect(library, IDENTITY, Device(), SimpleNamespace(rank=1, size=3), 0.2)
    assert time.monotonic() - began < 1.8


def test_a_refusal_is_told() -> None:
    def refuse(*_: object) -> None:
        raise nccl.NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    with pytest.raises(ExchangeError, match=r'rank 1: NCCL: NCCL_ERROR_INVALID_USAGE.*transport="gloo"'):
        connect(SimpleNamespace(NcclCommunicator=refuse), IDENTITY, Device(), SimpleNamespace(rank=1, size=3), 5.0)


def communicators(shared: nccl.World, timeout: float = 3.0) -> int:
    """Return how many communicators were made, once none of them is left without an abort."""
    end = time.monotonic() + timeout
    while shared.left() and time.monotonic() < end:
        time.sleep(0.01)
    assert shared.left() == 0
    return len(shared.made)


def join_alone(library: Any, seconds: float, where: Device | None = None) -> NcclLink:
    return connect(library, IDENTITY, where or Device(), SimpleNamespace(rank=1, size=3), seconds)


def test_a_communicator_whose_peers_do_not_come_is_aborted() -> None:
    shared = nccl.World(3)
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="not all of 3 ranks joined"):
        join_alone(shared.library(), 0.2)  # the call for the bytes of the others does not return
    assert communicators(shared) == 1 and time.monotonic() - began < 3.0
    shared = nccl.World(3)
    for peer in (0, 2):
        shared.links[peer, 1].put(b"\0")
    with pytest.raises(ExchangeError, match=r"joined|did not end"):
        join_alone(shared.library(), 0.2, Endless())
    assert communicators(shared) == 1


def test_a_communicator_that_refuses_a_byte_is_aborted() -> None:
    shared = nccl.World(3)
    library = shared.library()

    def refuse() -> None:
        raise nccl.NcclError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: no luck")

    library.groupStart = refuse  # type: ignore[method-assign]
    with pytest.raises(ExchangeError, match="no luck"):
        join_alone(library, 5.0)
    assert shared.left() == 0 and len(shared.made) == 1


def test_a_communicator_that_comes_too_late_is_aborted() -> None:
    shared, come = nccl.World(3), threading.Event()
    library = shared.library()
    make = library.NcclCommunicator

    def late(*arguments: Any) -> nccl.Communicator:
        assert come.wait(10.0)
        return make(*arguments)

    library.NcclCommunicator = late  # type: ignore[method-assign]
    with pytest.raises(ExchangeError, match="not all of 3 ranks joined"):
        join_alone(library, 0.1)
    assert not shared.made
    come.set()
    end = time.monotonic() + 3.0
    while not shared.made and time.monotonic() < end:
        time.sleep(0.01)
    assert communicators(shared) == 1 and library.groups == 0


def test_a_link_is_made_of_what_joined() -> None:
    """And every pair of ranks has met by then."""
    shared = nccl.World(3)

    def join(rank: int) -> NcclLink:
        tokens = SimpleNamespace(rank=rank, size=3)
        return connect(shared.library(), IDENTITY, Device(), tokens, 5.0, broken={})

    with ThreadPoolExecutor(3) as pool:
        links = list(pool.map(join, range(3)))
    assert [(link.rank, link.size) for link in links] == [(rank, 3) for rank in range(3)]
    assert all(link._library.groups == 1 for link in links)
    assert shared.left() == 3  # the control of the tests above: nobody aborted these


def test_an_abort_does_not_wait_for_a_call_that_hangs() -> None:
    link, communicator = a_link()
    hung, go_on = threading.Event(), threading.Event()

    def hangs() -> None:
        hung.set()
        go_on.wait(10.0)

    communicator._library.groupEnd = hangs  # type: ignore[method-assign]
    data = torch.zeros(4, dtype=torch.uint8)
    thread = threading.Thread(target=lambda: link.run([Transfer(sends=[(data, 0)])], Deadline(30.0)), daemon=True)
    thread.start()
    assert hung.wait(5.0)
    began = time.monotonic()
    link.abort()
    assert communicator.aborted and time.monotonic() - began < 3.0
    go_on.set()
    thread.join(5.0)


# ---- who uses it --------------------------------------------------------------------------------


def on(where: str) -> list[TensorSpec]:
    return [TensorSpec("a", (4, 4), "float32", where)]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("horovod.torch")
    from horovod_compress.fronts import startup

    monkeypatch.setattr(startup, "_check_kernels", lambda: None)
    return startup


def test_gradients_of_the_cpu_go_through_gloo(start: Any) -> None:
    assert start._transport_kind(Options(), 2, on("cpu")) == "gloo"
    assert start._transport_kind(Options(), 1, on("cuda:0")) == "local"
    assert start._transport_kind(Options(), 2, on("cuda:0")) == "auto"
    assert start._transport_kind(Options(), 2, [*on("cuda:0"), *on("cpu")]) == "gloo"
    assert start._transport_kind(Options(transport="gloo"), 2, on("cuda:0")) == "gloo"
    with pytest.raises(ConfigError, match="for gradients on GPUs"):
        start._transport_kind(Options(transport="nccl"), 2, on("cpu"))


def test_what_nccl_lacks_is_told(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.nccl, "why_not", lambda: "CuPy is not installed")
    with pytest.raises(ConfigError, match='"nccl" cannot be used here: CuPy is not installed; or use transport="gloo"'):
        start._transport_kind(Options(transport="nccl"), 2, on("cuda:0"))
    assert start._gpu(on("cuda:0"), "auto") is None


@pytest.mark.parametrize(
    ("gpus", "auto"), [(["h a", "h b"], True), (["h a", "i a"], True), (["h a", "h a"], False), (["h a", None], False)]
)
def test_auto_takes_nccl_where_every_rank_has_a_gpu(start: Any, gpus: list[str | None], auto: bool) -> None:
    documents = [Document({}, gpu=gpu) for gpu in gpus]
    assert start._through_nccl(documents, "auto") is auto
    assert start._through_nccl(documents, "gloo") is False
    if auto:
        assert start._through_nccl(documents, "nccl") is True


def test_ranks_that_share_a_gpu_are_named(start: Any) -> None:
    documents = [Document({}, gpu=gpu) for gpu in ("h a", "h b", "h a")]
    with pytest.raises(ConfigError, match=r"ranks 0, 2 share one.*set_device"):
        start._through_nccl(documents, "nccl")


def test_kernels_that_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch")
    from horovod_compress.fronts import startup

    def missing(name: str) -> None:
        raise ImportError(f"{name} does not load")

    monkeypatch.setattr(startup.loader, "load", missing)
    monkeypatch.setattr(startup.loader, "choice", lambda: "")
    with pytest.raises(ConfigError, match="gradients are on a GPU: _cuda does not load"):
        startup._transport_kind(Options(), 2, on("cuda:0"))
    monkeypatch.setattr(startup.loader, "choice", lambda: "reference")
    with pytest.raises(ConfigError, match="HVC_KERNELS=reference runs on the CPU only"):
        startup._transport_kind(Options(), 2, on("cuda:0"))


class Tokens:
    """A rank's transport for tokens, none of which are sent."""

    send = receive = aside = for_decoding = questions = notes = on_abort = say = said = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.closed = rank, size, False

    def watch(self, peer: int) -> Broken:
        return Broken()

    def close(self) -> None:
        self.closed = True


class Gathers:
    """All-gathers between threads; from the one of a given name on they run out of time."""

    def __init__(self, size: int, late: str = "") -> None:
        self.size, self.late = size, late
        self._met = threading.Barrier(size)
        self._values: dict[tuple[str, int], Any] = {}

    def __call__(self, rank: int, value: Any, name: str) -> list[Any]:
        if name == self.late:
            raise ExchangeError(f"not every rank joined {name}")
        self._values[name, rank] = value
        self._met.wait(10.0)
        return [self._values[name, other] for other in range(self.size)]


class OneOf:
    """The job of one rank, as far as a start asks."""

    def __init__(self, rank: int, gathers: Gathers) -> None:
        self.rank, self.size, self._gathers = rank, gathers.size, gathers

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        return self._gathers(self.rank, value, asked.name)


def link_all(
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[Tokens],
    shared: nccl.World,
    identity: Callable[[], Any] = lambda: IDENTITY,
    late: str = "",
) -> list[Any]:
    """Return each rank's transport or error."""

    def api() -> nccl.Library:
        library = shared.library()
        library.get_unique_id = identity  # type: ignore[attr-defined]
        return library

    gathers = Gathers(len(tokens), late)
    monkeypatch.setattr(start.nccl, "api", api)

    def link(mine: Tokens) -> Any:
        try:
            return start._link(mine, Device(), OneOf(mine.rank, gathers), 1.0)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tokens)) as pool:
        return list(pool.map(link, tokens))


def test_all_ranks_link(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, shared = [Tokens(rank, 3) for rank in range(3)], nccl.World(3)
    linked = link_all(start, monkeypatch, tokens, shared)
    assert [type(transport) for transport in linked] == [NcclTransport] * 3, linked
    assert not any(mine.closed for mine in tokens) and shared.left() == 3


def check_failed(found: list[Any], tokens: list[Tokens], shared: nccl.World, text: str) -> None:
    assert [type(error) for error in found] == [ExchangeError] * 3, found
    assert all(text in str(error) for error in found), found
    assert all(mine.closed for mine in tokens) and shared.left() == 0


def test_a_rank_without_an_identity_stops_all(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise nccl.NcclError("NCCL_ERROR_SYSTEM_ERROR: no interface")

    tokens, shared = [Tokens(rank, 3) for rank in range(3)], nccl.World(3)
    found = link_all(start, monkeypatch, tokens, shared, identity=refuse)
    check_failed(found, tokens, shared, "rank 0: NCCL_ERROR_SYSTEM_ERROR: no interface")


def test_a_peer_that_went_before_the_link_stops_all(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, shared = [Tokens(rank, 3) for rank in range(3)], nccl.World(3)

    def gone(peer: int) -> Broken:
        raise PeerError(peer, False, "Connection reset by peer")

    for mine in tokens[1:]:
        mine.watch = gone  # type: ignore[method-assign]
    found = link_all(start, monkeypatch, tokens, shared)
    check_failed(found, tokens, shared, "rank 1: rank 0 is gone: Connection reset by peer; rank 2: rank 0 is gone")
    assert str(found[0]).startswith("rank 0: not all of 3 ranks joined")


@pytest.mark.parametrize("late", ["hvc.nccl", "hvc.linked"])
def test_a_link_that_is_not_agreed_on_leaves_nothing_open(
    start: Any, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, shared = [Tokens(rank, 3) for rank in range(3)], nccl.World(3)
    check_failed(
        link_all(start, monkeypatch, tokens, shared, late=late), tokens, shared, f"not every rank joined {late}"
    )


# ---- a connection that breaks ---------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[list[gloo.GlooTransport]]:
    both = connected(2, 10.0)
    yield both
    for transport in both:
        transport.close()


@pytest.mark.parametrize("end", ["abort", "close"])
def test_a_watch_sees_a_connection_break(pair: list[gloo.GlooTransport], end: str) -> None:
    broken = pair[0].watch(1)
    assert not broken.wait(0.3)
    given, taken = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    moved = [pair[1].send(given, 0), pair[0].receive(taken, 1)]  # it is in nobody's way
    for pending in moved:
        pending.wait(Deadline(5.0))
    assert torch.equal(given, taken)
    pair[1].watch(0)
    pair[1].abort({"why": "a test"}) if end == "abort" else pair[1].close()
    assert broken.wait(3.0) and broken.noted is (end == "abort")


def test_a_watch_ends_with_its_own_transport(pair: list[gloo.GlooTransport]) -> None:
    broken = pair[0].watch(1)
    pair[0].close()
    assert broken.wait(3.0)


# ---- many ranks on one communicator ---------------------------------------------------------------


class Member:
    """One of several ranks that one thread plays."""

    def __init__(self, rank: int, world: int, codec: Codec, exchange: str, where: Device, link: NcclLink) -> None:
        self.link = NcclLink(link._library, link._communicator, where, rank, world)
        bucket = Bucket(0, tuple(TENSORS))
        self.state = BucketState(bucket, codec, rank, world, Choose(exchange), where, False, self.link)
        self.key = Key(0, 0, 0, rank)

    @property
    def round(self) -> Round:
        return self.state.round(0)

    def offer(self, grads: dict[str, Tensor]) -> None:
        turn = turn_of(self.state, self.key)
        for position, tensor in enumerate(TENSORS):
            assert not int(put(turn, position, grads[tensor.name].clone().to(self.link.where.where)))
        if turn.waits:
            turn.count_waiting(turn.submit_waiting())
        turn.take_over(Deadline(10.0))

    def prelude(self, number: int) -> Iterator[Transfer]:
        self.round.before(number, self.key)
        prelude = self.round.preludes[number]
        return prelude.collective.steps(self.link, prelude.layout, self.round.reduction(self.key), NonFiniteCount())

    def payload(self) -> Iterator[Transfer]:
        self.round.encode(self.key)
        reduction = CodecReduction(self.round.codec, self.round.work, self.key)
        return self.round.collective.steps(self.link, self.round.layout, reduction, NonFiniteCount())


def consensus(codec: Codec, world: int, exchange: str, where: Device, link: NcclLink) -> list[dict[str, Tensor]]:
    """Return every rank's consensus bytes, with all ranks' transfers through one communicator of one rank."""
    members = [Member(rank, world, codec, exchange, where, link) for rank in range(world)]
    with where.exchanging():
        for member, grads in zip(members, random_grads(world, TENSORS), strict=True):
            member.offer(grads)
        for number in range(len(members[0].round.preludes)):
            nccl.together(link, [member.prelude(number) for member in members])
        nccl.together(link, [member.payload() for member in members])
        link.finish(Deadline(20.0))
        return [{n: r.cpu() for n, r in complete(member.round.work).items()} for member in members]


def complete(work: Work) -> dict[str, Tensor]:
    """Return what every rank has after the exchange: regions, or the results that owners passed on in their place."""
    return work.regions | work.results


def over_local(method: str, world: int, exchange: str, **options: Any) -> list[dict[str, Tensor]]:
    with Fleet(world, TENSORS, method, exchange=exchange, **options) as fleet:
        fleet.step(random_grads(world, TENSORS))
        return [dict(complete(reducer.buckets[0].round(0).work)) for reducer in fleet.reducers]


VIRTUAL = [
    ("none", "ring", {}), ("none", "fold", {}), ("fp16", "ring", {}), ("bf16", "fold", {}),
    ("marsit", "ring", {"full_precision_every": 0}), ("marsit", "fold", {"full_precision_every": 0}),
    ("signsgd", "fold", {}), ("global_qsgd", "ring", {"bits": 8}), ("qsgd", "fold", {}), ("natural", "fold", {}),
    ("terngrad", "ring", {}),
]  # fmt: skip


def check_virtual(
    method: str, exchange: str, options: dict[str, Any], world: int, where: Device, link: NcclLink
) -> None:
    codec = create(method, **options)
    expected = over_local(method, world, exchange, **options)
    found = consensus(codec.for_step(0), world, exchange, where, link)
    for mine, theirs in zip(found, expected, strict=True):
        for name, region in theirs.items():
            assert torch.equal(mine[name].view(torch.uint8), region.view(torch.uint8)), (method, exchange, name)


@pytest.mark.each_value
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("method", "exchange", "options"), VIRTUAL)
def test_virtual_ranks_come_to_the_bytes_of_local(
    method: str, exchange: str, options: dict[str, Any], world: int
) -> None:
    library = nccl.World(1).library()
    link = NcclLink(library, library.NcclCommunicator(1, IDENTITY, 0), Device(), 0, 1)
    check_virtual(method, exchange, options, world, link.where, link)
    assert library.groups > 0


@pytest.fixture(scope="module")
def link_of_one() -> Iterator[NcclLink]:
    """Return a communicator of one rank on a GPU."""
    from horovod_compress.exchange.transports.nccl import api

    library, where = api(), device.of("cuda:0")
    link = connect(library, library.get_unique_id(), where, SimpleNamespace(rank=0, size=1), 60.0)
    yield link
    link.abort()


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("world", [2, 3, 4])
    @pytest.mark.parametrize(("method", "exchange", "options"), VIRTUAL)
    def test_virtual_ranks(
        self, link_of_one: NcclLink, method: str, exchange: str, options: dict[str, Any], world: int
    ) -> None:
        torch.cuda.set_device(0)
        check_virtual(method, exchange, options, world, link_of_one.where, link_of_one)
