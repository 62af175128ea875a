"""What to do about a failure, read from what the command printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

FULL_DISK = """\
The disk is full, or a quota is used up. Make room; .venv, build, and the caches of pip and of this set-up in ~/.cache
are large. XDG_CACHE_HOME and TMPDIR move the caches and the temporary files elsewhere."""
_NO_MEMORY = """\
The machine ran out of memory, and a compiler was killed: each needs about 1 GB. Close other programs, or run one
compiler at a time:  make setup JOBS=1, or  hvd-compress build-horovod --jobs 1"""
_NO_PYTHON_HEADERS = """\
Python's headers are missing. Debian, Ubuntu: sudo apt-get install python3-dev; Fedora: sudo dnf install
python3-devel."""
_NO_HEADER = """\
A header is missing: install the development package that contains it (Debian, Ubuntu: apt-file search NAME finds it).
If it belongs to the C++ standard library, update the compiler."""
_CERTIFICATE = """\
The package index's certificate is not trusted here. Behind a proxy that intercepts TLS, set PIP_CERT to the file with
the proxy's certificate."""
_NETWORK = """\
The package index could not be reached. Check the network. Behind a proxy, set HTTPS_PROXY; for a mirror, set
PIP_INDEX_URL. The rest of pip's configuration applies as usual."""
_DIGEST = """\
A downloaded file does not match the published one: a mirror or a proxy changed it, or the download was cut off.
Remove it from pip's cache with  python3 -m pip cache purge , or use another index."""
_NO_VERSION = """\
The package index has no such version for this Python. Another torch: make setup TORCH=torch==VERSION; another Python:
make setup PYTHON=python3.12; an index of your own: pip's PIP_INDEX_URL."""
PERMISSION = """\
A file belongs to another user, probably because something here was once run with sudo. Take it back with
sudo chown -R "$USER" .  ; make setup itself needs no sudo."""
_GENERAL = """\
See the full log: its first error is usually the cause, and the later ones follow from it."""

# The first that fits counts: a full disk and killed compilers cause many other errors.
_ADVICE = (
    (r"No space left on device|Errno 28\b|Disk quota exceeded|Errno 122\b", FULL_DISK),
    (
        r"Killed signal|virtual memory exhausted|Cannot allocate memory|std::bad_alloc|out of memory|MemoryError",
        _NO_MEMORY,
    ),
    (r"fatal error: .*\bPython\.h", _NO_PYTHON_HEADERS),
    (r"fatal error: .*No such file or directory|fatal error: .* file not found", _NO_HEADER),
    (r"CERTIFICATE_VERIFY_FAILED|SSLCertVerificationError", _CERTIFICATE),
    (
        (
            r"name resolution|Name or service not known|NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out"
            r"|Connection refused|Connection reset|Network is unreachable|ProxyError|Max retries exceeded"
        ),
        _NETWORK,
    ),
    (r"DO NOT MATCH THE HASHES", _DIGEST),
    (r"No matching distribution found|Could not find a version", _NO_VERSION),
    (r"Permission denied|Errno 13\b", PERMISSION),
)
_KILLED = (-9, 137)

_ERROR = re.compile(
    r"(error:|^\s*ERROR\b|\bError: |CMake Error|undefined reference|No space left|\*\*\* \[|Killed signal)"
)
# `-- Could NOT find NVTX` is what CMake says of anything that it can do without.
_HARMLESS = re.compile(r"^\s*(--|WARNING:|warning:)")


def advice(lines: Sequence[str], status: int) -> str:
    """Names the likely cause and its remedy; what to do in general where none is recognised."""
    for pattern, text in _ADVICE:
        if any(re.search(pattern, line) for line in lines):
            return text
    return _NO_MEMORY if status in _KILLED else _GENERAL


def first_error(lines: Sequence[str]) -> int:
    """The index of the first line that looks like an error; of the last line where none does."""
    found = (index for index, line in enumerate(lines) if _ERROR.search(line) and not _HARMLESS.match(line))
    return next(found, len(lines) - 1)


def excerpt(lines: Sequence[str], around: int = 5, last: int = 5) -> list[str]:
    """The lines that matter: the first error and what follows it, then the end."""
    start = max(first_error(lines), 0)
    stop = min(start + 1 + around, len(lines))
    tail = max(stop, len(lines) - last)
    gap = ["..."] if tail > stop else []
    return [*lines[start:stop], *gap, *lines[tail:]]
