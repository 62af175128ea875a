"""What a rank saves to resume with the same bits: its step and what its method keeps.

Optimizer state does not carry that. Residuals and the like are saved per parameter, by name, so that
they survive another choice of buckets; tables that stand for a whole bucket do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from ..schedule.plan import Plan
from . import spoilt
from .methods import Methods
from .reducer import Reducer

FORMAT = 2
#: Options that states of earlier versions do not know, and what these did.
_LATER = {"merge": "sampled", "step_scale": 1.0, "levels": 2}
_IDLE_SECONDS = 5.0


def save(reducer: Reducer, methods: Methods) -> dict[str, Any]:
    """Return this rank's state; every rank saves its own.

    Raises:
        ConfigError: a step is under way.
    """
    _between_steps(reducer, "saved")
    return {
        "format": FORMAT,
        "method": methods.name,
        "config": methods.config(),
        "seed": reducer.options.seed,
        "step": reducer.step,
        "world": reducer.world,
        "rank": reducer.rank,
        "plan": reducer.plan.fingerprint(),
        "buckets": reducer.plan.document(),
        "state": {kind: _copies(kept) for kind, kept in reducer.states().items()},
        "tables": _copies(reducer.tables()),
        "carries": _copies(reducer.carries()),
    }


def check(reducer: Reducer, methods: Methods, state: Mapping[str, Any], residuals: str) -> None:
    """Refuse a state that :func:`load` could not restore, whatever the buckets.

    Raises:
        ConfigError: the state is not of this method, rank, number of ranks or model.
    """
    if residuals not in ("restore", "reset"):
        raise ConfigError(f'residuals should be "restore" or "reset", got {residuals!r}')
    _check_form(state)
    _between_steps(reducer, "loaded")
    _expect("format", FORMAT, state.get("format"), "save it again with this version")
    _expect("method", methods.name, state.get("method"), "resume with the method it was saved with")
    saved = state.get("config")
    _expect("configuration", _known(methods.config(), saved), saved, "resume with the same options")
    _expect("seed", reducer.options.seed, state.get("seed"), "resume with the same seed")
    step = state.get("step")
    if not isinstance(step, int) or not 0 <= step < 1 << 32:
        raise ConfigError(f"the saved step should be a whole number from 0 to {(1 << 32) - 1}, got {step!r}")
    if residuals == "restore":
        again = 'load it on the rank it was saved on, or pass residuals="reset"'
        _expect("number of ranks", reducer.world, state.get("world"), again)
        _expect("rank", reducer.rank, state.get("rank"), again)
        _check_kept(reducer.states(), state["state"])


def _check_form(state: object) -> None:
    if not isinstance(state, Mapping) or "format" not in state:
        raise ConfigError(
            f"a compression state is what its state_dict() returned, got {type(state).__name__} without a format"
        )
    for part in ("state", "tables"):
        if state["format"] == FORMAT and not isinstance(state.get(part), Mapping):
            raise ConfigError(
                f"the saved compression state should have a mapping {part!r}, got {state.get(part)!r:.100}; "
                "save it again"
            )


def load(reducer: Reducer, methods: Methods, state: Mapping[str, Any], residuals: str) -> None:
    """Restore what :func:`save` returned.

    Args:
        residuals: "restore", or "reset" to continue with empty residuals, for example after a change of
            the number of ranks.

    Raises:
        ConfigError: the state is not of this method, rank, number of ranks, model or plan.
    """
    check(reducer, methods, state, residuals)
    kept = {**reducer.states(), "table": reducer.tables()}
    if residuals == "restore":
        if reducer.tables():
            _expect("plan", reducer.plan.fingerprint(), state.get("plan"), 'or pass residuals="reset"')
        _check_kept({"table": reducer.tables()}, {"table": state["tables"]})
        saved = {**state["state"], "table": state["tables"]}
    for kind, tensors in kept.items():
        for name, tensor in tensors.items():
            if residuals == "reset":
                tensor.zero_()
            else:
                tensor.copy_(saved[kind][name])
    _load_carries(reducer, state if residuals == "restore" else {})
    reducer.resume(state["step"])


def _load_carries(reducer: Reducer, state: Mapping[str, Any]) -> None:
    """Restore what merging keeps, which belongs to places of the payload: with any other it begins with zeros."""
    same = state.get("plan") == reducer.plan.fingerprint()
    saved = state.get("carries", {}) if same else {}  # earlier versions saved none
    for name, kept in reducer.carries().items():
        if name in saved and _kind(saved[name]) == _kind(kept):
            kept.copy_(saved[name])
        else:
            kept.zero_()


def _known(config: dict[str, Any], saved: object) -> dict[str, Any]:
    """Return options as a state of an earlier version has them: without those that came later."""
    if not isinstance(saved, Mapping):
        return config
    known = {name: v for name, v in config.items() if name in saved or name not in _LATER or v != _LATER[name]}
    return {name: _known_in_words(value, saved.get(name)) for name, value in known.items()}


def _known_in_words(value: Any, saved: object) -> Any:
    """Do so where a method and its options are one text, as in `per_layer` and `by_step`."""
    if not isinstance(value, str) or not isinstance(saved, str):
        return value
    if "levels=" not in saved:
        value = value.replace(" levels=2", "")
    return value if "merge=" in saved else value.replace(" merge='sampled' step_scale=1.0", "")


def saved_plan(state: Mapping[str, Any]) -> Plan:
    """Return the buckets that were in use.

    Raises:
        ConfigError: the state does not say.
    """
    if not isinstance(state.get("buckets"), list):
        raise ConfigError(
            "the saved compression state does not say which buckets were in use; save it again with this version"
        )
    return Plan.from_document(state["buckets"])


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _check_kept(kept: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    for kind in sorted({*kept, *saved}):
        _check_alike(kind, kept.get(kind, {}), saved.get(kind, {}))


def _check_alike(kind: str, kept: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    different = sorted(set(kept) ^ set(saved))[:5]
    _expect(f"list of what has a {kind}", [], different, 'or pass residuals="reset"')
    for name, tensor in kept.items():
        _expect(f"{kind} of {name}", _kind(tensor), _kind(saved[name]), "resume with the same model")
        if number := spoilt.count(saved[name]):
            raise ConfigError(
                f"the saved compression state has {number} value(s) in the {kind} of {name} that are not finite or not "
                f"below {spoilt.MOST:.1e}, which would corrupt every later step; load an earlier state, or pass "
                f'residuals="reset"'
            )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _between_steps(reducer: Reducer, verb: str) -> None:
    if not reducer.wait_idle(_IDLE_SECONDS):
        raise ConfigError(
            f"rank {reducer.rank}: the compression state can be {verb} between steps only; call the "
            f"optimizer's step() or synchronize() first"
        )


def _expect(what: str, want: object, got: object, advice: str) -> None:
    if want != got:
        raise ConfigError(f"the saved compression state has another {what}: expected {want!r}, got {got!r}; {advice}")
