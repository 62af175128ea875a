"""A method that changes during training: one for the first steps, another one later.

    codec of step t = the last stage that began at t or before, or what a function of t says

What one method did not send is in the residual that the next one starts with. If that one keeps no
residual of every element, its first round is in full precision instead, which sends what waits. So do
plain rounds (``none``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import ConfigError
from ..schedule.plan import Bucket
from .base import Algebra, Codec, Divides
from .dense import Dense, FullPrecision, Uncompressed
from .registry import create
from .work import Regions


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
            if codec.keeps_to_itself():
                raise ConfigError(
                    f"{codec.name} (stage {label!r}) keeps errors that no other method would send; let it be "
                    f"the last stage, by steps and not by a function"
                )

    def config(self) -> dict[str, Any]:
        prefix = "from step " if self.choose is None else ""
        return {f"{prefix}{label}": described(codec) for label, codec in self.stages}

    def divides(self) -> Divides:
        """A second moment is held after a warm-up; between methods that differ it would be a matter of the step."""
        warms_up = self.choose is None and all(isinstance(codec, Dense) for _, codec in self.stages[:-1])
        return self.stages[-1][1].divides() if warms_up else "never"

    def exact_until(self) -> int:
        return int(self.stages[-1][0]) if self.divides() != "never" else 0

    def compressed_turn(self, step: int) -> int:
        first, codec = self.stages[-1]
        turn = codec.compressed_turn(step)
        if step < first or turn == step:
            return step
        return next(number for number in (first, first + 1) if codec.at(number) == codec.at(turn))

    def state(self, bucket: Bucket) -> dict[str, torch.dtype]:
        return {name: dtype for _, codec in self.stages for name, dtype in codec.state(bucket).items()}

    def sees(self, variant: Codec, bucket: Bucket) -> Collection[str]:
        if isinstance(variant, Dense):  # plain rounds send and empty whatever waits
            return self.state(bucket)
        stages = [codec for _, codec in self.stages if variant in codec.variants()]
        return {name for codec in stages for name in codec.sees(variant, bucket)}

    def tables(self, bucket: Bucket) -> Regions:
        found: Regions = {}
        for _, codec in self.stages:
            for name, array in codec.tables(bucket).items():
                if found.setdefault(name, array) != array:
                    raise ConfigError(
                        f"two stages keep {name!r} in different sizes for bucket {bucket.index}; give methods "
                        f"that keep tables the same options in every stage"
                    )
        return found

    def plain(self) -> Codec | None:
        found = [(label, codec.plain()) for label, codec in self.stages]
        if not any(codec for _, codec in found):
            return None
        return ByStep(tuple((label, codec or FullPrecision()) for label, codec in found), self.choose)

    def communication_delay(self) -> int:
        return self.stages[-1][1].communication_delay()

    @property
    def full_precision_every(self) -> int:
        """Return the period of full-precision rounds of the last stage, 0 if it has none."""
        return int(getattr(self.stages[-1][1], "full_precision_every", 0))

    def at(self, step: int) -> Codec:
        codec = self._stage(step)
        if step and self._loses(self._stage(step - 1), codec):
            return FullPrecision()
        return codec.at(step)

    @staticmethod
    def _loses(before: Codec, codec: Codec) -> bool:
        """Return whether what waits after one stage would never be sent in another one."""
        waits = before is not codec and before.feedback() != "none"
        return waits and not isinstance(codec, Dense) and not codec.takes_over()

    def _stage(self, step: int) -> Codec:
        if self.choose is None:
            return next(codec for first, codec in reversed(self.stages) if first <= step)
        try:
            label = self.choose(step)
        except Exception as error:  # it is the user's, and may raise anything
            raise ConfigError(
                f"the function given to by_step raised {type(error).__name__} for step {step}: {error}"
            ) from error
        for known, codec in self.stages:
            if known == label:
                return codec
        names = ", ".join(repr(known) for known, _ in self.stages)
        raise ConfigError(f"the function given to by_step returned {label!r} for step {step}; methods has {names}")

    def variants(self) -> tuple[Codec, ...]:
        found = [variant for _, codec in self.stages for variant in codec.variants()]
        if any(self._loses(before, codec) for _, before in self.stages for _, codec in self.stages):
            found.append(FullPrecision())
        return tuple(dict.fromkeys(found))

    def check_world(self, world: int) -> None:
        for _, codec in self.stages:
            codec.check_world(world)


def by_step(
    when: Mapping[int, str | Codec] | Callable[[int], Hashable], methods: Mapping[Any, Any] | None = None
) -> ByStep:
    """Return a method that changes during training.

        hvc.by_step({0: "none", 500: hvc.method("topk", density=0.01)})
        hvc.by_step(lambda step: "late" if step > 500 else "early", {"early": "none", "late": "marsit"})

    Args:
        when: methods by the step they begin at, one of them at step 0; or a function from the step to a
            label of ``methods``. A function has to return the same on every rank and after a resume: it
            may depend on the step only.
        methods: with a function, the methods by label: names, or what :func:`method` returns.

    Raises:
        ConfigError: there is no method for step 0, or these are no methods.
    """
    if callable(when):
        if not isinstance(methods, Mapping) or not methods:
            raise ConfigError(
                "by_step with a function takes the methods by label too: by_step(choose, methods={...}), "
                f"got {methods!r:.200}"
            )
        return ByStep(tuple((label, stage(codec)) for label, codec in methods.items()), when)
    if not isinstance(when, Mapping) or methods is not None:
        raise ConfigError(
            'by_step takes methods by their first step, {0: "none", 500: "topk"}, or a function of the step and '
            f"methods by label, got {when!r:.200}"
        )
    if any(type(first) is not int or first < 0 for first in when) or 0 not in when:
        raise ConfigError(f"by_step takes methods by their first step, whole numbers from 0 on, got {list(when)}")
    return ByStep(tuple((first, stage(when[first])) for first in sorted(when)))


def warmed(codec: Codec, steps: int) -> Codec:
    """Return a codec that begins with plain rounds."""
    return ByStep(((0, FullPrecision()), (steps, codec))) if steps else codec


def stage(given: object) -> Codec:
    """Return the codec of a stage; plain rounds are of a kind that empties what earlier stages left."""
    codec = method(given) if isinstance(given, str) else given
    if not isinstance(codec, Codec):
        raise ConfigError(f'a method should be a name or hvc.method("name", option=...), got {given!r}')
    return FullPrecision() if isinstance(codec, Uncompressed) else codec


def method(name: str, **options: Any) -> Codec:
    """Return a method with its own options, for ``per_layer`` and ``by_step``.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    return create(name, **options)


def described(codec: Codec) -> str:
    """Return a method and its options in one line."""
    return " ".join([codec.name, *(f"{name}={value!r}" for name, value in codec.config().items())])
