"""Which process of which launch this is, read from the environment of the common launchers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megastable.core.errors import UserError

LAUNCHER_DEFAULT_PORT = 29500  # of `deepspeed`: two runs on one machine would both get it
SLURM_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class Launch:
    """This process's place in the launch.

    ``port_is_default`` is True where the launcher hands every run of the machine the same port, so that the processes
    have to agree on a free one by themselves.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    port_is_default: bool

    @property
    def single_node(self) -> bool:
        """True where all processes share this machine."""
        return self.local_world_size == self.world_size

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> Launch:
        """Read the launch from ``deepspeed``'s or torchrun's variables, SLURM's, or run as a single process.

        Raises:
            UserError: a variable is missing or no number.
        """
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return cls._of_launcher(environment)
        if int(environment.get("SLURM_NTASKS", "1")) > 1:
            return cls._of_slurm(environment)
        return cls(0, 0, 1, 1, "127.0.0.1", LAUNCHER_DEFAULT_PORT, port_is_default=True)

    @classmethod
    def _of_launcher(cls, environment: Mapping[str, str]) -> Launch:
        world_size = _number(environment, "WORLD_SIZE")
        # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE
        local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "LOCAL_SIZE"
        port = _number(environment, "MASTER_PORT")
        return cls(
            rank=_number(environment, "RANK"),
            local_rank=_number(environment, "LOCAL_RANK"),
            world_size=world_size,
            local_world_size=_number(environment, local_name) if local_name in environment else world_size,
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=port,
            # torchrun's agent already listens on its port, whatever the number
            port_is_default=port == LAUNCHER_DEFAULT_PORT and "TORCHELASTIC_RUN_ID" not in environment,
        )

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> Launch:
        world_size = _number(environment, "SLURM_NTASKS")
        num_nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
        if world_size % num_nodes:
            raise UserError(
                f"SLURM_NTASKS={world_size} is no multiple of SLURM_JOB_NUM_NODES={num_nodes}; "
                "start the same number of tasks on every node (--ntasks-per-node)"
            )
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        job_id = int(environment.get("SLURM_JOB_ID", "0"))
        # One port per job, the same on all nodes, so that two jobs on a node do not meet.
        default_port = SLURM_PORTS[job_id % len(SLURM_PORTS)]
        return cls(
            rank=_number(environment, "SLURM_PROCID"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            world_size=world_size,
            local_world_size=world_size // num_nodes,
            master_addr=environment.get("MASTER_ADDR", first_node(nodes)),
            master_port=int(environment.get("MASTER_PORT", default_port)),
            port_is_default=False,
        )


def first_node(node_list: str) -> str:
    """The first host name of a SLURM node list: ``gpu[07-09,12],cpu1`` gives ``gpu07``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", node_list)
    if match is None:
        raise UserError(f"Cannot read a host name from the SLURM node list {node_list!r}")
    prefix, ranges, suffix = match.groups()
    first = re.split(r"[,-]", ranges)[0] if ranges else ""
    return f"{prefix}{first}{suffix}"


def check_hostfile(process_id: int | None = None) -> None:
    """Refuse a launch whose ``--hostfile`` the launcher could not read.

    ``deepspeed`` only warns and goes on with this machine alone, so a typing error would train on one node in
    silence. The option is looked up in the command lines of the parent processes (Linux; elsewhere nothing is
    checked).

    Raises:
        UserError: the hostfile that was asked for does not exist.
    """
    pid = os.getpid() if process_id is None else process_id
    for _ in range(4):  # train.py <- launcher.launch <- deepspeed, and perhaps a shell
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            pid = int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
        except (OSError, IndexError):
            return
        hostfile = _option(words, ("--hostfile", "-H")) if any("deepspeed" in word for word in words) else None
        if hostfile and not Path(hostfile).is_file():
            raise UserError(
                f"The launch asks for --hostfile {hostfile}, which is not a file here; "
                "deepspeed would train on this machine alone"
            )


def _option(words: list[str], names: tuple[str, ...]) -> str | None:
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else words[position + 1] if position + 1 < len(words) else None
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name)
    if value is None or not value.isdigit():
        raise UserError(f"The launcher's variable {name} is {value!r}; it has to be a whole number from 0")
    return int(value)
