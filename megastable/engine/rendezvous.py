"""How the processes of a run find each other: the store through which they meet, and its port."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megastable.core.errors import UserError, first_line
from megastable.core.launch import LOOPBACK, Launch, port_fault
from megastable.core.launch_variables import sets_rank

CONNECT_TIMEOUT = timedelta(minutes=10)
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
POLL_SECONDS = 0.05
ATTEMPT = "attempt"
"""Key of the launcher's store: the name of the newest attempt."""


class AbsentError(Exception):
    """Not all processes of a launch have come in time; the text says how many, or which."""


def rendezvous(launch: Launch) -> Store:
    """Return the store through which the processes find each other.

    Raises:
        UserError: another program has taken the port, or not all processes have come within ``CONNECT_TIMEOUT``.
    """
    try:
        return _meet(launch)
    except (torch.distributed.DistStoreError, torch.distributed.DistNetworkError, AbsentError) as error:
        raise UserError(_absence(launch, error)) from error


def _absence(launch: Launch, error: Exception) -> str:
    """Describe who has not come, and what to look at."""
    joined = re.search(r"(\d+)/\d+ clients joined", str(error))
    where = f"{launch.master_addr}, port {launch.master_port}"
    if isinstance(error, AbsentError):
        what = str(error)
    elif joined is not None:
        what = f"{joined[1]} of {launch.world_size} processes have come to {where}"
    else:
        # torch names the fault of the network, such as a host without an address.
        what = f"rank {launch.rank} has not reached rank 0 at {where} ({first_line(error)})"
    return (
        f"{what}; after {CONNECT_TIMEOUT} the launch is given up. Look whether every node has started its processes "
        "(the output of those that ended says why), with the same MASTER_ADDR and MASTER_PORT, and whether each node "
        "can reach that host and port (its name, firewalls)"
    )


def _meet(launch: Launch) -> Store:
    if launch.store_is_hosted:
        store = TCPStore(launch.master_addr, launch.master_port, launch.world_size, timeout=CONNECT_TIMEOUT)
        return PrefixStore(_agree_on_attempt(launch, store), store)
    if launch.chooses_port:
        return _agree_on_port(launch)
    if launch.rank > 0:
        address = LOOPBACK if launch.single_node else launch.master_addr
        return TCPStore(address, launch.master_port, launch.world_size, timeout=CONNECT_TIMEOUT)
    try:
        if launch.single_node:
            return _serve_here(launch, launch.master_port, wait_for_workers=True)
        return TCPStore(
            launch.master_addr, launch.master_port, launch.world_size, is_master=True, timeout=CONNECT_TIMEOUT
        )
    except OSError as error:
        raise UserError(port_fault(launch, os.strerror(error.errno or 0))) from error
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(port_fault(launch, os.strerror(errno.EADDRINUSE))) from error


def _agree_on_attempt(launch: Launch, store: TCPStore) -> str:
    """Agree on a name under which no earlier attempt of the launch has written into the launcher's store.

    torchrun keeps its store where it restarts the ranks, with the addresses of those that have ended, and its count of
    restarts leaves out those for a node that came or went. So rank 0 makes up a name, the others sign under it, and a
    rank that finds an old name does not find its own signature among those that were counted there.
    """
    own = secrets.token_hex(8)
    if launch.rank == 0:
        store.set(ATTEMPT, own)
        signatures = [f"{own}/{rank}" for rank in range(1, launch.world_size)]
        _wait_for_all(store, signatures, f"{launch.master_addr}, port {launch.master_port}")
        store.set(f"{own}/{ATTEMPT}", ",".join(store.get(key).decode() for key in signatures))
        return own
    signed = ""
    deadline = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        name = store.get(ATTEMPT).decode()
        if name != signed:
            store.set(f"{name}/{launch.rank}", own)
            signed = name
        counted = f"{name}/{ATTEMPT}"
        if store.check([counted]) and own in store.get(counted).decode():
            return name
        time.sleep(POLL_SECONDS)
    raise AbsentError(f"rank {launch.rank} has not found the others at {launch.master_addr}, port {launch.master_port}")


