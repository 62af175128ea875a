"""How a compression object starts: handshake, plan and connections, the same on every rank."""

from __future__ import annotations

import contextlib
import secrets
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from ..codecs.base import Codec, check_world, tables_that_stay, variants_of
from ..codecs.masked import Masked
from ..engine.agreement import handshake
from ..engine.agreement.handshake import own_address
from ..engine.agreement.purposes import Meetings, bits
from ..engine.job import Job
from ..engine.methods import Methods, numbered, parse
from ..engine.names import pairs
from ..engine.reducer import Hooks, Reducer
from ..engine.shards import local
from ..errors import ConfigError, ExchangeError, HorovodCompressError, MismatchError, PeerError, without_addresses
from ..exchange import device, on_device
from ..exchange.choose import Choose
from ..exchange.transports import gloo, nccl
from ..exchange.transports.local import Hub
from ..exchange.transports.transport import NcclLink, Transport
from ..ops import loader
from ..ops.algebra import Algebra
from ..options import Options
from ..schedule.by_name import OPTIONAL, is_adaptive, make_plan
from ..schedule.plan import Plan, TensorSpec, supported_dtype
from . import sharing
from .gather import check_all, gather_stage

_DEFAULT_SECONDS = Options().flow_seconds
_EMPTY = "; it is empty: an iterator can be read only once, so write model.named_parameters() each time, or pass a list"
T = TypeVar("T")

#: The names of runs of the framework, by the jobs that compressions were made in.
_runs: weakref.WeakKeyDictionary[Job, str] = weakref.WeakKeyDictionary()

#: Of all compressions of this process.
_meetings = Meetings()

#: Puts a transport around another, as one that a fault is planted in.
Wrap = Callable[[Transport], Transport]


def as_it_is(transport: Transport) -> Transport:
    """Return a transport."""
    return transport


def start(
    method: str | Codec | Masked | Methods,
    named: object,
    given: Mapping[str, Any],
    job: Job,
    hooks: Hooks,
    wrap: Wrap = as_it_is,
) -> tuple[Methods, Reducer, str]:
    """Compare options with the other ranks, agree on the plan, connect; return methods, reducer and a name.

    A rank that must refuse takes part in the handshake all the same, so that every rank stops
    with the reason instead of waiting.
    """
    rank, world = job.rank, job.size
    seconds = _DEFAULT_SECONDS
    try:
        methods, options = parse(method, given)
        seconds = options.flow_seconds
        tensors = specs(named)
        kind = _transport_kind(options, world, tensors)
        place = job.place()
        methods.check_used(tensors)
        shown = handshake.fields(methods, options, tensors, kind, world)
        document = handshake.Document(
            shown, gpu=_gpu(tensors, kind), host=place.host, unreachable=place.problem, machine=place.machine
        )
        if rank == 0:
            plan = make_plan(options.schedule, tensors, options.min_elements, methods.number)
            if isinstance(options.schedule, Plan):
                plan = numbered(plan, methods)
            _check_options(methods, options, world)
            _check_buckets(methods, plan, options, world)
            document = replace(document, plan=plan.document(), name=secrets.token_hex(8), run=_run_of(job))
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        refuse(error, job, seconds)
    documents = _shake(document, job, seconds)
    own = own_address(place, documents)
    plan = Plan.from_document(documents[0].plan).placed(tensors)
    found = sharing.groups_of(options, methods, plan, [document.machine for document in documents])
    where = device.of(plan.buckets[0].device) if _through_nccl(documents, kind) else None
    if where:  # every rank comes to the same
        for variant in (variant for codec in methods.codecs for variant in variants_of(codec)):
            if variant.algebra is not Algebra.GATHER:
                on_device.of(Choose(options.exchange)(variant, 0, world))  # refuses what such links do not have
    transport = _connect_all(own, job, seconds, where)
    devices = (lambda name: where) if where else None
    with contextlib.ExitStack() as undo:
        undo.callback(transport.close)  # else its threads, ports and connections would stay
        transport = wrap(transport)
        host = sharing.share_memory(found, transport, tensors, job, seconds) if found else None
        choose = Choose(options.exchange, () if host else transport.adds)
        _meetings.rank = job.number
        group = job.group_of_all()
        words = group.in_words() if group and not hooks.ranks_in_words else hooks.ranks_in_words
        among = bits(group.ranks if group else None)
        hooks = replace(hooks, run=documents[0].run, meetings=_meetings, among=among, ranks_in_words=words)
        _runs[job] = hooks.run  # a process set in which another rank is the first calls it so, too
        reducer = Reducer(plan, methods.codecs, transport, choose, options, devices, hooks, host)
        undo.pop_all()
    return methods, reducer, documents[0].name


def _run_of(job: Job) -> str:
    """Return what this rank 0 calls the run of the framework that a job is in."""
    for other, known in reversed([*_runs.items()]):
        with contextlib.suppress(ConfigError):
            other.check()
            return _runs.setdefault(job, known)
    return _runs.setdefault(job, secrets.token_hex(8))


