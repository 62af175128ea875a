"""What a rank saves to resume with the same bits: its step and what its method keeps.

Optimizer state does not carry that. Residuals and the like are saved per parameter, by name, so that
they survive another choice of buckets; tables that stand for a whole bucket do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...codecs.base import variants_of
from ...codecs.work import work_dtype
from ...errors import ConfigError, CorruptFrameError, StateError, some_of
from ...schedule.plan import Plan
from .. import ratio
from ..bucket import withheld
from ..methods import Methods
from ..reducer import Reducer
from . import checksums

FORMAT = 3
_IDLE_SECONDS = 5.0


def save(reducer: Reducer, methods: Methods, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return this rank's state, with its checksums; every rank saves its own.

    Args:
        more: what others keep beside it: plain data and tensors.

    Raises:
        ConfigError: a step is under way.
    """
    between_steps(reducer, "saved")
    return copied(reducer, methods, more or {})


def copied(
    reducer: Reducer, methods: Methods, more: Mapping[str, Any], copy: Callable[[Tensor], Tensor] = torch.clone
) -> dict[str, Any]:
    """Return what :func:`save` does, where nothing is under way; nothing is refused here."""
    parts = reducer.kept
    kept = {
        "format": FORMAT,
        "method": methods.name,
        "config": methods.config(),
        "seed": reducer.options.seed,
        "step": reducer.step,
        "world": reducer.world,
        "rank": reducer.rank,
        "plan": reducer.plan.fingerprint(),
        "buckets": reducer.plan.document(),
        "state": {kind: _copies(kept, copy) for kind, kept in parts.whole().items()},
        "tables": _copies(parts.tables(), copy),
        "carries": _copies(parts.carries(), copy),
    }
    if parts.hosts:
        kept["hosts"] = parts.hosts
    if waiting := parts.withholding.waiting():
        kept["waiting"] = waiting
    if parts.summed:  # which another number of ranks has to know
        kept["summed"] = True
    return checksums.sealed(kept | dict(more))


def check(
    reducer: Reducer,
    methods: Methods,
    state: Mapping[str, Any],
    residuals: str,
    go_on: Callable[[Plan], Plan] | None = None,
) -> None:
    """Refuse a state that :func:`restore` could not restore; nothing is changed.

    Args:
        go_on: checks the saved buckets and returns those that the job would go on with; None for those in use.

    Raises:
        ConfigError: there is a step under way, or no such way to treat residuals.
        StateError: the state is malformed, or not of this method, rank, number of ranks, model or plan.
        CorruptFrameError: it is not what was saved, by its checksums.
    """
    parts = reducer.kept
    if residuals not in ("restore", "reset"):
        raise ConfigError(f'residuals should be "restore" or "reset", got {residuals!r}')
    _check_form(state)
    between_steps(reducer, "loaded")
    _expect("method", methods.name, state.get("method"), "resume with the method it was saved with")
    _check_options(methods, state.get("config"))
    _expect("seed", reducer.options.seed, state.get("seed"), "resume with the same seed")
    step = state.get("step")
    if type(step) is not int or not 0 <= step < 1 << 32:
        raise StateError(f"the saved step should be a whole number from 0 to {(1 << 32) - 1}, got {step!r}")
    if residuals == "restore":
        again = 'load it on the rank it was saved on, or pass residuals="reset"'
        _expect("number of ranks", reducer.world, state.get("world"), again)
        _expect("rank", reducer.rank, state.get("rank"), again)
        _check_hosts(parts.hosts, state.get("hosts"))
        of_model = _same_or_reset(reducer.plan, state)
        _check_kept(parts.whole(), state["state"], of_model)
        _check_waiting(parts.shares(reducer.plan), state.get("waiting", {}), of_model)
    _check_more(state)
    plan = reducer.plan
    if go_on:
        checksums.check(state)  # before anything is said about buckets that may be corrupt
        plan = go_on(saved_plan(state))
    if residuals == "restore":
        _check_tables(reducer, plan, methods, state)
        _check_codes(reducer, plan, methods, state)
    if not go_on:
        checksums.check(state)


