"""A Slurm of one's own on this machine: a login host and two nodes or more, for the tests of this directory.

Each host is a set of Linux name spaces (`tests.slurm.host`), with a host name and processes of its own, so that the
nodes are as far apart as one kernel lets them be: no process of one sees those of the other, nor its shared memory.
They have a network in common, which nothing else reaches, and all files but ``/dev/shm`` and ``TmpFS``. That
takes root's rights (CAP_SYS_ADMIN).

A node is lost by ending its first process: slurmd, slurmstepd and ranks are gone at one stroke. The hosts end with the
test process, however that ends: each of their launchers asks the kernel for SIGKILL at its parent's death.

What Slurm 22.05 does, as seen here:

- A batch job has no SLURM_JOB_END_TIME; ``squeue -h -j JOB -o %e`` tells its end. The environment of sbatch arrives.
- ``scontrol requeue`` in a batch script: SIGCONT and SIGTERM at once to the script and to all that it started, SIGKILL
  after KillWait. The job starts again cred_expire + 1 s later (6 s here; up to 30 s more with the default intervals of
  the scheduler, which `CONFIGURATION` shortens), under the same id. SLURM_RESTART_COUNT is unset at first, then 1.
- ``scancel``: the same signals. The state is COMPLETING until all processes have ended, whether the job was cancelled
  or was at its time limit. A requeue is *not* refused in this state, nor for a job that is over: whoever requeues has
  to look whether the job is RUNNING. It is refused, with exit code 1, for a job that waits, and for one that was
  submitted with ``--no-requeue``.
- ``scancel --signal=USR1`` signals the steps: the ranks *and their children*; ``--batch``: the batch shell alone;
  ``--full``: the steps, the batch shell and its children.
- Time limits are whole minutes, and slurmctld looks at them every 30 s: a job ends up to 30 s late, and a signal by
  ``--signal=USR1@N`` comes up to 30 s early. SIGCONT comes with it, and interrupts ``wait`` where the shell traps it.
  ``scontrol update JobId=JOB EndTime=now+SECONDS`` brings the end of a running job near.
- srun returns the highest code of its ranks, where a rank that a signal ended has 128 + its number. With
  ``--kill-on-bad-exit=1``: 75 where all leave with 75, 143 where srun had to end one that stayed. A rank that is killed
  with SIGKILL makes 143, too, not 137, once the others have been ended; srun's first line names it.
- A node that is lost is seen after 27 s, with SlurmdTimeout 10 as with 6. Its jobs are requeued. Where slurmstepd lives
  on there, srun says "Node failure on n1" and returns 0 (!) while the ranks run on, and the batch script goes on, too:
  its job waits or runs elsewhere by then, with ``Restarts`` higher than the script's SLURM_RESTART_COUNT.
- With ``--no-kill`` a job keeps its other nodes, even without that of its batch script: Slurm then leaves it RUNNING.
  Once the lost node is DOWN, the ranks on the others are killed, and srun returns 137. If one of them has failed
  before, srun waits for that, and the step stays in the way of others for good: ``--overlap``. ``scancel
  --signal=KILL JOB`` cancels a job that has no step but the batch script.
- In ``#SBATCH`` lines a value in double quotes arrives as it is, once each backslash and each double quote in it has a
  backslash before it. Without quotes, and in single ones, a backslash goes and a blank ends the value.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ringtrain.runtime.world import SLURM_FIRST_SPECIAL_STEP
from tests.slurm import host
from tests.world.fork_server import SERVERS
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command

NODES = ("n1", "n2")
CPUS_PER_NODE = 2
START_SECONDS = 30.0
ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# Nodes, of whatever size this machine is (config_overrides). What makes Slurm wait is as short as it can be:
# cred_expire before a job starts again, SlurmdTimeout until a node counts as lost, the scheduler's intervals.
CONFIGURATION = """
ClusterName=ringtrain
SlurmctldHost=login({address})
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={site}/munge.socket,cred_expire=5
StateSaveLocation={site}/state
SlurmctldPidFile={site}/slurmctld.pid
SlurmdSpoolDir={site}/%n/spool
SlurmdPidFile={site}/%n/slurmd.pid
TmpFS={site}/tmp
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmdTimeout=10
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

NODE = "NodeName={name} NodeAddr={address} Port={port} CPUs={cpus} RealMemory=1000000 Gres=gpu:2 Feature=fast"

# What Slurm gives out as GPUs: it asks no more than that they are devices.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"


