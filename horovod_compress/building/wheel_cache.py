"""Built wheels, kept for the user across checkouts and environments.

An entry is a folder that appears whole, by one rename, or not at all; so whatever is found is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .file_lock import file_lock


@dataclass(frozen=True)
class BuildFacts:
    """Everything that makes one build of Horovod differ from another; equal facts, equal wheel."""

    horovod: str
    torch: str  # with the local part: 2.13.0+cpu and 2.13.0+cu130 need different builds
    python: str  # the suffix of extension modules, such as cpython-311-x86_64-linux-gnu
    platform: str
    c_library: str
    compiler: str
    instruction_sets: str  # Horovod's build asks the processor, so a shared home folder needs this
    options: tuple[tuple[str, str], ...]
    recipe: str  # what we change in Horovod's sources

    def key(self) -> str:
        """A name a person can read, made unique by a digest of all facts."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"horovod-{self.horovod}-torch-{self.torch}-{self.python}-{digest[:12]}"


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "horovod-compress" / "wheels"


class WheelCache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> Path | None:
        return next(iter(sorted((self.folder / key).glob("*.whl"))), None)

    def discard(self, key: str) -> None:
        shutil.rmtree(self.folder / key, ignore_errors=True)

    @contextmanager
    def locked(self, key: str, say: Callable[[str], None], pause: Callable[[], None]) -> Iterator[None]:
        """Of two processes that want the same wheel, one builds and the other waits for it, as `file_lock` does."""
        with file_lock(self.folder / f"{key}.lock", f"building {key}", say, pause):
            yield

    @contextmanager
    def workplace(self, key: str) -> Iterator[Path]:
        """An empty folder to build in, on the cache's file system; call only while locked.

        A build that was killed leaves its folder behind, and perhaps compilers that still write there: so the next
        one removes it and takes another name. Only the digest is in that name, because build systems are not to be
        trusted with the + of 2.13.0+cpu.
        """
        prefix = f"partial-{key.rpartition('-')[2]}-"
        self.folder.mkdir(parents=True, exist_ok=True)
        for remains in self.folder.glob(f"{prefix}*"):
            shutil.rmtree(remains, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=self.folder))
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def store(self, key: str, built: Path, facts: BuildFacts) -> Path:
        """Makes the folder `built`, which holds one wheel, the entry of `key`."""
        (built / "facts.json").write_text(json.dumps(asdict(facts), indent=2) + "\n")
        self.discard(key)
        built.rename(self.folder / key)
        wheel = self.find(key)
        if wheel is None:
            raise FileNotFoundError(f"the build of {key} succeeded but left no wheel")
        return wheel