def check_alone(method: str | Codec | Masked | Methods, named: object, given: Mapping[str, Any]) -> None:
    """Check what needs no other ranks, where there are none yet.

    Raises:
        ConfigError: an option or the parameter list cannot work.
    """
    methods, options = parse(method, given)
    tensors = specs(named)
    methods.check_used(tensors)
    make_plan(options.schedule, tensors, options.min_elements, methods.number)
    _check_options(methods, options, 2)


def refuse(error: Exception, job: Job, seconds: float = _DEFAULT_SECONDS) -> NoReturn:
    """Take part in the handshake with this rank's error, which every rank then raises.

    Raises:
        ConfigError: says which rank has which error.
    """
    if not job.running() or not job.included():
        raise error
    try:
        _shake(handshake.refusal(error), job, seconds)
    except ExchangeError:
        raise error from None  # the others are somewhere else
    except HorovodCompressError as told:
        # What all ranks raise. Where it says all that this rank's error does, one traceback is enough.
        repeats = isinstance(error, HorovodCompressError) and without_addresses(str(error)) in str(told)
        raise told from (None if repeats else error)
    raise error


def _shake(document: handshake.Document, job: Job, seconds: float) -> list[handshake.Document]:
    """Return the documents of all ranks, which agree."""
    found = gather_stage("handshake", asdict(document), job, seconds)
    documents = [handshake.from_plain(plain) for plain in found]
    handshake.check(documents)
    return documents


@contextlib.contextmanager
def before_handshake(job: Job) -> Iterator[None]:
    """Let every rank know of an error of this one, where the others come to the handshake already."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks wait to hear of it
        refuse(error, job)


@contextlib.contextmanager
def as_at_first(named: Sequence[tuple[str, nn.Parameter]], exchanged: Iterable[str]) -> Iterator[None]:
    """Let parameters need a gradient that did so when ranks first connected: some may be frozen since, or trained.

    Args:
        exchanged: the names of those.
    """
    first, now = frozenset(exchanged), [(parameter, parameter.requires_grad) for _, parameter in named]
    try:
        for name, parameter in named:
            parameter.requires_grad_(name in first)
        yield
    finally:
        for parameter, needs in now:
            parameter.requires_grad_(needs)


def specs(named: object) -> list[TensorSpec]:
    """Return the tensors to reduce in backward order.

    Raises:
        ConfigError: these are no named parameters, a name occurs twice, or a dtype, a layout or a device is not
            supported.
    """
    given, tensors = pairs(named), []
    found = [(name, parameter) for name, parameter in given if parameter.requires_grad]
    for name, given_one in reversed(found):
        parameter = local(given_one)
        dtype = supported_dtype(f"parameter {name}", parameter.dtype)
        if parameter.layout is not torch.strided:
            raise ConfigError(
                f"parameter {name} is {parameter.layout}; parameters must be dense, their gradients may be sparse"
            )
        if (where := parameter.device).type not in device.KINDS:
            raise ConfigError(
                f"parameter {name} is on {where}; gradients can be reduced on {' and '.join(device.KINDS)}"
            )
        tensors.append(TensorSpec(name, tuple(parameter.shape), dtype, str(where)))
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"named_parameters holds {twice!r} twice; names must be unique: put several modules into one "
            "torch.nn.ModuleDict, and give its named_parameters(), or create a compression for each"
        )
    if len({id(parameter) for _, parameter in found}) < len(found):
        raise ConfigError(
            "named_parameters holds one parameter under two names; leave remove_duplicate=True in named_parameters()"
        )
    if not tensors:
        raise ConfigError(f"named_parameters holds no parameter that needs a gradient{'' if given else _EMPTY}")
    return tensors


def _check_options(methods: Methods, options: Options, world: int) -> None:
    """Refuse what the number of ranks or the exchange does not allow, before anybody connects."""
    for codec in methods.codecs:
        check_world(codec, world)
        codec.for_step(0)  # a function of the step may fail
        for variant in variants_of(codec):
            Choose(options.exchange)(variant, 0, world)


def _check_buckets(methods: Methods, plan: Plan, options: Options, world: int) -> None:
    """Refuse buckets that their method cannot take."""
    methods.check_plain(plan)
    for bucket in plan.buckets:
        methods.check_bucket(bucket, world)
        tables = tables_that_stay(methods.codecs[bucket.method], bucket, world)
        if tables and is_adaptive(options.schedule) and options.schedule != OPTIONAL:
            raise ConfigError(
                f"{methods.codecs[bucket.method].name} keeps {', '.join(tables)} for whole buckets, so they "
                f'cannot be changed in the running job; choose a fixed schedule such as "size:25MB"'
            )


def _transport_kind(options: Options, world: int, tensors: Sequence[TensorSpec]) -> str:
    """Return the transport that this rank is to use, or "auto" where that depends on the others' GPUs."""
    devices = device.check(tensor.device for tensor in tensors)
    if devices != ["cpu"]:
        _check_kernels()
    on_gpu = "cpu" not in devices
    if options.transport == "nccl":
        if not on_gpu:
            raise ConfigError(
                'transport="nccl" is for gradients on GPUs, and some are on the CPU: use transport="auto"'
            )
        if world > 1 and (reason := nccl.why_not()):
            raise ConfigError(f'transport="nccl" cannot be used here: {reason}; or use transport="gloo"')
    if world == 1:
        return "local"
    if options.transport == "local":
        raise ConfigError(
            'transport="local" joins threads of one process; the ranks of a job are processes: use transport="auto"'
        )
    if not gloo.available():
        raise ConfigError("this torch was built without Gloo, which moves the bytes between ranks")
    return options.transport if on_gpu else "gloo"


