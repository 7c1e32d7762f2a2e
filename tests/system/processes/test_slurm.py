"""The Slurm example with simulated engines: under three real node daemons of Slurm, and with its commands played."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from bench.rig.node import free_port, free_ports, short_folder, wait_until
from tests.repository.test_manifests import EXAMPLES, ROOT, SBATCH, with_model

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "unshare")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None]

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]
needs_slurm = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason="needs Debian's slurmctld, slurmd and slurm-client, and root to name the hosts in a mount namespace of its own",
)

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
            assert (
                wait_until(lambda: cluster.run("sinfo", "--noheader", "--format=%t %D").strip() == "idle 3", WITHIN_S)
                is not None
            )
            yield cluster
        finally:
            cluster.end()


def write_keys(folder: Path) -> None:
    command = [sys.executable, "-m", "supervisor", "hash-key", "alice"]
    done = subprocess.run(command, input=f"{SECRET}\n", capture_output=True, text=True, cwd=ROOT, check=True)
    (folder / "keys.toml").write_text(f"{done.stdout.strip()}\nadmin = true\n")


def simulated(text: str) -> tuple[str, dict[str, int]]:
    """Return the cluster file with engines that need no GPU, each both legs, and with ports that are free."""
    ports = dict(zip(("7400", "7500", "8000"), free_ports(3), strict=True))
    for old, new in ports.items():
        text = re.sub(rf"\b{old}\b", str(new), text)
    text = re.sub(r"^(leg|bootstrap_port|tensor_parallel|start_within_s) = .*\n", "", text, flags=re.MULTILINE)
    return with_model(text).replace('device = "cuda"', 'kind = "simulated"').replace(
        "drain_s = 60", "drain_s = 5"
    ), ports


def get(port: int, host: str, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def example(folder: Path) -> dict[str, int]:
    """Write the example as a user would, but for engines, accelerators and ports; return the ports."""
    text, ports = simulated((EXAMPLES / "slurm" / "cluster.toml").read_text())
    (folder / "cluster.toml").write_text(text)
    script = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", SBATCH.read_text())
    (folder / "espalier.sbatch").write_text(script.replace("--cpus-per-task=16", "--cpus-per-task=1"))
    write_keys(folder)
    return ports


def is_ready(ports: dict[str, int]) -> bool:
    try:
        return all(get(ports["7500"], host, "/ready")[0] == 200 for host in HOSTS.values())
    except URLError:
        return False


@needs_slurm
def test_a_job_drains_when_its_script_gets_sigterm_and_leaves_nothing() -> None:
    with slurm() as cluster:
        ports = example(cluster.folder)
        job = cluster.run("sbatch", "--parsable", "--output=log", "espalier.sbatch").strip()
        assert wait_until(lambda: is_ready(ports), WITHIN_S) is not None
        cluster.run("scancel", "--batch", "--signal=TERM", job)
        assert wait_until(lambda: cluster.state(job) not in {"RUNNING", "COMPLETING"}, WITHIN_S) is not None
        log = (cluster.folder / "log").read_text()
        assert cluster.state(job) == "COMPLETED", log[-3000:]
        assert log.count('"event": "stopped", "exit_code": 0') == len(HOSTS)
        assert "Killed" not in log
        assert not list(cluster.folder.glob("espalier-*"))  # the run folders of the nodes
        assert not list(cluster.folder.glob("job-*"))


# By the script, with the commands of Slurm played -----------------------------------------

SCONTROL = """#!/bin/bash
printf '%s\n' ${SLURM_JOB_NODELIST//,/ }
"""
SRUN = """#!/bin/bash
# One task after the other until --ntasks of them run; a signal kills them all, as Slurm's own srun does.
while [[ $1 == --* ]]; do case $1 in --ntasks=*) n=${1#*=};; esac; shift; done
tasks=()
trap 'kill -KILL "${tasks[@]}" 2> /dev/null; exit 137' TERM
for (( i = 0; i < n; i++ )); do SLURM_PROCID=$i "$@" & tasks+=($!); done
echo "${tasks[@]}" > "$SLURM_SUBMIT_DIR/tasks-of-step-0"
worst=0
for task in "${tasks[@]}"; do
    wait "$task" && code=0 || code=$?
    (( code > worst )) && worst=$code
done
exit $worst
"""
SCANCEL = """#!/bin/bash
# Signals every task of the one step of the job, and no process else.
[[ $* == "--quiet --signal=TERM $SLURM_JOB_ID.0" ]] || exit 64
read -ra tasks < "$SLURM_SUBMIT_DIR/tasks-of-step-0"
kill -TERM "${tasks[@]}" 2> /dev/null
"""


def test_a_job_serves_and_ends_with_nothing_left_when_it_is_signalled(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN), ("scancel", SCANCEL)):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    text, ports = simulated((EXAMPLES / "slurm" / "cluster.toml").read_text())
    (tmp_path / "cluster.toml").write_text(text)
    write_keys(tmp_path)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(HOSTS.values()),
        "ESPALIER_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(["bash", str(SBATCH)], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert job.poll() is None, (tmp_path / "log").read_text()
            return is_ready(ports)

        assert wait_until(ready, 180.0) is not None
        key = {"Authorization": f"Bearer {SECRET}"}
        assert get(ports["7500"], "127.0.0.2", "/metrics")[0] == 401
        assert 'espalier_link_up{peer="front"} 1.0' in get(ports["7500"], "127.0.0.2", "/metrics", **key)[1]
        status = [sys.executable, "-m", "supervisor", str(tmp_path / "job-7" / "cluster.toml"), "status"]
        seen = subprocess.run(status, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True).stdout
        assert "3 of 3 nodes answer" in seen
        code, models = get(ports["8000"], "127.0.0.1", "/v1/models", **key)
        assert (code, json.loads(models)["data"][0]["id"]) == (200, "qwen3-32b")
        job.send_signal(signal.SIGTERM)
        assert job.wait(90) == 0, (tmp_path / "log").read_text()
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(90)
    assert not (tmp_path / "job-7").exists()
    with pytest.raises(URLError):
        get(ports["7500"], "127.0.0.3", "/health")
