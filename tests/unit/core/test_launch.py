"""Which process of which launch this is, from the variables that the real launchers set."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.core.launch import SLURM_PORTS, Launch, first_node
from megastable.core.launch_variables import MPI, NUM_LAUNCHER_NODES, TORCH
from megastable.core.launch_variables import SLURM as SLURM_VARIABLES

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy

# As deepspeed/launcher/launch.py 0.19.8 sets them.
DEEPSPEED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
    "MASTER_ADDR": "node0",
}
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "node0",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "node0",
}
MPIS = pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH, MVAPICH], ids=["openmpi", "mpich", "mvapich"])


def test_deepspeed() -> None:
    assert Launch.detect(DEEPSPEED) == Launch(5, 1, 8, 4, "node0", 29500, port_is_default=True)


def test_torchrun_has_taken_its_port_already() -> None:
    assert Launch.detect(TORCHRUN) == Launch(5, 1, 8, 4, "node0", 29500, port_is_default=False)


def test_a_port_that_the_user_chose_is_kept() -> None:
    launch = Launch.detect({**DEEPSPEED, "MASTER_PORT": "31000"})
    assert (launch.master_port, launch.port_is_default) == (31000, False)


def test_slurm() -> None:
    launch = Launch.detect(SLURM)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (5, 1, 8, 4)
    assert launch.master_addr == "gpu07"
    assert launch.master_port in SLURM_PORTS
    assert not launch.port_is_default  # the processes of several nodes could not agree on another


def test_slurm_processes_of_a_job_share_a_port_and_jobs_do_not() -> None:
    ports = {
        Launch.detect({**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}).master_port
        for rank in range(8)
    }
    assert len(ports) == 1
    jobs = {Launch.detect({**SLURM, "SLURM_JOB_ID": str(1234567 + job)}).master_port for job in range(50)}
    assert len(jobs) == 50


def test_slurm_takes_a_given_address_and_port() -> None:
    launch = Launch.detect({**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.7", 4000)


def test_a_launcher_inside_a_slurm_job_wins() -> None:
    assert Launch.detect({**SLURM, **DEEPSPEED}) == Launch.detect(DEEPSPEED)
    assert Launch.detect({**SLURM, **TORCHRUN}) == Launch.detect(TORCHRUN)


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}, {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}])
def test_a_single_process(environment: dict[str, str]) -> None:
    launch = Launch.detect(environment)
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (0, 0, 1, 1)
    assert launch.single_node
    assert launch.port_is_default


@pytest.mark.parametrize("environment", [DEEPSPEED, TORCHRUN, SLURM], ids=["deepspeed", "torchrun", "slurm"])
def test_several_nodes_are_distinguished_from_one(environment: dict[str, str]) -> None:
    assert not Launch.detect(environment).single_node
    one_node = {
        "LOCAL_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "CROSS_SIZE": "1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_STEP_NUM_NODES": "1",
    }  # fmt: skip
    here = {name: one_node.get(name, value) for name, value in environment.items()}
    assert Launch.detect(here).single_node


BAD_NUMBERS = ["", "x", "-1", "1.5", " 3", "9" * 10]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_a_launchers_bad_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} is {value!r}"):
        Launch.detect({**DEEPSPEED, name: value})


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_PORT"])
def test_a_launchers_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"but not {name}"):
        Launch.detect({key: value for key, value in DEEPSPEED.items() if key != name})


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID"])
def test_slurms_missing_or_bad_variable_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"but not {name}"):
        Launch.detect({key: value for key, value in SLURM.items() if key != name})
    with pytest.raises(UserError, match=f"{name} is 'x'"):
        Launch.detect({**SLURM, name: "x"})


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_STEP_NUM_NODES", "SLURM_JOB_ID", "MASTER_PORT"])
def test_slurms_other_bad_numbers_are_named(name: str) -> None:
    with pytest.raises(UserError, match=name):
        Launch.detect({**SLURM, name: "x"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launch_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=name):
        Launch.detect({key: value for key, value in DEEPSPEED.items() if key != name})


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    with pytest.raises(UserError, match=f"MASTER_PORT is {port}"):
        Launch.detect({**DEEPSPEED, "MASTER_PORT": port})


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_SIZE": "9"}, {"WORLD_SIZE": "0"}])
def test_ranks_outside_the_world_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError):
        Launch.detect({**DEEPSPEED, **wrong})


def test_slurm_tasks_that_the_nodes_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"SLURM_NTASKS=7 .*SLURM_STEP_NUM_NODES=2"):
        Launch.detect({**SLURM, "SLURM_NTASKS": "7"})


def test_a_slurm_step_on_fewer_nodes_than_its_job() -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08"}  # srun --nodes 1 --ntasks 8
    launch = Launch.detect({**SLURM, **step})
    assert launch.master_addr == "gpu08"
    assert launch.local_world_size == 8


@MPIS
def test_mpi_on_several_nodes(mpi: dict[str, str]) -> None:
    assert Launch.detect(mpi) == Launch(5, 1, 8, 4, "node0", 29500, port_is_default=True)
    assert Launch.detect({**mpi, "MASTER_PORT": "4000"}).master_port == 4000
    without_address = {name: value for name, value in mpi.items() if name != "MASTER_ADDR"}
    with pytest.raises(UserError, match=r"MASTER_ADDR is not set.*-x MASTER_ADDR"):
        Launch.detect(without_address)


@MPIS
def test_mpi_on_this_machine_needs_no_address(mpi: dict[str, str]) -> None:
    here = {name: "8" if value == "4" else value for name, value in mpi.items() if name != "MASTER_ADDR"}
    assert Launch.detect(here) == Launch(5, 1, 8, 8, "127.0.0.1", 29500, port_is_default=True)


@MPIS
def test_half_of_mpis_variables_are_refused(mpi: dict[str, str]) -> None:
    for name in mpi:
        rest = {key: value for key, value in mpi.items() if key not in (name, "PMIX_RANK")}
        if name != "PMIX_RANK":
            with pytest.raises(UserError, match=name):
                Launch.detect(rest)
    with pytest.raises(UserError, match="PMIX_RANK"):
        Launch.detect({"PMIX_RANK": "0"})


def test_deepspeeds_mpich_launcher_sets_torchs_variables_beside_mpis() -> None:
    assert Launch.detect({**MPICH, **DEEPSPEED}) == Launch.detect(DEEPSPEED)


@pytest.mark.parametrize(
    "other",
    [
        {"OMPI_COMM_WORLD_RANK": "4"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "5"},
        {"PMI_RANK": "5", "PMI_SIZE": "3"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"MASTER_ADDR": "localhost"},
        {"CROSS_SIZE": "1"},
        {**SLURM, "SLURM_PROCID": "6"},
    ],
    ids=str,
)
def test_launchers_that_contradict_each_other_are_refused(other: dict[str, str]) -> None:
    (name, value), *_ = (item for item in other.items() if SLURM.get(item[0]) != item[1])
    with pytest.raises(
        UserError, match=value if name in ("LOCAL_WORLD_SIZE", "CROSS_SIZE") else f"{name}(=| is ){value}"
    ):
        Launch.detect({**DEEPSPEED, **other})


@pytest.mark.parametrize("inner", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
@pytest.mark.parametrize("outer", ["openmpi", "srun"])
def test_mpirun_or_srun_may_start_a_launcher_on_each_node(inner: dict[str, str], outer: str) -> None:
    nodes = {"GROUP_WORLD_SIZE": "2"} if inner is TORCHRUN else {}
    node = {
        "openmpi": {
            "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        },
        "srun": {**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},
    }[outer]  # fmt: skip
    assert Launch.detect({**node, **inner, **nodes}) == Launch.detect(inner)
    # As `srun torchrun --standalone` does: every node trains the same run.
    alone = {**inner, "RANK": "1", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "CROSS_SIZE": "1"}
    with pytest.raises(UserError, match="two launchers"):
        Launch.detect({**node, **alone})


def test_mpirun_inside_a_slurm_job() -> None:
    helpers = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}  # one on each node
    assert Launch.detect({**helpers, **OPEN_MPI}) == Launch.detect(OPEN_MPI)
    lone = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    lone |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert Launch.detect(lone).world_size == 1
    with pytest.raises(UserError, match="srun has started mpirun 2 times"):
        Launch.detect({**helpers, **lone})


@pytest.mark.parametrize("plugin", [{"PMI_RANK": "5", "PMI_SIZE": "8"}, {"PMIX_RANK": "5"}], ids=["pmi2", "pmix"])
def test_mpis_variables_that_srun_sets_itself(plugin: dict[str, str]) -> None:
    assert Launch.detect({**SLURM, **plugin}) == Launch.detect(SLURM)
    with pytest.raises(UserError):
        Launch.detect({**SLURM, **{name: "7" for name in plugin}})


@pytest.mark.parametrize("place", [{"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {}], ids=["sbatch", "salloc"])
@pytest.mark.parametrize("shell_step", [{}, {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}])
def test_slurm_tasks_without_srun_are_refused_at_once(place: dict[str, str], shell_step: dict[str, str]) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "1", **place, **shell_step}
    with pytest.raises(UserError, match=r"SLURM_NTASKS is 8, but .* not started by srun .* wait for 7 others"):
        Launch.detect(job)
    inside = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_PORT": "29500"}
    assert Launch.detect({**job, **inside}).world_size == 2


def test_nodes_of_different_numbers_of_tasks_are_refused() -> None:
    with pytest.raises(UserError, match=r"5,3"):
        Launch.detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5,3"})
    assert Launch.detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}) == Launch.detect(SLURM)


# All launchers' variables, in any combination

COUNTS = [
    *TORCH.world_size, *TORCH.local_world_size, *MPI.world_size, *MPI.local_world_size, *SLURM_VARIABLES.world_size,
    *NUM_LAUNCHER_NODES, "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS",
]  # fmt: skip
INDICES = [
    *TORCH.rank, *TORCH.local_rank, *MPI.rank, *MPI.local_rank, *SLURM_VARIABLES.rank, *SLURM_VARIABLES.local_rank,
]  # fmt: skip
OTHERS = {
    "MASTER_ADDR": ["node0", "127.0.0.1"], "MASTER_PORT": ["29500", "4000"], "SLURM_STEP_ID": ["0"],
    "TORCHELASTIC_RUN_ID": ["none"],
}  # fmt: skip


def says_more(environment: dict[str, str]) -> bool:
    """Tell whether a variable of the environment says that this is not the only process."""
    return any(int(environment.get(name, 1)) > 1 for name in COUNTS) or any(
        int(environment.get(name, 0)) > 0 for name in INDICES
    )


def check_no_lone_run(environment: dict[str, str]) -> Launch | None:
    """Check that the environment is one launch, or refused (None), and no lone run beside others."""
    try:
        launch = Launch.detect(environment)
    except UserError:
        return None
    assert launch.rank < launch.world_size and launch.local_rank < launch.local_world_size <= launch.world_size
    if launch.world_size == 1 and "SLURM_STEP_ID" not in environment:
        # A launcher in a batch script may use less than the job has.
        environment = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
        assert not says_more(environment)
    elif launch.world_size == 1:
        assert not says_more({name: value for name, value in environment.items() if name != "SLURM_STEP_NUM_TASKS"})
    return launch


@settings(max_examples=300, deadline=None)
@given(
    numbers=st.dictionaries(st.sampled_from(COUNTS), st.sampled_from("1112")),
    places=st.dictionaries(st.sampled_from(INDICES), st.sampled_from("0001")),
    others=st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OTHERS.items()}),
)
def test_any_variables_are_one_launch_or_refused(
    numbers: dict[str, str], places: dict[str, str], others: dict[str, str]
) -> None:
    check_no_lone_run({**numbers, **places, **others})


@settings(max_examples=300, deadline=None)
@given(
    launchers=st.lists(st.sampled_from([DEEPSPEED, TORCHRUN, SLURM, OPEN_MPI, MPICH, MVAPICH]), min_size=1, max_size=3),
    lost=st.sets(st.sampled_from([*COUNTS, *INDICES, *OTHERS])),
    changed=st.none() | st.tuples(st.sampled_from([*COUNTS, *INDICES]), st.integers(0, 9)),
)
def test_real_launches_with_lost_and_changed_variables(
    launchers: list[dict[str, str]], lost: set[str], changed: tuple[str, int] | None
) -> None:
    environment = {name: value for launcher in launchers for name, value in launcher.items() if name not in lost}
    if changed is not None and changed[0] in environment:
        environment[changed[0]] = str(changed[1])
    launch = check_no_lone_run(environment)
    if launch is not None and changed is None and set(INDICES + COUNTS) & environment.keys():
        assert (launch.rank, launch.world_size) == (5, 8)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("gpu[3]", "gpu3"),
        ("gpu[1-4].cluster.example", "gpu1.cluster.example"),
        ("a-b-3,a-b-4", "a-b-3"),
        ("n001-ib[01-02]-x,other", "n001-ib01-x"),
        ("rack[0-6]_blade[0-41]", "rack0_blade0"),
    ],
)  # fmt: skip
def test_first_node(node_list: str, first: str) -> None:
    assert first_node(node_list) == first


names = st.text("abcdefghij-.", min_size=1, max_size=8)
numbers = st.integers(0, 9999)


@quick
@given(name=names, suffix=st.just("") | names, first=numbers, rest=st.lists(numbers), width=st.integers(1, 6))
def test_first_node_of_any_ranges(name: str, suffix: str, first: int, rest: list[int], width: int) -> None:
    ranges = ",".join([f"{first:0{width}}-{first + 3:0{width}}", *(f"{number:0{width}}" for number in rest)])
    assert first_node(f"{name}[{ranges}]{suffix},other[1-3]") == f"{name}{first:0{width}}{suffix}"


@pytest.mark.parametrize("node_list", ["", "[1-3]", ",node1"])
def test_a_node_list_without_a_name_is_refused(node_list: str) -> None:
    with pytest.raises(UserError, match="node list"):
        first_node(node_list)
