"""The options that all methods share, and what is refused of any options without torch."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from .errors import ConfigError
from .known import OPTIONS
from .schedule.plan import Plan

EXCHANGES = ("auto", "ring", "fold", "torus", "hierarchical")
Transport = Literal["auto", "gloo", "nccl", "local"]
NonFinite = Literal["propagate", "raise", "zero"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
NONFINITE: tuple[str, ...] = get_args(NonFinite)
#: What ``timeout=None`` stands for: how long an exchange may take once every rank has come to it, and a rank may give
#: no sign of life; and for how long one that is alive may keep the others waiting before it.
FLOW_SECONDS, BUSY_SECONDS = 30.0, 600.0
#: The shortest timeout. With less, ranks miss each other by chance.
SHORTEST_SECONDS = 0.1
#: The longest timeout. Gloo counts in integers, which a few hundred years overflow.
LONGEST_SECONDS = 1e6


@dataclass(frozen=True)
class Options:
    """The options of all methods.

    Args:
        schedule: how tensors are fused into buckets. "auto", "layerfusion" and "mergecomp" measure the job and choose;
            "layerwise", "single", "size:25MB" or a :class:`~horovod_compress.schedule.plan.Plan` are fixed.
        exchange: "ring", "fold", "torus" (rings along rows and columns of ranks; "torus:2" for two rows), or "auto" to
            choose per bucket; methods that gather need "auto". "hierarchical" averages gradients within each host, in
            shared memory and full precision, and exchanges between hosts as "auto" does; residuals are then the hosts'.
        transport: what moves the bytes: "gloo"; "nccl" for gradients on GPUs, with one GPU per rank; "auto" takes NCCL
            in that case if CuPy is installed, else Gloo. With Gloo, payloads on GPUs go through host memory.
        seed: seed of all random bits, from 0 to 2^64 - 1; must be equal on every rank.
        timeout: seconds that one bucket's exchange may take, from its first prelude to the end of its
            payload, including the wait for slower ranks; from 0.1 to 1e6. None for two limits: 30 seconds once every
            rank has come to the exchange, and for a rank that gives no sign of life; 10 minutes for one that is alive
            and busy with something else, such as evaluation.
        nonfinite: what to do with NaN and infinity: "propagate" (the bucket is NaN on every rank, residuals
            stay unchanged), "raise" (NonFiniteError on every rank) or "zero" (such values count as 0;
            values that only overflow in a 16-bit payload are propagated).
        verify_every: number of steps between comparisons of a hash of all results, and of the weights, across ranks;
            the weights are also compared in the first step; 0 for never.
        min_elements: tensors with fewer elements share an uncompressed bucket, one for each dtype and device.
        warmup_steps: number of initial steps that are exchanged uncompressed, in full precision. None for 30, sent as
            bfloat16 instead of float32 (fewer with ``total_steps``), if a method sends one bit per element and the
            optimizer has momentum; else 0.
        total_steps: number of steps of the whole training, if known; then a short training begins with fewer exact
            steps, see :mod:`horovod_compress.engine.optimizer.second_moment`. None for unknown.
        follow_lr: whether to multiply residuals by old / new when a learning rate changes, see
            :mod:`horovod_compress.engine.optimizer.momentum`.
    """

    schedule: str | Plan = "auto"
    exchange: str = "auto"
    transport: Transport = "auto"
    seed: int = 0
    timeout: float | None = None
    nonfinite: NonFinite = "propagate"
    verify_every: int = 100
    min_elements: int = 0
    warmup_steps: int | None = None
    total_steps: int | None = None
    follow_lr: bool = False

    def __post_init__(self) -> None:
        check_exchange(self.exchange)
        _choice("transport", self.transport, TRANSPORTS)
        _choice("nonfinite", self.nonfinite, NONFINITE)
        _whole("seed", self.seed, 0, (1 << 64) - 1)
        _whole("verify_every", self.verify_every, 0, 1 << 31)
        _whole("min_elements", self.min_elements, 0, 1 << 62)
        _whole("warmup_steps", 0 if self.warmup_steps is None else self.warmup_steps, 0, 1 << 31)
        _whole("total_steps", 1 if self.total_steps is None else self.total_steps, 1, 1 << 31)
        if self.timeout is not None:
            _seconds("timeout", self.timeout)
        if not isinstance(self.follow_lr, bool):
            raise ConfigError(f"follow_lr should be True or False, got {self.follow_lr!r}")

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @property
    def flow_seconds(self) -> float:
        """Seconds that an exchange may take once every rank has come, and for which a rank may give no sign of life."""
        return FLOW_SECONDS if self.timeout is None else self.timeout

    @property
    def busy_seconds(self) -> float:
        """Seconds for which a rank that is alive may keep others waiting before an exchange."""
        return BUSY_SECONDS if self.timeout is None else self.timeout

    @property
    def longest_seconds(self) -> float:
        """Seconds after which any wait for other ranks is over."""
        return BUSY_SECONDS + FLOW_SECONDS if self.timeout is None else self.timeout

    def differing(self) -> str:
        """Return those that are not the defaults, in one line."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        return " ".join(f"{name}={value!r}" for name, value in self.document().items() if value != usual[name])

    def document(self) -> dict[str, Any]:
        """Return the options as plain data; the plan is compared on its own."""
        ours = {name: getattr(self, name) for name in self.names()}
        if isinstance(self.schedule, Plan):
            ours["schedule"] = f"plan {self.schedule.fingerprint()}"
        return ours


