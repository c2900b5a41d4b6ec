"""One job at a time in a workdir."""

import dataclasses
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
from support import processes

from bigtrain.cluster import lease
from bigtrain.config.errors import ConfigError

_OTHER = "0123abcd"
_HOLD = """
import sys
from bigtrain.cluster import lease
held = lease.acquire(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
held.release()
"""


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


@pytest.fixture
def other_job(workdir):
  """Another process, which holds the lease."""
  process = subprocess.Popen(
    [sys.executable, "-c", _HOLD, workdir],
    cwd=processes.ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "held\n"
  yield process
  process.kill()
  process.communicate()


def path_of(workdir):
  return pathlib.Path(workdir) / "lease.json"


def read(workdir):
  return lease.Holder(**json.loads(path_of(workdir).read_text()))


def put(workdir, **changes):
  """Writes another job's lease: this process's, with changes."""
  with lease.acquire(workdir):
    holder = dataclasses.replace(read(workdir), token=_OTHER, **changes)
  write(workdir, holder)
  return holder


def write(workdir, holder):
  path_of(workdir).write_text(json.dumps(dataclasses.asdict(holder)))


def test_the_lease_names_its_holder_and_is_removed(workdir):
  with lease.acquire(workdir) as held:
    holder = read(workdir)
    assert holder.pid == os.getpid() and holder.is_alive()
    assert 50 < holder.expires - time.time() <= 60
    held.check()
    assert os.listdir(workdir) == ["lease.json"]
  assert os.listdir(workdir) == []
  held.release()  # Again does nothing.


def test_a_second_live_job_is_refused(workdir, other_job):
  with pytest.raises(ConfigError) as e:
    lease.acquire(workdir)
  assert f"process {other_job.pid} on host {read(workdir).host}" in str(e.value)
  other_job.stdin.write("\n")
  other_job.stdin.flush()
  other_job.wait(60)
  lease.acquire(workdir).release()


def test_a_stopped_job_keeps_its_lease(workdir, other_job):
  write(workdir, dataclasses.replace(read(workdir), expires=0.0))
  with pytest.raises(ConfigError, match=f"process {other_job.pid}"):
    lease.acquire(workdir)


def test_a_killed_jobs_lease_is_taken_over_at_once(workdir, other_job, caplog):
  other_job.kill()
  other_job.wait(60)
  began = time.monotonic()
  with lease.acquire(workdir) as held:
    held.check()
    assert read(workdir).pid == os.getpid()
  assert time.monotonic() - began < 30
  assert f"taken over from process {other_job.pid}" in caplog.text
  assert "that process is gone" in caplog.text


def test_a_reused_process_number_is_not_the_holder(workdir):
  put(workdir, process_start=lease._process_start(os.getpid()) - 1)
  with lease.acquire(workdir):
    assert read(workdir).token != _OTHER


def test_a_live_job_on_another_machine_is_refused(workdir):
  holder = put(workdir, host="far", machine="another boot", pid=4321)

  def renew():
    write(workdir, dataclasses.replace(holder, expires=time.time() + 2))

  timer = threading.Timer(0.3, renew)
  timer.start()
  with pytest.raises(ConfigError, match="process 4321 on host far"):
    lease.acquire(workdir, term_secs=2)
  timer.join()
  assert read(workdir).host == "far"


def test_a_dead_job_on_another_machine_is_taken_over(workdir, caplog):
  put(workdir, host="far", machine="another boot", pid=4321)
  began = time.monotonic()
  lease.acquire(workdir, term_secs=0.5).release()
  assert 0.4 < time.monotonic() - began < 30
  assert "taken over from process 4321 on host far" in caplog.text
  # A lease that expired long ago is taken over at once.
  put(workdir, host="far", machine="another boot", expires=time.time() - 1000)
  began = time.monotonic()
  lease.acquire(workdir, term_secs=60).release()
  assert time.monotonic() - began < 30


_ODD = {"host": "h", "pid": 1, "machine": "m", "process_start": 1, "since": ""}


@pytest.mark.parametrize(
  "content",
  [
    "",
    *(
      pytest.param(content, marks=pytest.mark.slow)
      for content in ("{", "[]", '{"pid": 1}')
    ),
    json.dumps({**_ODD, "token": "../../x", "expires": 1.0}),
    json.dumps({**_ODD, "token": "ab", "expires": "never"}),
  ],
)
def test_a_lease_that_cannot_be_read_is_watched_first(workdir, content):
  os.makedirs(workdir)
  path_of(workdir).write_text(content)
  began = time.monotonic()
  lease.acquire(workdir, term_secs=0.4).release()
  assert time.monotonic() - began > 0.3


def test_a_lease_is_renewed_and_its_loss_is_noticed(workdir):
  held = lease.acquire(workdir, term_secs=0.4)
  first = read(workdir).expires
  deadline = time.monotonic() + 60
  while read(workdir).expires == first:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  held.check()
  other = dataclasses.replace(read(workdir), token=_OTHER, host="far")
  while True:  # A renewal may be in progress.
    write(workdir, other)
    try:
      held.check()
    except lease.LeaseLostError as e:
      assert "taken over by process" in str(e) and "host far" in str(e)
      break
    assert time.monotonic() < deadline
  write(workdir, other)
  held.release()
  assert read(workdir).host == "far"  # Only its holder may remove it.
  with pytest.raises(lease.LeaseLostError):
    held.check()


def _compete(workdir, gate, outcomes, done):
  gate.wait()
  try:
    held = lease.acquire(workdir, term_secs=1.0)
    outcomes.put("held")
    done.wait(30)
    held.check()
    held.release()
  except ConfigError:
    outcomes.put("refused")


@pytest.mark.parametrize("stale", [False, True])
def test_only_one_of_many_jobs_gets_the_lease(workdir, stale):
  if stale:
    put(workdir, process_start=1)
  context = multiprocessing.get_context("forkserver")
  gate, done = context.Event(), context.Event()
  outcomes = context.Queue()
  jobs = [
    context.Process(target=_compete, args=(workdir, gate, outcomes, done))
    for _ in range(6)
  ]
  for job in jobs:
    job.start()
  gate.set()
  results = sorted(outcomes.get(timeout=300) for _ in jobs)
  done.set()
  for job in jobs:
    job.join(30)
    assert job.exitcode == 0
  assert results == ["held"] + ["refused"] * 5
  assert os.listdir(workdir) == []


def test_a_lease_that_another_job_took_over_first_is_not_taken_over(
  workdir, monkeypatch
):
  dead = put(workdir, process_start=1)
  link = lease._link

  def link_late(source, path):
    if path.endswith(".claim"):  # Another job was faster.
      start = lease._process_start(os.getppid())
      other = {"pid": os.getppid(), "process_start": start, "token": "77"}
      write(workdir, dataclasses.replace(dead, **other))
    link(source, path)

  monkeypatch.setattr(lease, "_link", link_late)
  with pytest.raises(ConfigError, match=f"process {os.getppid()}"):
    lease.acquire(workdir)
  assert os.listdir(workdir) == ["lease.json"]


def test_an_unwritable_folder_is_reported(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match=r"--workdir=.*: cannot write there"):
    lease.acquire(str(tmp_path / "file" / "run"))


def test_exclusive_creation_on_a_file_system_without_hard_links(
  workdir, monkeypatch
):
  def no_links(*args):
    raise OSError(1, "Operation not permitted")

  monkeypatch.setattr(lease.os, "link", no_links)
  with lease.acquire(workdir):
    with pytest.raises(ConfigError, match="another job runs"):
      lease.acquire(workdir)
