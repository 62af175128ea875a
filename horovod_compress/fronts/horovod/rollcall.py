"""Which ranks have come to a point where all meet, known before any of them can send another one anything.

A gather of Horovod's does not say who is missing. But the rendezvous server that ``horovodrun`` starts, through which
Horovod's own ranks find each other, keeps small values by key: each rank leaves word there when it comes, and one that
has waited in vain reads who did not. Jobs without that server, as MPI starts them, do not learn it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from typing import Any

_SCOPE = "hvc.rollcall"
_SECONDS = 2.0  # that the server may take to answer
_GRACE_SECONDS = 1.0
_HERE, _LEFT = "here", "left"


class RollCall:
    """One meeting of all ranks.

    Args:
        name: of the meeting.
        process_set: the ranks that should come.
    """

    def __init__(self, name: str, process_set: Any) -> None:
        self._name = f"{name}.{process_set.process_set_id}"
        self._rank, self._ranks = process_set.rank(), range(process_set.size())
        self._numbers = process_set.ranks or list(self._ranks)  # of the whole job, as people know them
        self._say(_HERE)

    def _say(self, word: str) -> None:
        _call("PUT", f"{self._name}.{self._rank}", word)

    def held(self) -> None:
        """Note that every rank has come, as there may be another meeting of this name."""
        self._say(_LEFT)

    def absent(self) -> list[int]:
        """Return the ranks that have not come, as far as is known; one that came to an earlier meeting in vain has."""
        if self._missing():
            time.sleep(_GRACE_SECONDS)  # where the first of all has ended, others may be about to come
        return self._missing()

    def _missing(self) -> list[int]:
        missing = []
        for rank in self._ranks:
            word = _call("GET", f"{self._name}.{rank}")
            if word is None:
                return []  # the server does not answer
            if word != _HERE:
                missing.append(self._numbers[rank])
        return missing


def _call(verb: str, key: str, value: str | None = None) -> str | None:
    """Ask the server; return its answer, empty if it has no such value, or None if there is no server."""
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not port:
        return None
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # a message may go without names
        connection = http.client.HTTPConnection(host, int(port), timeout=_SECONDS)
        with contextlib.closing(connection):
            connection.request(verb, f"/{_SCOPE}/{key}", value)
            answer = connection.getresponse()
            return answer.read().decode() if answer.status == http.client.OK else ""
    return None
