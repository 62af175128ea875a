"""How buckets are chosen: ``schedule=`` becomes a plan.

A schedule is a function from tensors in backward order to groups of tensors. Each lives in a file
of its own in this package and is found by its name: ``"size:25MB"`` calls ``size.group`` with
``"25MB"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ..plan import Plan, TensorSpec
from . import layerwise, single, size

#: What fits the bucket's place in a key, less one for the verification's frames.
MAX_BUCKETS = (1 << 16) - 1

_SCHEDULES = {"layerwise": layerwise, "single": single, "size": size}


def make_plan(schedule: str | Plan, tensors: Sequence[TensorSpec], min_elements: int) -> Plan:
    """Return the plan for tensors given in backward order.

    Args:
        schedule: ``"layerwise"``, ``"single"``, ``"size:25MB"`` or a plan.
        min_elements: smaller tensors share one uncompressed bucket, which travels last.

    Raises:
        ConfigError: the schedule is unknown, or a given plan does not fit the tensors.
    """
    plan = _plan(schedule, tensors, min_elements)
    if len(plan.buckets) > MAX_BUCKETS:
        raise ConfigError(
            f"a plan should have at most {MAX_BUCKETS} buckets, this one has {len(plan.buckets)}; "
            f'choose schedule="size:25MB"'
        )
    return plan


def _plan(schedule: str | Plan, tensors: Sequence[TensorSpec], min_elements: int) -> Plan:
    if isinstance(schedule, Plan):
        schedule.check_covers(tensors)
        return schedule
    name, _, argument = str(schedule).partition(":")
    if name not in _SCHEDULES:
        raise ConfigError(
            f"schedule should be a Plan or one of {', '.join(sorted(_SCHEDULES))}, "
            f'got {schedule!r}; an example is schedule="size:25MB"'
        )
    large = [tensor for tensor in tensors if tensor.count >= min_elements]
    small = [tensor for tensor in tensors if tensor.count < min_elements]
    groups = [(group, True) for group in _SCHEDULES[name].group(large, argument)]
    return Plan.of(groups + ([(small, False)] if small else []))
