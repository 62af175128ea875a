"""The tokens that Horovod reduces in place of gradients, and what their mean or sum says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from ...engine.agreement import notes
from ...errors import ConfigError, HorovodCompressError
from .calls import calling_optimizer, owner_of_token, submit_rest


class Tokens:
    """One rank's tokens, one for each parameter.

    Args:
        rank: among those that take part.
        world: how many these are.
    """

    def __init__(self, rank: int, world: int, parameters: int) -> None:
        self._rank, self._world = rank, world
        self._gave_up = False
        self._owners = [owner_of_token() for _ in range(parameters)]

    @contextlib.contextmanager
    def whole_steps(self, compression: Any, failed: Callable[[], bool], places: Mapping[int, int]) -> Iterator[None]:
        """Hand over all tokens of a step if an error ends it in the middle of a backward pass.

        Else those of other ranks would wait for them, and their names could not be used again in this process.

        Args:
            compression: an optimizer calls it.
            failed: returns whether its ranks have failed: each of them gives up this step then.
            places: of the parameters' tokens, by identity.
        """
        try:
            yield
        except HorovodCompressError:
            optimizer = calling_optimizer(compression)
            if failed() and optimizer is not None and not self._gave_up:
                self._gave_up = True
                with contextlib.suppress(HorovodInternalError, ValueError):  # Horovod has ended, or a rank is behind
                    known = [p for p in optimizer._requires_update if id(p) in places]
                    submit_rest(optimizer, {p: self.of(places[id(p)]) for p in known})
            raise

    def of(self, index: int) -> Tensor:
        """Return the token of a parameter."""
        token = self._owners[index].grad
        assert token is not None
        return token.fill_(_value(self._rank))

    def result_scale(self, token: float, op: Any) -> float:
        """Return what Horovod's operation made of the ranks' tokens: 1 for the mean, the number of ranks for the sum.

        Args:
            op: the operation, None where it is not known.

        Raises:
            ConfigError: it is none of these, or some rank has joined.
        """
        values = [_value(rank) for rank in range(self._world)]
        total = sum(values)
        for result_scale in (1.0, float(self._world)):
            if abs(token - total * result_scale / self._world) < 1e-3:
                return result_scale
        if op in (hvd.Average, hvd.Sum) and (who := notes.joined(token, values, op == hvd.Average)):
            raise ConfigError(f"{who} called hvd.join() while rank {hvd.rank()} has a step left; {notes.ADVICE}")
        raise ConfigError(
            f"rank {hvd.rank()}: tokens with the sum {total:g} came back as {token:g} from {self._world} "
            f"ranks; only op=hvd.Average and op=hvd.Sum are supported"
        )


def _value(rank: int) -> float:
    """Return the value of a rank's tokens. They differ, so that no other operation gives their mean or sum."""
    return 3.0 if rank else 1.0
