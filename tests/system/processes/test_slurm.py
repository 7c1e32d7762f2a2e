"""The Slurm example under a real Slurm: three of its node daemons on this machine, and simulated engines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError

import pytest

from bench.rig.node import short_folder
from tests.repository.test_manifests import EXAMPLES, ROOT, SBATCH, free_port, get, simulated, until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "unshare")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(bool(MISSING), reason=f"needs Debian's slurmctld, slurmd and slurm-client: no {MISSING}"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="needs root: it gives the hosts names in a mount namespace of its own"
    ),
]

HOSTS = {"n0": "127.0.0.1", "n1": "127.0.0.2", "n2": "127.0.0.3"}
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
ReturnToService=2
KillWait=30
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=n0,n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=1 State=UNKNOWN"
# Everything in it ends with its first process, whose end is the namespace's.
DAEMONS = """\
mount --bind "$FOLDER/hosts" /etc/hosts
slurmctld -D > "$FOLDER/slurmctld.log" 2>&1 &
for name in n0 n1 n2; do slurmd -D -N $name > "$FOLDER/slurmd-$name.log" 2>&1 & done
sleep infinity
"""
WITHIN_S = 180.0
SECRET = "quetzalcoatl-quetzalcoatl"


class Slurm:
    """A Slurm of three nodes, each with one processor, and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(NODE.format(name=name, host=host, port=free_port()) for name in HOSTS)
        (folder / "state").mkdir()
        (folder / "hosts").write_text(
            Path("/etc/hosts").read_text() + "".join(f"{address} {name}\n" for name, address in HOSTS.items())
        )
        (folder / "slurm.conf").write_text(CONF.format(host=host, ports=[free_port()], folder=folder, nodes=nodes))
        self.environment = os.environ | {
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "FOLDER": str(folder),
            "TMPDIR": str(folder),
            "ESPALIER_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
        }
        self.daemons = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", DAEMONS],
            env=self.environment,
            start_new_session=True,
        )

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        return found[1] if found else "UNKNOWN"

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.daemons.pid, signal.SIGKILL)
        self.daemons.wait(10)


@contextmanager
def slurm() -> Iterator[Slurm]:
    with short_folder() as folder:
        cluster = Slurm(folder)
        try:
            until(lambda: cluster.run("sinfo", "--noheader", "--format=%t %D").strip() == "idle 3", WITHIN_S)
            yield cluster
        finally:
            cluster.end()


def example(folder: Path) -> dict[str, int]:
    """Write the example as a user would, but for engines, accelerators and ports; return the ports."""
    text, ports = simulated((EXAMPLES / "slurm" / "cluster.toml").read_text())
    (folder / "cluster.toml").write_text(text)
    script = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", SBATCH.read_text())
    (folder / "espalier.sbatch").write_text(script.replace("--cpus-per-task=16", "--cpus-per-task=1"))
    key = subprocess.run(
        [sys.executable, "-m", "supervisor", "hash-key", "alice"],
        input=f"{SECRET}\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    ).stdout
    (folder / "keys.toml").write_text(f"{key.strip()}\nadmin = true\n")
    return ports


def is_ready(ports: dict[str, int]) -> bool:
    try:
        return all(get(ports["7500"], host, "/ready")[0] == 200 for host in HOSTS.values())
    except URLError:
        return False


def test_a_job_drains_when_its_script_gets_sigterm_and_leaves_nothing() -> None:
    with slurm() as cluster:
        ports = example(cluster.folder)
        job = cluster.run("sbatch", "--parsable", "--output=log", "espalier.sbatch").strip()
        until(lambda: is_ready(ports), WITHIN_S)
        cluster.run("scancel", "--batch", "--signal=TERM", job)
        until(lambda: cluster.state(job) not in {"RUNNING", "COMPLETING"}, WITHIN_S)
        log = (cluster.folder / "log").read_text()
        assert cluster.state(job) == "COMPLETED", log[-3000:]
        assert log.count('"event": "stopped", "exit_code": 0') == len(HOSTS)
        assert "Killed" not in log
        assert not list(cluster.folder.glob("espalier-*"))  # the run folders of the nodes
        assert not list(cluster.folder.glob("job-*"))


def test_a_job_whose_file_is_wrong_fails() -> None:
    with slurm() as cluster:
        example(cluster.folder)
        file = cluster.folder / "cluster.toml"
        file.write_text(file.read_text().replace("[gateway]", "[gateway]\nbogus = 1"))
        job = cluster.run("sbatch", "--parsable", "--output=log", "espalier.sbatch").strip()
        until(lambda: cluster.state(job) not in {"PENDING", "RUNNING", "COMPLETING"}, WITHIN_S)
        assert cluster.state(job) == "FAILED"
        assert "gateway.bogus: is not a key here" in (cluster.folder / "log").read_text()
