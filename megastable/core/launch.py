"""Which process of which launch this is, read from the environment of the common launchers."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megastable.core.errors import UserError

LAUNCHER_DEFAULT_PORT = 29500
"""The default of ``deepspeed``, which two runs on one machine would both get."""
SLURM_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to outgoing connections (from 32768)."""
DEEPSPEED_COMMANDS = ("deepspeed", "deepspeed.launcher.runner", "runner.py")
PARENTS_SEARCHED = 4
"""train.py, launcher.launch and deepspeed, and perhaps a shell between them."""


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
        """Tell whether all processes share this machine."""
        return self.local_world_size == self.world_size

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> Launch:
        """Read the launch from ``deepspeed``'s or torchrun's variables, SLURM's, or run as a single process.

        Raises:
            UserError: a variable is missing or no number.
        """
        # A launcher inside a SLURM job finds SLURM's variables as well, which count the job's tasks, not its processes.
        if "RANK" in environment or "WORLD_SIZE" in environment:
            launch = cls._of_launcher(environment)
        elif _number(environment, "SLURM_NTASKS", 1) > 1:
            launch = cls._of_slurm(environment)
        else:
            launch = cls(0, 0, 1, 1, "127.0.0.1", LAUNCHER_DEFAULT_PORT, port_is_default=True)
        launch._check()
        return launch

    def _check(self) -> None:
        """Refuse numbers that no launch can have together."""
        if not self.rank < self.world_size:
            raise UserError(f"The launcher's rank {self.rank} is not below its world size {self.world_size}")
        if not self.local_rank < self.local_world_size <= self.world_size:
            raise UserError(
                f"The launcher's local rank {self.local_rank}, processes on this node {self.local_world_size} and "
                f"world size {self.world_size} do not fit together"
            )

    @classmethod
    def _of_launcher(cls, environment: Mapping[str, str]) -> Launch:
        """Read the variables of ``deepspeed`` or torchrun."""
        world_size = _number(environment, "WORLD_SIZE")
        # torchrun sets LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE.
        local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environment else "LOCAL_SIZE"
        port = _number(environment, "MASTER_PORT")
        return cls(
            rank=_number(environment, "RANK"),
            local_rank=_number(environment, "LOCAL_RANK"),
            world_size=world_size,
            local_world_size=_number(environment, local_name) if local_name in environment else world_size,
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=port,
            # torchrun's agent already listens on its port, whatever the number.
            port_is_default=port == LAUNCHER_DEFAULT_PORT and "TORCHELASTIC_RUN_ID" not in environment,
        )

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> Launch:
        """Read the variables of ``srun``, which starts one task for every process."""
        world_size = _number(environment, "SLURM_NTASKS")
        # A step may use fewer nodes than its job; outside of a step only the job's are known.
        in_step = "SLURM_STEP_NUM_NODES" in environment
        nodes_name = "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES"
        num_nodes = _number(environment, nodes_name, 1)
        if world_size % num_nodes:
            raise UserError(
                f"SLURM_NTASKS={world_size} is no multiple of {nodes_name}={num_nodes}; "
                "start the same number of tasks on every node (--ntasks-per-node)"
            )
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        # One port per job, the same on all nodes, so that two jobs on a node do not meet.
        default_port = SLURM_PORTS[_number(environment, "SLURM_JOB_ID", 0) % len(SLURM_PORTS)]
        return cls(
            rank=_number(environment, "SLURM_PROCID"),
            local_rank=_number(environment, "SLURM_LOCALID"),
            world_size=world_size,
            local_world_size=world_size // num_nodes,
            master_addr=environment.get("MASTER_ADDR") or first_node(nodes),
            master_port=_number(environment, "MASTER_PORT", default_port),
            port_is_default=False,
        )


def first_node(node_list: str) -> str:
    """Return the first host name of a SLURM node list: ``gpu[07-09,12],cpu1`` gives ``gpu07``.

    Raises:
        UserError: the list holds no name.
    """
    # Everything up to the first comma that stands outside of brackets.
    first = re.match(r"[^,\[\]](?:[^,\[\]]|\[[^\[\]]*\])*", node_list)
    if first is None:
        raise UserError(f"Cannot read a host name from the SLURM node list {node_list!r}; set MASTER_ADDR")
    # A bracket gives way to the first number in it, with its leading zeros.
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group())


def check_hostfile(process_id: int | None = None) -> None:
    """Refuse a launch whose ``--hostfile`` the launcher could not read.

    ``deepspeed`` only warns and goes on with this machine alone, so a typing error would train on one node without a
    sign. No variable carries the option, so it is looked up in the command lines of the parent processes (Linux;
    elsewhere nothing is checked).

    Raises:
        UserError: the hostfile that was asked for does not exist.
    """
    pid = os.getpid() if process_id is None else process_id
    for _ in range(PARENTS_SEARCHED):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            pid = int(re.findall(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
        except (OSError, IndexError):
            # The parent has ended or belongs to another user, or this system has no /proc.
            return
        hostfile = _hostfile_option(words)
        if hostfile and not Path(hostfile).is_file():
            raise UserError(
                f"The launch asks for --hostfile {hostfile}, which is not a file here; "
                "deepspeed would train on this machine alone"
            )


def _hostfile_option(words: list[str]) -> str | None:
    """Find the value of ``--hostfile`` in a ``deepspeed`` command line; None where the option is not given."""
    launcher = next((at for at, word in enumerate(words) if Path(word).name in DEEPSPEED_COMMANDS), None)
    if launcher is None:
        return None
    # Options before the launcher are those of another program, such as `python` or `env`.
    options = words[launcher + 1 :]
    for word, next_word in itertools.pairwise([*options, ""]):
        if word.endswith(".py"):
            # From here on the words are the training script's.
            return None
        name, equals, value = word.partition("=")
        if name in ("--hostfile", "-H"):
            return value if equals else next_word
    return None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number; a variable that is not set gives ``default``, or a UserError where there is no default."""
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not (value.isascii() and value.isdigit()):
        raise UserError(f"The launcher's variable {name} is {value!r}; it has to be a whole number from 0")
    return int(value)
