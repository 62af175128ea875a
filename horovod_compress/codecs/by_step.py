"""A method that changes during training: one for the first steps, another one later.

    codec of step t = the last stage that began at t or before, or what a function of t says

What one method did not send is in the residual that the next one starts with. If that one keeps no
residual of every element, its first round is in full precision instead, which sends what waits. So do
plain rounds (``none``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..errors import ConfigError
from ..known import MethodName
from ..options import plain
from ..schedule.plan import Bucket
from .base import Algebra, Codec, Law, Properties, variants_of, zero_groups_of
from .dense import Dense, FullPrecision, Uncompressed
from .registry import create
from .work import Layout, Regions


@dataclass(frozen=True)
class ByStep(Codec):
    """See :func:`by_step`.

    Args:
        stages: labels and methods; without a function of the step the labels are first steps, rising.
        choose: a function from the step to a label.
    """

    stages: tuple[tuple[Any, Codec], ...]
    choose: Callable[[int], Hashable] | None = None

    name: ClassVar[str] = "by_step"
    algebra: ClassVar[Algebra] = Algebra.SUM  # of plain rounds; every stage has its own
    summary: ClassVar[str] = "another method after some steps"

    def __post_init__(self) -> None:
        ends = self.stages if self.choose else self.stages[:-1]
        for label, codec in ends if len(self.stages) > 1 else ():
            if codec.properties().has_private_state:
                raise ConfigError(
                    f"{codec.name} (stage {label!r}) keeps errors that no other method would send; make it the last "
                    "stage, with stages given by step and not by a function"
                )

    def properties(self) -> Properties:
        last = self._of_stages[-1]
        # A second moment is held after a warm-up; between methods that differ it would be a matter of the step.
        warms_up = self.choose is None and all(isinstance(codec, Dense) for _, codec in self.stages[:-1])
        divides = last.divides if warms_up else "never"
        variants = [variant for _, codec in self.stages for variant in variants_of(codec)]
        numbers = range(len(self.stages))
        if any(self._loses(before, after) for before in numbers for after in numbers):
            variants.append(FullPrecision())
        return Properties(
            law=Law(few_exact=last.law.few_exact and divides != "never"),
            divides=divides,
            small_tensors=self._small_tensors(),
            variants=tuple(dict.fromkeys(variants)),
            full_precision_every=last.full_precision_every,
            communication_delay=last.communication_delay,
        )

    def exact_until(self) -> int:
        """Return the step of the first compressed round, where a second moment is held after a warm-up."""
        if self.properties().divides == "never":
            return 0
        first, last = self.stages[-1]
        return max(int(first), last.exact_until() if isinstance(last, ByStep) else 0)

    @property
    def asks(self) -> bool:
        """Whether a function of the user's is asked for the method of a step."""
        return self.choose is not None or any(isinstance(codec, ByStep) and codec.asks for _, codec in self.stages)

    def sends_numbers(self, step: int) -> bool:
        """Return whether the method of a step's stage sends plain numbers: somebody chose it for that."""
        return isinstance(self.stages[self._stage(step)][1], Dense)

    @cached_property
    def _of_stages(self) -> list[Properties]:
        return [codec.properties() for _, codec in self.stages]

    def _small_tensors(self) -> Codec | None:
        found = [each.small_tensors for each in self._of_stages]
        if not any(found):
            return None
        labels = (label for label, _ in self.stages)
        return ByStep(
            tuple((label, codec or FullPrecision()) for label, codec in zip(labels, found, strict=True)), self.choose
        )

    def layout(self, bucket: Bucket, world: int) -> Layout:
        layouts = [codec.layout(bucket, world) for _, codec in self.stages]
        state: dict[str, torch.dtype] = {}
        for name, dtype in (item for layout in layouts for item in layout.state.items()):
            if state.setdefault(name, dtype) is not dtype:
                raise ConfigError(
                    f"two stages keep a {name} of different dtypes for bucket {bucket.index}, {state[name]} and "
                    f"{dtype}; give every stage the same residual_dtype, or leave it out where one keeps float32 only"
                )
        tables: Regions = {}
        for name, array in (item for layout in layouts for item in layout.tables.items()):
            if tables.setdefault(name, array) != array:
                raise ConfigError(
                    f"two stages keep {name!r} in different sizes for bucket {bucket.index}; give methods "
                    f"that keep tables the same options in every stage"
                )
        groups = zero_groups_of(self.stages[-1][1], bucket, world)
        return Layout(state=state, tables=tables, zero_groups=groups)

    def for_step(self, step: int, *, without: int = 0) -> Codec:
        number = self._stage(step)
        if step and self._loses(self._stage(step - 1), number):
            return FullPrecision()
        return self.stages[number][1].for_step(step, without=without)

    def _loses(self, before: int, after: int) -> bool:
        """Return whether what waits after one stage would never be sent in another one."""
        codec, found = self.stages[after][1], self._of_stages[after]
        if self.stages[before][1] is codec or self._of_stages[before].feedback == "none":
            return False
        sent = found.feedback != "none" and codec.drains_residual
        return not sent and not isinstance(codec, Dense)

    def _stage(self, step: int) -> int:
        """Return the number of a step's stage."""
        if self.choose is None:
            return max(number for number, (first, _) in enumerate(self.stages) if first <= step)
        try:
            label = self.choose(step)
        except Exception as error:  # it is the user's, and may raise anything
            raise ConfigError(
                f"the function given to by_step raised {type(error).__name__} for step {step}: {error}"
            ) from error
        for number, (known, _) in enumerate(self.stages):
            if known == label:
                return number
        names = ", ".join(repr(known) for known, _ in self.stages)
        raise ConfigError(f"the function given to by_step returned {label!r} for step {step}; methods has {names}")


