"""Two hosts on one machine: network namespaces with addresses and names of their own, and a cable that can be cut.

Each host has a disk of its own at a path that both have, and shares all other folders with the other one. Where user
namespaces are allowed no privileges are needed; ``why_not`` says why there are no hosts to be had.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.launches import start

NAMES = ("host0", "host1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIME_LIMIT_SECONDS = 30.0
TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
OWN_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def why_not() -> str:
    """Say why this machine gives no network namespaces; empty where it does."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"two hosts need the commands {', '.join(missing)}"
    script = "ip link add name end0 type veth peer name end1 && mount -t tmpfs none /mnt"
    tried = subprocess.run([*OWN_NAMESPACES, "sh", "-c", script], capture_output=True, text=True, timeout=60)
    return f"two hosts need user and network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class TwoHosts:
    """Two hosts that live as long as their holders.

    Attributes:
        holders: the processes that hold the namespaces.
        local: the path at which each host has its own disk.
    """

    def __init__(self, holders: tuple[int, int], local: Path) -> None:
        self.holders = holders
        self.local = local

    def on(self, host: int, command: list[str]) -> list[str]:
        """Return the command line that runs ``command`` on a host."""
        enter = ["nsenter", "--target", str(self.holders[host]), "--user", "--net", "--mount", "--uts"]
        return [*enter, "--preserve-credentials", f"--wd={os.getcwd()}", *command]

    def start(self, host: int, command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a launch on a host, as ``launches.start`` does."""
        local = {"TMPDIR": str(self.local), "HOME": str(self.local)}
        return start(self.on(host, command), {**local, **(environment or {})})

    def cut(self) -> None:
        """Pull out the cable; nobody is told."""
        subprocess.run(self.on(1, ["ip", "link", "set", "cable1", "down"]), check=True, timeout=TIME_LIMIT_SECONDS)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Set up two hosts, with their disks and lists of names in ``folder``; what runs on them is the caller's to end."""
    local = folder / "local"
    hosts_file = folder / "hosts"
    lines = [f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True)]
    hosts_file.write_text("".join(["127.0.0.1 localhost\n", *lines]))
    for path in (local, *(folder / name for name in NAMES)):
        path.mkdir()
    hold = "".join(f"{_hold_host(folder, name, local, hosts_file)} &\n" for name in NAMES)
    outer = subprocess.Popen([*OWN_NAMESPACES, "sh", "-c", f"{hold}wait"], start_new_session=True)
    try:
        hosts = TwoHosts((_pid(folder / "host0.pid"), _pid(folder / "host1.pid")), local)
        _connect(hosts, outer.pid)
        yield hosts
    finally:
        os.killpg(outer.pid, signal.SIGKILL)
        outer.wait()


def _hold_host(folder: Path, name: str, local: Path, hosts_file: Path) -> str:
    """Return the shell command that makes the namespaces of a host, says its process id, and keeps them."""
    inside = "; ".join(
        [
            f"hostname {name}",
            f"mount --bind {folder / name} {local}",
            f"mount --bind {hosts_file} /etc/hosts",
            "ip link set lo up",
            f"echo $$ > {folder / name}.pid",
            "exec sleep 3600",
        ]
    )
    return f"unshare --net --uts --mount sh -c {shlex.quote(inside)}"


def _connect(hosts: TwoHosts, outer: int) -> None:
    add = ["ip", "link", "add", "cable0", "netns", str(hosts.holders[0]), "type", "veth"]
    add += ["peer", "name", "cable1", "netns", str(hosts.holders[1])]
    enter = ["nsenter", "--target", str(outer), "--user", "--net", "--preserve-credentials"]
    subprocess.run([*enter, *add], check=True, timeout=TIME_LIMIT_SECONDS)
    for host, address in enumerate(ADDRESSES):
        script = f"ip addr add {address}/24 dev cable{host} && ip link set cable{host} up"
        subprocess.run(hosts.on(host, ["sh", "-c", script]), check=True, timeout=TIME_LIMIT_SECONDS)


def _pid(path: Path) -> int:
    """Wait until a holder has written its process id."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return int(path.read_text())
