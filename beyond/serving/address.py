"""Open the port that the server listens on. No PyTorch here, so a port that is taken is reported at once."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 takes a free one.

    Raises:
        OSError: there is no such port, it is taken, or the address is not this machine's.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # what follows is the address
        raise OSError(f"cannot listen on host {host}, port {port}: {why}; choose others") from error
