"""The interface of a codec: what a method has to say, in the order in which it is asked.

``properties`` and ``layout`` state facts: the one what holds whatever the bucket, the other what a bucket needs. The
other methods do the work of a round, on all tensors they are given at once:

    submit    a gradient, or several, as they arrive: read them, and count values that are not finite
    before    an exchange begins: fill the arrays of this prelude, or do what the payload as a whole needs
    encode    write the payload of some parts of the tensors
    combine   two payloads become one, or fold: all of them do; gathered payloads stay as they are
    decode    write the result of some parts over the gradients, and renew what is kept

A method with tables may also let them move when buckets change, by the property ``moves_tables``.

Most methods need ``properties``, ``layout``, ``submit``, ``combine`` and ``decode`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.algebra import (
    Algebra as Algebra,  # for codecs, which import them with the rest of their interface
    Piece as Piece,
)
from ..ops.keys import Key
from ..options import check_choice as check_choice
from ..schedule.plan import Bucket, TensorSpec
from .work import Counts, Layout, Part, Work

Divides = Literal["before", "after", "never"]
#: What a rank remembers of what it did not send. With ``x = gradient + residual`` and the consensus result ``G``, the
#: residual afterwards is, by the rule "own", ``x`` minus what ``x`` became in this rank's own payload: ordinary error
#: feedback (Seide et al. 2014; Karimireddy et al. 2019). It is bounded whatever the other ranks hold. By "global" it is
#: ``x - G``: Marsit's global compensation (Wu et al. 2022, Alg. 1), which makes the parameters follow the mean gradient
#: exactly up to the mean residual; but on ranks whose data differ the residuals drift apart until a full-precision
#: round empties them. The decode kernels apply the rules, in the pass that writes the result; a residual is float32
#: (float64 for float64 gradients) or bfloat16, and is left as it was when a bucket is not finite.
Feedback = Literal["none", "own", "global"]
#: The usual period of full-precision rounds: one step in so many. Who asks for a shorter one means it.
FULL_PRECISION_EVERY = 50
#: What tables hold for one tensor, by the table's name: arrays that only the method itself understands.
Held = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Law:
    """What a method promises, for ``x = gradient + residual`` of every rank and their mean.

    The tests that are common to all methods prove it, and tables show it.

    Attributes:
        unbiased: the result's expectation over the random bits is the mean of ``x``.
        conserves: result + mean residual afterwards = mean of ``x``, but for rounding: what is not
            sent now is not lost.
        epsilon: relative size of the rounding of one number on the wire, or where it is kept.
        bound: the error of the result against the mean of ``x``, as a formula.
        error: returns a bound of the expected squared error of the mean, or None where there is none. It takes one
            tensor of a bucket of its own, on each rank; float64.
        zeros: where x is exactly 0 on every rank, so is the result.
        few_exact: training learns well with few exact rounds where a second moment is held; this is measured.
    """

    unbiased: bool = False
    conserves: bool = False
    epsilon: float = 2.0**-23
    bound: str = "none"
    error: Callable[[Sequence[Tensor]], float | None] | None = None
    zeros: bool = False
    few_exact: bool = False


@dataclass(frozen=True)
class TableMoves:
    """How what tables hold follows its tensors to other buckets, between two steps.

    Attributes:
        views: returns, by table, the part that belongs to the tensor at a position, where each tensor has one.
        read: where tensors share their tables, returns what these hold for each tensor, in order.
        write: lets tables that are zero hold what ``read`` found for each tensor, if anything, elsewhere. Only one
            kind of rounds of a method may have a table of that name, unless writing twice does no harm.
        scale: multiplies all that tables and carries hold, where these are codes and no plain numbers; such tables are
            each rank's own, where those of other methods are equal on all. They do not add, so another number of ranks
            begins with zeros.
        spoilt: returns how many scales of codes, in such a table or carry, are no magnitudes or not below a limit.
    """

    views: Callable[[Work, int], dict[str, Tensor]] = lambda work, position: {}
    read: Callable[[Work, Key], list[Held]] | None = None
    write: Callable[[Work, Sequence[Held], Key], None] | None = None
    scale: Callable[[Work, float], None] | None = None
    spoilt: Callable[[Tensor, float], int] | None = None


@dataclass(frozen=True)
class Properties:
    """What is true of a method with its options. A simple method says its law, its residual rule and ``divides``.

    Attributes:
        law: what it promises.
        feedback: the residual rule in use.
        divides: where a second moment that is held divides. Gradients "before" they are encoded, and results are
            multiplied again; or only in the optimizer, "after"; or "never", where results are so near the mean that
            the optimizer's own may move with them.

        share_sent: which share of the elements a round sends, if the others wait.
        has_private_state: something waits here that no other method would send: none may come after this one.
        moves_tables: how what its tables hold is taken to other buckets, tensor by tensor; None if it can't be.
        stands_for_mean: results stand for the mean of what the ranks have; None for what the law says of it.
        small_tensors: the codec of tensors too small to be compressed, None for their gradients as they are. Where a
            method changes what a learning rate means, as momentum does, small tensors need the same.

        variants: every codec that ``for_step`` may return; none for the method itself.
        full_precision_every: the period of full-precision rounds, 0 for none.
        communication_delay: after how many local steps an exchange is due in update mode, if the user does not say.
    """

    law: Law = field(default_factory=Law)
    feedback: Feedback = "none"
    divides: Divides = "never"

    # what waits, and what may take the method's place
    share_sent: float = 1.0
    has_private_state: bool = False
    moves_tables: TableMoves | None = None
    stands_for_mean: bool | None = None
    small_tensors: Codec | None = None

    # rounds that differ
    variants: tuple[Codec, ...] = ()
    full_precision_every: int = 0
    communication_delay: int = 1

    @property
    def may_be_plain(self) -> bool:
        """Whether a bucket may travel uncompressed in any step without a change of what its results mean.

        The result has to stand for the mean of what the ranks have, and nothing but a residual may wait.
        """
        law, mean = self.law, self.stands_for_mean
        stands = law.unbiased or law.conserves if mean is None else mean
        return stands and self.small_tensors is None and not self.has_private_state


#: A bucket that every method can take.
_NOTHING = Bucket(0, (TensorSpec("nothing", (0,), "float32"),))


class NoCompression:
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
class Codec(NoCompression):
    """One method. Stateless: its fields are its options, and all it may know is in its arguments.

    Equal arguments give equal bytes on every rank and device. One tensor is a batch of one: no method has a second
    form for it.
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

    #: All tensors of a bucket are taken in together, so gradients on a GPU wait for the last one.
    batched: ClassVar[bool] = False
    #: Its kernels divide and multiply by ``Work.divisors``, so that the engine need not.
    divides_itself: ClassVar[bool] = False
    #: The option by which it has momentum of its own, if it has one of this name.
    momentum_option: ClassVar[str] = "momentum"
    #: Values that are not finite are counted in ``before``, not in ``submit``.
    counts_late: ClassVar[bool] = False
    #: What waits in the residual of any element is sent in time, whoever left it there.
    drains_residual: ClassVar[bool] = True
    #: Under an optimizer's momentum, which multiplies what a code makes of the first gradients, a training begins with
    #: exact rounds. Options for which gradients are not divided, or have no residual of their own, take this back.
    exact_first: ClassVar[bool] = False
    #: The state and the local arrays that merging works with. They are where payloads are exchanged, which may be the
    #: host while all else is on a GPU.
    folded: ClassVar[frozenset[str]] = frozenset()

    # ---- facts ----

    def properties(self) -> Properties:
        """Return what is true of the method with these options."""
        return Properties()

    def layout(self, bucket: Bucket, world: int) -> Layout:
        """Return the arrays of a bucket on each of ``world`` ranks.

        Raises:
            ConfigError: these options cannot serve such a bucket or number of ranks; says which can.
        """
        raise NotImplementedError

    def for_step(self, step: int, *, without: int = 0) -> Codec:
        """Return the codec of one step, for methods whose rounds differ; ``properties`` lists them as variants.

        Args:
            without: leave out the full-precision rounds between compressed ones if their period is this many steps or
                more; 0 leaves out none.
        """
        return self

    # ---- one round ----

    def prepare(self, work: Work) -> None:
        """Fill what stays the same in every step; called once per bucket."""

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        """Take in the gradients of some tensors, which stay as they are: one as it arrives, or all at once on a GPU.

        ``dgc`` with ``clip=`` alone scales them, as its later stages are to read them.

        Returns:
            For each of them, how many values of what is to be sent are not finite; a GPU may keep its counts there,
            which spares a wait.
        """
        raise NotImplementedError

    def before(self, number: int, work: Work, key: Key) -> dict[int, int] | None:
        """Make this rank ready for one exchange, once every tensor of the bucket was submitted.

        That is, fill the arrays of the prelude of this number; those of earlier ones are complete. The last exchange is
        that of the payload: of a method without preludes it is number 0.

        Returns:
            By position, how many values turned out not to be finite; see ``counts_late``.
        """

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        """Write the payload of some parts of the bucket, or do what is left to do of it.

        Called with all that was submitted; or as ``Layout.cutting`` allows, with some parts before the chunk is sent
        that needs them. Where payloads are gathered it sets ``work.used``.
        """

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        """Merge the elements of another partial payload, ``other``, into ``piece.values``; numbers add by default.

        Args:
            weights: how many ranks the own and the other payload stand for.
            key: of the rank that merges, with the hop.
        """
        if self.algebra is not Algebra.SUM:
            raise NotImplementedError
        ops.dense_add(piece.values, other)

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        """Merge the payloads of all other ranks into ``piece.result``; by default one by one into ``piece.values``.

        Args:
            others: in rank order; they may be overwritten.
            key: of the rank that folds.
        """
        for index, other in enumerate(others):
            self.combine(work, piece, other, (index + 1, 1), key.at(hop=index))

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        """Write the result of some parts over the gradients, and renew what is kept.

        Called with all that was submitted; or as ``Layout.cutting`` allows, with some parts as their chunks arrive.

        Args:
            key: this rank's key, as given to ``submit``.
            result_scale: 1 for the mean over ranks, the number of ranks for the sum.
        """
        raise NotImplementedError


