"""Exit codes, signals and output of real processes of the program.

tests/faults tests faults at each single moment of a run.
"""

import re
import signal
import sys

import pytest
import tiny
from support import processes

from bigtrain import main


@pytest.fixture(scope="module")
def config_file(tiny_config, tmp_path_factory):
  """A file with the tiny config; its argument is a folder for flags.

  Each of the first four starts ends by a signal, later than the one before.
  """
  (folder,) = tiny_config.args
  path = tmp_path_factory.mktemp("configs") / "run.py"
  path.write_text(
    f"""
import tiny

SIGNALS = (
  (2, ["SIGTERM"]),
  (4, ["SIGKILL"]),
  (5, ["SIGINT", "SIGINT"]),
  (6, ["SIGUSR1"]),
)


def get_config(arg):
  config = tiny.config({str(folder)!r})
  config["hooks"] = {{
    f"before{{step}}": dict(
      type="tiny.hooks.Signals",
      step=step,
      names=names,
      flag=f"{{arg}}/{{step}}",
    )
    for step, names in SIGNALS
  }}
  return config
"""
  )
  return path


@pytest.mark.slow
def test_the_same_command_resumes_until_the_run_is_finished(
  config_file, tiny_config, tmp_path
):
  workdir = tmp_path / "run"

  def start_again():
    command = processes.main_command(f"{config_file}:{tmp_path}", workdir)
    ended = processes.run(command, devices=8)
    last_line = ended.stderr.strip().splitlines()[-1]
    return ended.returncode, ended.stdout, last_line

  code, _, last_line = start_again()
  assert (code, last_line) == (75, "preempted: saved step 2 of 6")
  assert tiny.checkpoint_steps(workdir) == [2]
  code, _, _ = start_again()
  assert code == -signal.SIGKILL
  # The save of step 3 was either in progress or complete.
  assert tiny.checkpoint_steps(workdir)[-1] in (2, 3)
  code, _, last_line = start_again()
  assert code == 128 + signal.SIGINT
  assert last_line == (
    "bigtrain: second signal, SIGINT: exiting now; the last checkpoint is "
    "intact."
  )
  assert tiny.checkpoint_steps(workdir)[-1] in (2, 3)
  code, _, last_line = start_again()
  assert (code, last_line) == (75, "preempted: saved step 6 of 6")
  code, output, _ = start_again()
  assert code == 0
  assert "Finished at step 6." in output
  assert re.search(r"val/acc +0\.\d+\n", output)
  assert str(workdir / "metrics.jsonl") in output

  straight = tmp_path / "straight"
  main.train(tiny_config(), str(straight))
  tiny.assert_same(tiny.arrays(workdir), tiny.arrays(straight))
  tiny.assert_same(tiny.rows(workdir), tiny.rows(straight))


def test_a_misspelled_key_on_the_command_line(config_file, tmp_path):
  command = processes.main_command(
    f"{config_file}:{tmp_path}",
    tmp_path / "run",
    "--config.log_steps=1",
    "--config.evals.val.topk=[1]",
  )
  ended = processes.run(command, devices=8)
  assert ended.returncode == 2
  lines = ended.stderr.strip().splitlines()
  assert lines[-1] == (
    "error: config.evals.val.topk: unknown key. Did you mean 'top_k'?"
  )
  assert "Traceback" not in ended.stderr
  assert not ended.stdout
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_flags_of_jax_and_absl_in_a_run_that_keeps_nothing(
  tiny_config, tmp_path
):
  (folder,) = tiny_config.args
  config = tmp_path / "run.py"
  config.write_text(
    f"""
import tiny

def get_config():
  return tiny.config({str(folder)!r})
"""
  )
  temporary = tmp_path / "temporary"
  temporary.mkdir()

  def start(*flags):
    command = [sys.executable, "-m", "bigtrain.main", f"--config={config}"]
    return processes.run([*command, *flags], env={"TMPDIR": str(temporary)})

  ended = start("--jax_log_compiles", "--verbosity=-1")
  assert ended.returncode == 0, ended.stderr
  assert "val/loss" in ended.stdout and "No files were kept" in ended.stdout
  lines = ended.stderr.splitlines()
  assert any("Finished tracing update_fn" in line for line in lines)
  assert not any(re.match(r"I\d{4} ", line) for line in lines)
  (warning,) = [line for line in lines if "Without a workdir" in line]
  assert "config.ckpt_steps" in warning
  assert not list(temporary.iterdir())

  ended = start(
    "--config.lr=1e38", f"--log_dir={tmp_path}/logs", "--jax_debug_nans"
  )
  assert ended.returncode == 1
  assert "invalid value (nan)" in ended.stderr.splitlines()[-1]
  (log,) = (tmp_path / "logs").glob("bigtrain*.INFO")
  assert "from scratch" in log.read_text()
  assert not list(temporary.iterdir())
