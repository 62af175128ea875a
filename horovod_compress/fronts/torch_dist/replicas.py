"""Compression between the replicas of torchft, which decides anew before every step who takes part.

    import horovod_compress.ddp as hvc

    group = hvc.Replicas.group_class(torchft.ProcessGroupGloo)(timeout=timedelta(seconds=30))
    manager = torchft.Manager(pg=group, use_async_quorum=False, rank=0, world_size=1, **others)

    def compression():
        made = hvc.Compression.marsit(model.named_parameters())
        made.register(model, optimizer)
        return made

    replicas = hvc.Replicas(manager, group, compression)
    while manager.current_step() < steps:
        replicas.begin()  # in place of manager.start_quorum()
        optimizer.zero_grad()
        with replicas.reporting():
            loss(model(batch)).backward()
        if replicas.should_commit():  # in place of manager.should_commit()
            optimizer.step()

A step that is discarded leaves what waits as it was. A replica that heals has nothing that waits; the others go on with
what they have. Each replica is one process, and the default process group of torch.distributed is that of all replicas,
made anew whenever these change. docs/elastic.md has more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from ...engine.saved.redistribute import Carried, common_of, resized
from ...errors import ConfigError, ExchangeError, HorovodCompressError
from .compression import Compression

_KEY = "horovod_compress"
#: What another quorum may not meet with again.
_PASSING = (ExchangeError, dist.DistError)

State = Mapping[str, Any]


class Replicas:
    """Lets a compression go on among the replicas that there are, and take back a step that is discarded.

    What is kept is copied after every step.

    Args:
        manager: a ``torchft.Manager`` with ``use_async_quorum=False``, so that a replica that heals has its weights
            before it takes part.
        group: that of the manager, of a class that :meth:`group_class` returned.
        make: makes the compression and registers it; called after each change of replicas.

    Raises:
        ConfigError: the manager has an asynchronous quorum, or replicas of several processes; or torch.distributed is
            initialized already.
    """

    def __init__(self, manager: Any, group: Any, make: Callable[[], Compression]) -> None:
        if manager._use_async_quorum or manager._group_world_size != 1:
            raise ConfigError(
                "Replicas takes a torchft.Manager with use_async_quorum=False, whose replicas are one process each "
                f"(world_size=1); this one has {manager._use_async_quorum} and {manager._group_world_size}"
            )
        if not hasattr(group, "place"):
            raise ConfigError(f"expected a group of Replicas.group_class(torchft.ProcessGroupGloo), got {group!r}")
        if dist.is_initialized():
            raise ConfigError("Replicas initializes torch.distributed itself, among all replicas: leave that out")
        self._manager, self._group, self._make = manager, group, make
        self._compression: Compression | None = None
        self._place: tuple[str, int, int] | None = None
        self._committed, self._coded = False, set[str]()
        self._mine: State | None = None  # all that is kept, as of the last step that counts
        self._common: State | None = None  # what is equal on all replicas, from the one that this one heals from
        manager.register_state_dict_fn(_KEY, self._heal, self._shown)

    @staticmethod
    def group_class(kind: type[Any]) -> type[Any]:
        """Return a class of process groups of torchft's that also remember where their replicas meet.

        Args:
            kind: ``torchft.ProcessGroupGloo``, or another one that configures itself anew for each quorum.
        """

        def configure(self: Any, store_addr: str, replica_id: str, rank: int, world_size: int, *more: Any) -> None:
            kind.configure(self, store_addr, replica_id, rank, world_size, *more)
            self.place = (store_addr, rank, world_size)

        return type(f"Remembering{kind.__name__}", (kind,), {"place": None, "configure": configure})

    @property
    def compression(self) -> Compression:
        """The one that exchanges gradients now.

        Raises:
            ExchangeError: the replicas are not connected.
        """
        if self._compression is None:
            raise ExchangeError("the replicas are not connected, and this step will be discarded")
        return self._compression

    def begin(self) -> None:
        """Begin a step among the replicas that are there: agree on them, and connect them if they have changed."""
        if self._committed:  # and the optimizer's step is over, with which a second moment moves
            self._mine, self._common, self._committed = self.compression._saved.of_last_step(), None, False
        self._manager.start_quorum()
        try:
            if self._manager.errored():
                self._leave()
            elif self._group.place != self._place:
                self._connect()
        except _PASSING as error:
            self._manager.report_error(error)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Within this, an exchange that fails discards the step, on this replica and on others that see it fail.

        What would come again in every step, such as a wrong option or a gradient that ``nonfinite="raise"`` refuses,
        is raised.
        """
        lost = self._compression is None or bool(self._manager.errored())  # then a pass may fail in any way
        try:
            yield
        except _PASSING as error:
            self._manager.report_error(error)
        except HorovodCompressError as error:
            if not lost:
                raise
            self._manager.report_error(error)

    def should_commit(self) -> bool:
        """Return whether to make the optimizer's step; if not, what waits is as it was before this one."""
        if self._compression is None and not self._manager.errored():
            self._manager.report_error(ExchangeError("the replicas are not connected"))
        self._committed = bool(self._manager.should_commit())
        if self._compression is not None and not self._committed:
            try:
                self._compression.load_state_dict(self._mine or {})
            except HorovodCompressError:  # its exchange has failed: the next one begins with what is kept
                self._leave()
        return self._committed

    # ---- what torchft calls ----

    def _shown(self) -> State:
        """Return what a replica that heals gets: nothing that waits; without a connection, what this one got."""
        return common_of(self._mine, self._coded) if self._mine else self._common or {}

    def _heal(self, common: State) -> None:
        self._mine, self._common, self._place = None, common or None, None

    # ---- connections ----

    def _connect(self) -> None:
        """Let a new compression go on among these replicas, with this one's part of what waits."""
        self._leave()
        address, rank, world = place = self._group.place or ("", 0, 0)
        try:
            self._meet(address, rank, world)
            self._compression = self._make()
            self._go_on(self._compression, world)
        except BaseException:
            self._leave()
            raise
        finally:
            self._place = place  # the next quorum has another one, also of the same replicas

    def _meet(self, address: str, rank: int, world: int) -> None:
        host, _, rest = address.rpartition(":")
        port, _, prefix = rest.partition("/")
        patience = self._group._timeout
        try:
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
            dist.init_process_group(
                "gloo", store=PrefixStore(f"{_KEY}/{prefix}", store), rank=rank, world_size=world, timeout=patience
            )
        except RuntimeError as error:  # Gloo's own has no other class
            raise ExchangeError(f"the replicas have not met: {error}") from error

    def _go_on(self, compression: Compression, world: int) -> None:
        session = compression._here()
        if session.reducer.options.exchange == "hierarchical":
            raise ConfigError(
                'exchange="hierarchical" keeps what waits in shares of hosts, which change with the replicas: use '
                'exchange="auto"'
            )
        methods = session.methods
        self._coded = {*methods.coded()}
        mine, common = self._mine, self._common
        if mine and not common:
            common = common_of(mine, self._coded)
        if common:  # a residual enters the mean over replicas by its share
            carried = Carried(world / common["world"], 1.0, methods.folded(), self._coded)
            compression.load_state_dict(common, "reset")  # its buckets, for the shapes of what follows
            compression.load_state_dict(resized(compression.state_dict(), mine, common, carried))
        self._mine = compression.state_dict()

    def _leave(self) -> None:
        """End the connections to the replicas of before."""
        if self._compression is not None:
            self._compression.close()
        self._compression = self._place = None
        if dist.is_initialized():
            dist.destroy_process_group()