class ByForm(Codec):
    """Checks options, and leaves all rounds to the class that they choose."""

    @cached_property
    def form(self) -> Codec:
        """The codec of every round."""
        raise NotImplementedError

    def properties(self) -> Properties:
        form = self.form
        return replace(form.properties(), variants=(form,))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return self.form.layout(bucket, world)

    def for_step(self, step: int, *, without: int = 0) -> Codec:
        return self.form


def variants_of(codec: Codec) -> tuple[Codec, ...]:
    """Return every codec that the steps of a method may take."""
    return codec.properties().variants or (codec,)


def zero_groups_of(codec: Codec, bucket: Bucket, world: int) -> Sequence[int]:
    """Return, for each tensor of a bucket, which zeros stay zeros; see ``Layout.zero_groups``."""
    said = codec.layout(bucket, world).zero_groups
    return said or [int(codec.properties().law.zeros)] * len(bucket.tensors)


def tables_that_stay(codec: Codec, bucket: Bucket, world: int) -> list[str]:
    """Return the tables of a bucket that cannot follow its tensors to other buckets."""
    stay: set[str] = set()
    move: set[str] = set()
    for each in variants_of(codec):
        (move if each.properties().moves_tables else stay).update(each.layout(bucket, world).tables)
    return sorted((codec.layout(bucket, world).tables.keys() - move) | stay)


def coded_tables(codec: Codec) -> set[str]:
    """Return the names of tables that hold codes and no plain numbers."""
    found = ((each, each.properties().moves_tables) for each in variants_of(codec))
    return {name for each, moves in found if moves and moves.scale for name in each.layout(_NOTHING, 1).tables}


def check_world(codec: Codec, world: int) -> None:
    """Refuse a number of ranks that a method with its options cannot serve, whatever the bucket.

    Raises:
        ConfigError: says which options can.
    """
    codec.layout(_NOTHING, world)


def whole(value: Any) -> bool:
    """Return whether an option is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
