"""Ports for tests that start processes themselves; two tests run at a time."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
