"""config.json, run.json, and the final message."""

import importlib
import json
import os
import socket
import stat
import sys

import jax
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config import choices
from bigtrain.config.lengths import Units
from bigtrain.reports import ending, record, run_files
from bigtrain.runtime import jax_flags


def read(folder, name):
  return json.loads((folder / name).read_text())


def test_run_json_has_an_entry_per_start(tmp_path):
  info = record.run_info(sharding.make_mesh(2, 4))
  record.write(str(tmp_path), {"lr": 0.1}, info)
  record.update(str(tmp_path), compile_secs=3.5)
  record.write(str(tmp_path), {"lr": 0.2}, info)
  record.update(str(tmp_path), compile_secs=0.5, programs={"a": 1})
  record.update(str(tmp_path), programs={"b": 2})
  assert read(tmp_path, "config.json") == {"lr": 0.2}
  starts = read(tmp_path, "run.json")["starts"]
  assert [start["compile_secs"] for start in starts] == [3.5, 0.5]
  assert starts[1]["programs"] == {"a": 1, "b": 2}
  assert starts[0]["mesh"] == dict(
    replica=2, pipeline=1, fsdp=4, sequence=1, tensor=1
  )
  assert starts[0]["devices"] == 8
  assert starts[0]["command"] == sys.argv
  assert starts[0]["python"].startswith("3.")
  assert {"jax", "jaxlib", "flax", "optax", "numpy"} <= set(
    starts[0]["packages"]
  )
  assert sorted(os.listdir(tmp_path)) == ["config.json", "run.json"]


def test_run_json_has_the_choices_of_the_program(tmp_path):
  record.write(str(tmp_path), {}, {})
  choices.forget_choices()
  assert choices.note_choice("config.model.attention", "8 queries", "a", "why")
  record.update(str(tmp_path), compile_secs=3.5)
  choices.note_choice("config.model.attention", "9 queries", "b", "how")
  again = "config.model.attention", "9 queries", "b", "how"
  assert not choices.note_choice(*again)
  record.update(str(tmp_path))
  (start,) = read(tmp_path, "run.json")["starts"]
  assert start["auto"] == {
    "config.model.attention": {
      "8 queries": {"choice": "a", "reason": "why"},
      "9 queries": {"choice": "b", "reason": "how"},
    }
  }
  choices.forget_choices()


def test_the_code_is_identified_by_its_commit(monkeypatch):
  outputs = {"rev-parse": "abc123", "status": " M file.py"}
  monkeypatch.setattr(record, "_git", lambda command, *_: outputs[command])
  info = record.run_info(sharding.make_mesh())
  assert info["code"] == {"commit": "abc123", "changed": True}


def test_no_git_is_no_error(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  info = record.run_info(sharding.make_mesh())
  assert info["code"] == {"commit": "", "changed": False}


def test_json_is_written_atomically(tmp_path, monkeypatch):
  path = tmp_path / "config.json"
  run_files.write_json(str(path), {"old": 1})
  replace = os.replace

  def checked(source, target):
    # The new file is complete before it replaces the old one.
    assert json.loads(open(source).read()) == {"new": 2}
    assert json.loads(open(target).read()) == {"old": 1}
    replace(source, target)

  monkeypatch.setattr(os, "replace", checked)
  run_files.write_json(str(path), {"new": 2})
  assert read(tmp_path, "config.json") == {"new": 2}
  assert not stat.S_IMODE(path.stat().st_mode) & 0o111


def test_a_config_as_json():
  config = {
    "pair": (1, 2),
    "array": np.zeros(2),
    "no": None,
    "tree": {"a": 1},
  }
  result = run_files.as_json(config)
  assert result == {
    "pair": [1, 2],
    "array": "array([0., 0.])",
    "no": None,
    "tree": {"a": 1},
  }
  assert run_files.as_json(result) == result


def test_a_missing_file(tmp_path):
  assert run_files.read_json(str(tmp_path / "run.json")) is None


def test_topology():
  assert record.topology(sharding.make_mesh(2, 4)) == (
    "Devices: 8 x cpu, mesh replica=2 x fsdp=4"
  )


def test_a_config_in_three_lines():
  config = {
    "task": "classification",
    "model_name": "vit",
    "model": {"width": 64, "variant": None},
    "input": {"data": {"type": "arrays", "name": "digits"}},
    "optimizer": {"name": "adamw"},
    "lr": 1e-3,
  }
  units = Units(16, examples_per_epoch=1438, total_steps=4000)
  assert record.summary(config, units) == [
    "classification with vit: width=64",
    "Data: type=arrays, name=digits; 1,438 examples, 16 a step",
    "4,000 steps: name=adamw, lr=0.001; seed 0",
  ]


def test_an_error_is_noted_in_the_run_that_it_ended(tmp_path):
  info = {"host": socket.gethostname(), "pid": os.getpid()}
  path = tmp_path / "run.json"
  for changed in ({}, {"pid": -1}):  # Its own, and another process's.
    path.write_text(json.dumps({"starts": [{}, info | changed]}))
    record.note_failure(str(tmp_path), "error: no more")
    (_, newest) = json.loads(path.read_text())["starts"]
    assert newest.get("error") == (None if changed else "error: no more")
  record.note_failure(str(tmp_path / "nothing"), "error: no more")


def test_frames_of_the_users_modules(tmp_path, monkeypatch):
  (tmp_path / "users_task.py").write_text("def loss(x):\n  return x + 'a'\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  config = {"task": "users_task", "lr": 1.0, "model_name": "json"}
  with pytest.raises(TypeError) as error:
    importlib.import_module("users_task").loss(1)
  first, *rest = ending.users_frames(error.value, config).splitlines()
  assert first == "Error in your own code (config.task):"
  assert "users_task.py" in rest[0] and "return x + 'a'" in rest[1]
  assert ending.users_frames(ValueError("x"), config) == ""


def test_the_ending_lists_results_and_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "runs/x/checkpoints").mkdir(parents=True)
  (tmp_path / "runs/x/metrics.jsonl").touch()
  results = {
    "step": 12,
    "loss": 0.12345,
    "lr": 0.1,
    "val/acc": 0.98765,
    "val/secs": 3.0,
    "account/step_secs": 9.0,
  }
  lines = ending.message(results, "runs/x").splitlines()
  assert lines[0] == "Finished at step 12."
  assert [line.split() for line in lines[1:3]] == [
    ["loss", "0.1235"],
    ["val/acc", "0.9877"],
  ]
  assert [line.split() for line in lines[3:]] == [
    ["metrics", "runs/x/metrics.jsonl"],
    ["checkpoints", "runs/x/checkpoints"],
  ]


@pytest.fixture
def cache_setting():
  """Restores the setting of jax."""
  before = jax.config.jax_compilation_cache_dir
  yield
  jax.config.update("jax_compilation_cache_dir", before)


def test_the_folder_of_the_compilation_cache(
  cache_setting, monkeypatch, tmp_path
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  folder = str(tmp_path / "somewhere")
  assert jax_flags.use_compile_cache("./somewhere") == folder
  assert jax.config.jax_compilation_cache_dir == folder
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert jax_flags.use_compile_cache(True) == str(tmp_path / "bigtrain" / "xla")
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert jax_flags.use_compile_cache(True).startswith(str(tmp_path / ".cache"))
  assert jax_flags.use_compile_cache(False) == ""
