"""The interface of a codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.algebra import Algebra as Algebra  # for codecs, which import it with the rest of their interface
from ..ops.keys import Key
from ..schedule.plan import Bucket, TensorSpec
from .feedback import Feedback
from .law import Law
from .work import Part, Regions, Work, work_dtype

Divides = Literal["before", "after", "never"]


#: Methods of a codec, and their forms for several tensors.
_FORMS = (
    ("offer", "offer_all"),
    ("encode", "offer_all"),
    ("encode_part", "encode_parts"),
    ("decode_part", "decode_parts"),
)


@dataclass(frozen=True)
class Codec:
    """One method. Stateless: its fields are its options, and all it may know is in its arguments.

    The reducer calls ``offer`` once per tensor as gradients arrive, or on a device ``offer_all`` once for
    all, ``encode`` when the bucket is full, then runs the collective with ``merge`` or ``fold``, then calls
    ``decode``. Equal arguments give equal bytes on every rank and device.

    A method that has to know something of all ranks before it can encode, such as a global norm,
    has *preludes*: exchanges of arrays of their own, before the payload's, in order.
    """

    name: ClassVar[str]
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
    #: Whether values that are not finite are counted in ``begin`` or ``encode``, not in ``offer``.
    counts_late: ClassVar[bool] = False
    #: Whether payloads merge by nothing but the addition of their numbers, in whatever order.
    adds_up: ClassVar[bool] = False
    #: Whether local arrays hold nothing from one round to the next, so that rounds of other kinds may
    #: use the same memory.
    local_is_scratch: ClassVar[bool] = False
    #: Whether its kernels divide and multiply by ``Work.divisors``, so that nobody else has to; see :meth:`divides`.
    divides_itself: ClassVar[bool] = False
    #: The state and the local arrays that merging and folding work with, if any. They are where payloads are
    #: exchanged, which may be the host while all else is on a GPU.
    folded: ClassVar[frozenset[str]] = frozenset()

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

    def law(self) -> Law:
        """Return what the method promises with these options."""
        return Law()

    def error_bound(self, x: Sequence[Tensor]) -> float | None:
        """Return a bound of the expected squared error of the mean, or None where there is none.

        Args:
            x: one tensor of a bucket of its own, on each rank; float64.
        """
        return None

    def config(self) -> dict[str, Any]:
        """Return the options as plain data, for the handshake and for checkpoints."""
        return dataclasses.asdict(self)

    def feedback(self) -> Feedback:
        """Return the residual rule in use."""
        return "none"

    def divides(self) -> Divides:
        """Return where a second moment that is held divides.

        Gradients "before" they are encoded, and results are multiplied again; or only in the optimizer, "after"; or
        "never", where results are so near the mean that the optimizer's own may move with them.
        """
        return "never"

    def keeps_to_itself(self) -> bool:
        """Return whether something waits here that no other method would send: then none may come after this one."""
        return False

    def may_be_plain(self) -> bool:
        """Return whether a bucket may travel uncompressed in any step without a change of what its results mean.

        The method's result has to stand for the mean of what the ranks have, and nothing but a residual may wait.
        """
        law = self.law()
        return (law.unbiased or law.conserves) and self.plain() is None and not self.keeps_to_itself()

    def plain_when_empty(self, bucket: Bucket) -> bool:
        """Return whether rounds send gradients as they are while nothing waits.

        Nothing waits after any round of such a method.
        """
        return False

    def share_sent(self) -> float:
        """Return which share of the elements a round sends, if the others wait."""
        return 1.0

    def takes_over(self) -> bool:
        """Return whether what waits in the residual of every element is sent in time, whoever left it there."""
        return self.feedback() != "none"

    def state(self, bucket: Bucket) -> dict[str, torch.dtype]:
        """Return the names and dtypes of what is kept for every element from step to step.

        It is saved by parameter and follows the parameters to other buckets. A bucket that is not
        finite leaves it as it was.
        """
        return {"residual": work_dtype(bucket)} if self.feedback() != "none" else {}

    def plain(self) -> Codec | None:
        """Return the codec of tensors that are too small to be compressed, None for their gradients as they are.

        Where a method changes what a learning rate means, as momentum does, small tensors need the same.
        """
        return None

    def sees(self, variant: Codec, bucket: Bucket) -> Collection[str]:
        """Return which kinds of state the rounds of one of the variants work with."""
        return self.state(bucket)

    def communication_delay(self) -> int:
        """Return after how many local steps an exchange is due in update mode, if the user does not say."""
        return 1

    def tables(self, bucket: Bucket) -> Regions:
        """Return the arrays that are kept from step to step for the bucket as a whole."""
        return {}

    def carries(self, world: int) -> dict[str, int]:
        """Return, by region of the payload, how many rows of its type merging keeps for the next round.

        They belong to the places that this rank merges, not to parameters: other buckets, another number of ranks or
        another collective begin with zeros. See :mod:`horovod_compress.codecs.carry`.
        """
        return {}

    def results(self, bucket: Bucket) -> Regions:
        """Return, by region of the payload, the array that the owner of a chunk passes on in its place, if it does.

        What becomes of a record lies at its place: the array is as many times as long as the region everywhere.
        :meth:`fold_in` writes it, and every rank finds all of it in ``Work.results``.
        """
        return {}

    def wants_owner(self) -> bool:
        """Return whether payloads merge better where one rank sees all of them, than hop by hop in a ring."""
        return False

    def at(self, step: int) -> Codec:
        """Return the codec of one step, for methods whose rounds differ."""
        return self

    def exact_until(self) -> int:
        """Return the step of the first compressed round."""
        return 0

    def compressed_turn(self, step: int) -> int:
        """Return what :meth:`at` takes for the compressed round of a step, where exact ones are somebody else's."""
        return step

    def variants(self) -> tuple[Codec, ...]:
        """Return every codec that :meth:`at` may return."""
        return (self,)

    def regions(self, bucket: Bucket) -> Regions:
        """Return the arrays of a bucket's payload; the reducer allocates them once.

        Where payloads are gathered there is one array, "payload", of as many bytes as a payload may
        take.
        """
        raise NotImplementedError

    def records(self) -> dict[str, int]:
        """Return, for regions that consist of records, how many elements make one.

        A record is handed to :meth:`merge` and :meth:`fold` whole: a scale and its codes, for example.
        """
        return {}

    def local(self, bucket: Bucket) -> Regions:
        """Return the arrays that the codec needs beside the payload."""
        return {}

    def preludes(self, bucket: Bucket) -> tuple[Regions, ...]:
        """Return the arrays of each exchange before ``encode``; names differ from the payload's.

        They are merged by :meth:`merge` or :meth:`fold` like the payload, with a key of rank 0: in
        rank order where they are small, else each chunk in its owner's order. If a gradient is not finite the rest of
        the round is left out on every rank.
        """
        return ()

    def begin(self, number: int, work: Work, key: Key) -> dict[int, int] | None:
        """Fill this rank's arrays of one prelude; those of earlier ones are complete.

        Returns:
            By position, how many values turned out not to be finite; see ``counts_late``.
        """

    def check_world(self, world: int) -> None:
        """Refuse a number of ranks that these options cannot serve.

        Raises:
            ConfigError: says which options can.
        """

    def compress(self, tensor: Tensor) -> Any:
        """Refuse to be used as a compression, which Horovod asks for this.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a method is not a compression: write "
            f'compression = hvc.Compression.create(hvc.method("{self.name}", option=...), '
            f"model.named_parameters()), and give that to the optimizer"
        )

    def check_bucket(self, bucket: Bucket) -> None:
        """Refuse a bucket that the method cannot take.

        Raises:
            ConfigError: says what would do.
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

    # ---- decoding while later chunks are still under way: optional, all three or none ----

    def granule(self, tensor: TensorSpec) -> int | None:
        """Return of how many elements the parts of a tensor are multiples; None: not in parts."""
        return None

    def needs(self, work: Work, position: int, start: int, stop: int) -> dict[str, tuple[int, int]]:
        """Return what a part needs of the payload: for each region, the first index and the end."""
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
