"""``python -m launch.gloo horovodrun --gloo ...``: horovodrun for ranks of this machine, on loopback only.

If all ranks are local, their connections are on the loopback already. The server in which they find each other, and
in which whoever reaches it may write, is not, and no option of horovodrun's says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from http.server import HTTPServer

from ringtrain.watchdog.hub import LOOPBACK


def find_port(create_server: Callable[[tuple[str, int]], HTTPServer]) -> tuple[HTTPServer, int]:
    """In place of Horovod's function of that name: a server on a free port of the loopback."""
    server = create_server((LOOPBACK, 0))
    return server, server.server_port


def main() -> None:
    """Run the command line that follows."""
    from horovod.runner.http import http_server
    from horovod.runner.launch import run_commandline

    http_server.find_port = find_port
    sys.argv = sys.argv[1:]
    run_commandline()


if __name__ == "__main__":
    main()
