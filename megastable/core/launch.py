"""Which process of which launch this is, read from the environment of the common launchers."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from megastable.core.errors import UserError
from megastable.core.launch_variables import (
    MPI,
    NUM_LAUNCHER_NODES,
    SLURM,
    TORCH,
    agreed_number,
    check_outer_launcher,
    in_srun_step,
    refuse_lone_step,
    set_by_mpi,
    whole_number,
)

LAUNCHER_DEFAULT_PORT = 29500
"""The default of ``deepspeed``, which two runs on one machine would both get."""
SLURM_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to outgoing connections (from 32768)."""
MAX_PORT = 65535
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Launch:
    """This process's place in the launch."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    port_is_default: bool
    """The launcher hands every run of the machine the same port."""
    store_is_hosted: bool = False
    """The launcher itself serves the store at the port, as torchrun does."""

    @property
    def chooses_port(self) -> bool:
        """Tell whether the processes have to agree on a free port by themselves."""
        return self.single_node and (self.port_is_default or self.world_size == 1) and not self.store_is_hosted

    @property
    def single_node(self) -> bool:
        """Tell whether all processes share this machine."""
        return self.local_world_size == self.world_size

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> Launch:
        """Read the launch from torch's variables, MPI's or SLURM's, or run as a single process.

        Raises:
            UserError: a variable is missing, is no number or contradicts another.
        """
        # A launcher inside a SLURM job finds SLURM's variables as well, which count the job's tasks, not its processes.
        if TORCH.set_in(environment) or (agreed_number(environment, NUM_LAUNCHER_NODES) or 1) > 1:
            launch = cls._of_launcher(environment)
        elif set_by_mpi(environment):
            launch = cls._of_mpi(environment)
        elif _slurm_has_more(environment):
            launch = cls._of_slurm(environment)
        else:
            launch = cls(0, 0, 1, 1, LOOPBACK, LAUNCHER_DEFAULT_PORT, port_is_default=True)
        launch._check()
        if launch.world_size == 1:
            refuse_lone_step(environment)
        return launch

    def _check(self) -> None:
        """Refuse numbers that no launch can have together."""
        if not self.rank < self.world_size:
            raise UserError(f"The launcher's rank {self.rank} is not below its world size {self.world_size}")
        if not (self.local_rank < self.local_world_size <= self.world_size and self.local_rank <= self.rank):
            raise UserError(
                f"The launcher's rank {self.rank}, local rank {self.local_rank}, processes on this node "
                f"{self.local_world_size} and world size {self.world_size} do not fit together"
            )
        if not 0 < self.master_port <= MAX_PORT:
            raise UserError(f"MASTER_PORT is {self.master_port}; a port is a number from 1 to {MAX_PORT}")
        if not self.single_node and is_loopback(self.master_addr):
            raise UserError(
                f"MASTER_ADDR is {self.master_addr}, by which every node means itself, but only "
                f"{self.local_world_size} of {self.world_size} processes are on this node; set it to the host of rank 0"
            )

    @classmethod
    def _of_launcher(cls, environment: Mapping[str, str]) -> Launch:
        """Read the variables of ``deepspeed`` or torchrun."""
        rank = TORCH.number(environment, TORCH.rank)
        world_size = TORCH.number(environment, TORCH.world_size)
        check_outer_launcher(environment, rank, world_size)
        port = TORCH.number(environment, ("MASTER_PORT",))
        master_addr = environment.get("MASTER_ADDR") or LOOPBACK
        local_world_size = agreed_number(environment, TORCH.local_world_size)
        if local_world_size is None:
            # Scripts that set the variables by hand leave this one out. At a loopback address all are on this machine.
            if world_size > 1 and not is_loopback(master_addr):
                TORCH.refuse_missing(environment, TORCH.local_world_size)
            local_world_size = world_size
        num_nodes = agreed_number(environment, NUM_LAUNCHER_NODES)
        if num_nodes is not None and (num_nodes == 1) != (local_world_size == world_size):
            raise UserError(
                f"The launcher's number of nodes {num_nodes}, processes on this node {local_world_size} and world size "
                f"{world_size} do not fit together"
            )
        return cls(
            rank=rank,
            local_rank=TORCH.number(environment, TORCH.local_rank),
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=master_addr,
            master_port=port,
            # torchrun's agent already listens on its port, whatever the number.
            port_is_default=port == LAUNCHER_DEFAULT_PORT and "TORCHELASTIC_RUN_ID" not in environment,
            store_is_hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @classmethod
    def _of_mpi(cls, environment: Mapping[str, str]) -> Launch:
        """Read the variables of an MPI launcher, which does not say where rank 0 is."""
        world_size = MPI.number(environment, MPI.world_size)
        local_world_size = MPI.number(environment, MPI.local_world_size)
        # In an srun step are mpirun's helpers, one a node; more of them than processes are launches side by side.
        nodes = whole_number(environment, "SLURM_STEP_NUM_NODES", 1)
        tasks = max(nodes, agreed_number(environment, SLURM.world_size) or 1)
        if in_srun_step(environment) and tasks > world_size:
            raise UserError(
                f"srun has started mpirun {tasks} times (SLURM_NTASKS, SLURM_STEP_NUM_NODES), each for a world of "
                f"{world_size}; start it once"
            )
        master_addr = environment.get("MASTER_ADDR")
        if not master_addr and local_world_size < world_size:
            raise UserError(
                f"MASTER_ADDR is not set: {local_world_size} of {world_size} processes are on this node, and MPI does "
                "not say where rank 0 is. Give all processes the host of rank 0, e.g. mpirun -x MASTER_ADDR=node0 "
                "(Open MPI) or mpirun -genv MASTER_ADDR node0 (MPICH, Intel MPI)"
            )
        port = whole_number(environment, "MASTER_PORT", LAUNCHER_DEFAULT_PORT)
        return cls(
            rank=MPI.number(environment, MPI.rank),
            local_rank=MPI.number(environment, MPI.local_rank),
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=master_addr or LOOPBACK,
            master_port=port,
            port_is_default=port == LAUNCHER_DEFAULT_PORT,
        )

    @classmethod
    def _of_slurm(cls, environment: Mapping[str, str]) -> Launch:
        """Read the variables of ``srun``, which starts one task for every process."""
        world_size = SLURM.number(environment, SLURM.world_size)
        if not in_srun_step(environment):
            raise UserError(
                f"SLURM_NTASKS is {world_size}, but this process was not started by srun (SLURM_STEP_ID): it would "
                f"wait for {world_size - 1} others. Start the run with srun, deepspeed or torchrun; a single process "
                "with srun --ntasks=1"
            )
        # A step may use fewer nodes than its job.
        in_step = "SLURM_STEP_NUM_NODES" in environment
        nodes_name = "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES"
        num_nodes = whole_number(environment, nodes_name, 1)
        # Such as 4(x2),3 for nodes of 4, 4 and 3 tasks.
        tasks_per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", str(world_size))
        if num_nodes == 0 or world_size % num_nodes or "," in tasks_per_node:
            raise UserError(
                f"SLURM_NTASKS={world_size} is no multiple of {nodes_name}={num_nodes}, or the nodes have different "
                f"numbers of tasks, {tasks_per_node}; start the same number of tasks on every node (--ntasks-per-node)"
            )
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", LOOPBACK))
        # One port per job, the same on all nodes, so that two jobs on a node do not meet.
        default_port = SLURM_PORTS[whole_number(environment, "SLURM_JOB_ID") % len(SLURM_PORTS)]
        return cls(
            rank=SLURM.number(environment, SLURM.rank),
            local_rank=SLURM.number(environment, SLURM.local_rank),
            world_size=world_size,
            local_world_size=world_size // num_nodes,
            master_addr=environment.get("MASTER_ADDR") or first_node(nodes),
            master_port=whole_number(environment, "MASTER_PORT", default_port),
            port_is_default=False,
        )


def _slurm_has_more(environment: Mapping[str, str]) -> bool:
    """Tell whether a variable of SLURM's says that there are more processes than this one."""
    counts = (*SLURM.world_size, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_NTASKS_PER_NODE")
    indices = (*SLURM.rank, *SLURM.local_rank)
    return any(whole_number(environment, name) > 1 for name in counts) or any(
        whole_number(environment, name) > 0 for name in indices
    )


def check_port(launch: Launch) -> None:
    """Check that the port at which this process will serve the others is free.

    Raises:
        UserError: it is taken, or not for this user to take.
    """
    if launch.rank > 0 or launch.chooses_port or launch.store_is_hosted:
        return
    # An empty address is that of all interfaces.
    address = LOOPBACK if launch.single_node else ""
    try:
        socket.create_server((address, launch.master_port)).close()
    except OSError as error:
        raise UserError(port_fault(launch, os.strerror(error.errno or 0))) from error


def port_fault(launch: Launch, fault: str) -> str:
    """Describe a port at which rank 0 cannot serve."""
    return (
        f"MASTER_PORT: rank 0 cannot listen at port {launch.master_port} ({fault}); give the launch another one, e.g. "
        "deepspeed --master_port 29511, or MASTER_PORT=29511 in the environment of srun or mpirun"
    )


def is_loopback(address: str) -> bool:
    """Tell whether an address means the machine that uses it, whichever it is."""
    return address in ("localhost", "::1") or address.startswith("127.")


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
