"""The command line, exit codes and last lines."""

import logging
import os

import jax
import pytest

from bigtrain import command
from bigtrain.checkpoints import manifest
from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.runtime import jax_flags, no_workdir

CONFIG = """
def get_config(arg=None):
  return {"lr": 0.1, "arg": arg, "mesh": {"fsdp": -1}, "name": "a", "steps": 5}
"""


@pytest.fixture(autouse=True)
def logging_of_later_tests():
  """Turns logging on again, which the end of a run turns off."""
  yield
  logging.disable(logging.NOTSET)


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "x.py"
  path.write_text(CONFIG)
  return str(path)


def parse(*words):
  return command.parse(["main", *words])


def test_config_values_follow_an_equals_sign_or_a_space(file):
  config, workdir, _ = parse(
    f"--config={file}:small",
    "--config.lr=1e-3",
    "--workdir=w",
    "--config.mesh.fsdp",
    "4",
    "--config.name",
    "--b",
    "--config.steps=1e3",
    "--config.new.key=(1, 2)",
  )
  assert workdir == os.path.abspath("w")
  assert config == {
    "lr": 1e-3,
    "arg": "small",
    "mesh": {"fsdp": 4},
    "name": "--b",
    "steps": 1000,
    "new": {"key": (1, 2)},
  }


def test_flag_values_follow_a_space_too(file):
  config, workdir, _ = parse("--config", file, "--workdir", "w")
  assert (config["arg"], workdir) == (None, os.path.abspath("w"))


def test_the_last_of_two_values_wins(file):
  config, *_ = parse(
    f"--config={file}", "--workdir=w", "--config.lr=1", "--config.lr=2"
  )
  assert config["lr"] == 2.0


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--workdir=w"], r"--config is missing. Usage: python -m bigtrain"),
    (["--config={file}", "--cleanup"], r"without --workdir keeps no checkp"),
    (
      ["--config={file}", "--jax_debug_nan"],
      r"jax_debug_nan'.*mean.*jax_debug_nans",
    ),
    (["--config={file}", "--jax_debug_nans=2"], r"jax_debug_nans=2"),
    (["--config={file}", "--pdb"], r"flag 'pdb'"),  # Needs absl's app.run.
    (
      ["--config={file}", "--jax_enable_preemption_service"],
      r"--jax_enable_preemption_service: not available",
    ),
    ([], r"--config is missing"),
    (["--config={file}", "--workdir="], r"--workdir is missing"),
    (["--config={file}", "--workdr=w"], r"workdr.*mean.*workdir.* Usage"),
    (
      ["--config={file}", "--workdir=w", "more"],
      r"'more' is not a flag. Usage",
    ),
    (["--config={file}", "--workdir=w", "--config.lr=x"], r"config.lr=x: exp"),
    (
      ["--config={file}", "--workdir=w", "--config.lr"],
      r"--config.lr: expected a value, as --config.lr=VALUE",
    ),
    (
      ["--config={file}", "--config.lr", "--workdir=w"],
      r"--config.lr: expected a value, as --config.lr=VALUE",
    ),
    (["--config={file}s", "--workdir=w"], r"no such file. .* mean '.*x.py'"),
  ],
)
def test_mistakes_are_explained_in_one_line(file, words, message):
  words = [word.format(file=file) for word in words]
  with pytest.raises(ConfigError, match=message) as error:
    parse(*words)
  assert "\n" not in str(error.value)


def test_flags_of_jax_reach_jax(file):
  def least():
    return jax.config.jax_persistent_cache_min_compile_time_secs

  try:
    parse(
      f"--config={file}",
      "--jax_log_compiles",
      "--jax_default_matmul_precision=highest",
      "--jax_persistent_cache_min_compile_time_secs=7",
    )
    assert jax.config.jax_log_compiles
    assert jax.config.jax_default_matmul_precision == "highest"
    jax_flags.default("jax_persistent_cache_min_compile_time_secs", 0.0)
    assert least() == 7  # Not overridden.
    parse(f"--config={file}")
    jax_flags.default("jax_persistent_cache_min_compile_time_secs", 0.0)
    assert least() == 0
  finally:
    jax.config.update("jax_log_compiles", False)
    jax.config.update("jax_default_matmul_precision", None)


def test_a_flag_file_holds_flags_and_changes_of_the_config(file, tmp_path):
  flagfile = tmp_path / "flags"
  flagfile.write_text("--config.lr=0.5\n--workdir=w\n")
  config, workdir, _ = parse(f"--config={file}", f"--flagfile={flagfile}")
  assert (config["lr"], workdir) == (0.5, os.path.abspath("w"))