def listen_on_loopback(launch: Launch) -> None:
    """Let gloo listen on the loopback interface where all processes are on this machine."""
    # Otherwise gloo takes the address of the machine's name, which other machines may reach.
    if not launch.single_node:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            os.environ.setdefault(GLOO_INTERFACE, name)


def _serve_here(launch: Launch, port: int, *, wait_for_workers: bool) -> TCPStore:
    """Serve the store at the loopback address; at a free port for ``port`` 0."""
    # Without a socket of ours it would listen on every interface, to whoever reaches this machine.
    listening = socket.create_server((LOOPBACK, port), backlog=max(128, launch.world_size))
    return TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        launch.world_size,
        is_master=True,
        wait_for_workers=wait_for_workers,
        timeout=CONNECT_TIMEOUT,
        master_listen_fd=listening.detach(),
    )


def _agree_on_port(launch: Launch) -> TCPStore:
    """Agree on a free port by a file named after the common launcher, so that two runs on one machine never meet."""
    if launch.world_size == 1:
        return _serve_here(launch, 0, wait_for_workers=False)
    launcher = launcher_of(psutil.Process())
    # Process ids are used again; with the time at which it was created the launcher's is unique.
    name = f"{_port_file_prefix()}{launcher.pid}-{launcher.create_time():.2f}.port"
    port_file = Path(tempfile.gettempdir()) / name
    if launch.rank == 0:
        return _publish_port(launch, port_file)
    deadline = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
    # A launch that was ended may have left its file under the same launcher, such as a shell.
    while not _is_held(port_file):
        if time.monotonic() > deadline:
            raise AbsentError(f"rank {launch.rank} has not found rank 0, whose port would stand in {port_file}")
        time.sleep(POLL_SECONDS)
    store = TCPStore(LOOPBACK, int(port_file.read_text()), launch.world_size, timeout=CONNECT_TIMEOUT)
    store.set(f"connected/{launch.rank}", "1")
    return store


def launcher_of(process: psutil.Process) -> psutil.Process:
    """Return the nearest ancestor that is not of one rank alone: a wrapper such as a shell is each rank's own."""
    parents = process.parents()
    for parent in parents:
        try:
            if not sets_rank(parent.environ()):
                return parent
        except psutil.Error:
            # A process of another user, which has started this one, is a launcher.
            return parent
    return parents[0]


def _publish_port(launch: Launch, port_file: Path) -> TCPStore:
    """Serve the store, name its port in ``port_file``, and remove the file when all have read it."""
    _remove_abandoned_files(port_file.parent)
    store = _serve_here(launch, 0, wait_for_workers=False)
    written = port_file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(written, "w", encoding="utf-8") as file:
            # The lock ends with this process, however it ends, and shows that the file is not abandoned.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(str(store.port))
            file.flush()
            # Renamed into place, so that nobody reads half a number.
            os.replace(written, port_file)
            others = [f"connected/{rank}" for rank in range(1, launch.world_size)]
            _wait_for_all(store, others, f"{LOOPBACK}, port {store.port}")
    finally:
        for path in (written, port_file):
            path.unlink(missing_ok=True)
    return store


def _wait_for_all(store: TCPStore, others: list[str], where: str) -> None:
    """Return when all other processes have set their keys, which are ``others``."""
    try:
        store.wait(others)
    except torch.distributed.DistStoreError as error:
        num_come = 1 + sum(store.check([name]) for name in others)
        raise AbsentError(f"{num_come} of {1 + len(others)} processes have come to {where}") from error


def _remove_abandoned_files(folder: Path) -> None:
    """Remove the port files of launches that have ended before all their processes had met."""
    for path in folder.glob(f"{_port_file_prefix()}*.port"):
        # Another launch may remove it at the same time.
        with contextlib.suppress(OSError):
            if not _is_held(path):
                path.unlink()
    for path in folder.glob(f"{_port_file_prefix()}*.tmp"):
        # Such a file exists for a moment only, until it is renamed.
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > CONNECT_TIMEOUT.total_seconds():
                path.unlink()


def _port_file_prefix() -> str:
    return f"megastable-{os.getuid()}-"


def _is_held(port_file: Path) -> bool:
    """Tell whether the file exists and the rank 0 that wrote it waits for the others."""
    try:
        with open(port_file, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
