"""What a rank raises that cannot start: one error for one mistake, with the traceback of what nobody foresaw."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.errors import ConfigError
from horovod_compress.fronts.common.startup import refuse


class Alone:
    """A job of one rank."""

    rank, size = 0, 1

    def running(self) -> bool:
        return True

    def included(self) -> bool:
        return True

    def gather(self, value: Any, gathering: object) -> list[Any]:
        return [value]


def refused(error: Exception) -> ConfigError:
    with pytest.raises(ConfigError, match="what was wrong") as raised:
        try:
            raise error
        except Exception as caught:
            refuse(caught, Alone())  # type: ignore[arg-type]
    return raised.value


def test_a_mistake_is_told_once() -> None:
    error = refused(ConfigError("what was wrong"))
    assert error.__cause__ is None and error.__suppress_context__


def test_what_nobody_foresaw_keeps_its_traceback() -> None:
    bug = KeyError("what was wrong")
    assert refused(bug).__cause__ is bug