def _check_options(methods: Methods, saved: object) -> None:
    """Refuse a state of other options, and name only those that differ."""
    mine = methods.config()
    if isinstance(saved, Mapping):
        both = mine, saved
        names = mine.keys() | saved.keys()
        other = {name for name in names if not _are_alike(*([each.get(name), name in each] for each in both))}
        mine, saved = ({name: value for name, value in each.items() if name in other} for each in both)
    _expect("configuration", mine, saved, "resume with the same options")


def _same_or_reset(plan: Plan, state: Mapping[str, Any]) -> str:
    """Return what to do where residuals are of other tensors: with "reset", a saved second moment has to fit too."""
    moments, again = state.get("second_moment"), "resume with the same model and min_elements="
    fits = {*moments} <= {*plan.names()} if isinstance(moments, Mapping) else True
    return f'{again}, or pass residuals="reset"' if fits else again


def _check_hosts(mine: list[int] | None, saved: object) -> None:
    """Refuse what waits for shares of hosts, where a rank now has other shares, or whole tensors."""
    again = 'resume with the same exchange= and the same ranks on each host, or pass residuals="reset"'
    _expect(
        'hosts for exchange="hierarchical", in number, with this one\'s number and the place on it,', mine, saved, again
    )


def _check_waiting(plan: Plan, waiting: Mapping[str, Tensor], again: str) -> None:
    """Refuse what is to wait for elements that are not there, or would corrupt later steps."""
    tensors = {t.name: (bucket, t.count) for bucket in plan.buckets for t in bucket.tensors}
    if unknown := sorted({*waiting} - {*tensors}):
        raise StateError(
            f"in the saved state, gradients wait for {some_of(unknown)}, which this job does not have; {again}"
        )
    like = {n: torch.empty(tensors[n][1], dtype=work_dtype(tensors[n][0]), device="meta") for n in waiting}
    _check_kept({"waiting": like}, {"waiting": waiting})


def _check_tables(reducer: Reducer, plan: Plan, methods: Methods, state: Mapping[str, Any]) -> None:
    """Refuse tables that are not of these buckets; sizes are those of this rank's shares, where ranks share hosts."""
    parts, tables = reducer.kept, {}
    for bucket in parts.shares(plan).buckets:
        regions = {} if bucket.plain else methods.codecs[bucket.method].layout(bucket, parts.ranks).tables
        for name, (dtype, count) in regions.items():
            tables[f"{bucket.index} {name}"] = torch.empty(count, dtype=dtype, device="meta")
    if tables:
        again = 'resume with the same buckets, or pass residuals="reset"'
        _expect("plan", plan.fingerprint(), state.get("plan"), again)
    _check_kept({"table": tables}, {"table": state["tables"]})


def _check_codes(reducer: Reducer, plan: Plan, methods: Methods, state: Mapping[str, Any]) -> None:
    """Refuse codes whose scales would corrupt later steps."""
    parts, saved = reducer.kept, state["carries"]
    own = parts.carries()
    carries = [n for n in own.keys() & saved.keys() if checksums.kind_of(own[n]) == checksums.kind_of(saved[n])]
    for bucket in (bucket for bucket in parts.shares(plan).buckets if not bucket.plain):
        for codec in variants_of(methods.codecs[bucket.method]):
            moves = codec.properties().moves_tables
            if moves is None or moves.spoilt is None:
                continue
            tables = codec.layout(bucket, parts.ranks).tables
            kept = {name: state["tables"][name] for name in (f"{bucket.index} {table}" for table in tables)}
            kept |= {name: saved[name] for name in carries if name.startswith(f"{bucket.index} {codec.name} ")}
            for name, codes in kept.items():
                _refuse_spoilt(moves.spoilt(codes, withheld.MOST), "scale", f"codes of {name}")


