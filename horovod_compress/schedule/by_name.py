"""How buckets are chosen: ``schedule=`` becomes a plan.

A schedule that measures nothing is a function from tensors in backward order to groups of tensors: ``"size:25MB"``
calls :func:`.plan.by_size` with ``"25MB"``. Those that try buckets in the running job have a file of their own each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ConfigError
from . import auto, layerfusion, mergecomp
from .plan import USUAL_SIZE, Plan, TensorSpec, by_size, layerwise, single
from .trial import by_kind

#: What fits the bucket's place in a key.
_PLACES = 1 << 16

_SCHEDULES = {"layerwise": layerwise, "single": single, "size": by_size}

#: Schedules that try buckets in the running job, see :mod:`.trial`; they begin with the usual ones.
ADAPTIVE = {"auto": auto, "layerfusion": layerfusion, "mergecomp": mergecomp}

#: Takes part where it can, and leaves the buckets as they are where it cannot; the others are refused there.
OPTIONAL = "auto"


def is_adaptive(schedule: str | Plan) -> bool:
    """Return whether a schedule chooses buckets while the job runs."""
    return isinstance(schedule, str) and schedule.partition(":")[0] in ADAPTIVE


def check_schedule(schedule: object) -> None:
    """Refuse what is no schedule, whatever the tensors are.

    Raises:
        ConfigError: says which there are.
    """
    if isinstance(schedule, Plan):
        return
    name, _, argument = schedule.partition(":") if isinstance(schedule, str) else ("", "", "")
    if name in ADAPTIVE:
        ADAPTIVE[name].check(argument)
    elif name in _SCHEDULES:
        _SCHEDULES[name]([], argument)
    else:
        raise ConfigError(
            f"schedule should be a Plan or one of {', '.join(sorted(_SCHEDULES | ADAPTIVE))}, "
            f'got {schedule!r}; an example is schedule="size:25MB"'
        )


def make_plan(
    schedule: str | Plan,
    tensors: Sequence[TensorSpec],
    min_elements: int,
    method: Callable[[str], int] = lambda name: 1,
) -> Plan:
    """Return the plan for tensors given in backward order.

    Args:
        schedule: a name such as ``"layerwise"``, ``"single"`` or ``"size:25MB"``, or a plan, which is taken as it is.
        min_elements: smaller tensors share one uncompressed bucket for each dtype and device, which travel last.
        method: returns the number of the method of a parameter; a bucket has one method, dtype and device.

    Raises:
        ConfigError: the schedule is unknown, or a given plan does not fit the tensors.
    """
    plan = _plan(schedule, tensors, min_elements, method)
    check_number(plan)
    return plan


def check_number(plan: Plan, shares: int = 1) -> None:
    """Refuse a plan of too many buckets.

    Args:
        shares: of each bucket, which have random bits of their own: the ranks of a host, where these share it.

    Raises:
        ConfigError: there are more than a key has room for.
    """
    most = _PLACES // shares - 1  # one is left for the verification's frames
    if len(plan.buckets) > most:
        where = f" where {shares} ranks share a host" if shares > 1 else ""
        raise ConfigError(
            f'a plan should have at most {most} buckets{where}, this one has {len(plan.buckets)}; choose schedule="size'
            ':25MB"'
        )


def _plan(schedule: str | Plan, tensors: Sequence[TensorSpec], min_elements: int, method: Callable[[str], int]) -> Plan:
    if isinstance(schedule, Plan):
        schedule.check_covers(tensors)
        return schedule.placed(tensors)
    check_schedule(schedule)
    name, _, argument = schedule.partition(":")
    if name in ADAPTIVE:
        name, argument = "size", USUAL_SIZE
    small = [tensor for tensor in tensors if tensor.count < min_elements]
    large = by_kind((tensor for tensor in tensors if tensor.count >= min_elements), method)
    groups = [(g, number) for (number, _, _), own in large.items() for g in _SCHEDULES[name](own, argument)]
    place = {tensor.name: index for index, tensor in enumerate(tensors)}
    groups.sort(key=lambda group: place[group[0][-1].name])  # by when its last gradient is there
    return Plan.of(groups + [(own, 0) for own in by_kind(small, lambda name: 0).values()])