def test_without_a_workdir_there_are_no_checkpoints(file, caplog):
  config, workdir, _ = parse(
    f"--config={file}",
    *("--config.ckpt_steps=5", "--config.keep_ckpt_steps=9"),
    *("--config.local_ckpt_steps=2", "--config.local_ckpt_dir=/dev/shm"),
  )
  assert workdir is None
  with no_workdir.folder(config) as (config, folder):
    assert os.listdir(folder) == [] and "local_ckpt_steps" not in config
    assert config["keep_ckpts"] == 0 and "keep_ckpt_steps" not in config
  assert not os.path.exists(folder)
  (warning,) = caplog.messages
  assert "keeps no files" in warning
  assert "config.ckpt_steps, config.keep_ckpt_steps" in warning


# The end of a run.


def run(train, file, monkeypatch, capsys, *words):
  """(exit code, standard output, lines of standard error) of a command."""
  argv = ["main", f"--config={file}", "--workdir=w", *words]
  monkeypatch.setattr(command.sys, "argv", argv)

  def exit_now(code):
    raise SystemExit(code)

  monkeypatch.setattr(process, "exit_now", exit_now)
  with pytest.raises(SystemExit) as end:
    command.run(train)
  out, err = capsys.readouterr()
  return end.value.code, out, err.strip().splitlines()


def test_a_finished_run_prints_its_results(file, monkeypatch, capsys):
  def train(config, workdir):
    assert (config["lr"], workdir) == (0.5, os.path.abspath("w"))
    return {"step": 7, "loss": 0.25, "val/acc": 0.5, "account/eval_secs": 1.0}

  code, out, _ = run(train, file, monkeypatch, capsys, "--config.lr=0.5")
  assert code == 0
  assert out.splitlines()[0] == "Finished at step 7."
  assert "loss" in out and "0.25" in out and "val/acc" in out
  assert "account" not in out


@pytest.mark.parametrize(
  ("error", "code", "last"),
  [
    (ConfigError("config.x: bad."), 2, "error: config.x: bad."),
    (DataError("no example"), 2, "error: no example"),
    (process.Preempted("saved step 3"), 75, "preempted: saved step 3"),
    (OSError("disk full"), 1, "error: OSError: disk full"),
    (RuntimeError("hook"), 1, "error: RuntimeError: hook"),
  ],
)
def test_an_error_ends_with_its_code_and_its_reason_in_the_last_line(
  file, monkeypatch, capsys, error, code, last
):
  def train(config, workdir):
    raise error

  actual_code, out, err = run(train, file, monkeypatch, capsys)
  assert (actual_code, out, err[-1]) == (code, "", last)
  # Only unexpected errors show a traceback.
  assert any("Traceback" in line for line in err) == (code == 1)


def test_a_damaged_checkpoint_ends_in_one_line(file, monkeypatch, capsys):
  def train(config, workdir):
    raise manifest.DamagedError("w/checkpoints/00000008: array 'x' is damaged")

  code, _, err = run(train, file, monkeypatch, capsys)
  assert code == 1
  assert err == [
    "error: DamagedError: w/checkpoints/00000008: array 'x' is damaged"
  ]


def test_a_mistake_on_the_command_line_starts_no_training(
  file, monkeypatch, capsys
):
  code, _, err = run(
    pytest.fail, file, monkeypatch, capsys, "--config.steps=0.5"
  )
  assert code == 2
  assert err == ["error: --config.steps=0.5: expected int, as in 5."]


class Ended(BaseException):
  """The process would end with this exit code."""


@pytest.mark.parametrize(
  ("flags", "ending", "code", "remains"),
  [
    (["--cleanup"], None, 0, False),
    ([], None, 0, True),
    (["--cleanup"], process.Preempted("saved"), 75, True),
    (["--cleanup"], RuntimeError("broken"), 1, True),
    (["--cleanup", "--config.stop_at_steps=3"], None, 2, True),
  ],
)
def test_cleanup_removes_the_checkpoints_of_a_finished_run(
  file, tmp_path, monkeypatch, flags, ending, code, remains
):
  def end(code):
    raise Ended(code)

  def train(config, workdir):
    if ending:
      raise ending
    return {"step": 3, "loss": 0.5}

  checkpoint = tmp_path / "run" / "checkpoints" / "00000003"
  checkpoint.mkdir(parents=True)
  (tmp_path / "run" / "metrics.jsonl").touch()
  words = ["main", f"--config={file}", f"--workdir={tmp_path}/run", *flags]
  monkeypatch.setattr("sys.argv", words)
  monkeypatch.setattr(process, "exit_now", end)
  with pytest.raises(Ended) as e:
    command.run(train)
  assert e.value.args == (code,)
  assert checkpoint.exists() == remains
  assert (tmp_path / "run" / "metrics.jsonl").exists()
