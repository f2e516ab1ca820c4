"""Hosts on one machine: network namespaces that see one another, each with a host name and a folder of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen


@frozen
class Host:
    """One of two hosts. Their names are `names(prefix)`."""

    name: str
    address: str
    interface: str

    def start(self, command: list[str], *, mounts: dict[Path, Path], **variables: str) -> subprocess.Popen[str]:
        """Start a command on this host. mounts: folders that it sees under another path."""
        binds = "; ".join(f"mount --bind {there} {seen}" for seen, there in mounts.items())
        script = f'hostname {self.name}; {binds}{"; " if binds else ""}exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "bash", "-ec", script, "bash"]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, **variables}
        return subprocess.Popen(
            [*inside, *command],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Give two hosts with a network between them. Raise OSError where they cannot be made."""
    number = os.getpid() % 10000
    first, second = (Host(f"ml{number}-{i}", f"10.99.0.{i + 1}", f"mv{number}{i}") for i in (0, 1))
    pair = ["link", "add", first.interface, "netns", first.name, "type", "veth", "peer", "name", second.interface]
    commands = [["netns", "add", host.name] for host in (first, second)]
    commands += [[*pair, "netns", second.name]]
    for host in (first, second):
        commands += [["-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface]]
        commands += [["-n", host.name, "link", "set", name, "up"] for name in (host.interface, "lo")]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(done.stderr.strip())
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
