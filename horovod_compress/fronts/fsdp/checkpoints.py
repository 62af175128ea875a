"""What torch.distributed.checkpoint saves of a compression, beside model and optimizer.

There is one part for each rank, with which the same grid of ranks resumes bit by bit, and all residuals as tensors that
are divided like the parameters, with replicas as another dimension: these can be divided anew, for other grids. They
are in units of gradients there, as what a second moment makes of these belongs to the shards that there were. The
second moment that is held goes with them: the optimizer's own has been raised to a floor for each row, and elements
that never had a gradient are no longer 0 there.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...engine.optimizer.held_moment import HeldMoment
from ...engine.ratio import Ratio
from ...engine.saved import checksums
from ...engine.saved.redistribute import rounded
from ...errors import StateError
from ..saving import Saved, tell_dealt
from ..session import Session

_ABOUT, _RANKS, _MOMENT = "about", "ranks", "second_moment"
#: In what is said about a checkpoint: norms as the shard has them that says it, and the number of shards.
_NORMS, _SHARDS = "norms", "shards"
#: Kinds of what is kept: what any method may have, and what waits for elements that rounds leave out.
_RESIDUAL, _WAITING = "residual", "waiting"
#: What is equal on all ranks, and goes with what waits.
_COMMON = (
    "method",
    "config",
    "seed",
    "step",
    "exchanged",
    "rates",
    "rates_seen",
    "last_rates",
    "scale",
    "due",
    "unused",
)
#: The numbers of a second moment that is held, beside the tensor and whether codecs divide by it, which buckets say.
_NUMBERS = ("steps", "since", "eps")
#: That which has to be as it was.
_FIXED = ("method", "config", "seed", "exchanged")


class Sharded:
    """The state of one compression, for a checkpoint of all ranks.

    Args:
        mesh: of all ranks, replicas first.
    """

    def __init__(self, session: Session, saved: Saved, mesh: DeviceMesh) -> None:
        self._session, self._saved, self._mesh = session, saved, mesh
        self._parameters: dict[str, DTensor] = dict(session.steps.named)  # type: ignore[arg-type]

    @property
    def _part(self) -> str:
        """The name of this rank's part."""
        (replica, shard), (replicas, shards) = self._mesh.get_coordinate() or (0, 0), self._mesh.shape
        return f"replica {replica} of {replicas}, shard {shard} of {shards}"

    def state(self) -> dict[str, Any]:
        """Return all that this rank has to save.

        Raises:
            ConfigError: a step is under way.
        """
        state = self._saved.state()
        whole = io.BytesIO()
        torch.save(state, whole)
        about = {name: state[name] for name in _COMMON if name in state}
        held = state.get(_MOMENT, {})
        about[_MOMENT] = {name: {part: saved[part] for part in _NUMBERS} for name, saved in held.items()}
        about |= {_NORMS: state.get(_NORMS, {}), _SHARDS: self._mesh.shape[1]}
        return {
            _of(self._mesh.shape[0]): self._residuals(state),
            **self._moments(held),
            _ABOUT: json.dumps(about),
            _RANKS: {self._part: whole.getvalue()},
        }

    def load(self, state: Mapping[str, Any], residuals: str) -> None:
        """Restore what :meth:`state` returned on the same grid, completely or not at all.

        Raises:
            ConfigError, StateError, CorruptFrameError: see :meth:`~..compression.BaseCompression.load_state_dict`.
        """
        parts = state.get(_RANKS) if isinstance(state, Mapping) else None
        part = parts.get(self._part) if isinstance(parts, Mapping) else None
        if not isinstance(part, bytes):
            raise StateError(
                f"this is not what state_dict() returned for {self._part}; for a checkpoint of another grid of ranks, "
                "load compression.resharded(replicas=) in its place"
            )
        self._saved.load(torch.load(io.BytesIO(part), map_location="cpu", weights_only=True), residuals)

    # ---- residuals that can be divided anew ----

    def _kinds(self) -> dict[str, list[str]]:
        """Return what is kept for elements, with the names of the tensors; the same on all ranks, in the same order.

        A tensor may be small enough on one rank to go uncompressed, and on another not: so it is what its method keeps,
        whatever its bucket's does here.
        """
        reducer = self._session.reducer
        found: dict[str, list[str]] = {}
        separate = {*self._session.steps.may_hold()}  # what waits there is left out of coded rounds, unlike a residual
        buckets = {tensor.name: bucket for bucket in reducer.plan.buckets for tensor in bucket.tensors}
        for name in self._parameters:
            codec = self._session.methods.codec(name)
            kinds = codec.layout(replace(buckets[name], plain=False), reducer.world).state
            for kind in kinds if _RESIDUAL in kinds and name not in separate else [*kinds, _WAITING]:
                found.setdefault(kind, []).append(name)
        return found

    def _residuals(self, state: Mapping[str, Any]) -> dict[str, dict[str, DTensor]]:
        """Return what this rank keeps for elements, by kind and tensor, as its part of what all ranks keep."""
        divisors, waiting = self._session.steps.divisors(), state.get(_WAITING, {})
        found: dict[str, dict[str, DTensor]] = {}
        kinds = self._kinds()
        separate = {*kinds.get(_WAITING, ())}
        for kind, names in kinds.items():
            for name in names:
                kept = waiting.get(name) if kind == _WAITING else state["state"].get(kind, {}).get(name)
                part = self._zeros(name) if kept is None else kept
                if kind != _WAITING and name in divisors:
                    part = part * divisors[name]
                if kind == _RESIDUAL and name in waiting and name not in separate:
                    part = part + waiting[name]
                found.setdefault(kind, {})[name] = self._divided(
                    name, part.to(self._zeros(name).dtype).view(1, part.numel()), self._mesh.shape[0], Shard(0)
                )
        return found

    def _moments(self, held: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, DTensor]]:
        """Return the second moments of all shards, equal on replicas; zeros without ``held``, to be filled.

        A shard that goes uncompressed has its optimizer's own, as others of the same tensor may be held.
        """
        own = {} if held is None else self._session.steps.own_moments(held)
        own |= {name: saved["moment"] for name, saved in (held or {}).items()}
        found: dict[str, DTensor] = {}
        for name in self._session.steps.may_hold():
            parameter, zeros = self._parameters[name], self._zeros(name)
            mine = own.get(name, zeros).to(zeros.device, zeros.dtype, copy=True).view(parameter.to_local().shape)
            stride = torch.empty(parameter.shape, device="meta").stride()
            placements = [Replicate(), Shard(_dimension_of(parameter))]
            found[name] = DTensor.from_local(
                mine, self._mesh, placements, run_check=False, shape=parameter.shape, stride=stride
            )
        return {_MOMENT: found} if found else {}

    def _handed_over(self, moments: Mapping[str, DTensor], numbers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the second moments to hold here from now on, of those that were held when they were saved."""
        divides = self._session.steps.divides()
        return {
            name: numbers[name] | {"divides": divides[name] == "before", "moment": moment.to_local().contiguous()}
            for name, moment in moments.items()
            if name in numbers and divides[name] != "never"
        }

    def _zeros(self, name: str) -> Tensor:
        mine = self._parameters[name].to_local()
        return torch.zeros(mine.numel(), dtype=torch.promote_types(mine.dtype, torch.float32), device=mine.device)

    def _divided(self, name: str, mine: Tensor, replicas: int, along: Placement) -> DTensor:
        """Return this rank's part of what is kept for a parameter on so many replicas.

        Args:
            mine: with replicas as the first dimension.
            along: how these are divided.
        """
        parameter = self._parameters[name]
        shape = torch.Size([replicas, *parameter.shape])
        stride = torch.empty(shape, device="meta").stride()
        placements = [along, Shard(_dimension_of(parameter) + 1)]
        mine = mine.view(len(mine), *parameter.to_local().shape)
        return DTensor.from_local(mine, self._mesh, placements, run_check=False, shape=shape, stride=stride)

    def empty(self, replicas: int) -> dict[str, Any]:
        """Return what is to be filled from a checkpoint of so many replicas, with whatever number of shards."""
        found: dict[str, dict[str, DTensor]] = {}
        for kind, names in self._kinds().items():
            for name in names:
                mine = self._zeros(name)
                mine = mine.new_zeros(replicas, mine.numel())
                found.setdefault(kind, {})[name] = self._divided(name, mine, replicas, Replicate())
        return {_of(replicas): found, **self._moments(), _ABOUT: ""}

    def fill(self, state: Mapping[str, Any], replicas: int) -> None:
        """Take what waits on all replicas of the checkpoint that :meth:`empty` was filled from.

        Every replica gets the mean of it, as a step applies the mean; what a rank keeps as an owner is added up, and
        replica 0 has it.

        Raises:
            StateError: the checkpoint is of another method or seed, or has something that nothing here waits as, or
                has no compression.
        """
        mine, owned = self._saved.state(), self._session.methods.folded()
        about = _checked(state[_ABOUT], mine)
        kept: dict[str, dict[str, Tensor]] = {}
        waiting: dict[str, Tensor] = {}
        filled: set[str] = set()
        held = self._handed_over(state.get(_MOMENT, {}), about.get(_MOMENT, {}))
        divisors = {name: HeldMoment(**saved).divisor for name, saved in held.items()}
        for kind, tensors in state[_of(replicas)].items():
            for name, tensor in tensors.items():
                of_all = tensor.to_local().double()
                dealt = of_all.sum(0) * (not self._session.reducer.rank) if kind in owned else of_all.mean(0)
                part = dealt.view(-1).to(tensor.dtype)
                here = name in mine["state"].get(kind, {})
                if kind == _WAITING or (kind == _RESIDUAL and not here):  # uncompressed here: the next round sends it
                    waiting |= {name: waiting[name] + part if name in waiting else part} if bool(part.any()) else {}
                elif here:
                    if (divisor := divisors.get(name)) is not None:
                        part = part / divisor
                    filled |= {name} if bool(of_all.any()) else set()
                    kept.setdefault(kind, {})[name] = rounded(
                        part, mine["state"][kind][name].dtype, self._session.reducer.rank
                    )
                elif bool(part.any()):
                    raise StateError(
                        f"the checkpoint has a {kind} of {name}, which is exchanged uncompressed here: give the "
                        "compression the same schedule= and min_elements=, or begin without what waits"
                    )
        gone = {checksums.KEY, _MOMENT, _NORMS, "added_to", _WAITING, *_COMMON} - {*_FIXED}
        rest = {name: part for name, part in mine.items() if name not in gone}
        rest |= ({_WAITING: waiting} if waiting else {}) | ({_MOMENT: held} if held else {})
        # Of another shard, but else a spike that waits would pass for usual. An exact round that sends what waits is
        # not the exact mean.
        norms = _norms_of_a_shard(about, self._mesh.shape[1]) | ({"wait": sorted(filled)} if filled else {})
        rest |= {_NORMS: norms} if norms else {}
        more = {name: about[name] for name in _COMMON if name in about and name not in _FIXED}
        dealt = checksums.sealed(rest | more | {"state": kept, "carries": {}})
        self._saved.load(dealt, "restore")
        if self._session.reducer.rank == 0 and replicas != self._session.reducer.world:
            tell_dealt(replicas, self._session.reducer.world, dealt)


class Resharded:
    """Stands for a compression in ``torch.distributed.checkpoint.load()``, for a checkpoint of another grid of ranks.

    Args:
        replicas: how many there were when it was saved.
    """

    def __init__(self, sharded: Sharded, replicas: int) -> None:
        self._sharded, self._replicas = sharded, replicas

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be filled from the checkpoint."""
        return self._sharded.empty(self._replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let what waits be dealt out to the ranks that there are now.

        Raises:
            StateError: the checkpoint is of another method or seed.
        """
        self._sharded.fill(state, self._replicas)


def _checked(text: str, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint says of itself, if it fits.

    Raises:
        StateError: it does not.
    """
    if not text:  # as torch leaves what a checkpoint lacks with allow_partial_load=True
        raise StateError(
            "the checkpoint has no compression under the key that it was loaded from: load it as it was saved, or "
            "leave the compression out, to begin without what waits"
        )
    about: dict[str, Any] = json.loads(text)
    for name in _FIXED:
        if about.get(name) != json.loads(json.dumps(mine.get(name))):
            raise StateError(
                f"the checkpoint has a different {name}: expected {mine.get(name)!r}, got {about.get(name)!r}; "
                "resume with the same options"
            )
    return about


def _norms_of_a_shard(about: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """Return the norms that a checkpoint has, as those of one of so many shards; empty where it has none."""
    ratio = Ratio()
    ratio.load(about.get(_NORMS, {}))
    if (before := about.get(_SHARDS, shards)) != shards:
        ratio.rescale(math.sqrt(before / shards))
        ratio.usual.code = 0  # names buckets of other shards
    return ratio.state()


def _of(replicas: int) -> str:
    """Return the key of residuals, which torch names where the checkpoint has those of another number of replicas."""
    return f"residuals of {replicas} replicas"


def _dimension_of(parameter: DTensor) -> int:
    """Return the dimension along which a parameter is divided."""
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    return placement.dim
