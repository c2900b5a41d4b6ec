"""Workdirs in an object store, on a real server on the loopback interface."""

import errno
import json
import logging
import os
import socket
import time

import numpy as np
import pytest
from support.saved_states import (
  host_state,
  like,
  make_state,
  path_of,
  same,
  save,
)

from bigtrain.checkpoints import (
  checkpointer,
  folders,
  integrity,
  restore,
  snapshot,
)
from bigtrain.checkpoints.manifest import CheckpointError, DamagedError
from bigtrain.cluster import lease, watchdog
from bigtrain.config import choices
from bigtrain.config.errors import ConfigError
from bigtrain.files import objects, paths
from bigtrain.reports import log_entries, record, run_files
from bigtrain.tools import checkpoint as tool


@pytest.fixture
def workdir(gs_bucket, request):
  return f"{gs_bucket}/{request.node.name}"


# Names.


@pytest.mark.parametrize(
  "path, message",
  [
    ("s4://bucket/run", "'s4'; expected a folder, gs://.* or s3://bucket"),
    ("gs://", "expected gs://bucket/folder"),
    ("gs:///run", "expected gs://bucket/folder"),
    ("gs://bucket/../run", "without empty parts, '.' and '..'"),
    ("s3://bucket/run//a", "without empty parts"),
    ("s3://bucket/./a", "without empty parts"),
  ],
)
def test_urls_that_are_not_valid_are_refused(path, message):
  with pytest.raises(ConfigError, match=message):
    paths.absolute(path)
  with pytest.raises(ConfigError):
    folders.check_writable(path)


def test_parse():
  assert objects.parse("s3://bucket/a/b") == ("s3", "bucket", "a/b")


def test_standard_variables_set_the_endpoint(monkeypatch):
  for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
  spec = objects.kvstore("s3://bucket/run", is_folder=True)
  assert spec["endpoint"] == "http://127.0.0.1:1"
  assert spec["aws_region"] == "us-east-1" and spec["path"] == "run/"
  monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
  monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
  spec = objects.kvstore("s3://bucket/run")
  assert spec["endpoint"] == "http://127.0.0.1:2"
  assert spec["aws_region"] == "eu-west-1" and spec["path"] == "run"
  monkeypatch.delenv("AWS_ENDPOINT_URL")
  monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
  assert "endpoint" not in objects.kvstore("s3://bucket/run")


# Objects.


def test_objects(workdir):
  assert objects.read(f"{workdir}/a").content is None
  for name, content in {"a": b"1", "d/b": b"", "d/e f": b"2"}.items():
    assert objects.write(f"{workdir}/{name}", content)
  objects.write(f"{workdir}0", b"a neighbour")
  assert objects.below(workdir) == ["a", "d/b", "d/e f"]
  assert objects.below(f"{workdir}/d") == ["b", "e f"]
  assert objects.read(f"{workdir}/d/b").content == b""
  assert [paths.exists(f"{workdir}/{x}") for x in ("a", "d", "e")] == [1, 1, 0]
  objects.remove_below(f"{workdir}/d")
  assert objects.below(workdir) == ["a"]
  objects.write(f"{workdir}/a", None)
  objects.write(f"{workdir}/a", None)  # It is already gone.
  assert not paths.exists(workdir)
  assert objects.read(f"{workdir}0").content == b"a neighbour"


def test_files(workdir, tmp_path):
  path = f"{workdir}/notes.txt"
  with pytest.raises(FileNotFoundError, match=r"notes\.txt"):
    paths.read_bytes(path)
  with paths.replacing(path) as file:
    file.write("ä\n")
    assert not paths.exists(path)  # Written as a whole at the end.
  assert paths.read_bytes(path) == "ä\n".encode()
  with paths.replacing(path, "wb") as file:
    file.write(b"\x00")
  assert paths.read_bytes(path) == b"\x00"
  assert run_files.read_json(f"{workdir}/none.json") is None
  choices.forget_choices()
  record.write(workdir, {"seed": 1}, {"started": "now"})
  record.update(workdir, programs={"update": {}})
  assert run_files.read_json(f"{workdir}/config.json") == {"seed": 1}
  (start,) = run_files.read_json(f"{workdir}/run.json")["starts"]
  assert start == {"started": "now", "programs": {"update": {}}}
  (tmp_path / "plugins").mkdir()
  (tmp_path / "plugins" / "trace").write_text("1")
  paths.push_folder(str(tmp_path), f"{workdir}/profile")
  assert paths.read_bytes(f"{workdir}/profile/plugins/trace") == b"1"


