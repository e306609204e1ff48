"""Two hosts on one machine: network namespaces with separate addresses, joined by a virtual cable.

A process in a namespace sees no other network. Its traffic to the other host goes through the cable, where the kernel
counts it. When the cable is pulled, nothing arrives and no connection is closed, as if a host had lost its power. This
needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = "cable"  # the interface's name on both hosts


class TwoHosts:
    """The namespaces, by number: 0 and 1. `two_hosts` makes and removes them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a process on a host, in a new process group."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command], cwd=ROOT, start_new_session=True, text=True, **options
        )

    def bytes_sent(self, host: int) -> int:
        """Return the bytes that a host has sent so far, including TCP and IP headers."""
        command = ["ip", "-n", self.names[host], "-s", "-j", "link", "show", CABLE]
        [link] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return link["stats64"]["tx"]["bytes"]

    def pull_the_cable(self) -> None:
        """Stop all traffic between the hosts. No connection is closed by that."""
        _ip("-n", self.names[1], "link", "set", CABLE, "down")


def missing() -> str | None:
    """Return what this machine lacks for two hosts, or None."""
    if not shutil.which("ip"):
        return "`ip` (iproute2) is missing"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return None if probe.returncode == 0 else f"no network namespaces here ({probe.stderr.strip()})"


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts, and remove them at the end.

    Raises:
        subprocess.CalledProcessError: see `missing`.
    """
    names = [f"host{number}-{os.getpid()}" for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for interface in ("lo", CABLE):
                _ip("-n", name, "link", "set", interface, "up")
        yield TwoHosts(names)
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def torchrun(host: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module with these arguments as one of two ranks, on this host."""
    words = f"-m torch.distributed.run --nnodes 2 --node-rank {host} --nproc-per-node 1 --master-addr {ADDRESSES[0]}"
    return [sys.executable, *words.split(), "--master-port", "29511", *arguments]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
