"""Open the server's port. This module does not import PyTorch, so an occupied port is reported at once."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address; port 0 chooses a free port.

    Raises:
        OSError: the port is invalid or occupied, or the address does not belong to this machine.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # what follows is the address
        raise OSError(f"cannot listen on host {host}, port {port}: {why}; choose others") from error
