"""What a copy of a model, or a model that was saved whole, has in place of its compression."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from ...errors import ConfigError

_log = logging.getLogger("horovod_compress")


class Copied:
    """Stands for a compression, whose connections cannot be copied. A copied model has no hook registered."""

    def exchange(self, bucket: Any) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a compression cannot be copied or saved with its model: create and register another one")


def copied() -> Copied:
    """Return what comes out of a copy."""
    _log.warning(
        "a copy of a DistributedDataParallel model has no compression; if it is trained, it exchanges gradients "
        "uncompressed: create one, and write compression.register(ddp_model, optimizer)"
    )
    return Copied()