def by_step(
    when: Mapping[int, MethodName | Codec] | Callable[[int], Hashable], methods: Mapping[Any, Any] | None = None
) -> ByStep:
    """Return a method that changes during training.

        hvc.by_step({0: "none", 500: hvc.method("topk", density=0.01)})
        hvc.by_step(lambda step: "late" if step > 500 else "early", {"early": "none", "late": "marsit"})

    Args:
        when: methods by the step they begin at, one of them at step 0; or a function from the step to a
            label of ``methods``. A function must return the same on every rank and after a resume: it
            may depend on the step only.
        methods: with a function, the methods by label: names, or what :func:`method` returns.

    Raises:
        ConfigError: there is no method for step 0, or something given is not a method.
    """
    if callable(when):
        if not isinstance(methods, Mapping) or not methods:
            raise ConfigError(
                "by_step with a function also needs the methods by label: by_step(choose, methods={...}), got "
                f"{methods!r:.200}"
            )
        return ByStep(tuple((label, stage(codec)) for label, codec in methods.items()), when)
    if not isinstance(when, Mapping) or methods is not None:
        raise ConfigError(
            'by_step takes methods by their first step, {0: "none", 500: "topk"}, or a function of the step and '
            f"methods by label, got {when!r:.200}"
        )
    when = {plain(first): codec for first, codec in when.items()}
    if any(type(first) is not int or first < 0 for first in when):
        raise ConfigError(f"by_step takes methods by their first step, a whole number of 0 or more, got {list(when)}")
    if 0 not in when:
        raise ConfigError(f"by_step needs a method for step 0, where training begins, got {sorted(when)}")
    return ByStep(tuple((first, stage(when[first])) for first in sorted(when)))


def warmed(codec: Codec, steps: int) -> Codec:
    """Return a codec that begins with plain rounds."""
    return ByStep(((0, FullPrecision()), (steps, codec))) if steps else codec


def stage(given: object) -> Codec:
    """Return the codec of a stage; plain rounds are of a kind that empties what earlier stages left."""
    codec = method(given) if isinstance(given, str) else given
    if not isinstance(codec, Codec):
        raise ConfigError(
            f'a method should be a name or hvc.method("name", option=...), got {given!r}; masked() goes around '
            "by_step()"
        )
    return FullPrecision() if isinstance(codec, Uncompressed) else codec


def method(name: str, **options: Any) -> Codec:
    """Return a method with its own options, for ``per_layer`` and ``by_step``.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    return create(name, **options)


def config_of(codec: Codec) -> dict[str, Any]:
    """Return a method's options as plain data, for the handshake and for checkpoints."""
    if not isinstance(codec, ByStep):
        return dataclasses.asdict(codec)
    prefix = "from step " if codec.choose is None else ""
    return {f"{prefix}{label}": described(stage) for label, stage in codec.stages}


def described(codec: Codec) -> str:
    """Return a method and its options in one line."""
    return " ".join([codec.name, *(f"{name}={value!r}" for name, value in config_of(codec).items())])