def _check_kernels() -> None:
    """Refuse gradients on GPUs where there are no kernels for them.

    Raises:
        ConfigError: says why there are none.
    """
    if loader.choice():
        raise ConfigError(f"HVC_KERNELS={loader.choice()} runs on the CPU only, and gradients are on a GPU; unset it")
    try:
        loader.load("_cuda")
    except ImportError as error:
        raise ConfigError(f"gradients are on a GPU: {error}") from None


def _gpu(tensors: Sequence[TensorSpec], kind: str) -> str | None:
    """Return a name of this rank's GPU that no other one has, or None if NCCL is out of the question."""
    if kind not in ("auto", "nccl") or nccl.why_not():
        return None
    found = torch.cuda.get_device_properties(torch.device(tensors[0].device))
    return f"{socket.gethostname()} {found.uuid}"


def _through_nccl(documents: Sequence[handshake.Document], kind: str) -> bool:
    """Return whether payloads go through NCCL; every rank comes to the same end.

    Raises:
        ConfigError: they should, and two ranks share a GPU.
    """
    gpus = [document.gpu for document in documents]
    able = None not in gpus and len(set(gpus)) == len(gpus)
    if kind == "nccl" and not able:
        twice = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
        raise ConfigError(
            f'transport="nccl" needs one GPU per rank, but ranks {", ".join(map(str, twice))} share one: call '
            'torch.cuda.set_device(local_rank) before you create the model, or use transport="gloo"'
        )
    return able and kind in ("auto", "nccl")


def _connect_all(own: str, job: Job, seconds: float, where: device.Device | None) -> Transport:
    """Connect, and return when every rank has: a rank that closes early must not fail one that is late.

    Raises:
        ExchangeError: some rank could not connect; every rank says which.
    """
    divided: list[HorovodCompressError] = []
    with contextlib.ExitStack() as undo:
        transport, problem = _attempt(lambda: _connect(own, job, seconds, divided))
        if transport:
            undo.callback(transport.close)
        if divided:
            raise divided[0] from None  # the ranks are not together, so there is nobody to hear of it
        # Connecting has a bound of its own, which another rank may use up before it answers here.
        check_all(gather_stage("connected", problem, job, 2 * seconds))
        undo.pop_all()
    assert transport is not None
    return _link(transport, where, job, seconds) if where else transport


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what this rank's part of something gives, or what stood against it, in words for every rank."""
    try:
        return work(), None
    except PeerError as error:
        return None, f"rank {error.peer} is gone: {error}"
    except (HorovodCompressError, ImportError, RuntimeError) as error:  # NcclError is the last
        return None, str(error)


def _link(tokens: Transport, where: device.Device, job: Job, seconds: float) -> Transport:
    """Join NCCL's communicator; ranks come here together, as joining would wait for a late one without limit.

    Raises:
        ExchangeError: some rank could not join; every rank says which.
    """

    def identity() -> tuple[int, ...] | None:
        library = nccl.api()  # which every rank needs
        return library.get_unique_id() if tokens.rank == 0 else None

    def join() -> NcclLink:
        peers = set(range(tokens.size)) - {tokens.rank}
        broken = {peer: tokens.watch(peer) for peer in peers}  # type: ignore[attr-defined]
        return nccl.connect(nccl.api(), tuple(found_by_all[0][0]), where, tokens, seconds, broken=broken)

    with contextlib.ExitStack() as undo:
        undo.callback(tokens.close)
        found, problem = _attempt(identity)
        found_by_all = gather_stage("nccl", [found, problem], job, seconds)
        check_all([problem for _, problem in found_by_all])
        link, problem = _attempt(join)
        if link:
            undo.callback(link.abort)
        else:
            undo.close()  # at once: other ranks may be waiting for this one
        check_all(gather_stage("linked", problem, job, 2 * seconds))
        undo.pop_all()
    assert link is not None
    return nccl.NcclTransport(tokens, link)


def _connect(own: str, job: Job, seconds: float, divided: list[HorovodCompressError]) -> Transport:
    """Connect; errors of the meeting itself are noted."""
    if job.size == 1:
        return Hub(1).transports()[0]
    limits = iter((seconds, 2 * seconds))  # before the second time, others may use up the bound to connect

    def share(values: dict[str, bytes]) -> dict[str, bytes]:
        shown = {key: value.hex() for key, value in values.items()}
        try:
            found = gather_stage("addresses", shown, job, next(limits))
        except (ExchangeError, MismatchError) as error:
            divided.append(error)
            raise
        return {key: bytes.fromhex(value) for mine in found for key, value in mine.items()}

    return gloo.GlooTransport(share, job.rank, job.size, own, seconds)