def plain(value: Any) -> Any:
    """Return a number of NumPy as Python's, as ranks compare options and states hold them; anything else as it is."""
    numpy: Any = sys.modules.get("numpy")  # which a program that has such a number has imported
    return value.item() if numpy and isinstance(value, numpy.generic) else value


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} should be one of {', '.join(allowed)}, got {value!r}")


def check_exchange(value: object) -> None:
    """Refuse a word that names no exchange.

    Raises:
        ConfigError: says which there are.
    """
    kind, _, rows = str(value).partition(":")
    if kind == "torus" and rows.isdecimal() and int(rows) >= 1:
        return
    if value not in EXCHANGES:
        raise ConfigError(f'exchange should be one of {", ".join(EXCHANGES)}, or "torus:2" for two rows, got {value!r}')


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} should be a whole number from {low} to {high}, got {value!r}")


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} should be a number of seconds, got {value!r}")
    if not SHORTEST_SECONDS <= value <= LONGEST_SECONDS:  # so is NaN refused
        raise ConfigError(
            f"{name} should be from {SHORTEST_SECONDS} to {LONGEST_SECONDS:.0f} seconds, got {value!r}; "
            f"write {name}=1e6, eleven days, for no limit in practice"
        )


# ---- methods and their own options -------------------------------------------------------------


class Preset(NamedTuple):
    """A method by its name, and options of its own, which those given come before."""

    method: str
    options: Mapping[str, Any]
    #: Of ``DistributedUpdateOptimizer``, where the system is one of local steps.
    updates: Mapping[str, Any] = MappingProxyType({})


_NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # DiLoCo's outer SGD

#: Systems that are known under a name of their own, docs/systems.md has the paper of each. What ranks compare, what
#: checkpoints hold and what a running job names is the method with its options.
PRESETS: dict[str, Preset] = {
    "fp8": Preset("natural", {"mantissa": 2}),
    "gmc": Preset("dgc", {"momentum_kind": "global"}),
    "loco": Preset("qsgd", {"bits": 4, "rounding": "nearest", "feedback": "average"}),
    "sparse_dithering": Preset("qsgd", {"norm": 2, "coding": "elias", "rounding": "nearest", "error": 0.1}),
    "scalecom": Preset("topk", {"positions": "leader"}),
    "sbc": Preset("sparse_binary", {}),
    "diloco": Preset("none", {}, {"communication_delay": 30, "outer_optimizer": _NESTEROV}),
    "sparse_loco": Preset(
        "topk",
        {"density": 1 / 64, "value_bits": 2, "chunk": 4096, "residual_decay": 0.95, "average": "senders"},
        {"communication_delay": 30, "outer_optimizer": {"lr": 0.4}, "clip": "median"},
    ),
    "cd_sgd": Preset(
        "marsit",
        {"full_precision_every": 5, "full_precision_dtype": "bfloat16"},
        {"communication_delay": 1, "overlap": 1},
    ),
}