@pytest.mark.slow
def test_a_silent_store_is_an_error_within_seconds(monkeypatch):
  with socket.socket() as unused:  # Does not listen.
    unused.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    started = time.monotonic()
    with pytest.raises(ConfigError, match="cannot write there: no answer"):
      folders.check_writable("s3://silent/run")
    with pytest.raises(CheckpointError, match="unknown, so nothing is started"):
      folders.listing("s3://silent/run")
    assert time.monotonic() - started < 30


@pytest.mark.usefixtures("gs_bucket")
def test_a_missing_bucket_is_an_error():
  with pytest.raises(ConfigError, match="does the bucket exist"):
    folders.check_writable("gs://another-bucket/run")


def test_failures_do_not_prove_absence():
  kinds = {
    "NOT_FOUND: no bucket [source]": (OSError, errno.EIO, "bucket exist"),
    "PERMISSION_DENIED: 403": (PermissionError, errno.EACCES, "credentials"),
    "ABORTED: All 8 retry": (OSError, errno.EHOSTUNREACH, "no answer"),
    "DATA_LOSS: flipped": (OSError, errno.EIO, "DATA_LOSS: flipped"),
  }
  for text, (kind, number, words) in kinds.items():
    error = objects.as_os_error(ValueError(text), "gs://elsewhere/run")
    assert isinstance(error, kind) and error.errno == number
    assert not isinstance(error, FileNotFoundError)
    assert words in error.strerror and "source" not in error.strerror
    assert error.filename == "gs://elsewhere/run"


# Checkpoints.


def test_saves_and_restores_as_in_a_folder(workdir, tmp_path):
  folders.check_writable(workdir)
  assert restore.resume(workdir, like()) is None
  save(workdir, 1, 2, 3, keep=1, keep_every_steps=2)
  assert folders.steps(workdir) == [2, 3]
  for mesh in ((8, 1), (1, 8)):
    state, manifest = restore.resume(workdir, like(*mesh))
    same(state, 3)
    assert manifest.step == 3 and manifest.host_state == host_state(3)
  same(restore.restore(workdir, like(), step=2)[0], 2)
  same(restore.restore(path_of(workdir, 2) + "/", like())[0], 2)
  same(restore.restore(folders.folder(workdir), like())[0], 3)

  # The files have the same names as in a folder, so they can be copied there.
  local = tmp_path / "run"
  for name in objects.below(workdir):
    (local / name).parent.mkdir(parents=True, exist_ok=True)
    (local / name).write_bytes(paths.read_bytes(f"{workdir}/{name}"))
  same(restore.resume(str(local), like())[0], 3)
  assert integrity.verify(folders.find(str(local))) == []
  save(str(tmp_path / "other"), 3)
  copies = [folders.find(str(tmp_path / name)) for name in ("run", "other")]
  names = [sorted(dict(folders.files_below(path))) for path in copies]
  assert names[0] == names[1]


def requests():
  """Number of requests of this process to object stores so far."""
  import tensorstore as ts

  name = "/tensorstore/http/request_started"
  (metric,) = ts.experimental_collect_matching_metrics(name)
  return sum(value["value"] for value in metric["values"])


