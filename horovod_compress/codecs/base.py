"""The interface of a codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.algebra import Algebra as Algebra  # for codecs, which import it with the rest of their interface
from ..ops.keys import Key
from ..schedule.plan import Bucket, TensorSpec
from .layout import Layout
from .properties import Properties
from .work import Part, Work

#: Methods of a codec, and their forms for several tensors.
_FORMS = (
    ("offer", "offer_all"),
    ("encode", "offer_all"),
    ("encode_part", "encode_parts"),
    ("decode_part", "decode_parts"),
)


#: A bucket that every method can take.
_NOTHING = Bucket(0, (TensorSpec("nothing", (0,), "float32"),))


class _NoCompression:
    """Refuses to be used as a compression of Horovod's."""

    name: ClassVar[str]

    def compress(self, tensor: Tensor) -> Any:
        """Refuse what Horovod asks of a compression.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a method is not a compression: write "
            f'compression = hvc.Compression.create(hvc.method("{self.name}", option=...), '
            f"model.named_parameters()), and give that to the optimizer"
        )


@dataclass(frozen=True)
class Codec(_NoCompression):
    """One method. Stateless: its fields are its options, and all it may know is in its arguments.

    The reducer calls ``offer`` once per tensor as gradients arrive, or on a device ``offer_all`` once for
    all, ``encode`` when the bucket is full, then runs the collective with ``merge`` or ``fold``, then calls
    ``decode``. Equal arguments give equal bytes on every rank and device.

    A method that has to know something of all ranks before it can encode, such as a global norm,
    has *preludes*: exchanges of arrays of their own, before the payload's, in order.
    """

    wire_version: ClassVar[int] = 1
    algebra: ClassVar[Algebra]
    summary: ClassVar[str]
    #: The paper that the method is from.
    source: ClassVar[str] = ""
    #: Its page in docs/, with the heading where several methods share one.
    page: ClassVar[str] = ""
    #: Options that show every rule of the method: what the tests common to all methods, the golden
    #: payloads and the tables go through.
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def __init_subclass__(cls, **options: Any) -> None:
        """Take back the forms for several tensors where what belongs to them is redefined, and they are not."""
        super().__init_subclass__(**options)
        for one, several in _FORMS:
            if cls._place_of(one) < cls._place_of(several):
                setattr(cls, several, getattr(Codec, several))

    @classmethod
    def _place_of(cls, name: str) -> int:
        """Return how far up the classes the definition of a method is."""
        return next(place for place, base in enumerate(cls.__mro__) if name in vars(base))

    def properties(self) -> Properties:
        """Return what is true of the method with these options."""
        return Properties()

    def layout(self, bucket: Bucket, world: int) -> Layout:
        """Return the arrays of a bucket on each of ``world`` ranks.

        Raises:
            ConfigError: these options cannot serve such a bucket, or so many ranks; says which can.
        """
        raise NotImplementedError

    def for_step(self, step: int, *, compressed: bool = False) -> Codec:
        """Return the codec of one step, for methods whose rounds differ.

        Args:
            compressed: leave out the full-precision rounds between compressed ones: they are somebody else's.
        """
        return self

    def begin(self, number: int, work: Work, key: Key) -> dict[int, int] | None:
        """Fill this rank's arrays of one prelude; those of earlier ones are complete.

        Returns:
            By position, how many values turned out not to be finite; see ``counts_late``.
        """

    def prepare(self, work: Work) -> None:
        """Fill what stays the same in every step; called once per bucket."""

    def offer(self, work: Work, position: int, key: Key) -> int | Tensor:
        """Take in the gradient of one tensor.

        Returns:
            The number of non-finite values; on a GPU it may be one element there, which spares a wait.
        """
        raise NotImplementedError

    def encode(self, work: Work, key: Key) -> dict[int, int] | None:
        """Finish the payload once every tensor of the bucket was offered.

        Where payloads are gathered it sets ``work.used``.

        Returns:
            By position, how many values turned out not to be finite; see ``counts_late``.
        """
        if self.encodes_in_parts:
            self.encode_first(work, key)
            self.encode_parts(work, _whole(work), key)
        return None

    def merge(self, region: str, start: int, into: Tensor, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        """Merge two partial payloads of a region in place.

        Args:
            start: index in the region of the first element.
            weights: how many ranks ``into`` and ``other`` stand for.
        """
        raise NotImplementedError

    def fold(self, region: str, start: int, into: Tensor, others: Sequence[Tensor], key: Key) -> None:
        """Merge the payloads of all other ranks into this rank's own; by default one by one.

        Args:
            others: in rank order; they may be overwritten.
            key: of the rank that folds.
        """
        for index, other in enumerate(others):
            self.merge(region, start, into, other, (index + 1, 1), key.at(hop=index))

    def merge_in(
        self, work: Work, region: str, start: int, into: Tensor, other: Tensor, weights: tuple[int, int], key: Key
    ) -> None:
        """Do what :meth:`merge` does, in a round whose ``work.carry`` has what merging left."""
        self.merge(region, start, into, other, weights, key)

    def fold_in(
        self, work: Work, region: str, start: int, into: Tensor, others: Sequence[Tensor], key: Key, result: Tensor
    ) -> None:
        """Do what :meth:`fold` does, likewise.

        Args:
            result: where the result of these elements goes, of the type that :meth:`results` says; else ``into``.
        """
        self.fold(region, start, into, others, key)

    def decode(self, work: Work, key: Key, gain: float) -> None:
        """Write the result over the gradients and update the residual.

        Args:
            key: this rank's key, as given to ``offer``.
            gain: 1 for the mean over ranks, the number of ranks for the sum.
        """
        self.decode_parts(work, _whole(work), key, gain)

    # ---- all tensors of a bucket at once: optional, for kernels that are one launch then and not one for each ----

    def offer_all(self, work: Work, positions: Sequence[int], key: Key) -> Tensor:
        """Take in the gradients of several tensors of the bucket, as :meth:`offer` does one by one.

        A method with a form of its own gets the gradients of a device by it, when the bucket is full.

        Returns:
            The numbers of non-finite values, one for each tensor, where the gradients are.
        """
        counts = [self.offer(work, position, key) for position in positions]
        where = [work.grad(position).device for position in positions]
        return torch.cat([torch.as_tensor(count, device=at).view(1) for count, at in zip(counts, where, strict=True)])

    def offers_together(self) -> bool:
        """Return whether :meth:`offer_all` is anything but :meth:`offer` for one tensor after the other."""
        return type(self).offer_all is not Codec.offer_all

    def encode_parts(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        """Do what :meth:`encode_part` does, for several parts of the bucket."""
        for part in parts:
            self.encode_part(work, part.position, part.start, part.stop, key)

    def decode_parts(self, work: Work, parts: Sequence[Part], key: Key, gain: float) -> None:
        """Do what :meth:`decode_part` does, for several parts of the bucket."""
        for part in parts:
            self.decode_part(work, part.position, part.start, part.stop, key, gain)

    # ---- encoding while earlier chunks are on their way: optional; needs those of decoding in parts too ----

    #: Whether ``encode`` is the same as ``encode_first`` and then ``encode_part`` for every element. Its
    #: values that are not finite are counted before.
    encodes_in_parts: ClassVar[bool] = False

    def encode_first(self, work: Work, key: Key) -> None:
        """Do what all parts need."""

    def encode_part(self, work: Work, position: int, start: int, stop: int, key: Key) -> None:
        """Write the payload of elements ``start`` to ``stop`` of one tensor; see :meth:`decode_part`."""
        raise NotImplementedError

    def decode_part(self, work: Work, position: int, start: int, stop: int, key: Key, gain: float) -> None:
        """Do what ``decode`` does for elements ``start`` to ``stop`` of one tensor only.

        Args:
            start: a multiple of the granule; ``stop`` is one too, or the end of the tensor.
        """
        raise NotImplementedError


def _whole(work: Work) -> list[Part]:
    """Return all of the tensors that were offered."""
    return [Part(position, 0, work.bucket.tensors[position].count) for position in work.present()]


def variants_of(codec: Codec) -> tuple[Codec, ...]:
    """Return every codec that the steps of a method may take."""
    return codec.properties().variants or (codec,)


def check_world(codec: Codec, world: int) -> None:
    """Refuse a number of ranks that a method with its options cannot serve, whatever the bucket.

    Raises:
        ConfigError: says which options can.
    """
    codec.layout(_NOTHING, world)
