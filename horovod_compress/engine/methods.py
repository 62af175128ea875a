"""Which parameter takes which method: one for all, or by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ..codecs import registry
from ..codecs.base import Codec, coded_tables, variants_of
from ..codecs.by_step import ByStep, config_of, described, method, warmed
from ..codecs.dense import Dense, Uncompressed
from ..codecs.masked import Masked
from ..errors import ConfigError, some_of
from ..options import Options, meant, own_options, plain
from ..schedule.by_name import check_schedule
from ..schedule.plan import Bucket, Plan, TensorSpec

_ALL = "*"


@dataclass(frozen=True)
class Methods:
    """Patterns and their codecs; a parameter takes the codec of the first pattern that fits its name.

    A codec's number is its place in ``codecs``. Number 0 is that of buckets that are not compressed.

    Args:
        warmup: number of initial uncompressed rounds.
        masked: the patterns whose parameters are masked, see :class:`.masks.Masks`.
        given: the longer names that parameters were given with, by their own; patterns may fit either.
        shown: patterns as they are written into handshakes and saved states, where that is not as they are.
    """

    rules: tuple[tuple[str, Codec], ...]
    warmup: int = 0
    masked: frozenset[str] = frozenset()
    given: Mapping[str, str] = field(default_factory=dict, compare=False)
    shown: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Return every codec once, by number."""
        found = self._plain()
        plain = warmed(found[0], self.warmup) if len(found) == 1 and found[0] else Uncompressed()
        return plain, *(warmed(codec, self.warmup) for codec in self._own())

    def _plain(self) -> list[Codec | None]:
        return list(dict.fromkeys(codec.properties().small_tensors for codec in self._own()))

    def check_plain(self, plan: Plan) -> None:
        """Refuse methods that want different things of the buckets that are not compressed, if there are any.

        Raises:
            ConfigError: says what would do.
        """
        found = self._plain()
        if len(found) > 1 and not all(bucket.compressed for bucket in plan.buckets):
            wanted = ", ".join("none" if codec is None else described(codec) for codec in found)
            raise ConfigError(
                f"small tensors share one uncompressed bucket, but the methods do not agree on it: {wanted}; "
                f"leave min_elements=0, or give all methods the same momentum"
            )

    def _own(self) -> list[Codec]:
        return list(dict.fromkeys(codec for _, codec in self.rules))

    @property
    def name(self) -> str:
        """Return the name of the one method, or that there are several."""
        return self.rules[0][1].name if len(self.rules) == 1 else "per_layer"

    def config(self) -> dict[str, Any]:
        """Return all options as plain data, for the handshake and for checkpoints."""
        if len(self.rules) == 1:
            return config_of(self.rules[0][1]) | ({"masked": True} if self.masked else {})
        masked = dict.fromkeys(self.masked, "masked ")
        rules = [(self.shown.get(p, p), masked.get(p, "") + described(codec)) for p, codec in self.rules]
        return {f"{number}: {pattern}": text for number, (pattern, text) in enumerate(rules)}

    def number(self, tensor: str) -> int:
        """Return the number of the method of a parameter.

        Raises:
            ConfigError: no pattern fits.
        """
        return 1 + self._own().index(self.codec(tensor))

    def codec(self, tensor: str) -> Codec:
        """Return the method of a parameter.

        Raises:
            ConfigError: no pattern fits.
        """
        return self._rule(tensor)[1]

    def is_masked(self, tensor: str) -> bool:
        """Return whether a parameter is masked where its weights are 0."""
        return bool(self.masked) and self._rule(tensor)[0] in self.masked

    def _rule(self, tensor: str) -> tuple[str, Codec]:
        if rule := _first(self, tensor):
            return rule
        raise ConfigError(f'no pattern matches the parameter {tensor}; end with "*" for the rest: {{..., "*": "none"}}')

    def check_bucket(self, bucket: Bucket, world: int) -> None:
        """Refuse a bucket that its method cannot take with that many ranks.

        Raises:
            ConfigError: says what would do.
        """
        if not 0 <= bucket.method < len(self.codecs):
            raise ConfigError(
                f"bucket {bucket.index} has method number {bucket.method}, but this compression has only "
                f"{len(self.codecs)}"
            )
        if bucket.plain and not self.may_be_plain(bucket.method):
            raise ConfigError(
                f"bucket {bucket.index} of the plan is left uncompressed, which would change the results "
                f'of {self.name}; give its parameters the method "none" with per_layer'
            )
        codec = self.codecs[bucket.method]
        for kind in (codec, *variants_of(codec)):
            kind.layout(bucket, world)

    def may_be_plain(self, number: int) -> bool:
        """Return whether buckets of a method may travel uncompressed in any step."""
        return number > 0 and not self.is_plain(number) and self._own()[number - 1].properties().may_be_plain

    def is_plain(self, number: int) -> bool:
        """Return whether a method compresses nothing, so that nothing is gained by leaving its buckets uncompressed."""
        return number > 0 and isinstance(self._own()[number - 1], Uncompressed)

    def asks(self) -> bool:
        """Return whether a function of the user's is asked for the method of a step."""
        return any(isinstance(codec, ByStep) and codec.asks for codec in self._own())

    def is_exact(self, step: int) -> bool:
        """Return whether no method compresses in a step."""
        return all(isinstance(warmed(codec, self.warmup).for_step(step), Dense) for codec in self._own())

    def differing(self) -> str:
        """Return the methods, and those of their options that are not the defaults, in one line."""
        if len(self.rules) == 1:
            return _differing(self.rules[0][1])
        return ", ".join(f"{pattern}: {_differing(codec)}" for pattern, codec in self.rules)

    def check_used(self, tensors: Sequence[TensorSpec]) -> None:
        """Refuse a pattern that no parameter takes its method from; "*" may be left with none.

        Raises:
            ConfigError: names the pattern.
        """
        first = {rule[0] for rule in (_first(self, tensor.name) for tensor in tensors) if rule}
        for pattern, _ in self.rules:
            if pattern != _ALL and pattern not in first:
                raise ConfigError(
                    f"no parameter takes its method from the pattern {pattern!r}; parameters are named "
                    f"as in {', '.join(t.name for t in tensors[:3])}"
                )

    def folded(self) -> set[str]:
        """Return the names of the state that owners of chunks keep of what they merge."""
        variants = (variant for codec in self.codecs for variant in variants_of(codec))
        return {name for variant in variants for name in variant.folded}

    def coded(self) -> set[str]:
        """Return the names of tables that hold codes, which do not add."""
        return {name for codec in self.codecs for name in coded_tables(codec)}

    def communication_delay(self) -> int:
        """Return after how many local steps these settings exchange updates.

        Raises:
            ConfigError: the methods differ in that.
        """
        return int(self._one("communication delay", [c.properties().communication_delay for _, c in self.rules]))

    def full_precision_every(self) -> int:
        """Return the period of full-precision rounds, 0 if there are none.

        Raises:
            ConfigError: the methods differ in that.
        """
        return int(self._one("full_precision_every", [c.properties().full_precision_every for _, c in self.rules]))

    def _one(self, what: str, values: list[int]) -> int:
        if len(set(values)) > 1:
            raise ConfigError(f"update mode needs one {what} for all parameters, the methods have {values}")
        return values[0]


