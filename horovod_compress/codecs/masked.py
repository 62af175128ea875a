"""A method for pruned weights: what is masked is not sent, and its result is exactly 0.

After PacTrain (arXiv:2505.18563): a mask is what is 0 in the weights, and all ranks agree on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..known import MethodName
from .base import Codec, NoCompression
from .registry import create


@dataclass(frozen=True)
class Masked(NoCompression):
    """See :func:`masked`."""

    codec: Codec

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the method within."""
        return self.codec.name


def masked(given: MethodName | Codec) -> Masked:
    """Return a method that leaves out masked weights: their gradients count as 0, and their results are exactly 0.

        hvc.Compression.create(hvc.masked("signsgd"), model.named_parameters())
        hvc.Compression.per_layer({"*.weight": hvc.masked("powersgd"), "*": "none"}, model.named_parameters())

    A weight is masked if it is exactly 0 in the first step, in a tensor that is not wholly 0 then, or becomes so later;
    and as long as it is 0. Ranks compare their masks whenever they change. Once a tenth of a tensor is masked, payloads
    hold what is left of it, in rows of one length where rows have steps of their own; methods that keep tables send
    whole tensors.

    Args:
        given: the name of a method, or what :func:`method` or :func:`by_step` returns.

    Raises:
        ConfigError: that is not a method.
    """
    codec = create(given) if isinstance(given, str) else given
    if not isinstance(codec, Codec):
        raise ConfigError(
            'masked() takes the name of a method, hvc.method("name", option=...) or hvc.by_step(...), got '
            f"{given!r:.200}"
        )
    return Masked(codec)
