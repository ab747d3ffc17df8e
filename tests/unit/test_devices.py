"""How ranks share a node: cores, thread pools, GPUs and settings, planned before TensorFlow starts."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.runtime import devices
from ringtrain.runtime import machine as machine_module
from ringtrain.runtime.devices import (
    DevicePlan,
    Needs,
    Setting,
    adapt_plan,
    plan_devices,
    plan_settings,
    set_environment,
)
from ringtrain.runtime.machine import (
    CLAIMS_VARIABLE,
    Machine,
    claim_cores,
    format_cores,
    read_cgroup_quota,
    read_machine,
)
from ringtrain.runtime.world import World
from tests.world.processes import REPOSITORY, clean_environment, run_command


def local_world(local_rank: int, local_size: int) -> World:
    return World(
        rank=local_rank, size=local_size, local_rank=local_rank, local_size=local_size, node="a", launcher="mpirun"
    )


def machine(cores: int = 4, quota: float | None = None, *, bound: bool = False) -> Machine:
    return Machine(cores=tuple(range(cores)), quota=quota, bound_by_launcher=bound, may_have_gpus=False)


def plan(
    local_rank: int,
    local_size: int,
    on: Machine,
    claim_cores: Callable[[tuple[int, ...]], bool] = lambda cores: True,
    **needs: bool,
) -> DevicePlan:
    return plan_devices(local_world(local_rank, local_size), on, {}, Needs(**needs), claim_cores=claim_cores)


GLOO = dataclasses.replace(local_world(0, 2), launcher="horovodrun --gloo")


def settings_of(
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    world: World = local_world(0, 2),  # noqa: B008 - it is frozen
    on: Machine = machine(),  # noqa: B008
    **needs: Any,
) -> dict[str, str]:
    """What is set for a rank, by name."""
    return {item.name: item.value for item in plan_settings(world, on, environ, Needs(**needs))}


def test_ranks_take_equal_shares_of_the_cores() -> None:
    plans = [plan(rank, 2, machine(8)) for rank in range(2)]
    assert [item.own_cores for item in plans] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [item.cores for item in plans] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(item.cores_source == "ringtrain" and item.intra_op_threads == 4 for item in plans)


def test_cores_that_are_left_over_are_shared() -> None:
    plans = [plan(rank, 3, machine(8)) for rank in range(3)]
    assert [item.own_cores for item in plans] == [(0, 1), (2, 3), (4, 5)]
    assert [item.cores for item in plans] == [(0, 1, 6, 7), (2, 3, 6, 7), (4, 5, 6, 7)]


def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = Machine(cores=(3, 5, 9, 12), quota=None, bound_by_launcher=False, may_have_gpus=False)
    assert [plan(rank, 2, allowed).cores for rank in range(2)] == [(3, 5), (9, 12)]


def test_a_single_process_keeps_all_cores_and_does_not_pin() -> None:
    alone = plan(0, 1, machine(4))
    assert (alone.own_cores, alone.cores, alone.intra_op_threads) == ((), (0, 1, 2, 3), 4)
    assert alone.cores_source == "environment"
    assert devices.describe_cores(alone) == "cores 0-3"


def test_more_ranks_than_cores_share_all_of_them() -> None:
    shared = plan(2, 3, machine(2))
    assert (shared.own_cores, shared.cores, shared.intra_op_threads) == ((), (0, 1), 1)
    assert devices.describe_cores(shared) == "cores 0-1 (not pinned: there are 3 ranks)"


@pytest.mark.parametrize(("quota", "threads"), [(4.0, 2), (3.0, 1), (0.5, 1)])
def test_a_quota_limits_threads_and_forbids_pinning(quota: float, threads: int) -> None:
    limited = plan(1, 2, machine(8, quota))
    assert limited.own_cores == ()
    assert limited.why_unpinned == f"the cgroup's quota is {quota:g} cores"
    assert limited.intra_op_threads == threads


def test_a_quota_of_all_cores_is_no_limit() -> None:
    assert plan(1, 2, machine(4, 4.0)).own_cores == (2, 3)


def test_the_launcher_s_binding_is_kept() -> None:
    bound = plan(1, 2, Machine(cores=(4, 5, 6), quota=2.0, bound_by_launcher=True, may_have_gpus=False))
    assert (bound.own_cores, bound.cores, bound.cores_source, bound.intra_op_threads) == ((), (4, 5, 6), "launcher", 3)


def test_horovod_needs_at_least_two_inter_op_threads() -> None:
    assert plan(0, 2, machine(2)).inter_op_threads == 2
    assert plan(0, 2, machine(16)).inter_op_threads == 8


def test_serial_operations_on_one_core_get_one_inter_op_thread() -> None:
    assert plan(0, 2, machine(2), one_at_a_time=True).inter_op_threads == 1
    assert plan(0, 2, machine(3), one_at_a_time=True).inter_op_threads == 2  # with the one that is left over
    assert plan(0, 2, machine(16), one_at_a_time=True).inter_op_threads == 8
    assert plan(0, 1, machine(1), one_at_a_time=True).inter_op_threads == 2  # there are no sums
    shared = plan(0, 3, machine(2), one_at_a_time=True)
    assert (shared.intra_op_threads, shared.inter_op_threads) == (1, 2)  # Horovod carries them: the ranks share cores


def test_without_horovod_no_horovod_variable_is_set() -> None:
    names = settings_of(hang_timeout=9, horovod=False)
    assert "OMPI_MCA_mpi_yield_when_idle" in names
    assert not any(name.startswith("HOROVOD_") for name in names)


@pytest.mark.parametrize(
    ("backend", "launcher", "is_installed", "is_used"),
    [
        ("auto", "mpirun", True, True),
        ("auto", "mpirun", False, False),
        ("auto", "horovodrun --gloo", False, True),  # where it must be, then
        ("native", "mpirun", True, False),
        ("native", "horovodrun --gloo", True, True),
        ("horovod", "mpirun", False, True),
    ],
)
def test_horovod_is_used_if_installed_or_requested(
    backend: str, launcher: str, is_installed: bool, is_used: bool
) -> None:
    with mock.patch("importlib.util.find_spec", return_value=object() if is_installed else None):
        assert devices.uses_horovod(backend, launcher) is is_used


def test_ranks_of_several_nodes_leave_their_sums_to_horovod() -> None:
    far = World(rank=0, size=4, local_rank=0, local_size=2, node="a", launcher="mpirun")
    assert plan_devices(far, machine(2), {}, Needs(one_at_a_time=True)).inter_op_threads == 2


def test_cores_that_another_run_has_are_not_taken() -> None:
    asked: list[tuple[int, ...]] = []

    def refuse(cores: tuple[int, ...]) -> bool:
        asked.append(cores)
        return False

    second = plan(1, 2, machine(4), claim_cores=refuse)
    assert asked == [(2, 3)]
    assert (second.own_cores, second.cores, second.intra_op_threads) == ((), (0, 1, 2, 3), 2)
    assert second.why_unpinned == "another run holds some of 2-3"


def test_the_peak_memory_is_that_of_the_program_itself() -> None:
    """And not of the one that has started it, which has a hundred MiB here."""
    child = "from ringtrain.runtime.machine import read_peak_memory as read; print(read()); b'.' * 2**26; print(read())"
    start = f"import subprocess, sys; b'.' * 2**27; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    first, later = map(int, subprocess.check_output([sys.executable, "-c", start], text=True).split())
    assert first < 2**26 < later < 2**27


HOLD_CORES = """
import sys
from ringtrain.runtime.machine import claim_cores
print(claim_cores((100001, 100002)), flush=True)
sys.stdin.read()
"""


def test_a_core_is_held_until_its_process_ends() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_CORES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "True\n"
        assert not claim_cores((100000, 100001))
        assert claim_cores((100000,)), "a refused claim kept a core"
    finally:
        holder.communicate("")
    assert claim_cores((100001, 100002))


def test_claims_of_another_name_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert claim_cores((100005,))
    assert not claim_cores((100005,))
    monkeypatch.setenv(CLAIMS_VARIABLE, f"{os.environ[CLAIMS_VARIABLE]}-other")
    assert claim_cores((100005,))


HOLD_AS_STRANGER = """
import os, socket, sys
os.sched_setaffinity(0, eval(sys.argv[2]))
os.setuid(65534)
held = [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)]
for each in held:
    each.bind(f"\\0{sys.argv[1]}")