def _first(methods: Methods, tensor: str) -> tuple[str, Codec] | None:
    """Return the first rule that fits the name of a parameter, or the longer one that it was given with."""
    names = {tensor, methods.given.get(tensor, tensor)}
    return next((rule for rule in methods.rules if any(fnmatchcase(name, rule[0]) for name in names)), None)


def _differing(codec: Codec) -> str:
    try:
        usual = config_of(type(codec)())
    except TypeError:  # it has options without a default
        usual = {}
    given = {name: value for name, value in config_of(codec).items() if value != usual.get(name, codec)}
    return " ".join([codec.name, *(f"{name}={value!r}" for name, value in given.items())])


def single(codec: Codec) -> Methods:
    """Return one method for all parameters."""
    return Methods(((_ALL, codec),))


def per_layer(given: object) -> Methods:
    """Return methods by pattern.

    Args:
        given: names, or codecs, by pattern.

    Raises:
        ConfigError: these are no methods by pattern.
    """
    if not isinstance(given, Mapping) or not given or not all(isinstance(pattern, str) for pattern in given):
        raise ConfigError(
            f'per_layer takes methods by pattern first, {{"embed*": "topk", "*": "marsit"}}, then named_parameters; '
            f"got {'an empty dict' if given == {} else type(given).__name__}"
        )
    within = {pattern: m.codec if isinstance(m, Masked) else m for pattern, m in given.items()}
    rules = tuple((pattern, method(m) if isinstance(m, str) else m) for pattern, m in within.items())
    for pattern, codec in rules:
        if not isinstance(codec, Codec):
            raise ConfigError(
                f'the method of pattern {pattern!r} should be a name or hvc.method("name", option=...), got {codec!r}'
            )
    return Methods(rules, masked=frozenset(pattern for pattern, m in given.items() if isinstance(m, Masked)))


def parse(method: str | Codec | Masked | Methods, given: Mapping[str, Any]) -> tuple[Methods, Options]:
    """Split the options of a compression into the method's own and the common ones.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    if isinstance(method, Masked):
        method = replace(single(method.codec), masked=frozenset((_ALL,)))
    if not isinstance(method, (str, Codec, Methods)):
        raise ConfigError(
            f'a method should be a name or hvc.method("name", option=...), got {method!r:.200}; the '
            "parameters are the second argument"
        )
    common = {key: plain(value) for key, value in given.items() if key in Options.names()}
    own = {key: value for key, value in given.items() if key not in common}
    known = registry.option_names(method) if isinstance(method, str) else []
    if unknown := sorted(set(own) - set(known)):
        option = unknown[0]
        said = f'{option!r} is not an option of all methods; a method takes its own in hvc.method("name", option=...)'
        if isinstance(method, str):
            near = meant(option, [*known, *Options.names()])
            said = f"{method} has no option {option!r}{near}; {own_options(known)}"
        raise ConfigError(
            f"{said}; options of all methods are {', '.join(Options.names())} and process_set, or process_group with "
            "DistributedDataParallel"
        )
    options = Options(**common)
    check_schedule(options.schedule)
    if not isinstance(method, Methods):
        method = single(method if isinstance(method, Codec) else registry.create(method, **own))
    return replace(method, warmup=options.warmup_steps or 0), options


def numbered(plan: Plan, methods: Methods) -> Plan:
    """Return a given plan with the methods' numbers; buckets that are not compressed stay so.

    Raises:
        ConfigError: a bucket holds parameters of different methods.
    """
    found = []
    for bucket in plan.buckets:
        numbers = {methods.number(tensor.name) for tensor in bucket.tensors} if bucket.compressed else {bucket.method}
        if len(numbers) > 1:
            raise ConfigError(
                f"bucket {bucket.index} of the plan holds parameters of different methods: "
                f"{some_of(tensor.name for tensor in bucket.tensors)}; split it between them"
            )
        found.append(replace(bucket, method=numbers.pop()))
    return Plan(tuple(found))
