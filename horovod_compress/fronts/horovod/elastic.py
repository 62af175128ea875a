"""Elastic jobs: a compression whose ranks change goes on, and loses nothing where changes are announced.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, batch=0)

The compression object stays, as its optimizer has it; its session is made anew for each run of Horovod:

    commit()                ranks show each other the norms of what waits; then save: a copy in host memory
    hosts will change       on all ranks at the same commit: what waits is pooled among them, and connections are closed
    a rank has failed       restore: back to the copy, and connections are closed
    after the reset         ranks connect again, before anything else that new ranks meet for; then rank 0 gives new
                            ranks what is equal on all, and each goes on with its share of what waits

Where hosts were only removed, Horovod has ranks go on without ``sync()``: they connect at their next gradient then.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic import state as stock

from ...errors import ConfigError
from ..gather import ELASTIC
from ..updates import STATE_KEY, UpdateMode
from .compression import Compression
from .private import calling_state
from .resets import Resets

#: Of the states that are made from now on.
_chosen = {"copies": False}


def configure(*, neighbour_copy: bool = False) -> None:
    """Choose what the elastic states do that are made after this call; call it on every rank.

    Args:
        neighbour_copy: at each commit, every rank sends what waits on it to the next rank, so that nothing is lost with
            a rank that dies alone. It costs the bytes of the residuals at each commit, and as much host memory.
    """
    if not isinstance(neighbour_copy, bool):
        raise ConfigError(f"neighbour_copy should be True or False, got {neighbour_copy!r}")
    _chosen["copies"] = neighbour_copy


def register() -> None:
    """Let Horovod's elastic states take compressions."""
    ours = [(Compression, CompressionHandler), (UpdateMode, UpdateModeHandler)]
    known = [kind for kind, _ in stock.get_handler_registry()]
    if Compression not in known:
        stock.set_handler_registry([*ours, *stock.get_handler_registry()])  # in front of that for all optimizers


class CompressionHandler(stock.StateHandler):  # type: ignore[misc]
    """What an elastic state of Horovod's calls for a compression that it has.

    Raises:
        ConfigError: the compression cannot follow a change of ranks; it says why.
    """

    def __init__(self, compression: Compression) -> None:
        super().__init__(compression)
        state = calling_state(stock.TorchState)
        if state is None:
            raise ConfigError(
                "a compression belongs into an hvd.elastic.TorchState, and none is being made here; write "
                "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
            )
        self._resets = Resets(compression, copies=_chosen["copies"])
        _watch(state, self._resets)

    def save(self) -> None:
        self._resets.save()

    def restore(self) -> None:
        self._resets.restore()

    def sync(self) -> None:
        self._resets.sync()

    def set_value(self, value: Any) -> None:
        if value is not self.value:
            raise ConfigError("the compression of an elastic state cannot be replaced; make another state")
        self.save()


class UpdateModeHandler(stock.OptimizerStateHandler):  # type: ignore[misc]
    """What it calls for an optimizer in update mode, whose momentum is each rank's own."""

    _member = False  # it was there before

    def __init__(self, optimizer: Any) -> None:
        stock.StateHandler.__init__(self, optimizer)  # that of Horovod's handler would ask for a state that is saved
        self.save()

    def save(self) -> None:
        """Copy the optimizer's state, which ends with this process: what its end would lose is not saved by that."""
        self._saved_optimizer_state = copy.deepcopy(self.value._state())

    def restore(self) -> None:
        self.value._updates.give_up()
        super().restore()

    def sync(self) -> None:
        """Give new ranks the optimizer's state of rank 0, and all the common weights and counters."""
        compression: Compression = self.value._compression
        session, resets = compression._here(), compression._resets
        members = session.gather(self._member, f"{ELASTIC}.members")
        if any(members):
            mine = self.value._state()
            shown = {STATE_KEY: mine[STATE_KEY]} | ({} if all(members) else _by_texts(mine))
            given = resets.received(shown if session.reducer.rank == 0 else None)
            self.value.load_state_dict({**(mine if self._member else _by_numbers(given)), STATE_KEY: given[STATE_KEY]})
            if not self._member:
                self.save()  # it may have to go back before its first commit
        self._member = True


def _by_texts(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with texts for the numbers of parameters, as what is sent has them."""
    kept = {str(number): dict(part) for number, part in state["state"].items()}
    return {"state": kept, "param_groups": [dict(group) for group in state["param_groups"]]}


def _by_numbers(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": {int(number): part for number, part in given["state"].items()},
        "param_groups": [
            {
                name: tuple(value) if isinstance(value, list) and name != "params" else value
                for name, value in group.items()
            }
            for group in given["param_groups"]
        ],
    }


# ---- the state of the job ------------------------------------------------------------------------

#: By state.
_watched: weakref.WeakKeyDictionary[Any, list[Resets]] = weakref.WeakKeyDictionary()


def _watch(state: Any, resets: Resets) -> None:
    """Let an elastic state connect ranks before they meet for anything else, and pool what waits before they part."""
    if state in _watched:
        _watched[state].append(resets)
        return
    several = _watched[state] = [resets]
    sync, check_host_updates, commit = state.sync, state.check_host_updates, state.commit

    def connect_then_sync() -> None:
        state._handlers = dict(sorted(state._handlers.items(), key=lambda item: _place(item[1])))
        for _, meet in sorted((meeting for each in several for meeting in each.meetings()), key=lambda one: one[0]):
            meet()
        sync()

    def check_then_part() -> None:
        try:
            check_host_updates()
        except HostsUpdatedInterrupt:
            for each in several:
                each.part()
            raise

    def show_then_commit() -> None:
        try:
            for each in several:
                each.begin_commit()
            commit()
        finally:
            for each in several:
                each.end_commit()

    # Not by setattr, which asks for handlers that are not there yet.
    vars(state).update(sync=connect_then_sync, check_host_updates=check_then_part, commit=show_then_commit)


def _place(handler: stock.StateHandler) -> int:
    """Return when it is a handler's turn among those of a state, whatever their names are; a job begins with a sync.

    Compressions first: one that goes back gives up the step under way, which no optimizer could load its state in, and
    leaves that state to torch. Models last: to have a state that Horovod can fill, a new rank's optimizer makes a step
    without gradients, and with weight decay, as AdamW's, that moves its weights.
    """
    return 0 if isinstance(handler, CompressionHandler) else 2 if isinstance(handler, stock.ModelStateHandler) else 1
