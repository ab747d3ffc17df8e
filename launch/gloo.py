"""``python -m launch.gloo horovodrun --gloo ...``: horovodrun for local ranks, on loopback only.

Horovod's rendezvous server otherwise accepts writes on all interfaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import HTTPServer

from ringtrain.watchdog.hub import LOOPBACK


def find_port(create_server: Callable[[tuple[str, int]], HTTPServer]) -> tuple[HTTPServer, int]:
    server = create_server((LOOPBACK, 0))
    return server, server.server_port


def main() -> None:
    from horovod.runner.http import http_server
    from horovod.runner.launch import run_commandline

    http_server.find_port = find_port
    sys.argv = sys.argv[1:]
    run_commandline()


if __name__ == "__main__":
    main()
