"""A part of the check: one command with a time limit, and the words that choose it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LIMIT = 600.0


@dataclass(frozen=True)
class Part:
    """One command whose exit status says whether a part of the check is right.

    Args:
        name: of its group, with dots before what divides it: ``memcheck.2``.
        about: what it shows.
        command: to be run in the root of the repository.
        expected: seconds that it may well take, until it has run here once.
        environment: added to the environment.
        alone: it measures, or takes much memory: nothing runs beside it.
        missing: why it cannot be run here.
        limit: seconds after which it is ended.
    """

    name: str
    about: str
    command: tuple[str, ...]
    expected: float
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    missing: str = ""
    limit: float = LIMIT

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


def chosen(parts: Sequence[Part], words: Sequence[str]) -> list[Part]:
    """Return the parts of these names or groups, all without a word.

    Raises:
        ValueError: a word names none.
    """
    for word in words:
        if not any(_named(part, word) for part in parts):
            groups = dict.fromkeys(part.group for part in parts)
            raise ValueError(f"there is no part {word!r}: take one of {', '.join(groups)}, or a name that --list shows")
    return [part for part in parts if not words or any(_named(part, word) for word in words)]


def _named(part: Part, word: str) -> bool:
    return part.name == word or part.name.startswith(f"{word}.")
