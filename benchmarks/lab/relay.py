"""Delays what hosts send, where the kernel has no netem: a process of the lab between links and switch.

    python -m benchmarks.lab.relay SECONDS PORT ...

    host: eth0 ---- port0 (relay) late-port0 ---- switch

Each frame that comes out of a port is handed to the switch so much later, by a device of its own (TAP) that takes the
port's place there; what the switch sends to a host passes at once. So a packet is late once on its way. The kernel
removes these devices when the process ends. It writes one line when they are there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from .needs import LabError
from .network import SWITCH, command

# Of linux/if_tun.h, linux/if_packet.h and linux/if_ether.h: Python has no names for them.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_INFO, _HEADERS = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS_V4, _SEGMENTS_V6 = 1, 2, 4  # that the kernel may leave to a device
_SOL_PACKET, _PACKET_HEADERS, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ALL_PROTOCOLS = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ROOM = 32 << 20  # bytes that wait in a socket: where the relay is late, and in the queue of a limited link
#: A frame of the largest piece, with its header of what the kernel has left to do (struct virtio_net_hdr).
_LARGEST = 10 + 18 + (64 << 10)
_AT_ONCE = 64  # frames read from one device before the others have their turn
_READY_SECONDS = 10.0


class Relay:
    """The process, and the devices that stand for ports at the switch while it runs.

    Args:
        ports: the switch's ends of links.
        seconds: how long what comes out of them waits.

    Raises:
        LabError: this machine does not let us make such devices.
    """

    def __init__(self, ports: Sequence[str], seconds: float) -> None:
        self._ports = ports
        words = [sys.executable, "-m", "benchmarks.lab.relay", str(seconds), *ports]
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.pid = self._process.pid
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], _READY_SECONDS)[0] or not self._process.stdout.readline():
            raise LabError(
                f"links cannot be delayed, as this kernel has no netem, and no TAP devices in its place ({self._end()})"
                ": leave the delay out, or load a module: modprobe sch_netem, or modprobe tun; in a container, add "
                "--device /dev/net/tun"
            )
        for port in ports:
            command("ip", "link", "set", port, "nomaster")
            command("ip", "link", "set", late_of(port), "master", SWITCH, "up")

    def check(self) -> None:
        """See that it runs.

        Raises:
            LabError: it has ended.
        """
        if self._process.poll() is not None:
            raise LabError(f"what delays the lab's links has ended ({self._end()}); start the lab again")

    def stop(self) -> None:
        """Join ports and switch again. The devices go with the process."""
        self._end()
        for port in self._ports:
            command("ip", "link", "set", port, "master", SWITCH)

    def _end(self) -> str:
        """End the process, and return what it said last."""
        self._process.kill()
        return (self._process.communicate()[1].decode().strip().splitlines() or ["no reason given"])[-1]


def late_of(port: str) -> str:
    """Return the name of the device that takes a port's place at the switch."""
    return f"late-{port}"


class Way:
    """What goes on between one port and the switch."""

    def __init__(self, port: str, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[tuple[float, bytes]] = deque()
        self.port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        for side in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
            self.port.setsockopt(socket.SOL_SOCKET, side, _ROOM)
        self.port.setsockopt(_SOL_PACKET, _PACKET_HEADERS, 1)
        self.port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        self.port.bind((port, _ALL_PROTOCOLS))
        self.port.setblocking(False)
        self.switch = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = struct.pack("16sH", late_of(port).encode(), _TAP | _NO_INFO | _HEADERS)
        fcntl.ioctl(self.switch, _TUNSETIFF, name)
        fcntl.ioctl(self.switch, _TUNSETOFFLOAD, _CHECKSUMS | _SEGMENTS_V4 | _SEGMENTS_V6)

    def from_port(self) -> None:
        """Take frames that the host has sent, and note when they are due."""
        for _ in range(_AT_ONCE):
            try:
                frame = self.port.recv(_LARGEST)
            except BlockingIOError:
                return
            self._waiting.append((time.monotonic() + self._seconds, frame))

    def from_switch(self) -> None:
        """Hand frames for the host over at once; what its queue has no room for is lost, as in any port."""
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(self.switch, _LARGEST)
            except BlockingIOError:
                return
            with contextlib.suppress(OSError):
                self.port.send(frame)

    def deliver(self) -> float | None:
        """Hand over what is due; return in how many seconds the next frame is, None if nothing waits."""
        while self._waiting:
            due, frame = self._waiting[0]
            if (left := due - time.monotonic()) > 0:
                return left
            with contextlib.suppress(OSError):  # the device is not up yet
                os.write(self.switch, frame)
            self._waiting.popleft()
        return None


def main() -> None:
    seconds, ports = float(sys.argv[1]), sys.argv[2:]
    ways = [Way(port, seconds) for port in ports]
    selector = selectors.SelectSelector()  # the others wait for whole milliseconds
    for way in ways:
        selector.register(way.port, selectors.EVENT_READ, way.from_port)
        selector.register(way.switch, selectors.EVENT_READ, way.from_switch)
    print("ready", flush=True)
    while True:
        waits = [left for way in ways if (left := way.deliver()) is not None]
        for key, _ in selector.select(min(waits, default=None)):
            key.data()


if __name__ == "__main__":
    main()
