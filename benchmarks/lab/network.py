"""The lab's network: a switch, hosts and links. Runs inside the lab's own namespaces only."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .needs import LabError
from .rates import MOST_PIECE, Rate

SWITCH = "switch"
SWITCH_ADDRESS, SWITCH_HARDWARE = "10.77.0.254", "02:00:00:00:00:fe"
INTERFACE = "eth0"
MOST_HOSTS = 200
_READY_SECONDS = 10.0


@dataclass(frozen=True)
class Host:
    """One host: a process that holds its namespaces open, and its address."""

    name: str
    address: str
    port: str  # the switch's end of the link
    holder: subprocess.Popen[bytes]

    def enter(self, *command: str) -> list[str]:
        """Return a command that runs another one on this host."""
        return ["nsenter", "--target", str(self.holder.pid), "--net", "--uts", "--", *command]


def build(names: list[str]) -> list[Host]:
    """Make the switch and a host for each name, joined by unlimited links."""
    command("ip", "link", "set", "lo", "up")
    # An address of its own: else it has that of one of its ports, which come and go.
    command("ip", "link", "add", SWITCH, "address", SWITCH_HARDWARE, "type", "bridge")
    command("ip", "address", "add", f"{SWITCH_ADDRESS}/24", "dev", SWITCH)
    command("ip", "link", "set", SWITCH, "up")
    hosts = [_host(number, name) for number, name in enumerate(names)]
    _name(hosts)
    return hosts


def _host(number: int, name: str) -> Host:
    hold = f"echo {name} > /proc/sys/kernel/hostname && exec sleep infinity"
    holder = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", hold], stdin=subprocess.DEVNULL)
    host = Host(name, f"10.77.0.{number + 1}", f"port{number}", holder)
    _await_namespace(holder.pid)
    command("ip", "link", "add", host.port, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid))
    command("ip", "link", "set", host.port, "master", SWITCH, "up")
    command(*host.enter("ip", "link", "set", "lo", "up"))
    command(*host.enter("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
    command(*host.enter("ip", "link", "set", INTERFACE, "up"))
    return host


def _namespace(process: int | str, kind: str) -> Path:
    return Path(f"/proc/{process}/ns/{kind}").readlink()


def _await_namespace(pid: int) -> None:
    """Wait until a process has left our network and host name for its own."""
    end = time.monotonic() + _READY_SECONDS
    while any(_namespace(pid, kind) == _namespace("self", kind) for kind in ("net", "uts")):
        if time.monotonic() > end:
            raise LabError("a host's namespace was not ready in time; is this machine overloaded?")
        time.sleep(0.005)


def _name(hosts: list[Host]) -> None:
    """Let every name resolve to its address, in the lab only: the mount is the lab's own."""
    lines = ["127.0.0.1 localhost", f"{SWITCH_ADDRESS} {SWITCH}", *(f"{host.address} {host.name}" for host in hosts)]
    with tempfile.NamedTemporaryFile("w", prefix="hosts-", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    try:
        command("mount", "--bind", file.name, "/etc/hosts")
    finally:
        Path(file.name).unlink()  # the mount keeps the file


# ---- limits -------------------------------------------------------------------------------------


def has_netem() -> bool:
    """Return whether this kernel can delay the packets of a link."""
    add = subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem"], capture_output=True, check=False)
    if not add.returncode:
        command("tc", "qdisc", "del", "dev", "lo", "root")
    return not add.returncode


def limit(hosts: list[Host], rate: Rate | None, delay: float) -> None:
    """Limit both directions of every link; None takes a limit away.

    Args:
        delay: seconds that each packet waits on its way from one host to another, by netem.

    Raises:
        LabError: this kernel has no tbf, or no limit of what a host hands over at once.
    """
    piece = rate.piece if rate else MOST_PIECE
    for host in hosts:
        command(*host.enter("ip", "link", "set", "dev", INTERFACE, "gso_max_size", str(piece)))
        for enter, device in ((host.enter, INTERFACE), (_here, host.port)):
            subprocess.run(enter("tc", "qdisc", "del", "dev", device, "root"), capture_output=True, check=False)
            late = delay if device == INTERFACE else 0.0  # once on the way, where the packet leaves its host
            if late:
                _delay(enter("tc", "qdisc", "add", "dev", device, "root", "handle", "1:"), late, rate)
            if rate:
                parent = ["parent", "1:1"] if late else ["root"]
                _shape(enter("tc", "qdisc", "add", "dev", device, *parent, "handle", "10:"), rate)


def _here(*words: str) -> list[str]:
    return list(words)


def _shape(add: list[str], rate: Rate) -> None:
    words = ["tbf", "rate", rate.text, "burst", str(rate.burst), "limit", str(rate.queue)]
    done = subprocess.run([*add, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise LabError(
            f"this kernel does not offer the queueing discipline tbf ({said[0]}): links cannot be limited, or load the "
            "module sch_tbf (modprobe sch_tbf; a kernel without it needs another one)"
        )


def _delay(add: list[str], seconds: float, rate: Rate | None) -> None:
    # Everything that is under way waits here: a queue of fewer packets would drop some.
    packets = 1000 + int(2 * seconds * (rate.bits if rate else 100e9) / 8 / 1514)
    words = ["netem", "delay", f"{seconds * 1e6:.0f}us", "limit", str(packets)]
    command(*add, *words)


# ---- counters -----------------------------------------------------------------------------------


def counters(hosts: list[Host]) -> list[dict[str, int | str]]:
    """Return what every host's link has carried since it was made, in bytes and packets.

    The kernel counts Ethernet frames without preamble and checksum; a burst of segments that the
    network stack handles as one counts the headers of one.
    """
    return [_counter(host) for host in hosts]


def _counter(host: Host) -> dict[str, int | str]:
    (link,) = json.loads(command(*host.enter("ip", "-json", "-statistics", "link", "show", INTERFACE)))
    sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
    return {
        "host": host.name,
        "sent": sent["bytes"],
        "received": received["bytes"],
        "packets_sent": sent["packets"],
        "packets_received": received["packets"],
        "dropped": _dropped(host.enter, INTERFACE) + _dropped(_here, host.port),
    }


def _dropped(enter: Callable[..., list[str]], device: str) -> int:
    queues = json.loads(command(*enter("tc", "-json", "-statistics", "qdisc", "show", "dev", device)))
    return sum(queue.get("drops", 0) for queue in queues)


def difference(after: list[dict[str, int | str]], before: list[dict[str, int | str]]) -> list[dict[str, int | str]]:
    """Return what the links carried in between."""
    return [
        {key: value - old[key] if isinstance(value, int) else value for key, value in new.items()}  # type: ignore[operator]
        for new, old in zip(after, before, strict=True)
    ]


_SYSCTL = Path("/proc/sys/net/ipv4")


def congestion_control(hosts: list[Host], wanted: str | None) -> str:
    """Set TCP's congestion control on all hosts and return its name.

    Args:
        wanted: an algorithm; None for cubic, Linux's own default, or for reno, its forerunner, where
            the machine lets namespaces have no cubic. A machine may itself be set to another one.

    Raises:
        LabError: the algorithm is not there, or not for namespaces.
    """
    allowed = (_SYSCTL / "tcp_allowed_congestion_control").read_text().split()
    name = wanted or ("cubic" if "cubic" in allowed else "reno")
    if name not in allowed:
        raise LabError(
            f"congestion control {name} is not allowed in network namespaces of this machine, "
            f"only {', '.join(allowed)} are (sysctl net.ipv4.tcp_allowed_congestion_control)"
        )
    for host in hosts:
        command(*host.enter("sh", "-c", f"echo {name} > {_SYSCTL}/tcp_congestion_control"))
    return name


def command(*words: str) -> str:
    """Run a command and return its output.

    Raises:
        LabError: it failed.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(words)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
