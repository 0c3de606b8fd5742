"""Which process of which launch this is, from the variables that the real launchers set."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.core.errors import UserError
from megastable.core.launch import SLURM_PORTS, Launch, first_node

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
}


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
    ports = {Launch.detect({**SLURM, "SLURM_PROCID": str(rank)}).master_port for rank in range(8)}
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
    one_node = {"LOCAL_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_NODES": "1"}
    here = {name: one_node.get(name, value) for name, value in environment.items()}
    assert Launch.detect(here).single_node


BAD_NUMBERS = ["", "x", "-1", "1.5", " 3"]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_a_launchers_bad_number_is_named(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} is {value!r}"):
        Launch.detect({**DEEPSPEED, name: value})


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_PORT"])
def test_a_launchers_missing_variable_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is None"):
        Launch.detect({key: value for key, value in DEEPSPEED.items() if key != name})


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID"])
def test_slurms_missing_or_bad_variable_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is None"):
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
