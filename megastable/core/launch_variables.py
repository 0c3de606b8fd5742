"""The environment variables by which launchers tell a process its place, and how they are read.

Three kinds of launchers are told apart: those that set torch's variables (``deepspeed``, torchrun), those that set
MPI's (mpirun, mpiexec, jsrun, flux, horovodrun), and SLURM's srun. Variables that mean the same have to agree: where
one is overlooked, every process trains alone, in the same folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

from megastable.core.errors import UserError

MAX_DIGITS = 9
"""A rank or a size with more digits is a mistake, and Python does not read numbers of thousands of digits."""


@dataclass(frozen=True)
class Variables:
    """Holds the names under which one kind of launcher sets a process's place; names in one tuple mean the same."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]

    def set_in(self, environment: Mapping[str, str]) -> list[str]:
        """List the names that are set."""
        names = chain(self.rank, self.world_size, self.local_rank, self.local_world_size)
        return [name for name in names if name in environment]

    def number(self, environment: Mapping[str, str], names: tuple[str, ...]) -> int:
        """Read the number that one of this launcher's variables gives.

        Raises:
            UserError: none of ``names`` is set; what is set instead is named.
        """
        value = agreed_number(environment, names)
        if value is None:
            self.refuse_missing(environment, names)
        return value

    def refuse_missing(self, environment: Mapping[str, str], names: tuple[str, ...]) -> NoReturn:
        """Refuse a launch of which none of ``names`` is set."""
        present = ", ".join(self.set_in(environment)) or "number of nodes"
        missing = f"none of {', '.join(names)}" if len(names) > 1 else f"not {names[0]}"
        raise UserError(
            f"The environment has a launcher's {present}, but {missing}. A launcher sets RANK, LOCAL_RANK, WORLD_SIZE, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or MPI's or SLURM's variables; unset them all to train in "
            "one process"
        )


# torchrun sets LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE.
TORCH = Variables(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
# Open MPI, MVAPICH2, MPICH and Intel MPI (PMI_, MPI_), PMIx, Cray (PALS_), IBM's jsrun (JSM_), flux, Horovod.
MPI = Variables(
    rank=(
        "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK",
        "FLUX_TASK_RANK", "HOROVOD_RANK",
    ),
    world_size=(
        "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE",
        "HOROVOD_SIZE",
    ),
    local_rank=(
        "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK",
        "PALS_LOCAL_RANKID", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "HOROVOD_LOCAL_RANK",
    ),
    local_world_size=(
        "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE",
        "JSM_NAMESPACE_LOCAL_SIZE", "HOROVOD_LOCAL_SIZE",
    ),
)  # fmt: skip
# SLURM gives the processes of a node as a list over all nodes.
SLURM = Variables(("SLURM_PROCID",), ("SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",), ())
NUM_LAUNCHER_NODES = ("GROUP_WORLD_SIZE", "CROSS_SIZE")
"""torchrun's and ``deepspeed``'s number of nodes."""


def rank_as_given(environment: Mapping[str, str]) -> str:
    """Return the rank that the environment gives, unchecked; "0" where it gives none."""
    names = chain(TORCH.rank, MPI.rank, SLURM.rank)
    return next((environment[name] for name in names if name in environment), "0")


def sets_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether the environment is of one process of a launch: a launcher itself has no rank."""
    # SLURM's batch script has one; srun's tasks meet at a port of their job.
    return any(name in environment for name in chain(TORCH.rank, MPI.rank))


def agreed_number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Read the variables ``names``, which mean the same; None where none of them is set.

    Raises:
        UserError: one is no number, or two differ.
    """
    found = {name: whole_number(environment, name) for name in names if name in environment}
    if len(set(found.values())) > 1:
        described = " and ".join(f"{name}={value}" for name, value in found.items())
        raise UserError(f"The environment has {described}, which have to be the same; unset those of another launcher")
    return next(iter(found.values()), None)


def whole_number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    """Read a whole number from a variable; ``default`` where it is not set.

    Raises:
        UserError: the value is no whole number.
    """
    value = environment.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS):
        raise UserError(
            f"The launcher's variable {name} is {value[:40]!r}; it has to be a whole number from 0, of at most "
            f"{MAX_DIGITS} digits"
        )
    return int(value)


