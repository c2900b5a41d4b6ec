"""Hooks decide the same on all processes of a job, also after a resume."""

import json

import jax
import pytest
import tiny
from jax.experimental import multihost_utils
from tiny import hooks

from bigtrain import main


def wait_for_both():
  multihost_utils.sync_global_devices("two processes")


def tiny_config(folder):
  """The tiny config on data that process 0 writes into the folder."""
  if jax.process_index() == 0:
    tiny.write_data(folder)
  wait_for_both()
  return tiny.config(folder)


def train_until_stopped(folder):
  """A part of a shared job, see support/two_processes.py."""
  config = tiny_config(folder)
  config |= dict(total_steps=12, keep_ckpts=1, lr=0.1)
  config["evals"]["val"]["log_steps"] = 2
  note = dict(function="tiny.hooks.note", path=str(folder / "notes"))
  # `progress` always grows: early_stopping stops at the fourth row, at step 6.
  config["hooks"] = dict(
    early=dict(type="early_stopping", metric="progress", patience=4),
    best=dict(type="checkpoint_best", metric="val/loss"),
    nan=dict(type="stop_on_nan", metrics=["loss", "val/loss"]),
    note=dict(type="call", **note),
    trace=dict(type="profile", start=2, steps=1),
  )
  results = []
  for _ in range(2):
    main.train(config, str(folder / "run"))
    wait_for_both()
    rows = tiny.rows(folder / "run")
    results.append(
      dict(
        steps=tiny.checkpoint_steps(folder / "run"),
        last_row=max(rows),
        notes=(folder / "notes").read_text().split(),
      )
    )
    wait_for_both()
  return results


@pytest.mark.slow
def test_both_stop_and_keep_the_best_at_the_same_step(two_processes):
  part = two_processes(
    "runtime.test_hooks_of_two_processes.train_until_stopped"
  )
  workdir = part.folder / "run"
  rows = tiny.rows(workdir)
  losses = {s: row["val/loss"] for s, row in rows.items() if "val/loss" in row}
  best = min(losses, key=losses.get)
  assert best < 6  # With this high learning rate the loss grows again.
  # Process 0 shows the rows of training and evaluations to the hooks. The
  # second call of main.train finds the run stopped and changes nothing.
  expected = dict(
    steps=[best, 6], last_row=6, notes=["1", "2", "2", "4", "4", "6"]
  )
  assert part.results == [[expected] * 2] * 2
  with open(workdir / "best_best.json") as file:
    assert json.load(file)["step"] == best
  assert len(list((workdir / "profile").rglob("*.xplane.pb"))) >= 1
  for text in part.texts:
    assert text.count("'early': progress has not improved") >= 2


def train_acting(folder):
  """A part of a shared job, see support/two_processes.py."""
  config = tiny_config(folder) | dict(keep_ckpts=9, ckpt_steps=6)
  config["evals"]["val"]["log_steps"] = 0
  plan = {2: ["request_save"], 3: ["request_evaluation"], 5: ["stop", "enough"]}
  config["hooks"] = dict(
    acts=dict(type="tiny.hooks.Acts", plan=plan, only=0, scalars_at=[4]),
    # What process 1 asks for does not happen.
    other=dict(type="tiny.hooks.Acts", plan={1: ["request_save"]}, only=1),
  )
  main.train(config, str(folder / "run"))
  wait_for_both()
  return dict(steps=tiny.checkpoint_steps(folder / "run"), ends=hooks.Acts.ends)


@pytest.mark.slow
def test_what_process_0_asks_for_happens_on_both(two_processes):
  part = two_processes("runtime.test_hooks_of_two_processes.train_acting")
  end = [5, "stopped", "hook 'acts': enough"]
  assert part.results == [dict(steps=[2, 5], ends=[end] * 2)] * 2
  rows = tiny.rows(part.folder / "run")
  assert {s for s in rows if "val/loss" in rows[s]} == {3}
  assert rows[4]["acts/count"] == 4


def train_until_nan(folder):
  """A part of a shared job, see support/two_processes.py."""
  config = tiny_config(folder)
  config |= dict(task="tiny.mine", model_name="tiny.mine", model={})
  config["input"]["data"] = dict(type="tiny.mine", length=64)
  config["evals"] = dict(
    own=dict(type="tiny.mine", pred="shifted", at=float("nan"), log_steps=4)
  )
  config["hooks"] = dict(nan=dict(type="stop_on_nan", metrics="own/out"))
  results = []
  # The second start resumes from step 3 and ends in the same way.
  for _ in range(2):
    with pytest.raises(RuntimeError) as error:
      main.train(config, str(folder / "run"))
    wait_for_both()
    steps = tiny.checkpoint_steps(folder / "run")
    results.append([str(error.value), steps])
    wait_for_both()
  return results


@pytest.mark.slow
def test_both_fail_at_a_result_that_is_not_finite(two_processes):
  part = two_processes("runtime.test_hooks_of_two_processes.train_until_nan")
  for starts in part.results:
    for error, steps in starts:
      assert "'nan': own/out is nan at step 4" in error
      assert steps == [3]
  assert max(tiny.rows(part.folder / "run")) == 4
