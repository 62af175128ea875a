"""What a step takes with a method on a network: buckets on a time line, by the model of ``schedule.costs``.

Every bucket is computed by itself, with the bytes that its own tensors make; only the search for the best buckets
takes costs to be affine in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...codecs import registry
from ...codecs.base import Codec, check_world
from ...codecs.by_step import config_of
from ...engine.bucket.shares import share_of
from ...errors import ConfigError
from ...exchange.choose import Choose
from ...schedule import layerfusion
from ...schedule.by_name import make_plan
from ...schedule.costs import Arrivals, Costs, fitted
from ...schedule.plan import Bucket, Plan, TensorSpec
from .models import Table
from .network import Cost, Link, PayloadCost, Traffic, crowded, formula, rounds, traffic, within_host
from .processor import Processor, measure_codec

#: Processor's seconds for handing a bucket from thread to thread, beyond what its codec needs: an estimate.
BUCKET_SECONDS = 100e-6
#: Schedules that are compared with the best one.
USUAL = ("layerwise", "single", "size:25MB")
BEST = "layerfusion"
#: The method that sends float32 as it is.
PLAIN = "none"
_FLOAT_BYTES = 4
#: Of a step's compute: a backward pass has two products for each one of the forward pass.
FORWARD_SHARE = 1 / 3
#: Numbers of even buckets that the affine costs go through; the job's own search measures two of them.
_FITTED_AT = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class World:
    """Where a job runs.

    Attributes:
        cores: processor cores for each rank; with less than one everything computed takes longer.
        exchange: as the option of that name.
        pace: what the processor's seconds are multiplied by, where a fit has shown that.
        hosts: ranks on a host and the connection between them, with ``exchange="hierarchical"``.
    """

    ranks: int
    link: Link
    cores: float = 1.0
    exchange: str = "auto"
    pace: float = 1.0
    hosts: tuple[int, Link] | None = None

    @property
    def stretch(self) -> float:
        """How many times as long as on a core of its own the processor's work takes."""
        return self.pace * max(1.0, 1.0 / self.cores)


