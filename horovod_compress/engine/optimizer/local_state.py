"""What is saved of update mode beside its counters: fragments, the exchange under way, and the outer optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...errors import StateError
from ..reducer import Reducer
from ..saved import checksums
from . import update_moment
from .fragments import Fragment
from .updates import InFlight, UpdateExchange

_log = logging.getLogger("horovod_compress")


def of(
    fragments: Sequence[Fragment],
    pending: InFlight | None,
    exchange: UpdateExchange,
    since: int,
    rhythm: Mapping[str, int],
) -> dict[str, Any]:
    """Return what an exchange of all weights, applied at once, has nothing of.

    Args:
        pending: its results are there.
        since: local steps of the cycle under way.
        rhythm: when exchanges begin and end.
    """
    found: dict[str, Any] = {}
    if len(fragments) > 1 or pending or fragments[0].strayed != (since > 0):
        found["fragments"] = [[fragment.since, fragment.strayed] for fragment in fragments]
    if pending:
        found["pending"] = {"rhythm": dict(rhythm)} | _saved(pending, exchange)
    if mixed := exchange.mixed():
        found["mixed"] = mixed
    if exchange.outer:
        found["outer"] = exchange.outer.state_dict()
    return found


def _saved(pending: InFlight, exchange: UpdateExchange) -> dict[str, Any]:
    names = exchange.reducer.plan.names()
    return {
        "names": [names[index] for index in pending.indices],
        "resting": [names[index] for index in sorted(pending.resting)],
        "bad": [names[index] for index in pending.bad],
        "age": pending.age,
        "results": [exchange.result(index).clone() for index in pending.indices],
        "weights": [pending.weights[index].clone() for index in pending.indices],
        "sent": [{n: mask.clone() for n, mask in pending.sent.get(index, {}).items()} for index in pending.indices],
    }


def check_form(state: object) -> None:
    """Refuse what is not the state of an update-mode optimizer.

    Raises:
        StateError: it is malformed.
        CorruptFrameError: it is not what was saved, by its checksums.
    """
    update_moment.check_form(state)
    assert isinstance(state, Mapping)
    pending = state.get("pending", {})
    fits = isinstance(pending, Mapping) and (not pending or _is_pending(pending))
    names = checksums.is_list(state.get("mixed", []), lambda name: isinstance(name, str))
    if not checksums.is_list(state.get("fragments", []), _is_fragment) or not fits or not names:
        raise StateError(
            f"the saved state of an update-mode optimizer should have its fragments and what is pending, got "
            f"{state.get('fragments')!r:.100}; load what its state_dict() returned"
        )


def _is_fragment(one: Any) -> bool:
    return type(one) in (list, tuple) and len(one) == 2 and type(one[0]) is int and type(one[1]) is bool


def _is_pending(saved: Mapping[str, Any]) -> bool:
    lists = [saved.get(kind) for kind in ("names", "results", "weights", "sent")]
    known = saved.get("names") or []
    return (
        all(isinstance(one, list) and len(one) == len(known) for one in lists)
        and all(isinstance(saved.get(kind), list) and set(saved[kind]) <= set(known) for kind in ("resting", "bad"))
        and type(saved.get("age")) is int
        and isinstance(saved.get("rhythm"), Mapping)
        and all(isinstance(masks, Mapping) for masks in saved["sent"])
    )


def has_strayed(state: Mapping[str, Any]) -> bool:
    """Return whether the weights had left the common ones, which were saved then."""
    fragments = state.get("fragments")
    return any(strayed for _, strayed in fragments) if fragments else state["since"] > 0


def check_fits(
    state: Mapping[str, Any], fragments: Sequence[Fragment], rhythm: Mapping[str, int], exchange: UpdateExchange
) -> None:
    """Refuse a state of other options.

    Raises:
        StateError: says what was expected.
    """
    saved = len(state.get("fragments", [])) or len(fragments)
    pending = state.get("pending", {"rhythm": rhythm, "names": [], "results": [], "weights": []})
    if saved != len(fragments) or pending["rhythm"] != rhythm:
        theirs = (
            f"an exchange under way with {_in_words(pending['rhythm'])}" if "pending" in state else "none under way"
        )
        raise StateError(
            f"the saved optimizer had {saved} fragment(s) and {theirs}; expected {len(fragments)} and "
            f"{_in_words(rhythm)}: resume with the same options, or call flush() before you save"
        )
    index, shapes = _numbers(exchange), [base.shape for base in exchange.base]
    for name, result, weights in zip(pending["names"], pending["results"], pending["weights"], strict=True):
        if name not in index or not shapes[index[name]] == result.shape == weights.shape:
            raise StateError(f"the saved optimizer exchanged {name}, which has another shape here; use the same model")
    if (exchange.outer is None) != ("outer" not in state):
        given = "an outer optimizer" if "outer" in state else "no outer optimizer"
        raise StateError(f"the saved optimizer had {given}; resume with the same outer_optimizer=")
    if exchange.outer:
        exchange.outer.check(state["outer"])


def _in_words(rhythm: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={number}" for name, number in rhythm.items())


def load(state: Mapping[str, Any], fragments: Sequence[Fragment], exchange: UpdateExchange) -> InFlight | None:
    """Restore what :func:`of` returned, once the common weights are; return the exchange that is pending."""
    for fragment in fragments:
        fragment.since, fragment.strayed = state["since"], state["since"] > 0
    for fragment, (since, strayed) in zip(fragments, state.get("fragments", ()), strict=False):
        fragment.since, fragment.strayed = since, strayed
    if exchange.outer:
        exchange.outer.load_state_dict(state["outer"])
    if (saved := state.get("pending")) is None:
        return None
    number = _numbers(exchange)

    def of_names(kind: str) -> Iterator[int]:
        return (number[name] for name in saved[kind])

    indices = list(of_names("names"))
    pending = InFlight(indices, set(of_names("resting")), None, saved["age"], list(of_names("bad")))
    for place, index in enumerate(indices):
        exchange.result(index).copy_(saved["results"][place])
        pending.weights[index] = _like(exchange, index, saved["weights"][place])
        pending.sent[index] = {n: _like(exchange, index, mask) for n, mask in saved["sent"][place].items()}
    return pending


def _numbers(exchange: UpdateExchange) -> dict[str, int]:
    return {name: index for index, name in enumerate(exchange.reducer.plan.names())}


def _like(exchange: UpdateExchange, index: int, saved: Tensor) -> Tensor:
    """Return a copy where the parameter is."""
    return saved.to(exchange.base[index].device, copy=True)


def tell_of_lost(reducer: Reducer, exchanges: int) -> None:
    """Warn of an optimizer that goes on from a saved state while its compression begins.

    Args:
        exchanges: those that the optimizer has behind it.
    """
    kept = reducer.kept
    if exchanges and not reducer.step and (any(kept.states().values()) or kept.tables()):
        _log.warning(
            "rank %d: the optimizer's state was loaded, with %d exchange(s) behind it, and that of its compression was "
            "not: what these exchanges kept for later ones, the residuals, is lost. Save compression.state_dict() too, "
            "and load it on every rank",
            *(reducer.rank, exchanges),
        )
