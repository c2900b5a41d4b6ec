"""Real processes of `python -m bigtrain.main`: exit codes, signals, output.

tests/faults has what goes wrong at each single moment of a run.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import tiny

from bigtrain import main

TESTS = pathlib.Path(__file__).parents[1]
# A start costs a few seconds; a machine that is shared may take many.
LIMIT_SECS = 120


def start(config, workdir, *flags):
  """Runs the program to its end."""
  paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
  return subprocess.run(
    [
      sys.executable,
      "-m",
      "bigtrain.main",
      f"--config={config}",
      f"--workdir={workdir}",
      *flags,
    ],
    cwd=TESTS.parent,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    capture_output=True,
    text=True,
    timeout=LIMIT_SECS,
    check=False,
  )


@pytest.fixture(scope="module")
def config_file(tiny_config, tmp_path_factory):
  """A file with the tiny config; its argument is a folder for flags.

  The first four starts end by signals, each a bit further.
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


def test_the_same_command_goes_on_until_the_run_is_finished(
  config_file, tiny_config, tmp_path
):
  workdir = tmp_path / "run"

  def again():
    done = start(f"{config_file}:{tmp_path}", workdir)
    return done.returncode, done.stdout, done.stderr.strip().splitlines()[-1]

  code, _, last = again()
  assert (code, last) == (75, "preempted: saved step 2 of 6")
  assert tiny.checkpoint_steps(workdir) == [2]
  code, _, _ = again()
  assert code == -signal.SIGKILL
  # The save of step 3 was under way, or it was complete already.
  assert tiny.checkpoint_steps(workdir)[-1] in (2, 3)
  code, _, last = again()
  assert code == 128 + signal.SIGINT
  assert last == (
    "bigtrain: SIGINT again: ending at once; the last checkpoint stands."
  )
  assert tiny.checkpoint_steps(workdir)[-1] in (2, 3)
  code, _, last = again()
  assert (code, last) == (75, "preempted: saved step 6 of 6")
  code, output, _ = again()
  assert code == 0
  assert "Finished at step 6." in output
  assert re.search(r"val/acc +0\.\d+\n", output)
  assert str(workdir / "metrics.jsonl") in output

  straight = tmp_path / "straight"
  main.train(tiny_config(), str(straight))
  tiny.assert_same(tiny.arrays(workdir), tiny.arrays(straight))
  tiny.assert_same(tiny.rows(workdir), tiny.rows(straight))


def test_a_misspelled_key_on_the_command_line(config_file, tmp_path):
  done = start(
    f"{config_file}:{tmp_path}",
    tmp_path / "run",
    "--config.log_steps=1",
    "--config.evals.val.topk=[1]",
  )
  assert done.returncode == 2
  lines = done.stderr.strip().splitlines()
  assert lines[-1] == (
    "error: config.evals.val.topk: unknown key. Did you mean 'top_k'?"
  )
  assert "Traceback" not in done.stderr
  assert not done.stdout
  assert not (tmp_path / "run").exists()
