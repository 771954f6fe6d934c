"""A real SLURM of two nodes on this machine, in a folder and on ports of its own, for the user who runs the tests.

The daemons are Debian's (``scripts/setup.sh --slurm``). The nodes have names, which no name server knows: nss_wrapper
answers for them in the processes of a job, as ``/etc/hosts`` would.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from processes import is_running, processes_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
WRAPPER = "libnss_wrapper.so"
NODES = ("node1", "node2")
PATHS = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
SOON_S = 60
SETTINGS = """\
ClusterName=rlinf
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
# A job that goes back into the queue waits until the credential of its last start has expired: 121 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=5
# A job in the queue is looked at every 30 s by default.
SchedulerParameters=bf_interval=1,sched_interval=1
# The nodes have more CPUs and GPUs than this machine: their number only decides which jobs fit.
SlurmdParameters=config_overrides
GresTypes=gpu
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 Gres=gpu:2 State=UNKNOWN\n"


def missing() -> str:
    """Return which parts of SLURM this machine lacks; empty if none."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATHS) is None]
    found = subprocess.run(["sh", "-c", "ls /usr/lib/*/$0 /usr/lib/$0 /usr/lib64/$0", WRAPPER], capture_output=True)
    absent += [] if found.stdout else [WRAPPER]
    return f"SLURM is not installed ({', '.join(absent)}): bash scripts/setup.sh --slurm" if absent else ""


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that no other process is given meanwhile; a daemon that reuses addresses, as these do, can listen there.

    Each has a socket that is bound and does not listen.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", 0))
        yield [one.getsockname()[1] for one in sockets]


def own_address() -> str:
    """Return the address of this machine in its network, where Ray's daemons listen; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
        except OSError:  # no network
            return "127.0.0.1"
        return one.getsockname()[0]


class Slurm:
    """A running cluster: submits jobs and waits for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{PATHS}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        }

    def call(self, *words: str, **environment: str) -> str:
        """Run a command of SLURM and return its output."""
        done = subprocess.run(
            words, env=self.environment | environment, cwd=Path(__file__).parents[1], capture_output=True, text=True,
            timeout=SOON_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: Path, *words: str, **environment: str) -> Job:
        """Submit a script with one task on each node; the nodes' names are known in the processes of the job."""
        number = self.call(
            "sbatch", "--parsable", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2",
            f"--output={self.folder}/job-%j.out", str(script), *words,
            LD_PRELOAD=WRAPPER, NSS_WRAPPER_HOSTS=str(self.folder / "hosts"), **environment,
        )  # fmt: skip
        return Job(self, number)

    def start(self, stack: ExitStack) -> None:
        """Start the daemons, and wait until both nodes are idle; ``stack`` ends them, and a watcher if this process is killed."""
        folder = self.folder
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        watcher = stack.enter_context(subprocess.Popen([sys.executable, __file__, mark], stdin=subprocess.PIPE))
        stack.callback(watcher.stdin.close)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        controller, *ports = stack.enter_context(held_ports(1 + len(NODES)))
        nodes = "".join(NODE.format(name=name, port=port) for name, port in zip(NODES, ports, strict=True))
        settings = SETTINGS.format(folder=folder, port=controller, user=getpass.getuser())
        (folder / "slurm.conf").write_text(f"{settings}{nodes}PartitionName=all Nodes=ALL Default=YES State=UP\n")
        for name in ("gpu0", "gpu1", "state", *NODES):
            (folder / name).mkdir() if name in ("state", *NODES) else (folder / name).touch()
        (folder / "gres.conf").write_text(f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-1]\n")
        # torch asks for the IPv6 addresses of a name, too, and tries again and again where there are none.
        (folder / "hosts").write_text("".join(f"{at} {name}\n" for name in NODES for at in (own_address(), "::1")))
        munge = {word: f"--{word}={folder}/munge.{end}" for word, end in
                 (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed"))}  # fmt: skip
        self._daemon(stack, "munged", "--foreground", "--force", *munge.values())
        log = (folder / "daemons.log").read_text
        until(lambda: (folder / "munge.socket").exists(), log)
        self._daemon(stack, "slurmctld", "-D", "-c")
        for name in NODES:
            self._daemon(stack, "slurmd", "-D", "-N", name)
        until(lambda: self._node_states() == ["idle"] * len(NODES), log)

    def _node_states(self) -> list[str]:
        found = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"], env=self.environment, capture_output=True, text=True
        )
        return found.stdout.split()

    def _daemon(self, stack: ExitStack, *words: str) -> None:
        log = stack.enter_context((self.folder / "daemons.log").open("a"))
        process = subprocess.Popen(words, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(process.wait, SOON_S)
        stack.callback(process.terminate)


class Job:
    """A submitted job."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self.slurm, self.number = slurm, number

    def output(self) -> str:
        """Return everything that the job has printed in all of its starts."""
        path = self.slurm.folder / f"job-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def fields(self) -> dict[str, str]:
        """Return what SLURM knows of the job, such as JobState, ExitCode and Restarts."""
        words = self.slurm.call("scontrol", "show", "job", self.number).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait(self, seconds: float = 300) -> dict[str, str]:
        """Wait until the job has ended for good and return its fields."""
        until(lambda: self.fields()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), self.output, seconds)
        return self.fields()


def until(condition, who, seconds: float = SOON_S) -> None:
    """Wait for a condition; fail with the name of, or the text from, ``who``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing after {seconds:g} s: {who() if callable(who) else who}"
        time.sleep(0.1)


@contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Start a cluster in ``folder`` and end it with all of its jobs."""
    slurm = Slurm(folder)
    with ExitStack() as stack:
        slurm.start(stack)
        try:
            yield slurm
        finally:
            slurm.call("scancel", "--full", f"--user={getpass.getuser()}")
            until(lambda: not slurm.call("squeue", "--noheader"), "scancel")


def end_when_alone(mark: str) -> None:
    """Wait for the end of standard input, so of its writer; then kill all processes whose environment holds ``mark``."""
    sys.stdin.read()
    while found := [pid for pid in processes_of(mark) if is_running(pid)]:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which may reach the whole group of the tests
        signal.signal(number, signal.SIG_IGN)
    end_when_alone(sys.argv[1])
