"""How a compression object starts: handshake, plan and connections, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
from torch import nn

from . import device, handshake
from ._horovod import allgather_object
from .codecs.base import Codec
from .collectives.choose import chooser
from .errors import ConfigError, ExchangeError, HorovodCompressError
from .methods import Methods, numbered, parse
from .options import Options
from .plan import Plan, TensorSpec
from .reducer import Reducer
from .schedule import OPTIONAL, is_adaptive, make_plan
from .transports import gloo
from .transports.base import Transport
from .transports.local import Hub

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_DEFAULT_SECONDS = Options().timeout


def start(
    method: str | Codec | Methods,
    named: Sequence[tuple[str, nn.Parameter]],
    given: Mapping[str, Any],
    process_set: Any,
) -> tuple[Methods, Reducer]:
    """Compare options with the other ranks, agree on the plan, connect, and return a reducer.

    A rank that must refuse takes part in the handshake all the same, so that every rank stops
    with the reason instead of waiting.
    """
    meeting: gloo.Meeting | None = None
    rank, world = process_set.rank(), process_set.size()
    seconds = _DEFAULT_SECONDS
    try:
        methods, options = parse(method, given)
        seconds = options.timeout
        tensors = specs(named)
        kind = _transport_kind(options, world)
        own = gloo.own_address(one_host=hvd.local_size() == hvd.size())
        methods.check_used(tensors)
        document = handshake.Document(handshake.fields(methods, options, tensors, kind, world))
        if rank == 0:
            plan = make_plan(options.schedule, tensors, options.min_elements, methods.number)
            if isinstance(options.schedule, Plan):
                plan = numbered(plan, methods)
            _check_options(methods, options, world)
            _check_buckets(methods, plan, options)
            if world > 1:
                meeting = gloo.Meeting(None, own, seconds)
            document = handshake.Document(
                document.fields, None, plan.document(), meeting.address if meeting else None
            )
    except HorovodCompressError as error:
        document = handshake.refusal(error)
    documents = allgather_object(document, "hvc.handshake", process_set, seconds)
    handshake.check(documents)
    plan = Plan.from_document(documents[0].plan).placed(tensors)
    transport = _connect_all(meeting, documents[0].meeting, own, process_set, seconds)
    return methods, Reducer(plan, methods.codecs, transport, chooser(options.exchange), options)


def specs(named: Sequence[tuple[str, nn.Parameter]]) -> list[TensorSpec]:
    """Return the tensors to reduce in backward order.

    Raises:
        ConfigError: these are no named parameters, a name occurs twice, or a dtype or a device is not supported.
    """
    tensors = []
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], nn.Parameter)):
            raise ConfigError(
                f"named_parameters should hold (name, parameter) pairs, as model.named_parameters() "
                f"gives them, got {type(pair).__name__}"
            )
    for name, parameter in reversed(named):
        if not parameter.requires_grad:
            continue
        dtype = str(parameter.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ConfigError(f"parameter {name} is {dtype}; supported are {', '.join(_DTYPES)}")
        tensors.append(TensorSpec(name, tuple(parameter.shape), dtype, _device_of(name, parameter)))
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"named_parameters holds {twice!r} twice; names must be unique")
    if not tensors:
        raise ConfigError("named_parameters holds no parameter that needs a gradient")
    return tensors


def _device_of(name: str, parameter: nn.Parameter) -> str:
    where = parameter.device
    if where.type not in device.KINDS:
        raise ConfigError(f"parameter {name} is on {where}; gradients can be reduced on {' and '.join(device.KINDS)}")
    return str(where)


def _check_options(methods: Methods, options: Options, world: int) -> None:
    """Refuse what the number of ranks or the exchange does not allow, before anybody connects."""
    for codec in methods.codecs:
        codec.check_world(world)
        for variant in codec.variants():
            chooser(options.exchange)(variant, 0, 2)


def _check_buckets(methods: Methods, plan: Plan, options: Options) -> None:
    """Refuse buckets that their method cannot take."""
    methods.check_plain(plan)
    for bucket in plan.buckets:
        methods.check_bucket(bucket)
        tables = methods.codecs[bucket.method].tables(bucket)
        if tables and is_adaptive(options.schedule) and options.schedule != OPTIONAL:
            raise ConfigError(
                f"{methods.codecs[bucket.method].name} keeps {', '.join(sorted(tables))} for whole buckets, so they cannot "
                f'be changed in the running job; choose a fixed schedule such as "size:25MB"'
            )


def _transport_kind(options: Options, world: int) -> str:
    if world == 1:
        return "local"
    if options.transport == "local":
        raise ConfigError(
            'transport="local" joins threads of one process; the ranks of a Horovod job are '
            'processes: use transport="auto"'
        )
    if not gloo.available():
        raise ConfigError("this torch was built without Gloo, which moves the bytes between ranks")
    return "gloo"


def _connect_all(
    meeting: gloo.Meeting | None, address: tuple[str, int] | None, own: str, process_set: Any, seconds: float
) -> Transport:
    """Connect, and return when every rank has: a rank that closes early must not fail one that is late.

    Raises:
        ExchangeError: some rank could not connect; every rank says which.
    """
    transport, problem = None, None
    try:
        transport = _connect(meeting, address, own, process_set, seconds)
    except HorovodCompressError as error:
        problem = str(error)
    # Connecting has a bound of its own, which another rank may use up before it answers here.
    problems = allgather_object(problem, "hvc.connected", process_set, 2 * seconds)
    if transport is None or any(problems):
        if transport:
            transport.close()
        raise ExchangeError(next(text for text in problems if text))
    return transport


def _connect(
    meeting: gloo.Meeting | None, address: tuple[str, int] | None, own: str, process_set: Any, seconds: float
) -> Transport:
    if process_set.size() == 1:
        return Hub(1).transports()[0]
    meeting = meeting or gloo.Meeting(address, own, seconds)
    return gloo.GlooTransport(meeting, process_set.rank(), process_set.size(), own, seconds)