held[1].listen()
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_stranger(name: str, cores: set[int]) -> Iterator[None]:
    """A process of another user, bound to these cores, that holds a name."""
    command = [sys.executable, "-c", HOLD_AS_STRANGER, name, repr(cores)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "\n"
        yield
    finally:
        holder.communicate("")


def test_another_user_s_claim_counts_if_it_is_bound_to_the_core() -> None:
    everywhere = os.sched_getaffinity(0)
    with held_by_stranger(f"{os.environ[CLAIMS_VARIABLE]}/core/100003", everywhere):
        assert claim_cores((100003, 100004))
    name, core, other = f"ringtrain/test/{os.getpid()}", max(everywhere), min(everywhere)
    assert core != other
    for cores, is_believed in (({core}, True), (everywhere, False), ({other}, False)):
        with held_by_stranger(name, cores):
            assert machine_module.is_run_on_core(f"\0{name}", core) is is_believed
    assert not machine_module.is_run_on_core(f"\0{name}", core)


def test_settings_are_defaults_and_record_their_source() -> None:
    settings = {item.name: item for item in plan_settings(local_world(0, 2), machine(), {"HOROVOD_CYCLE_TIME": "7"})}
    assert settings["HOROVOD_CYCLE_TIME"] == Setting(name="HOROVOD_CYCLE_TIME", value="7", source="environment")
    assert settings["OMPI_MCA_mpi_yield_when_idle"].source == "ringtrain"
    assert "HOROVOD_DISABLE_GROUP_FUSION" not in settings


def test_ranks_of_one_node_use_shared_memory_not_the_network() -> None:
    plenty = 2 * devices.SHARED_MEMORY_BYTES_PER_RANK
    several_nodes = dataclasses.replace(local_world(0, 2), size=4)

    def transports(world: World, environ: dict[str, str], free_bytes: int) -> str | None:
        on = dataclasses.replace(
            machine(), may_have_gpus=True, shared_memory_bytes=10 * plenty, shm_free_bytes=free_bytes
        )
        settings = settings_of(environ, world=world, on=on)
        assert settings.get("OMPI_MCA_pml") == ("ob1" if world == local_world(0, 2) else None)
        warnings = devices.describe_shared_memory(world, plan_devices(world, on, environ))
        assert bool(warnings) == (world == local_world(0, 2) and "OMPI_MCA_btl" not in settings)
        return settings.get("OMPI_MCA_btl")

    assert transports(local_world(0, 2), {}, plenty) == devices.TRANSPORTS_BETWEEN_NODES
    assert transports(local_world(0, 2), {"OMPI_MCA_btl": "tcp,self"}, plenty) == "tcp,self"
    assert transports(local_world(0, 2), {}, plenty - 1) is None
    on = dataclasses.replace(machine(), shm_free_bytes=plenty)
    chosen = {item.name: item for item in plan_settings(local_world(0, 2), on, {"OMPI_MCA_pml": "ucx"})}["OMPI_MCA_pml"]
    assert (chosen.value, chosen.source) == ("ucx", "environment")
    for world in (GLOO, several_nodes, local_world(0, 1)):
        assert transports(world, {}, plenty) is None
    assert read_machine({}).shared_memory_bytes >= read_machine({}).shm_free_bytes > 0


def fusion_threshold(environ: dict[str, str], *, may_have_gpus: bool = False, size: int = 2) -> str | None:
    world, on = (
        dataclasses.replace(local_world(0, 2), size=size),
        dataclasses.replace(machine(), may_have_gpus=may_have_gpus),
    )
    return settings_of(environ, world=world, on=on).get("HOROVOD_FUSION_THRESHOLD")


def test_large_gradients_are_not_copied_together_between_cores() -> None:
    assert fusion_threshold({}) == str(8 * 1024 * 1024)
    assert fusion_threshold({"HOROVOD_FUSION_THRESHOLD": "0"}) == "0"
    assert fusion_threshold({}, may_have_gpus=True) is None
    assert fusion_threshold({}, size=4) is None  # of which two are on another node


@pytest.mark.parametrize("has_driver", [False, True])
def test_ranks_on_gpu_machines_keep_horovod_s_fusion_threshold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_driver: bool
) -> None:
    monkeypatch.setattr(machine_module, "GPU_DEVICES", (tmp_path / "none", tmp_path / "driver"))
    if has_driver:
        (tmp_path / "driver").touch()
    first = plan(0, 2, read_machine({}))
    adapted = adapt_plan(first, local_world(0, 2), {}, Needs(one_at_a_time=True))
    for planned in (first, adapted):
        names = {setting.name for setting in planned.settings}
        assert ("HOROVOD_FUSION_THRESHOLD" in names) is not has_driver