def test_a_save_needs_two_requests_for_each_array(workdir):
  state = {f"a{i}": np.full((4, 4), i, np.float32) for i in range(40)}
  saver = checkpointer.Checkpointer(workdir)
  before = requests()
  saver.save(1, state, block=True)
  # Also the manifest, and what removes and lists the objects of the attempt.
  assert requests() - before <= 2 * len(state) + 5
  saver.close()
  assert integrity.verify(path_of(workdir, 1)) == []


@pytest.mark.parametrize("point", ["metadata written", "manifest written"])
def test_only_the_manifest_makes_a_checkpoint(
  workdir, monkeypatch, caplog, point
):
  save(workdir, 1)

  def fail(name):
    if name == point:
      raise OSError(errno.EIO, "pulled out", "cable")

  with monkeypatch.context() as patch:
    patch.setattr(checkpointer, "_point", fail)
    with pytest.raises(CheckpointError, match="step 2 was not saved: cable"):
      save(workdir, 2)
  assert folders.steps(workdir) == [1]
  assert folders.listing(workdir).leftovers == [path_of(workdir, 2)]
  with pytest.raises(DamagedError, match="not a checkpoint: it has no"):
    restore.restore(path_of(workdir, 2), like())
  with caplog.at_level(logging.WARNING):
    same(restore.resume(workdir, like())[0], 1)
  assert f"{path_of(workdir, 2)}: removed, left by an" in caplog.text
  assert not paths.exists(path_of(workdir, 2))