def check_exchanged(exchanged: str, state: Mapping[str, Any]) -> None:
    """Refuse what waits of gradients where updates are exchanged, and the other way round: these have other units.

    Raises:
        StateError: says what the state is of.
    """
    again = (
        "resume in the mode it was saved in (for update mode, load it after DistributedUpdateOptimizer is created), "
        'or pass residuals="reset"'
    )
    _expect("mode", exchanged, state.get("exchanged"), again)


def check_shard(mine: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse the state of another part of a model than this rank has.

    Raises:
        StateError: says which part it is of.
    """
    whole = [0, 1]
    here, saved = (part.get("shard", whole) if isinstance(part, Mapping) else whole for part in (mine, state))
    if here != saved:
        raise StateError(
            f"the saved state is of shard {saved!r:.50} (number, and of how many), and this rank has shard {here}: "
            "resume with as many shards, or save with torch.distributed.checkpoint, which divides anew"
        )


def _check_form(state: object) -> None:
    """Refuse what does not have the parts of a state, or has others in them."""
    if not isinstance(state, Mapping) or "format" not in state:
        raise StateError(
            f"a compression state is what its state_dict() returned, got {type(state).__name__} without a format"
        )
    checksums.outline(state)
    if type(state["format"]) is not int or state["format"] != FORMAT:
        _expect("format", FORMAT, state["format"], "save it again with this version")
    if checksums.KEY not in state:
        raise CorruptFrameError(
            "the saved compression state is corrupt: it has no checksums; load another copy, or an earlier state"
        )
    for part in ("state", "tables", "carries", "waiting"):
        kept = state.get(part, {} if part == "waiting" else None)  # which is there only if there is something
        if not isinstance(kept, Mapping) or not all(map(_is_kept, kept.values() if part == "state" else [kept])):
            raise StateError(
                f"the saved compression state should have a mapping {part!r} of tensors, got {kept!r:.100}; save it "
                f"again"
            )


def _is_kept(tensors: object) -> bool:
    return isinstance(tensors, Mapping) and all(isinstance(tensor, Tensor) for tensor in tensors.values())


def _check_more(state: Mapping[str, Any]) -> None:
    """Refuse malformed values of what not every state has."""
    wrong = {
        "tuned": type(state.get("tuned", False)) is not bool,
        "due": type(state.get("due", False)) is not bool,
        "summed": type(state.get("summed", False)) is not bool,
        "scale": not checksums.is_number(state.get("scale", 0.0)),
        **{name: not _are_rates(state.get(name, [])) for name in ("rates", "rates_seen", "last_rates")},
        "second_moment": not isinstance(state.get("second_moment", {}), Mapping),
        "norms": not ratio.check_state(state.get("norms", {})),
        "added_to": not _are_flags(state.get("added_to", {})),
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise StateError(f"the saved compression state has {state[name]!r:.100} for {name!r}; save it again")
    if "buckets" in state:
        saved_plan(state)


def _are_flags(saved: object) -> bool:
    """Return whether these are lists of flags, by name."""
    each = saved.items() if isinstance(saved, Mapping) else [(None, None)]
    return all(isinstance(name, str) and checksums.is_list(found, lambda f: type(f) is bool) for name, found in each)


def _are_rates(saved: object) -> bool:
    """Return whether these are learning rates by group or, of several optimizers, by parameter."""
    if isinstance(saved, Mapping):
        return all(isinstance(name, str) for name in saved) and all(map(checksums.is_number, saved.values()))
    return checksums.is_list(saved, checksums.is_number)


def load(reducer: Reducer, methods: Methods, state: Mapping[str, Any], residuals: str) -> None:
    """Restore what :func:`save` returned, whole or not at all.

    Args:
        residuals: "restore", or "reset" to continue with empty residuals, for example after a change of
            the number of ranks.

    Raises:
        ConfigError, CorruptFrameError: see :func:`check`.
    """
    check(reducer, methods, state, residuals)
    restore(reducer, state, residuals)


def restore(reducer: Reducer, state: Mapping[str, Any], residuals: str) -> None:
    """Restore a state that :func:`check` has found good."""
    parts = reducer.kept
    parts.put(None if residuals == "reset" else state["state"])
    for name, table in parts.tables().items():
        table.zero_() if residuals == "reset" else table.copy_(state["tables"][name])
    # What merging keeps belongs to places of the payload: with any other it begins with zeros.
    same = residuals == "restore" and state.get("plan") == reducer.plan.fingerprint()
    carries = state["carries"] if same else {}
    for name, tensor in parts.carries().items():
        if name in carries and checksums.kind_of(carries[name]) == checksums.kind_of(tensor):
            tensor.copy_(carries[name])
        else:
            tensor.zero_()
    parts.withholding.load(state.get("waiting", {}) if residuals == "restore" else {})
    reducer.resume(state["step"])
    if parts.summed is None:
        parts.summed = bool(state.get("summed"))


def saved_plan(state: Mapping[str, Any]) -> Plan:
    """Return the buckets that were in use.

    Raises:
        ConfigError: the state does not say, or is malformed there.
    """
    if not isinstance(state.get("buckets"), list):
        raise StateError(
            "the saved compression state does not say which buckets were in use; save it again with this version"
        )
    try:
        return Plan.from_document(state["buckets"])
    except ConfigError as error:
        raise StateError(f"the saved compression state has malformed buckets: {error}") from None


def _copies(tensors: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: copy(tensor) for name, tensor in tensors.items()}


def _check_kept(
    kept: Mapping[str, Mapping[str, Tensor]],
    saved: Mapping[str, Mapping[str, Tensor]],
    again: str = 'pass residuals="reset"',
) -> None:
    for kind in sorted({*kept, *saved}):
        mine, theirs = kept.get(kind, {}), saved.get(kind, {})
        both = [name for name in mine if name in theirs]
        for name in both:
            want, got = checksums.kind_of(mine[name]), checksums.kind_of(theirs[name])
            _expect(f"{kind} of {name}", want, got, "resume with the same model")
        if len(both) < len(mine) or len(both) < len(theirs):
            only_saved, only_here = (
                some_of(map(repr, sorted({*x} - {*y}))) for x, y in ((theirs, mine), (mine, theirs))
            )
            raise StateError(
                f"the saved compression state has a different list of what has a {kind}: only the state has one "
                f"of {only_saved or 'nothing'}, only this job one of {only_here or 'nothing'}; {again}"
            )
        for name in both:
            _refuse_spoilt(withheld.count(theirs[name]), "value", f"{kind} of {name}")


def _refuse_spoilt(number: int, what: str, where: str) -> None:
    if number:
        raise StateError(
            f"the saved compression state has {number} {what}(s) in the {where} that are not finite or not below "
            f"{withheld.MOST:.1e}, which would corrupt every later step; load an earlier state, or pass "
            'residuals="reset"'
        )


def between_steps(reducer: Reducer, verb: str) -> None:
    """Wait until nothing is under way, or raise a ConfigError."""
    if not reducer.wait_idle(_IDLE_SECONDS):
        raise ConfigError(
            f"rank {reducer.rank}: the compression state can be {verb} between steps only; call the "
            f"optimizer's step() or synchronize() first"
        )


def _are_alike(one: object, other: object) -> bool:
    outlines = (checksums.outline({"": value}) for value in (one, other))
    return len({*map(checksums.canonical, outlines)}) == 1


def _expect(what: str, want: object, got: object, advice: str) -> None:
    if not _are_alike(want, got):
        raise StateError(
            f"the saved compression state has a different {what}: expected {want!r}, got {got!r}; {advice}"
        )