@pytest.mark.parametrize(
    ("value", "is_left"), [("1", True), (" 2x", True), ("0", False), ("", False), ("true", False), ("-1", False)]
)
def test_variables_that_horovod_tunes_are_not_set(value: str, is_left: bool) -> None:
    tuned = {"HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"}
    assert settings_of({"HOROVOD_AUTOTUNE": value}).keys() & tuned == (set() if is_left else tuned)


def test_a_workload_may_ask_horovod_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    """By setting the variable when it is imported: what was set before is taken back."""
    tuned = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")
    for name in ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "OMPI_MCA_mpi_yield_when_idle", *tuned):
        monkeypatch.delenv(name, raising=False)
    world = local_world(0, 2)
    first = plan_devices(world, machine(2), os.environ)
    set_environment(first)
    assert set(tuned) <= os.environ.keys()
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    adapted = adapt_plan(first, world, os.environ, Needs())
    set_environment(adapted, before=first)
    assert not set(tuned) & os.environ.keys()
    set_environment(dataclasses.replace(adapted, settings=()), before=adapted)


def test_a_process_alone_has_no_communication_settings() -> None:
    names = settings_of(world=local_world(0, 1))
    assert not [name for name in names if name.startswith(("HOROVOD_", "OMPI_"))]


def test_deterministic_runs_fix_the_order_of_sums() -> None:
    settings = settings_of(deterministic=True)
    assert settings["HOROVOD_DISABLE_GROUP_FUSION"] == "1"
    assert settings["TF_DETERMINISTIC_OPS"] == "1"


