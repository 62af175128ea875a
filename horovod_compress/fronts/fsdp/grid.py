"""The two dimensions of ranks: those of one column have the same shard, those of one row make up one replica.

Each column has an engine of its own, whose ranks are numbered by replica.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...engine.agreement.differences import explained
from ...engine.job import Gathering
from ...engine.saved.manifests import RankGroup
from ...errors import ConfigError, ExchangeError, NonFiniteError, one_line
from ..torch_dist.job import TorchJob, gather_among, group_of

RECIPE = (
    'mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")); '
    'fully_shard(model, mesh=mesh["shard"]); compression.register(model, optimizer, replicate=mesh["replicate"])'
)

_NAMES = ("replicate", "shard")  # of dimensions that have none


class Unmet(TorchJob):
    """The ranks of a compression that is not registered yet, which has not met any of them.

    Attributes:
        replicate: the dimension along which the model is replicated, where it was given already.
    """

    def __init__(self, replicate: DeviceMesh | None) -> None:
        super().__init__(None)
        self.replicate = replicate


class Column(TorchJob):
    """The ranks that have the same shard as this one: a rank's number among them is that of its replica.

    Args:
        replicate: the dimension of the mesh along which the model is replicated.
        shard: the one along which it is divided.

    Raises:
        ConfigError: these are not two dimensions of one mesh.
    """

    def __init__(self, replicate: object, shard: DeviceMesh) -> None:
        if not isinstance(replicate, DeviceMesh) or replicate.ndim != 1:
            raise ConfigError(
                "replicate= should be the dimension of a mesh along which the model is replicated, such as "
                f'mesh["replicate"], got {replicate!r:.200}. Write {RECIPE}'
            )
        super().__init__(replicate.get_group())
        self.replicate, self._divides = replicate, shard
        self._row = row = TorchJob(shard.get_group())
        mine, theirs = (dist.get_process_group_ranks(job.group) for job in (self, row))
        if {*mine} & {*theirs} != {self.number}:
            raise ConfigError(
                f"replicate= has ranks {mine}, and the model is divided among ranks {theirs}; these should be two "
                f"dimensions of one mesh, with no rank in both but this one, {self.number}. Write {RECIPE}"
            )
        which = ", ".join(f"replica {replica} is rank {rank}" for replica, rank in enumerate(mine))
        self._numbers: list[int] = []  # of all ranks, in the order of mesh(), once they have met there
        #: What an error's numbers of ranks mean.
        self.in_words = f"Numbers of ranks are those of the replicas of shard {row.rank} here; in the job, {which}."

    @property
    def row(self) -> TorchJob:
        return self._row

    def check(self) -> None:
        super().check()
        self.row.check()

    def gather_all(self, value: Any, asked: Gathering) -> list[Any]:
        if self._numbers:
            return gather_among(self._numbers, dist.group.WORLD, value, asked)
        columns = self.row.gather(self.gather(value, asked), asked)
        return [column[rank] for rank in range(self.size) for column in columns]

    def group_of_all(self) -> RankGroup | None:
        return group_of(self._numbers or dist.get_process_group_ranks(self.group))

    def place_in_grid(self) -> list[int]:
        """Return the replica, the shard and the number of this rank."""
        return [self.rank, self.row.rank, self.number]

    def mesh(self, places: list[list[int]]) -> DeviceMesh:
        """Return the mesh of all ranks, replicas first; from then on they meet at once, no longer row by row.

        Args:
            places: of every rank, replica by replica.

        Raises:
            ConfigError: some rank is at another place than its groups say.
        """
        found = [place[:2] for place in places]
        numbers = torch.tensor([number for _, _, number in places], device="cpu")
        expected = [[replica, shard] for replica in range(self.size) for shard in range(self.row.size)]
        if found != expected:
            raise ConfigError(
                f"the ranks that have one shard are not those that replicate= joins: by replica and shard they are "
                f"{found}, and should be {expected}. Write {RECIPE}"
            )
        dimensions, groups = (self.replicate, self._divides), [self.group, self.row.group]
        self._numbers = numbers.tolist()
        names = [(mesh.mesh_dim_names or (name,))[0] for mesh, name in zip(dimensions, _NAMES, strict=True)]
        by_replica = numbers.view(self.size, self.row.size)
        return DeviceMesh.from_group(groups, self._divides.device_type, by_replica, mesh_dim_names=tuple(names))

    def agree(self, mine: NonFiniteError | None, seconds: float) -> NonFiniteError | None:
        flag = torch.tensor(float(mine is not None), device=self._divides.device_type)
        under_way = dist.all_reduce(flag, dist.ReduceOp.MAX, self.row.group, async_op=True)
        try:
            under_way.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            row = [rank for rank in dist.get_process_group_ranks(self.row.group) if rank != self.number]
            raise ExchangeError(
                f"rank {self.number}: expected to hear within {seconds:g} s from rank(s) {', '.join(map(str, row))}, "
                "which have the other shards of this replica, whether all their values are finite; look for an error "
                f"there ({one_line(error, 200)}){'' if mine is None else f'. {mine}'}"
            ) from None
        if mine is None and bool(flag):
            mine = NonFiniteError(
                f"rank {self.number}: gradients of another shard than that of this rank, {self.row.rank}, are not "
                "finite; the ranks that have that shard say where. All ranks raise this: skip the step, or restart "
                "from a checkpoint"
            )
        elif mine is not None:
            mine = NonFiniteError(explained(str(mine), self.in_words))
        return mine
