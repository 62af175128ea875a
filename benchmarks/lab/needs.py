"""What the lab needs of this machine, checked before anything is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}

_NAMESPACES = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]


class LabError(RuntimeError):
    """The lab cannot be started, or broke; the text says why and what to do."""


def namespaces() -> list[str]:
    """Return the command that starts another in namespaces of its own.

    Root may always do so; other users where the kernel lets them make user namespaces.

    Raises:
        LabError: this user may not, a tool is missing, or this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"the network lab needs Linux's network namespaces, this is {sys.platform}")
    missing = {tool: package for tool, package in _TOOLS.items() if not _find(tool)}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise LabError(
            f"the network lab needs {', '.join(missing)}; install them, on Debian and Ubuntu with: "
            f"apt-get install {packages}"
        )
    command = [
        _find("unshare") or "unshare",
        *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
        *_NAMESPACES,
    ]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise LabError(
            f"the network lab needs root, to make network namespaces and to limit their links: `make setup` first, "
            f"then `sudo make lab` or `sudo make demo`; in a container, add --privileged ({tried.stderr.strip()})"
        )
    return command


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
