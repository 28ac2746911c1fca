"""How much the clocks of two hosts differ, measured over a TCP connection."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time

#: The difference in seconds above which a check warns. At twice of it, Slurm may refuse a requeued job.
MOST_S = 1.0
EXCHANGES = 5
_TIMEOUT_S = 10.0
_TIME = struct.Struct("!d")


class _Handler(socketserver.BaseRequestHandler):
    """Answers each byte with the time."""

    request: socket.socket

    def handle(self) -> None:
        self.request.settimeout(_TIMEOUT_S)
        try:
            while self.request.recv(1):
                self.request.sendall(_TIME.pack(time.time()))
        except OSError:  # the other side disconnected or does not answer
            pass


class TimeServer(socketserver.ThreadingTCPServer):
    """Sends its host's time to every client, from a separate thread, until ``close``."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("", 0), _Handler)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.1,), name="clock", daemon=True).start()

    def close(self) -> None:
        """Stops answering."""
        self.shutdown()
        self.server_close()


def difference(host: str, port: int) -> tuple[float, float]:
    """Seconds by which this host's clock is ahead of a TimeServer's, and the round trip in seconds.

    The exchange with the shortest round trip counts. The difference is exact to half of that. Raises OSError.
    """
    measured = []
    with socket.create_connection((host, port), _TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(EXCHANGES):
            wall, started = time.time(), time.monotonic()
            connection.sendall(b"?")
            theirs = _receive(connection)
            trip = time.monotonic() - started
            measured.append((trip, wall + trip / 2 - theirs))
    trip, ahead = min(measured)
    return ahead, trip


def _receive(connection: socket.socket) -> float:
    data = b""
    while len(data) < _TIME.size:
        part = connection.recv(_TIME.size - len(data))
        if not part:
            raise ConnectionError("the time server closed the connection")
        data += part
    return float(_TIME.unpack(data)[0])
