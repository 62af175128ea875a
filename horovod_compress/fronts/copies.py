"""What a copy of a compression is: nothing that exchanges, and it says so."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from ..errors import ConfigError

_log = logging.getLogger("horovod_compress")


class Copied:
    """Stands for a compression, whose connections cannot be copied, wherever a framework would call it."""

    def exchange(self, *given: Any, **options: Any) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a compression cannot be copied or saved with its model or optimizer, and this is a copy: create another "
            "one, for the copied model and an optimizer of its own"
        )

    compress = decompress = attach = register = exchange


def copied(text: str) -> Copied:
    """Return what comes out of a copy.

    Args:
        text: is logged.
    """
    _log.warning("%s", text)
    return Copied()