class RoundCosts:
    """One kind of round of a method in a world.

    Args:
        codec: of that kind, one of the method's variants.
        costs: of the processor with a core of its own.
    """

    def __init__(self, codec: Codec, costs: Processor, world: World) -> None:
        self._codec, self._world = codec, world
        self._processor = costs.scaled(world.stretch)
        self._link = replace(world.link, message=world.link.message * world.stretch)
        self._each, self._local = world.hosts or (1, self._link)
        #: Those that a method exchanges among.
        self._ranks = world.ranks // self._each

    def offer(self, elements: int) -> float:
        """Return the seconds of taking in a tensor's gradient."""
        if self._each > 1:  # it is copied into memory that the host shares
            return _FLOAT_BYTES * elements / self._local.rate * self._world.stretch
        return self._processor.offer(elements)

    def traffic(self, bucket: Bucket) -> Traffic:
        share = share_of(bucket, 0, self._each) if self._each > 1 else bucket
        return traffic(self._codec, share, self._ranks, self._world.exchange, self._processor.filled)

    def exchange(self, bucket: Bucket) -> Cost:
        """Return what encoding and exchanging a bucket takes, on the exchange thread."""
        found, world, processor = self.traffic(bucket), self._world, self._processor
        parts = (*found.preludes, found.payload)
        count = bucket.count // self._each
        merge = processor.merge(count) / (sum(part.nbytes for part in parts) or 1)  # for each byte
        cost = Cost(processor.encode(count) + BUCKET_SECONDS * world.stretch)
        if self._each > 1:
            cost += Cost(processor.offer(count)) + within_host(_FLOAT_BYTES * bucket.count, self._each, self._local)
        for part in parts if self._ranks > 1 else ():
            payload = PayloadCost(part.nbytes, merge * part.nbytes, processor.copy)
            cost += formula(part.collective)(payload, self._ranks, crowded(self._link, self._each))
        return cost

    def decode(self, bucket: Bucket) -> float:
        """Return the seconds on the decoding thread."""
        return self._processor.decoding(bucket.count // self._each, self._ranks)


@dataclass(frozen=True)
class Slot:
    """A bucket's place on the time line, in seconds from the begin of the step.

    Attributes:
        ready: its last gradient is there.
        begin: of encoding and exchange.
        end: of the exchange.
        decoded: its result is there.
        sent: bytes over one rank's link.
    """

    bucket: Bucket
    ready: float
    begin: float
    end: float
    decoded: float
    sent: float
    collective: str


@dataclass(frozen=True)
class Timeline:
    """A predicted step.

    Attributes:
        schedule: names the choice of buckets.
        arrivals: of the gradients.
        step: seconds on average over the method's kinds of rounds.
        slots: of the usual kind of round, in the order of exchange.
    """

    schedule: str
    plan: Plan
    arrivals: Arrivals
    step: float
    slots: tuple[Slot, ...]

    @property
    def sent(self) -> float:
        """Bytes over one rank's link in a usual round."""
        return sum(slot.sent for slot in self.slots)


class Predictor:
    """Predicts the steps of one model with one method in one world.

    Args:
        compute: seconds of a step without any exchange.

    Raises:
        ConfigError: the method cannot serve that many ranks, or the exchange does not fit it.
    """

    def __init__(self, table: Table, codec: Codec, world: World, compute: float) -> None:
        check(codec, world)
        self._codec, self._world, self._table, self._compute = codec, world, table, compute
        #: In backward order, as a job's plan has them.
        self.tensors = [TensorSpec(tensor.name, tensor.shape, "float32") for tensor in table.backward()]
        self._kinds = [(RoundCosts(one, measure_codec(codec, one), world), share) for one, share in rounds(codec)]

    @cached_property
    def arrivals(self) -> Arrivals:
        """When gradients are there in a usual round."""
        return arrivals(self._table, self._compute, self._kinds[0][0].offer)

    def timeline(self, schedule: str, plan: Plan) -> Timeline:
        """Return the step with given buckets, whose tensors are in backward order.

        Raises:
            ConfigError: the method cannot take one of the buckets.
        """
        each = self._world.hosts[0] if self._world.hosts else 1
        for bucket in plan.buckets:
            self._codec.layout(share_of(bucket, 0, each) if each > 1 else bucket, self._world.ranks // each)
        found = [slots(arrivals(self._table, self._compute, kind.offer), plan, kind) for kind, _ in self._kinds]
        step = sum(share * line[-1].decoded for line, (_, share) in zip(found, self._kinds, strict=True))
        return Timeline(schedule, plan, self.arrivals, step, tuple(found[0]))

    def usual(self, schedule: str) -> Timeline:
        """Return the step with the buckets of a schedule that does not measure."""
        return self.timeline(schedule, make_plan(schedule, self.tensors, 0))

    def costs(self) -> list[Costs]:
        """Return affine costs of buckets in a usual round, through buckets of all sizes, of small and of large ones.

        They are not the same line: small payloads take another collective, and large ones fill the link.
        """
        kind, counts = self._kinds[0][0], [tensor.count for tensor in self.tensors]
        numbers = [number for number in _FITTED_AT if number <= len(counts)]
        buckets = [one for number in numbers for one in self._cut(layerfusion.even(counts, number)).buckets]
        buckets.sort(key=lambda one: one.count)
        points = [(one.count, kind.exchange(one).seconds, kind.decode(one)) for one in buckets]
        half = len(points) // 2
        return [
            Costs(fitted([(n, exchange) for n, exchange, _ in some]), fitted([(n, decode) for n, _, decode in some]))
            for some in (points, points[:half], points[half:])
            if some
        ]

    def best(self) -> Timeline:
        """Return the step with the buckets that are best by affine costs, or with usual ones where these are better."""
        found = {tuple(layerfusion.best(self.arrivals, costs)) for costs in self.costs()}
        lines = [*(self.timeline(BEST, self._cut(groups)) for groups in sorted(found)), *map(self.usual, USUAL)]
        return replace(min(lines, key=lambda one: one.step), schedule=BEST)

    def _cut(self, groups: Sequence[int]) -> Plan:
        cut, first = [], 0
        for number in groups:
            cut.append((self.tensors[first : first + number], 1))
            first += number
        return Plan.of(cut)


def check(codec: Codec, world: World) -> None:
    """Refuse what no bucket could be exchanged with, before anything is measured.

    Raises:
        ConfigError: the method cannot serve that many ranks, or the exchange does not fit it.
    """
    ranks = world.ranks // (world.hosts[0] if world.hosts else 1)
    check_world(codec, ranks)
    for one, _ in rounds(codec):
        Choose(world.exchange)(one, 0, ranks)


def can_serve(codec: Codec, world: World, ranks: int) -> bool:
    """Return whether anything could be exchanged among so many ranks."""
    try:
        check(codec, replace(world, ranks=ranks))
    except ConfigError:
        return False
    return True


def slots(come: Arrivals, plan: Plan, kind: RoundCosts) -> list[Slot]:
    """Return when each bucket is ready, exchanged and decoded: one exchange and one decoding at a time."""
    found: list[Slot] = []
    sent = decoded = 0.0
    first = 0
    for bucket in plan.buckets:
        first += len(bucket.tensors)
        ready, taken = come.seconds[first - 1], kind.exchange(bucket)
        begin = max(sent, ready)
        sent = begin + taken.seconds
        decoded = max(sent, decoded) + kind.decode(bucket)
        found.append(Slot(bucket, ready, begin, sent, decoded, taken.sent, kind.traffic(bucket).payload.collective))
    return found


def arrivals(table: Table, seconds: float, offer: Callable[[int], float] = lambda elements: 0.0) -> Arrivals:
    """Return when each gradient is there after the beginning of a step, in backward order.

    A step's compute is spread over the layers as their multiply-adds are. The gradients of a layer are there together,
    when its part of the backward pass is done.

    Args:
        seconds: of a step's compute, forward and backward.
        offer: seconds to submit a gradient of that many elements, one after the other, on a thread that the backward
            pass does not wait for; a gradient is there once it is submitted.
    """
    total = sum(tensor.macs for tensor in table.tensors) or 1
    counts, times = [], []
    done, taken = FORWARD_SHARE * seconds, 0.0
    for layer in reversed(table.layers()):
        done += (1 - FORWARD_SHARE) * seconds * layer.macs / total
        for tensor in reversed(layer.tensors):
            taken = max(done, taken) + offer(tensor.count)
            counts.append(tensor.count)
            times.append(taken)
    return Arrivals(tuple(counts), tuple(times))


@dataclass(frozen=True)
class Case:
    """What is planned for.

    Attributes:
        compute: seconds of a step without any exchange, which is T1.
    """

    table: Table
    compute: float
    world: World


@dataclass(frozen=True)
class Found:
    """A method in a world.

    Attributes:
        timelines: by schedule, the best one first.
        share: of usual rounds among all.
    """

    codec: Codec
    timelines: tuple[Timeline, ...]
    share: float

    @property
    def best(self) -> Timeline:
        return self.timelines[0]


def predicted(case: Case, codec: Codec, schedules: Sequence[str] = USUAL) -> Found:
    """Return what a method takes with the best buckets, and with those of some schedules.

    Raises:
        ConfigError: the method cannot serve this world or this model.
    """
    predictor = Predictor(case.table, codec, case.world, case.compute)
    timelines = (predictor.best(), *(predictor.usual(name) for name in schedules))
    return Found(codec, timelines, rounds(codec)[0][1])


def plain(case: Case) -> Found:
    """Return the same without compression: float32 through this package's own exchange."""
    return predicted(case, registry.create(PLAIN), ("size:25MB",))


# ---- other worlds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One method with one number of ranks: a prediction, or why there is none."""

    method: str
    ranks: int
    timeline: Timeline | None
    problem: str = ""
    hosted: bool = False  # with exchange="hierarchical", and one link for each host
    lossless: bool = False  # unbiased, or what is not sent now is sent later


def cells(case: Case, codecs: Sequence[Codec], ranks: Sequence[int], hosts: tuple[int, Link] | None) -> list[Cell]:
    """Return the predictions of some methods for some numbers of ranks, with the best buckets of each.

    Args:
        hosts: ranks on a host and the connection between them: adds what ``exchange="hierarchical"`` takes.
    """
    found = []
    for codec in codecs:
        for number in ranks:
            world = replace(case.world, ranks=number)
            found.append(_cell(replace(case, world=world), codec))
            if hosts and number % hosts[0] == 0 < number - hosts[0]:
                on_hosts = _cell(replace(case, world=replace(world, hosts=hosts)), codec)
                found.append(replace(on_hosts, method=f"{on_hosts.method}, hierarchical", hosted=True))
    return found


def _cell(case: Case, codec: Codec) -> Cell:
    law = codec.properties().law
    lossless = law.unbiased or law.conserves
    try:
        found = Predictor(case.table, codec, case.world, case.compute).best()
    except ConfigError as error:
        return Cell(name_of(codec), case.world.ranks, None, str(error))
    return Cell(name_of(codec), case.world.ranks, found, lossless=lossless)


def name_of(codec: Codec) -> str:
    """Return a method with the options that are not its defaults."""
    usual = config_of(type(codec)())
    options = {name: value for name, value in config_of(codec).items() if value != usual.get(name)}
    return " ".join([codec.name, *(f"{name}={value}" for name, value in options.items())])
