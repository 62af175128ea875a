"""Goes on with other buckets, between two steps."""

from __future__ import annotations

from ..codecs.base import Held
from ..errors import ConfigError
from ..schedule.plan import Plan
from .buckets import Buckets
from .context import Context
from .kept import Kept


def check(context: Context, buckets: Buckets, plan: Plan) -> None:
    """Refuse buckets that :func:`replan` could not go on with.

    Raises:
        ConfigError: says what they should be.
    """
    plan.check_covers([tensor for bucket in buckets.plan.buckets for tensor in bucket.tensors])
    before, after = ({t.name: b.method for b in p.buckets for t in b.tensors} for p in (buckets.plan, plan))
    if before != after:
        name = next(name for name in before if before[name] != after[name])
        raise ConfigError(
            f"rank {context.rank}: {name} has a different method in the new buckets; its state would be lost"
        )
    if tables := buckets.tables_that_stay():
        raise ConfigError(
            f"rank {context.rank}: this method keeps {', '.join(sorted(tables))} for whole buckets, so the "
            'buckets cannot be changed; choose a fixed schedule such as "size:25MB"'
        )


def replan(context: Context, buckets: Buckets, kept: Kept, plan: Plan) -> None:
    """Take other buckets; what is kept for the elements of a tensor goes with it, bit by bit.

    What tables hold goes with it as far as their method can tell one tensor from another.
    """
    plan = plan.placed(tensor for bucket in buckets.plan.buckets for tensor in bucket.tensors)
    context.devices.synchronize()
    before, waiting, step = kept.states(), kept.withholding.waiting(), buckets.next_step()
    tables = {state.bucket: state.memory.tables for state in buckets}
    held: dict[str, Held] = {}
    for state in buckets:
        if state.bucket not in plan.buckets:
            held |= state.rounds.read_tables(context.key(step, state.bucket.index))
    with context.changed:
        buckets.take_plan(plan)
        for kind, tensors in kept.states().items():
            for name, tensor in tensors.items():
                tensor.copy_(before[kind][name])
        kept.withholding.load(waiting)
        for state in buckets:
            if state.bucket in tables:  # it stays as it is
                for name, table in tables[state.bucket].items():
                    state.memory.tables[name].copy_(table)
            else:
                state.rounds.write_tables(held, context.key(step, state.bucket.index))
            state.resume(step)
        context.devices.synchronize()
        context.changed.notify_all()
