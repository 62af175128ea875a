"""Every sample of every method: what tests walk through, so that a new codec is tested by being there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from horovod_compress.codecs import registry
from horovod_compress.codecs.base import Codec, check_world, variants_of
from horovod_compress.errors import ConfigError
from horovod_compress.exchange.choose import Choose
from horovod_compress.options import EXCHANGES
from horovod_compress.schedule.plan import Bucket, TensorSpec
from tests.support.local import Fleet

#: Methods that go through the engine each in its own way, for `make test`; matrices of every method belong to
#: `make test-all`. What is sent as it is, or in 16 bits; bits that merge, by several kinds of rounds; codes that add;
#: sections, gathered; preludes, and tables of the bucket; records that an owner folds, with a state of its own.
KINDS = ("none", "fp16", "marsit", "global_qsgd", "topk", "powersgd", "onebit_adam")
#: Those of them that differ most, for what takes a second of each.
FEW = ("marsit", "topk", "powersgd")

#: A bucket for questions to a codec whose answer does not depend on the shape.
ANY_BUCKET = Bucket(0, (TensorSpec("any", (64,), "float32"),))


@dataclass(frozen=True)
class Sample:
    """One method with one set of its options."""

    kind: type[Codec]
    number: int
    options: dict[str, Any] = field(hash=False)

    @property
    def method(self) -> str:
        return self.kind.name

    @property
    def name(self) -> str:
        """Return the method and its options as the examples take them."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def quick(self) -> bool:
        """Return whether `make test` takes it through what takes seconds."""
        return self.number == 0 and self.method in KINDS

    def codec(self) -> Codec:
        return self.kind(**self.options)

    def fleet(self, world: int, tensors: list[TensorSpec], **common: Any) -> Fleet:
        """Return reducers of all ranks; steps are verified unless the test says otherwise."""
        return Fleet(world, tensors, self.codec(), **{"verify_every": 1} | common)

    def worlds(self, *wanted: int) -> list[int]:
        """Return which of these numbers of ranks the options can serve."""
        return [world for world in wanted if not _refused(lambda: check_world(self.codec(), world))]

    def exchanges(self) -> list[str]:
        """Return the values of ``exchange`` that fit every kind of round."""
        kinds = variants_of(self.codec())
        fits = [e for e in EXCHANGES if not any(_refused(lambda: Choose(e)(kind, 1, 2)) for kind in kinds)]
        return [exchange for exchange in fits if exchange != "hierarchical"]  # of ranks without hosts it is "auto"


def samples(few: bool = False) -> Iterator[Sample]:
    """Return the samples of all registered methods, or only the first one of a method of each kind."""
    for name in registry.methods():
        found = samples_of(registry.codec_class(name))
        yield from (sample for sample in found if not few or sample.quick)


def samples_of(kind: type[Codec]) -> Iterator[Sample]:
    for number, options in enumerate(kind.samples):
        yield Sample(kind, number, options)


def keeps_anything(codec: Codec) -> bool:
    """Return whether a method keeps anything from step to step."""
    layout = codec.layout(ANY_BUCKET, 1)
    return bool(layout.state or layout.tables)


def _refused(ask: Any) -> bool:
    try:
        ask()
    except ConfigError:
        return True
    return False
