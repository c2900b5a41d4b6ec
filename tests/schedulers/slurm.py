"""A Slurm cluster of two nodes on this machine, with its own daemons."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time

LIMIT_SECS = 600.0
NODES = ("bigtrain-n1", "bigtrain-n2")

_HOSTS = pathlib.Path("/etc/hosts")
_NAMES = [f"127.0.0.1 {name}\n" for name in NODES]

_CONF = """\
ClusterName=bigtrain
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until its credential has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1
SelectType=select/linear
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
KillWait=60
NodeName=DEFAULT CPUs=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
  """The reason why no cluster can be started here, or ""."""
  for name in ("slurmctld", "slurmd", "munged", "srun"):
    if not shutil.which(name):
      return f"{name} is not installed; `make test-cluster` as root installs it"
  return "" if os.geteuid() == 0 else "slurmd must run as root"


class Slurm:
  """A running cluster, until `close`; `run` runs its commands.

  Args:
    folder: folder for all files of the cluster.
    env: environment of its daemons and jobs.
  """

  def __init__(self, folder, env):
    self.folder = pathlib.Path(folder)
    self._daemons = []
    self.env = {
      **env,
      "SLURM_CONF": str(self.folder / "slurm.conf"),
      "MUNGE_SOCKET": str(self.folder / "munge.socket"),
    }
    try:
      self._start()
    except BaseException:
      self.close()
      raise

  def _start(self):
    # The other processes find process 0 by the name of its node.
    with open(_HOSTS, "a") as file:
      file.writelines(_NAMES)
    self.folder.mkdir(parents=True, exist_ok=True)
    # Munge refuses a socket that other users could replace.
    self.folder.chmod(0o755)
    key = self.folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    with contextlib.ExitStack() as at_end:
      sockets = [at_end.enter_context(socket.socket()) for _ in range(3)]
      for s in sockets:
        s.bind(("127.0.0.1", 0))
      ports = [s.getsockname()[1] for s in sockets]
    (self.folder / "state").mkdir()
    conf = _CONF.format(
      folder=self.folder, host=socket.gethostname(), ports=ports, nodes=NODES
    )
    (self.folder / "slurm.conf").write_text(conf)
    self._daemon(
      "munged",
      "--foreground",
      "--force",
      f"--socket={self.folder}/munge.socket",
      f"--key-file={key}",
      f"--pid-file={self.folder}/munged.pid",
      f"--seed-file={self.folder}/munge.seed",
      f"--log-file={self.folder}/munged.log",
    )
    self._until(lambda: (self.folder / "munge.socket").exists(), "munged")
    self._daemon("slurmctld", "-D", "-i")
    for name in NODES:
      self._daemon("slurmd", "-D", "-N", name)
    self._until(
      lambda: self.run("sinfo", "-h", "-o", "%t %D", check=False) == "idle 2",
      "two idle nodes",
    )

  def _daemon(self, *command):
    with open(self.folder / f"{len(self._daemons)}.{command[0]}", "w") as log:
      self._daemons.append(
        subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
      )

  def _until(self, condition, what, secs=LIMIT_SECS):
    deadline = time.monotonic() + secs
    while not condition():
      ended = [d.args[0] for d in self._daemons if d.poll() is not None]
      if ended or time.monotonic() > deadline:
        why = f"{ended} ended" if ended else f"{secs:g} s have passed"
        raise AssertionError(f"no {what}: {why}\n{self.logs()}")
      time.sleep(0.1)

  def logs(self):
    """The ends of the daemons' logs."""
    paths = [*self.folder.glob("*.log"), *self.folder.glob("[0-9].*")]
    return "\n".join(f"{p}:\n{p.read_text()[-2000:]}" for p in sorted(paths))

  def run(self, *command, check=True, **options):
    """The output of a command."""
    ended = subprocess.run(
      command,
      env=self.env,
      capture_output=True,
      text=True,
      timeout=LIMIT_SECS,
      check=False,
      **options,
    )
    if check and ended.returncode:
      raise AssertionError(f"{command}: {ended.stdout}{ended.stderr}")
    return ended.stdout.strip()

  def state(self, job):
    """{field: value} of `scontrol show job`."""
    words = self.run("scontrol", "-o", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)

  def wait(self, job, secs):
    """The final state of a job."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    self._until(
      lambda: self.state(job)["JobState"] in over, f"end of job {job}", secs
    )
    return self.state(job)

  def end_jobs(self):
    """Ends all running and waiting jobs."""

    def jobs():
      return self.run("squeue", "-h", "-o", "%i", check=False).split()

    for job in jobs():
      self.run("scancel", job, check=False)
      self.run("scancel", "--full", "--signal=KILL", job, check=False)
    self._until(lambda: not jobs(), "end of all jobs")

  def close(self):
    """Ends the jobs and daemons that this object has started."""
    try:
      if len(self._daemons) > 1:
        self.end_jobs()
    finally:
      self._end_daemons()

  def _end_daemons(self):
    for daemon in reversed(self._daemons):
      daemon.terminate()
    for daemon in self._daemons:
      try:
        daemon.wait(20)
      except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    lines = _HOSTS.read_text().splitlines(keepends=True)
    _HOSTS.write_text("".join(x for x in lines if x not in _NAMES))