@pytest.mark.parametrize(("hang_timeout", "seconds"), [(300.0, "1200"), (1000.5, "2001"), (4.0, "1200")])
def test_horovod_and_gloo_time_out_after_the_watchdog(hang_timeout: float, seconds: str) -> None:
    for world, names in (
        (local_world(0, 2), ["HOROVOD_STALL_CHECK_TIME_SECONDS"]),
        (GLOO, ["HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"]),
    ):
        settings = settings_of(world=world, hang_timeout=hang_timeout)
        found = {name: value for name, value in settings.items() if name.endswith("_SECONDS")}
        assert found == dict.fromkeys(names, seconds)


def test_without_a_watchdog_horovod_speaks_as_it_always_does() -> None:
    assert not [name for name in settings_of(hang_timeout=0.0) if "STALL" in name or "GLOO" in name]


def one_setting(name: str, value: str) -> DevicePlan:
    setting = Setting(name=name, value=value, source="ringtrain")
    return dataclasses.replace(plan(0, 1, machine(1)), settings=(setting,))


def test_applying_a_plan_keeps_the_user_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "7")
    devices.apply_plan(one_setting("HOROVOD_CYCLE_TIME", "1"))
    assert os.environ["HOROVOD_CYCLE_TIME"] == "7"
    monkeypatch.delenv("HOROVOD_CYCLE_TIME")
    devices.apply_plan(one_setting("HOROVOD_CYCLE_TIME", "1"))
    assert os.environ["HOROVOD_CYCLE_TIME"] == "1"
    monkeypatch.delenv("HOROVOD_CYCLE_TIME")


def test_a_plan_is_adapted_to_the_defaults_of_a_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "HOROVOD_CYCLE_TIME", "HOROVOD_STALL_CHECK_TIME_SECONDS",
                 "HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_FUSION_THRESHOLD", "TF_DETERMINISTIC_OPS",
                 "OMPI_MCA_mpi_yield_when_idle"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "7")
    world = local_world(0, 2)
    first = plan_devices(world, machine(2), os.environ, Needs(hang_timeout=600.0, one_at_a_time=True))
    set_environment(first)
    adapted = adapt_plan(first, world, os.environ, Needs(deterministic=True))
    set_environment(adapted, before=first)
    assert (adapted.cores, adapted.inter_op_threads) == (first.cores, 2)
    said = {setting.name: (setting.value, setting.source) for setting in adapted.settings}
    assert said["HOROVOD_CYCLE_TIME"] == ("7", "environment")
    assert said["HOROVOD_DISABLE_GROUP_FUSION"] == ("1", "ringtrain")
    assert {name: os.environ[name] for name in said} == {name: value for name, (value, _) in said.items()}
    assert "HOROVOD_STALL_CHECK_TIME_SECONDS" not in os.environ
    again = adapt_plan(adapted, world, os.environ, Needs(deterministic=True))
    assert again == adapted
    set_environment(dataclasses.replace(adapted, settings=()), before=adapted)


