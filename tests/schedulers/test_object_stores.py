"""The program with its workdir in an object store, against real servers."""

import json
import re
import signal
import sys
import time

import pytest
import tiny
from faults import program as program_lib
from support import object_stores, processes

from bigtrain.checkpoints import folders, integrity
from bigtrain.files import objects, paths

pytestmark = pytest.mark.cluster

# As in faults/test_killed_runs.py: the fault, a lower bound of the newest step
# afterwards, and whether it leaves an unfinished checkpoint behind.
MOMENTS = (
  (("kill", "begin", "2"), 2, False),
  (("kill", "metadata written", "2"), 4, True),
  (("kill", "data written", "2"), 6, True),
  (("kill", "manifest written", "2"), 8, True),
  (("kill", "committed", "2"), 12, False),
  (("kill", "renamed for removal", "1"), 14, True),
)


@pytest.fixture(
  params=["gs_store", "s3_store"], ids=["gs", "s3"], scope="module"
)
def store(request):
  return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  folder = tmp_path_factory.mktemp("shared")
  program_lib.write_data(folder / "data")
  return folder


@pytest.fixture(scope="module")
def undisturbed(shared):
  """Workdir of a finished run in a folder."""
  starter = program_lib.Program(shared)
  try:
    starter.run(shared / "undisturbed", "keep_ckpts=100")
  finally:
    starter.close()
  return shared / "undisturbed"


@pytest.fixture
def program(store, shared, undisturbed):
  del undisturbed  # Fills the compilation cache.
  starter = program_lib.Program(shared, store.env)
  yield starter
  starter.close()


@pytest.fixture
def workdir(store, request):
  return f"{store.root}/{re.sub('[^a-z0-9]', '_', request.node.name)}"


def tool(store, name, *arguments):
  """(exit code, output) of a tool."""
  ended = processes.run(
    [sys.executable, "-m", f"bigtrain.tools.{name}", *arguments], env=store.env
  )
  return ended.returncode, ended.stdout + ended.stderr


def test_killed_at_each_moment_of_a_save(program, workdir, undisturbed):
  for fault, least, is_left in MOMENTS:
    process = program.start(workdir, fault=fault)
    assert process.wait() == -signal.SIGKILL, f"{fault}:\n{process.text()}"
    assert bool(folders.listing(workdir).leftovers) == is_left, fault
    newest = folders.newest(workdir)
    assert newest >= least, fault
    program_lib.assert_same_state(workdir, undisturbed, newest)
  program.run(workdir)
  assert folders.listing(workdir).leftovers == []
  assert folders.steps(workdir) == [22, 24]
  program_lib.assert_same_run(workdir, undisturbed, 24)
  names = {name.split("/")[0] for name in objects.below(workdir)}
  assert names == {
    *("checkpoints", "config.json", "metrics.jsonl", "parameters.txt"),
    *("finished.json", "run.json"),
  }


def test_damage_and_tools(store, program, workdir, undisturbed):
  program.run(workdir, "stop_at_steps=8", "tensorboard=True")
  assert objects.below(f"{workdir}/tensorboard")
  code, output = tool(store, "checkpoint", "verify", workdir)
  assert code == 0 and output.count("intact") == 2
  code, output = tool(store, "evaluate", f"--workdir={workdir}", "--step=6")
  assert code == 0, output
  row = json.loads(next(x for x in output.splitlines() if x.startswith("{")))
  assert row["step"] == 6 and 0 <= row["val/acc"] <= 1
  code, output = tool(store, "report", workdir)
  assert code == 0, output
  page = paths.read_bytes(f"{workdir}/report/report.html")
  assert b"val/acc" in page

  directory = folders.find(workdir)
  name = next(
    x for x in objects.below(directory) if re.match(r"params/.*/c[.\d]*$", x)
  )
  content = paths.read_bytes(f"{directory}/{name}")
  array = name.rpartition("/")[0]
  for damaged in (None, content[:-9], b"\x01" + content[1:]):
    objects.write(f"{directory}/{name}", damaged)
    process = program.run(workdir, code=1)
    last = process.last_line()
    assert f"array '{array}'" in last and directory in last, last
    assert f"/{name}" in last, last
    code, output = tool(store, "checkpoint", "verify", workdir)
    assert (
      code == 1 and f"DAMAGED array '{array}': {directory}/{name}" in output
    )
  program.run(workdir, "ckpt_fallback=True")
  program_lib.assert_same_run(workdir, undisturbed, 24)


def test_second_job_is_refused_and_a_dead_jobs_lease_is_taken_over(
  program, workdir, tmp_path, undisturbed
):
  flag = tmp_path / "flag"
  gate = dict(type="faults.waiting.Gate", step=6, flag=str(flag))
  first = program.start(workdir, f"hooks={dict(gate=gate)}")
  first.until_file(flag)
  second = program.run(workdir, code=2)
  lease = f"error: {workdir}/lease.json: another job runs in this workdir"
  assert second.last_line().startswith(lease)
  first.kill()
  program.run(workdir)
  program_lib.assert_same_run(workdir, undisturbed, 24)


def test_of_two_writers_one_wins(store, workdir):
  if store.root.startswith("gs"):
    pytest.skip("fake-gcs-server ignores the conditions of simple uploads")
  path = f"{workdir}/lease.json"
  before = objects.read(path)
  assert objects.write(path, b"first", instead_of=before)
  assert not objects.write(path, b"second", instead_of=before)
  version = objects.read(path)
  assert version.content == b"first"
  assert objects.write(path, b"third", instead_of=version)
  assert not objects.write(path, b"fourth", instead_of=version)
  assert objects.read(path).content == b"third"


def test_two_processes(program, workdir, undisturbed):
  job = program.start_job(workdir, "mesh.fsdp=2", "stop_at_steps=8")
  for process in job:
    assert process.wait() == 0, process.text()
  for directory in folders.find_all(workdir).values():
    assert integrity.verify(directory) == []
  program.run(workdir)
  assert list(tiny.rows(workdir)) == list(tiny.rows(undisturbed))


def test_a_store_that_goes_away_in_a_save_ends_the_run(
  shared, undisturbed, tmp_path, request
):
  del undisturbed
  for scheme in ("gs", "s3"):
    server = object_stores.Server(scheme)
    if server.missing:
      continue
    server.start()
    program = program_lib.Program(shared, server.env)
    flag = tmp_path / scheme
    try:
      process = program.start(
        f"{server.root}/{request.node.name}",
        fault=("hold", "metadata written", "2", str(flag)),
      )
      process.until_file(flag)
      server.kill()
      began = time.monotonic()
      (tmp_path / f"{scheme}.go").touch()
      assert process.wait() == 1, process.text()
      assert time.monotonic() - began < 300
      last = process.last_line()
      # Checkpoint and rows are written there; the first failure ends the run.
      assert re.search(
        r"the checkpoint of step 4 was not saved: |cannot write .*metrics", last
      ), last
      assert "no answer" in last and server.root in last, last
    finally:
      program.close()
      server.kill()


def test_a_missing_bucket_is_reported_before_compiling(program, store):
  began = time.monotonic()
  process = program.run(f"{store.root}-of-nobody/run", code=2)
  assert "does the bucket exist" in process.last_line()
  assert "Compiled" not in process.text()
  assert time.monotonic() - began < 300
