"""Free ports for servers and process groups of tests."""

from __future__ import annotations

import secrets
import socket


def free_port() -> int:
    """A port that nobody listens on, outside the range from which the system takes ports of connections.

    A port of this range is free when it is looked up, and may be taken by another test's connection a moment later.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