#: Why presets of update mode do not exchange gradients.
FOR_UPDATES = {
    name: f"{name} takes local steps: write optimizer = hvc.DistributedUpdateOptimizer(optimizer, "
    f'model.named_parameters(), compression); to exchange gradients, take its method, "{preset.method}"'
    for name, preset in PRESETS.items()
    if preset.updates
}


def check_known(method: str, given: Mapping[str, Any]) -> None:
    """Refuse a method, an option of its own or a word that there is not; a method itself checks the rest.

    Raises:
        ConfigError: says what there is.
    """
    name = PRESETS[method].method if method in PRESETS else method
    if name not in OPTIONS:
        if name in installed():
            return  # its package is loaded later, and checks all of them
        raise unknown_method(method, [*OPTIONS, *installed(), *PRESETS])
    own = OPTIONS[name]
    check_own(method, given, own)
    for name, value in given.items():
        if allowed := own[name]:
            check_choice(name, value, *allowed)


#: The group of entry points by which other packages offer methods.
METHODS_GROUP = "horovod_compress.methods"


@cache
def installed() -> dict[str, list[EntryPoint]]:
    """Return what other installed packages offer under the names of methods; none of it is loaded yet."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=METHODS_GROUP):
        if point.name in OPTIONS or point.name in PRESETS:
            warnings.warn(
                f"{package_of(point)} offers a method {point.name!r}; that of horovod-compress is used", stacklevel=2
            )
        elif point.value not in [other.value for other in found.setdefault(point.name, [])]:
            found[point.name].append(point)
    return found


def package_of(point: EntryPoint) -> str:
    """Return the name and the version of the package that has an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


#: What puts methods together, and has a name like one.
_COMPOSED = {
    "by_step": 'hvc.by_step({0: "none", 500: "marsit"})',
    "masked": 'hvc.masked("marsit")',
    "per_layer": 'hvc.Compression.per_layer({"*.weight": "marsit", "*": "none"}, model.named_parameters())',
}


def unknown_method(name: object, known: Iterable[str]) -> ConfigError:
    """Return the error for the name of no method."""
    names = list(known)
    if isinstance(name, str) and name in _COMPOSED:
        return ConfigError(f"{name!r} is no method, but is made of some; write {_COMPOSED[name]}")
    return ConfigError(f"unknown method {name!r:.200}{meant(name, names)}; choose one of: {', '.join(names)}")


def check_own(method: str, given: Iterable[str], own: Iterable[str]) -> None:
    """Refuse what is no option of a method's own.

    Raises:
        ConfigError: says which there are.
    """
    names = list(own)
    if unknown := sorted(set(given) - set(names)):
        first, is_common = unknown[0], unknown[0] in Options.names()
        common = f"; {first} is common to all methods: give it to the compression as a whole" if is_common else ""
        question = "" if is_common else meant(first, [*names, *Options.names()])
        raise ConfigError(f"{method} has no option {first!r}{question}; {own_options(names)}{common}")


def own_options(names: Iterable[str]) -> str:
    """Return in words which options a method has beside those common to all."""
    own = ", ".join(names)
    return f"its own options are {own}" if own else "it has no specific options"


def meant(given: object, known: Iterable[str]) -> str:
    """Return a question whether a name was meant that is, or begins with, almost what was given."""
    name, full = str(given).lower().replace("-", "_"), list(known)
    beginnings = {one[: len(name)]: one for one in reversed(full)} if len(name) > 2 else {}
    whole, begun = (difflib.get_close_matches(name, choices, 1) for choices in (full, beginnings))
    near = whole or [beginnings[one] for one in begun]
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_choice(name: str, value: Any, *allowed: str | int | bool | None) -> None:
    """Refuse an option that is none of the values that it can have.

    Raises:
        ConfigError: says which these are.
    """
    # Types count too: 1 is not True, nor 16.0 the 16 that ranks and checkpoints compare.
    if not any(type(value) is type(one) and value == one for one in allowed):
        *first, last = (f'"{one}"' if isinstance(one, str) else str(one) for one in allowed)
        raise ConfigError(f"{name} should be {', '.join(first)} or {last}, got {value!r}")