def test_another_keras_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(UsageError, match="KERAS_BACKEND='jax'"):
        devices.apply_plan(one_setting("KERAS_BACKEND", "tensorflow"))


def test_only_own_cores_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    settings = one_setting("KERAS_BACKEND", "tensorflow")
    devices.apply_plan(settings)
    assert pinned == []
    shared = plan_devices(local_world(1, 2), machine(5), os.environ)
    for item in shared.settings:
        monkeypatch.setenv(item.name, item.value)
    devices.apply_plan(shared)
    assert pinned == [(2, 3, 4)]


def test_ranks_take_gpus_by_their_local_rank_unless_they_see_one_alone() -> None:
    assert [devices.choose_gpu(local_world(rank, 4), 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [devices.choose_gpu(local_world(rank, 3), 4) for rank in range(3)] == [0, 1, 2]


def test_more_ranks_than_gpus_is_an_error() -> None:
    with pytest.raises(UsageError, match="shows 2 GPUs to 3 ranks"):
        devices.choose_gpu(local_world(2, 3), 2)


def test_ranks_share_gpus_if_nccl_is_allowed_to() -> None:
    assert [devices.choose_gpu(local_world(rank, 3), 2, can_share=True) for rank in range(3)] == [0, 1, 0]
    assert [devices.can_share_gpus({devices.SHARED_GPUS: value}) for value in ("1", "0", "")] == [True, False, False]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        ({"sys/fs/cgroup/a/b/cpu.max": "400000 100000", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        ({"sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        ({}, None),
    ],
)
def test_the_tightest_quota_of_cgroup_version_2_counts(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert read_cgroup_quota(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "0::/a/b", **files})
    assert read_cgroup_quota(tmp_path) == quota


def test_the_quota_of_cgroup_version_1_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/jobs/7\n1:name=systemd:/x",
            "sys/fs/cgroup/cpu/jobs/7/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/jobs/7/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us": "100000",
        },
    )
    assert read_cgroup_quota(tmp_path) == 2.5


def test_the_machine_s_cores_are_this_process_s() -> None:
    assert read_machine({}).cores == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("environ", "bound"),
    [
        ({}, False),
        ({"OMPI_MCA_orte_bound_at_launch": "1"}, True),
        ({"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, True),
        ({"SLURM_CPU_BIND_TYPE": "none"}, False),
        ({"OMPI_COMM_WORLD_RANK": "0"}, False),
    ],
)
def test_a_launcher_s_binding_is_seen(environ: dict[str, str], bound: bool) -> None:
    assert read_machine(environ).bound_by_launcher == bound


def test_fewer_cores_than_mpirun_itself_has_is_a_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    affinities = {0: {1}, os.getppid(): {0, 1}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinities[pid])
    assert read_machine({"OMPI_COMM_WORLD_RANK": "1"}).bound_by_launcher


def test_cores_are_written_as_ranges() -> None:
    assert format_cores((0, 1, 2, 3, 8)) == "0-3,8"
    assert format_cores((5,)) == "5"
    assert format_cores((4, 2, 3)) == "2-4"


@pytest.fixture(autouse=True)
def _free_claims() -> object:
    held = len(machine_module._claims)
    yield
    for claim in machine_module._claims[held:]:
        claim.close()
    del machine_module._claims[held:]


def test_a_device_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process holds all memory of a GPU, which cannot be had here."""
    import tensorflow as tf

    def fail() -> None:
        raise tf.errors.InternalError(None, None, "cudaSetDevice() on GPU:0 failed. Status: out of memory")

    monkeypatch.setattr(tf.config, "list_logical_devices", fail)
    with pytest.raises(RingtrainError, match=r"^GPU 0 on a cannot be used: cudaSetDevice.*nvidia-smi") as caught:
        devices.open_device("GPU 0", local_world(0, 1))
    assert caught.value.exit_code == 1


def test_tensorflow_without_eager_execution_is_refused(tmp_path: Path) -> None:
    """As a workload's file may leave it, when it is imported."""
    script = (
        "import tensorflow as tf; tf.compat.v1.disable_eager_execution()\n"
        "from ringtrain.runtime.devices import start_tensorflow\n"
        "start_tensorflow(None, None)"
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py")]
    finished = run_command(command, env=clean_environment(PYTHONPATH=str(REPOSITORY)), timeout=60)
    assert "UsageError: TensorFlow's eager execution is off" in finished.stderr
