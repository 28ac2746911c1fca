"""The least server that does what a hello needs: ``python -m benchmarks.scale.bare``. The limit of the join.

One thread accepts, reads a line of JSON per connection and answers it, without a token, limits or events. It answers
``usage`` on stdin as ``supervised.py`` does.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import sys
from typing import Any

from clusterddp.supervisor.main import prepare_process


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    """Serves until the end of the input."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    selector, joined = selectors.DefaultSelector(), 0
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    say(start={"port": listener.getsockname()[1], "token": "none", "time": 0.0})
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ)
            elif key.fileobj is sys.stdin:
                if not os.read(0, 4096):
                    return
                used = resource.getrusage(resource.RUSAGE_SELF)
                say(usage={"cpu_s": used.ru_utime + used.ru_stime, "joined": joined})
            elif isinstance(key.fileobj, socket.socket):
                if not (line := key.fileobj.recv(65536)):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                json.loads(line)
                joined += 1
                key.fileobj.sendall(b'{"host": "127.0.0.1", "port": 1, "open": true, "known": 0}\n')


if __name__ == "__main__":
    prepare_process()
    main()
