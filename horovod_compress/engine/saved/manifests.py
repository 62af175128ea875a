"""What a checkpoint folder says of itself: which files belong together, and whose they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import CorruptFrameError
from . import checksums

_FORMAT = 1
#: Say of at most so many ranks of a group which ones of the job they are.
_LISTED = 64
#: Of one rank's file, which has a name that no other save uses.
NAME = re.compile(r"rank\d+\.[0-9a-f]{16}\.hvc")


@dataclass(frozen=True)
class Entry:
    """One rank's file."""

    name: str
    bytes: int
    crc32c: int


@dataclass(frozen=True)
class RankGroup:
    """Some of a job's ranks, which have a checkpoint of their own.

    Attributes:
        ranks: their numbers in the job.
        of: so many ranks has the job.
    """

    ranks: list[int]
    of: int

    def in_words(self) -> str:
        """Return what numbers of ranks mean that are those within the group."""
        which = ", ".join(f"rank {mine} is rank {number}" for mine, number in enumerate(self.ranks[:_LISTED]))
        more = ", and so on" if len(self.ranks) > _LISTED else ""
        return f"Numbers of ranks are those within a group here; in the job, {which}{more}."

    def is_apart(self, other: RankGroup) -> bool:
        """Return whether these and the other ones are different ranks of one job, as far as their numbers tell."""
        return self.of == other.of and {*self.ranks}.isdisjoint(other.ranks)


@dataclass(frozen=True)
class Manifest:
    """What belongs together.

    Attributes:
        files: in rank order.
        group: whose they are, None for all ranks of a job.
    """

    format: int
    package: str
    wire: int
    step: int
    world: int
    method: str
    config: dict[str, Any]
    seed: int
    plan: str
    files: list[Entry]
    group: RankGroup | None = None

    def text(self) -> bytes:
        """Return it as it is written."""
        body = self._body()
        document = {"manifest": body, "crc32c": checksums.crc(checksums.canonical(body))}
        return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"

    def fingerprint(self) -> str:
        """Return what tells it from others."""
        return f"{checksums.crc(checksums.canonical(self._body())):08x}"

    def _body(self) -> Mapping[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "group" or value}


def made(state: Mapping[str, Any], files: list[Entry], group: RankGroup | None, package: str, wire: int) -> Manifest:
    """Return the manifest of some files, one of which has this state."""
    same = {name: state[name] for name in ("step", "method", "config", "seed", "plan")}
    return Manifest(_FORMAT, package, wire, world=len(files), files=files, group=group, **same)


def parse(data: bytes) -> Manifest:
    """Return the manifest that was written so.

    Raises:
        CorruptFrameError: it is not, byte for byte, what was written.
    """
    try:
        body = json.loads(data)["manifest"]
        group = RankGroup(**body["group"]) if "group" in body else None
        read = Manifest(**{**body, "files": [Entry(**entry) for entry in body["files"]], "group": group})
        intact = data == read.text() and _is_well_formed(read)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CorruptFrameError("it is not what was written")
    return read


def _is_well_formed(found: Manifest) -> bool:
    numbers = [found.format, found.wire, found.step, found.world, found.seed]
    numbers += [number for entry in found.files for number in (entry.bytes, entry.crc32c)]
    if found.group:
        numbers += [found.group.of, *found.group.ranks]
    return (
        all(type(number) is int for number in numbers)
        and found.format == _FORMAT
        and len(found.files) == found.world > 0
        and all(isinstance(entry.name, str) and NAME.fullmatch(entry.name) for entry in found.files)
    )
