"""What a rank raises that cannot start: one error for one mistake, with the traceback of what nobody foresaw."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.engine.agreement.handshake import refusal
from horovod_compress.errors import ConfigError
from horovod_compress.fronts.startup import refuse


class Two:
    """Rank 1 of two, beside a rank that cannot start either."""

    rank, size = 1, 2

    def __init__(self, first: Exception) -> None:
        self._first = first

    def running(self) -> bool:
        return True

    def included(self) -> bool:
        return True

    def gather(self, value: Any, gathering: object) -> list[Any]:
        stage, _ = value
        return [[stage, asdict(refusal(self._first))], value]


def refused(error: Exception, first: Exception | None = None) -> ConfigError:
    """Return what rank 1 raises for an error, where rank 0 has the same, or another first one."""
    with pytest.raises(ConfigError) as raised:
        try:
            raise error
        except Exception as caught:
            refuse(caught, Two(first or error))  # type: ignore[arg-type]
    return raised.value


def test_a_mistake_is_told_once() -> None:
    error = refused(ConfigError("what was wrong"))
    assert str(error) == "what was wrong"
    assert error.__cause__ is None and error.__suppress_context__


def test_a_mistake_is_one_wherever_objects_lie() -> None:
    error = refused(
        ConfigError("got <function at 0x7f08>, and more"), ConfigError("got <function at 0x7fA1>, and more")
    )
    assert str(error) == "got <function>, and more" and error.__cause__ is None


def test_a_mistake_of_this_rank_alone_is_not_lost() -> None:
    own = ConfigError("what was wrong here")
    error = refused(own, ConfigError("what was wrong there"))
    assert str(error) == "rank 0 cannot start: what was wrong there" and error.__cause__ is own


def test_what_nobody_foresaw_keeps_its_traceback() -> None:
    bug = KeyError("what was wrong")
    assert refused(bug).__cause__ is bug
