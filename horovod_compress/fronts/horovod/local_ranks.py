"""Horovod's ranks on this machine, started without ``horovodrun``.

Only the server through which ranks find each other is taken from Horovod's launcher.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..common import local_ranks
from ..common.local_ranks import End, Look

_MODULE = "horovod_compress.fronts.horovod.selftest"


def run(
    world: int, what: Any, seconds: float, victims: Collection[int] = (), look: Look = lambda left: None
) -> list[End]:
    """Run the selftest as every rank of a job; see :func:`..common.local_ranks.run`."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    plan = get_host_assignments(parse_hosts(f"localhost:{world}"), world)
    common = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(plan)
    try:
        own = [{key: str(value) for key, value in (common | create_slot_env_vars(slot)).items()} for slot in plan]
        return local_ranks.run(_MODULE, own, what, seconds, victims, look)
    finally:
        server.stop()
        server._httpd.server_close()  # which stop() leaves to the garbage collector