class Cluster:
    """A running Slurm; leaving the context, or `stop`, ends all of it."""

    def __init__(self, nodes: Sequence[str] = NODES) -> None:
        """Start it, and wait until its nodes take jobs.

        Raises:
            PermissionError: this process may not make name spaces.
        """
        if os.geteuid() != 0:
            raise PermissionError("the tests' Slurm needs root: its nodes have name spaces and mounts of their own")
        # munged refuses a socket that others could not reach.
        self.site = Path(tempfile.mkdtemp(prefix="ringtrain-slurm-", dir="/tmp"))
        self.site.chmod(0o711)
        self._nodes = nodes
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files()
            self._start_host("login", ["unshare", "--net"])
            for node in self._nodes:
                self._start_node(node)
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process, and with them their mounts."""
        for name in reversed(list(self._hosts)):
            self._end_host(name)
        shutil.rmtree(self.site)

    # --- What a user does ---

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a user who has logged in, and who wants to know where Python was when C code crashed."""
        return clean_environment(**({"SLURM_CONF": str(self.site / "slurm.conf"), "PYTHONFAULTHANDLER": "1"} | more))

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        timeout: float = 60,
    ) -> Finished:
        """Run a command on the login host to its end.

        Args:
            env: variables besides those of `environment`.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``timeout`` seconds; it carries what was written until then.
        """
        return run_command(self.on_login(command, cwd=cwd), env=self.environment(**(env or {})), timeout=timeout)

    def on_login(self, command: Sequence[str | Path], *, cwd: Path = REPOSITORY) -> list[str]:
        """The command that runs another one on the login host."""
        return [*self._enter("login", "pid", "net", "mount", "uts"), "env", f"--chdir={cwd}", *map(str, command)]

    def ask(self, *command: str | Path) -> str:
        """What a Slurm command prints; it has to succeed."""
        finished = self.run(command)
        assert finished.rc == 0, f"{command}: {finished.stderr}"
        return finished.stdout

    def submit(
        self, script: Path, *options: str | Path, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
    ) -> int:
        """The id of a new job; options are sbatch's."""
        finished = self.run(["sbatch", "--parsable", *options, script], env=env, cwd=cwd)
        assert finished.rc == 0, finished.stderr
        return int(finished.stdout)

    def start_fork_servers(self) -> None:
        """Fork the Python programs of later jobs, with the environment of `run`, on each node."""
        for node in self._nodes:
            SERVERS.start_on(node, self.environment(), self._enter(node, "pid", "net", "mount", "uts"))
        for node in self._nodes:
            SERVERS.wait_for(node)

    def cancel(self, job: int, *options: str) -> None:
        self.ask("scancel", *options, str(job))

    # --- What Slurm says ---

    def describe(self, job: int) -> str:
        return self.ask("scontrol", "show", "job", str(job))

    def state(self, job: int) -> str:
        return self._field(job, "JobState")

    def restarts(self, job: int) -> int:
        return int(self._field(job, "Restarts"))

    def exit_code(self, job: int) -> int:
        """That of the batch script."""
        return int(self._field(job, "ExitCode").split(":")[0])

    def node(self, job: int) -> str:
        """Where the batch script runs."""
        return self._field(job, "BatchHost")

    def output_file(self, job: int) -> Path:
        return Path(self._field(job, "StdOut", r".*"))

    def output(self, job: int) -> str:
        """What the job has written so far."""
        path = self.output_file(job)
        return path.read_text(errors="replace") if path.exists() else ""

    def shorten(self, job: int, seconds: float) -> None:
        """Bring the time limit of a running job near."""
        self.ask("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds:.0f}")

    def lengthen(self, job: int, minutes: int) -> None:
        """Give a waiting job another time limit."""
        self.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def _field(self, job: int, name: str, value: str = r"\S+") -> str:
        found = re.search(rf"\b{name}=({value})", self.describe(job))
        assert found, f"no {name} in {self.describe(job)}"
        return found[1]

    def wait_for(self, what: str, is_there: Callable[[], bool], job: int, *, timeout: float) -> None:
        """Wait for something that job ``job`` does; the error shows its state and output."""
        end = time.monotonic() + timeout
        while True:
            begin = time.monotonic()
            if is_there():
                return
            if begin > end:
                raise AssertionError(
                    f"no {what} after {timeout:.0f} s:\n{self.describe(job)}\n{self.output(job)}\n{self.logs()}"
                )
            # To ask Slurm takes several processes, and the ranks want the cores.
            time.sleep(min(0.5, max(0.1, 9 * (time.monotonic() - begin))))

    def wait_for_state(self, job: int, *states: str, timeout: float) -> str:
        """Wait until the job has one of some states, and return it."""
        self.wait_for(f"state {' or '.join(states)}", lambda: self.state(job) in states, job, timeout=timeout)
        return self.state(job)

    def wait_for_end(self, job: int, *, timeout: float) -> str:
        """Wait until the job is over and will not start again, and return its state."""
        return self.wait_for_state(job, *ENDED, timeout=timeout)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are free for a job."""
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        self._wait_until("idle nodes", lambda: self.run(command).stdout.split() == ["idle"] * len(self._nodes))

    def _wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + START_SECONDS
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError(f"no {what} after {START_SECONDS:.0f} s:\n{self.logs()}")
            time.sleep(0.1)

    def _registered(self, node: str) -> float:
        """When the slurmd of a node, as Slurm knows it, was started: seconds since 1970."""
        found = re.search(r"SlurmdStartTime=(\S+)", self.ask("scontrol", "show", "node", node))
        return datetime.fromisoformat(found[1]).timestamp() if found and found[1] != "None" else 0.0

    # --- Processes, and what can happen to them ---

    def rank_pids(self, job: int) -> dict[int, int]:
        """The process of each rank of a job's step, as srun started it."""
        pids = {}
        for node in self._nodes:
            for pid in self._pids(node):
                variables = _variables(pid)
                step = int(variables.get("SLURM_STEP_ID", SLURM_FIRST_SPECIAL_STEP))
                is_of_step = variables.get("SLURM_JOB_ID") == str(job) and step < SLURM_FIRST_SPECIAL_STEP
                if is_of_step and _name(_parent(pid)) == "slurmstepd":
                    pids[int(variables["SLURM_PROCID"])] = pid
        return pids

    def job_pids(self, job: int) -> list[int]:
        """All living processes that carry the job's id, the batch script among them."""
        pids = (pid for node in self._nodes for pid in self._pids(node))
        return [pid for pid in pids if _variables(pid).get("SLURM_JOB_ID") == str(job)]

    def kill_slurmd(self, node: str) -> None:
        """Slurm loses the node, on which slurmstepd, the batch script and ranks live on."""
        [pid] = [pid for pid in self._pids(node) if _name(pid) == "slurmd"]
        os.kill(pid, signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """The node loses its power."""
        self._end_host(node)

    def restart_node(self, node: str) -> None:
        """Start the node anew; whatever lived there is gone."""
        self._end_host(node)
        began = int(time.time())
        self._start_node(node)
        self._wait_until(f"registration of {node}", lambda: self._registered(node) >= began)

    def report_down(self, node: str) -> None:
        """Tell Slurm that the node is lost, which it would see by itself after 27 s."""
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def tidy(self) -> None:
        """Make it as new: no jobs, and all nodes free."""
        self.run(["scancel", "--user=root"])
        self.run(["scancel", "--user=root", "--signal=KILL", "--full"])
        for node in self._nodes:
            if "slurmd" not in map(_name, self._pids(node)):
                self.restart_node(node)
        self.wait_for_nodes()

    # --- Hosts ---

    def _write_files(self) -> None:
        for directory in ("state", "tmp", *self._nodes):
            (self.site / directory).mkdir()
        nodes = "\n".join(
            NODE.format(name=name, address=host.ADDRESS, port=17001 + number, cpus=CPUS_PER_NODE)
            for number, name in enumerate(self._nodes)
        )
        text = CONFIGURATION.format(site=self.site, address=host.ADDRESS, nodes=nodes)
        (self.site / "slurm.conf").write_text(text)
        (self.site / "gres.conf").write_text(GPUS)
        (self.site / "hosts").write_text(f"127.0.0.1 localhost\n{host.ADDRESS} login {' '.join(self._nodes)}\n")
        key = self.site / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(128))

    def _start_node(self, name: str) -> None:
        self._start_host(name, [*self._enter("login", "net", "mount"), "unshare"])

    def _start_host(self, name: str, unshare: Sequence[str]) -> None:
        command = [
            *("setpriv", "--pdeathsig", "KILL", *unshare),
            *("--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts"),
            *(sys.executable, host.__file__, name, str(self.site)),
        ]
        env = self.environment()
        env["PATH"] += ":/usr/sbin:/sbin"  # not in everybody's, and the daemons are there
        with (self.site / f"{name}.log").open("ab") as log:
            self._hosts[name] = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + START_SECONDS
        while not _children(self._hosts[name].pid):
            if self._hosts[name].poll() is not None or time.monotonic() > end:
                raise PermissionError(f"host {name} cannot be started (see unshare(1)):\n{self.logs()}")
            time.sleep(0.01)

    def _end_host(self, name: str) -> None:
        """The first process of a name space takes all others with it; each has gone when it has."""
        launcher = self._hosts.pop(name, None)
        if launcher is None:
            return
        for pid in _children(launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()

    def _first_pid(self, name: str) -> int:
        [pid] = _children(self._hosts[name].pid)
        return pid

    def _enter(self, name: str, *kinds: str) -> list[str]:
        """The command that runs another one in name spaces of a host."""
        return ["nsenter", f"--target={self._first_pid(name)}", *(f"--{kind}" for kind in kinds)]

    def _pids(self, name: str) -> list[int]:
        """The processes of a host; none where it is lost."""
        if name not in self._hosts:
            return []
        space = _pid_space(self._first_pid(name))
        return [pid for pid in _all_pids() if _pid_space(pid) == space]

    def logs(self) -> str:
        """The last lines of every log."""
        paths = [path for path in sorted(self.site.rglob("*.log")) if path.stat().st_size]
        return "\n".join(f"{path}:\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in paths)


def pids_of_site(site: Path) -> list[int]:
    """All living processes that were given this cluster's configuration, on whichever host."""
    return [pid for pid in _all_pids() if _variables(pid).get("SLURM_CONF") == str(site / "slurm.conf")]


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _pid_space(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has ended
        return None


def _parent(pid: int) -> int:
    """The parent's pid; 0 where the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def _children(parent: int) -> list[int]:
    return [pid for pid in _all_pids() if _parent(pid) == parent]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