def test_a_second_save_of_a_step_may_have_other_files(workdir, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(snapshot, "_SMALL_SHARD_BYTES", 0)
    save(workdir, 1, like=like(1, 8))
  before = objects.below(path_of(workdir, 1))
  saver = checkpointer.Checkpointer(workdir)
  saver.save(1, make_state(like(8, 1), 7))
  saver.close()
  assert len(objects.below(path_of(workdir, 1))) < len(before)
  same(restore.resume(workdir, like())[0], 7)


def test_strays_are_left_alone(workdir, caplog):
  save(workdir, 5)
  strays = ("00000099/notes.txt", "100/zarr.json", "backup/00000098/c", "note")
  for name in strays:
    objects.write(f"{folders.folder(workdir)}/{name}", b"mine")
  with caplog.at_level(logging.WARNING):
    assert restore.resume(workdir, like())[1].step == 5
  for name in strays:
    assert paths.exists(f"{folders.folder(workdir)}/{name}")
    head = name.split("/")[0]
    assert f"{folders.folder(workdir)}/{head}: ignored" in caplog.text


def _damage(path, how):
  content = objects.read(path).content
  middle = len(content) // 2
  changed = {
    "deleted": None,
    "cut": content[:middle],
    "flipped": content[:middle]
    + bytes([content[middle] ^ 1])
    + content[middle + 1 :],
  }
  objects.write(path, changed[how])


@pytest.mark.parametrize(
  "how, file, message",
  [
    ("deleted", "params/wide/c.0.0", "c.0.0: missing"),
    ("cut", "params/wide/c.0.0", "c.0.0"),
    ("flipped", "params/wide/c.0.0", "c.0.0"),
    ("deleted", "params/wide/zarr.json", "zarr.json: missing"),
    (
      "flipped",
      "params/wide/zarr.json",
      "zarr.json: has changed: its digest",
    ),
  ],
)
def test_errors_name_the_damaged_array_and_object(
  workdir, how, file, message, capsys
):
  save(workdir, 1, 2)
  _damage(path_of(workdir, 2, file), how)
  with pytest.raises(DamagedError) as refused:
    restore.resume(workdir, like())
  assert "array 'params/wide'" in str(refused.value)
  assert message in str(refused.value) and workdir in str(refused.value)
  same(restore.resume(workdir, like(), fallback=True)[0], 1)
  assert tool.main(["verify", workdir]) == 1
  output = capsys.readouterr().out
  assert output.count("DAMAGED array 'params/wide'") == 1
  assert f"{path_of(workdir, 1)}: intact" in output


def test_unsafe_array_names_are_refused(workdir):
  save(workdir, 1)
  path = path_of(workdir, 1, "manifest.json")
  text = paths.read_bytes(path).decode()
  objects.write(path, text.replace("params/wide", "params/../wide").encode())
  with pytest.raises(DamagedError, match="damaged"):
    restore.resume(workdir, like())
  saver = checkpointer.Checkpointer(workdir)
  with pytest.raises(CheckpointError, match="not allowed as a path"):
    saver.save(2, {"..": make_state(like(), 1)})
  saver.close()


def test_tools(workdir, tmp_path, capsys):
  save(workdir, 1, 2)
  assert tool.main(["show", workdir]) == 0
  assert "steps in this workdir: 1, 2" in capsys.readouterr().out
  assert tool.main(["verify", f"{workdir}/"]) == 0
  assert capsys.readouterr().out.count("intact") == 2
  assert tool.main(["show", path_of(workdir, 1), "--depth=1"]) == 0
  out = str(tmp_path / "x.npz")
  assert tool.main(["export", workdir, out, "--prefix=params"]) == 0
  assert tool.main(["show", f"{workdir}/none"]) == 2
  assert "no such file or directory" in capsys.readouterr().err


# The lease.


def test_one_job_at_a_time(workdir):
  held = lease.acquire(workdir, term_secs=2.0)
  with pytest.raises(ConfigError, match="another job runs in this workdir"):
    lease.acquire(workdir, term_secs=2.0)
  held.check()
  path = f"{workdir}/{lease.FILE}"
  before = json.loads(paths.read_bytes(path))
  deadline = time.monotonic() + 30
  while json.loads(paths.read_bytes(path))["expires"] == before["expires"]:
    assert time.monotonic() < deadline, "the lease was not renewed"
    time.sleep(0.05)
  held.release()
  assert objects.below(workdir) == []


def test_the_lease_of_a_dead_process_is_taken_over(workdir, caplog):
  path = f"{workdir}/{lease.FILE}"
  held = lease.acquire(workdir)
  content = json.loads(paths.read_bytes(path)) | {"process_start": 1}
  content["token"] = "dead"
  objects.write(path, json.dumps(content).encode())
  with pytest.raises(lease.LeaseLostError, match="was taken over by process"):
    held.check()
  with lease.acquire(workdir):
    assert "that process is gone" in caplog.text
    held.release()  # Leaves the file, which is no longer its own.
    assert paths.exists(path)
  assert not paths.exists(path)


# Rows.


def test_rows_are_cut_on_resuming_and_written_once(workdir):
  path = f"{workdir}/metrics.jsonl"
  file = log_entries.EntryFile(path, None)
  assert file.last_alive is None
  for step in (1, 2, 3):
    file.add({"step": step, "loss": 1.0 / step})
  file.sync()
  file.add({"step": 2, "val/acc": 0.5})  # Of an earlier step.
  file.add({"step": 4, "loss": 0.25})
  file.sync()
  assert [row["step"] for row in log_entries.read(workdir)] == [1, 2, 3, 4]
  file.add({"step": 5, "loss": 0.2})
  file.close()  # Like a killed process: step 5 was not uploaded.
  file = log_entries.EntryFile(path, 3)
  assert log_entries.read(workdir) == [
    {"step": 1, "loss": 1.0},
    {"step": 2, "loss": 0.5, "val/acc": 0.5},
    {"step": 3, "loss": 1.0 / 3},
  ]
  file.add({"step": 4, "loss": 0.125})
  file.publish()
  # The last upload was recent.
  assert log_entries.read(workdir)[-1]["step"] == 3
  file.sync()
  assert log_entries.read(workdir)[-1] == {"step": 4, "loss": 0.125}
  file.close()


def test_stacks_are_uploaded(workdir):
  dog = watchdog.Watchdog(None, workdir)
  message = dog._write_stacks("it hangs")
  (name,) = objects.below(workdir)
  assert message.endswith(f"{workdir}/{name}") and name.startswith("stacks-")
  assert b"it hangs" in paths.read_bytes(f"{workdir}/{name}")
  os.remove(dog._path)