def in_srun_step(environment: Mapping[str, str]) -> bool:
    """Tell whether ``srun`` has started this process as one of SLURM_NTASKS.

    A batch script has that variable as well, and the shell that salloc opens runs in a step of one task.
    """
    if not ("SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment):
        return False
    tasks = agreed_number(environment, SLURM.world_size)
    return tasks is None or tasks == whole_number(environment, "SLURM_STEP_NUM_TASKS", tasks)


def refuse_lone_step(environment: Mapping[str, str]) -> None:
    """Refuse a run of one process in a step of which SLURM says that it has more.

    Raises:
        UserError: with SLURM's variables that say so.
    """
    if not ("SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment):
        return
    counts = [name for name in (*SLURM.world_size, "SLURM_STEP_NUM_NODES") if whole_number(environment, name, 1) > 1]
    places = [name for name in (*SLURM.rank, *SLURM.local_rank) if whole_number(environment, name, 0) > 0]
    if counts or places:
        given = ", ".join(f"{name}={environment[name]}" for name in (*counts, *places))
        raise UserError(
            f"This process would train alone, but {given} say that srun has started others beside it, each of which "
            "would train the same run. Start the run by srun alone, or by one launcher that srun does not start"
        )


def set_by_mpi(environment: Mapping[str, str]) -> bool:
    """Tell whether MPI's variables are set, and by MPI's launcher: srun sets some of them for its tasks, too."""
    if not MPI.set_in(environment):
        return False
    if not in_srun_step(environment):
        return True
    # mpirun starts one helper a node by srun, whose SLURM variables the processes inherit. They mean this process only
    # where both say the same.
    tasks = agreed_number(environment, SLURM.world_size)
    same_rank = "SLURM_PROCID" in environment and _agree(environment, MPI.rank, SLURM.rank)
    same_local_rank = agreed_number(environment, MPI.local_rank) is None or _agree(
        environment, MPI.local_rank, SLURM.local_rank
    )
    same_size = agreed_number(environment, MPI.world_size) in (None, tasks)
    fits = (agreed_number(environment, MPI.local_world_size) or 1) <= (tasks or 1)
    return not (same_rank and same_local_rank and same_size and fits)


def _agree(environment: Mapping[str, str], names: tuple[str, ...], others: tuple[str, ...]) -> bool:
    return agreed_number(environment, names) == agreed_number(environment, others)


def check_outer_launcher(environment: Mapping[str, str], rank: int, world_size: int) -> None:
    """Check torch's rank and world size against MPI or srun, which started this process or the launcher of its node.

    Raises:
        UserError: they do not fit, so that other processes of the outer launch would train the same run again.
    """
    if MPI.set_in(environment):
        outer = MPI
    elif in_srun_step(environment):
        outer = SLURM
    else:
        return
    outer_rank = outer.number(environment, outer.rank)
    outer_size = agreed_number(environment, outer.world_size)
    on_this_node = agreed_number(environment, outer.local_world_size) or 1
    started_this = outer_rank == rank and outer_size in (None, world_size) and on_this_node <= world_size
    nodes = agreed_number(environment, NUM_LAUNCHER_NODES)
    # torchrun numbers its nodes as they arrive, so that only their count is comparable.
    started_launcher = nodes is not None and outer_size in (None, nodes) and outer_rank < nodes and on_this_node == 1
    local_rank = agreed_number(environment, outer.local_rank) or 0
    if local_rank > outer_rank or not (started_this or started_launcher):
        given = ", ".join(f"{name}={environment[name]}" for name in outer.set_in(environment))
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={world_size} contradict {given}: two launchers have set them. Start the run "
            "by one launcher, or one torchrun or deepspeed on each node"
        )
