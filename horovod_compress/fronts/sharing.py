"""``exchange="hierarchical"`` at the start: which ranks share a host, and the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..engine.bucket.shares import nbytes_of, share_of
from ..engine.job import Job
from ..engine.methods import Methods
from ..errors import ConfigError
from ..exchange.hosts import LocalHost, Shared, groups, of_ranks, opened
from ..exchange.transports.transport import Transport
from ..options import Options
from ..schedule.by_name import check_number
from ..schedule.plan import Plan, TensorSpec
from .gather import check_all, gather_stage


def groups_of(options: Options, methods: Methods, plan: Plan, machines: Sequence[str]) -> list[list[int]] | None:
    """Return the ranks of every host, where these share memory; every rank comes to the same end.

    Args:
        machines: names the host of each rank.

    Raises:
        ConfigError: hosts have different numbers of ranks, there are too many buckets for these, or a method cannot
            take the shares of a tensor.
    """
    if options.exchange != "hierarchical":
        return None
    if methods.masked:
        raise ConfigError('exchange="hierarchical" does not know masked(): use exchange="auto"')
    if any(bucket.device != "cpu" for bucket in plan.buckets):
        raise ConfigError(
            'exchange="hierarchical" is for gradients on the CPU, and some are on a GPU: use exchange="auto"'
        )
    hosts = of_ranks(machines)
    ranks = len(hosts[0])
    if ranks == 1:
        return None
    check_number(plan, ranks)
    for bucket in plan.buckets:
        for place in range(ranks):
            methods.check_bucket(share_of(bucket, place, ranks), len(hosts))
    return hosts


def share_memory(
    hosts: Sequence[Sequence[int]], transport: Transport, tensors: Sequence[TensorSpec], job: Job, seconds: float
) -> LocalHost:
    """Share memory with the ranks of this host.

    Raises:
        ConfigError: some rank could not; every rank says which.
    """
    within, for_decoding, between = groups(transport, transport.for_decoding, hosts)
    own: Shared | None = None
    problem: str | None = None
    try:
        own = Shared(nbytes_of(tensors, within.rank, within.size))
    except ConfigError as error:
        problem = str(error)
    try:
        shown = [own.shown() if own else None, problem]
        found = gather_stage("memory", shown, job, seconds)
        check_all([problem for _, problem in found])
        memories: list[Tensor] = []
        try:
            memories = [opened(found[rank][0]) for rank in within.ranks]
        except ConfigError as error:
            problem = str(error)
        check_all(gather_stage("mapped", problem, job, seconds))
    finally:
        if own:
            own.close()
    return LocalHost(within, for_decoding, between, memories)
