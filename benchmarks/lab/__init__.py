"""A network of several hosts on one machine: real processes, real TCP, links with a real limit.

Every host is a network namespace with a name and an address of its own, joined to one switch (a
bridge) by one link. Both directions of a link are limited by the kernel (``tc tbf``). A job's ranks
run on these hosts as they would on machines of their own: Horovod and everybody else see several
hosts, and only the time that bytes need on the links is emulated.

The lab lives in namespaces that only its own processes hold (network, mounts, host name, process
ids). The kernel removes all of it, with every process in it, as soon as the lab's first process is
gone, however that came about. So nothing is left behind, nothing of the machine's own network is
touched, and any number of labs can run at once.
"""

from .lab import Lab
from .needs import LabError

__all__ = ["Lab", "LabError"]
