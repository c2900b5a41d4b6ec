"""Faults 37 and 38: a NaN between two rows never reaches the state."""

import re

import numpy as np
import pytest
import tiny

from bigtrain.checkpoints import integrity
from faults import program as program_lib
from faults.program import path_of, steps

BAD_STEP = 5  # Rows are written after steps 3 and 6.
# In the order of the file and without random ops, so that the batches are known
# and do not change when others are left out.
IN_ORDER = (
  "input.shuffle=False",
  "input.pp=value_range(-1,1,0,16)|onehot(10,key='label',key_result='labels')"
  "|keep('image','labels','id')",
)


def train_data(*bad_steps):
  """The digits, with one NaN in the batch of each of these steps."""
  train = program_lib.digits()["train"]
  train["image"] = train["image"].astype(np.float32)
  for step in bad_steps:
    train["image"][8 * (step - 1) + 3, 4, 4] = np.nan
  return train


@pytest.fixture
def data(tmp_path):
  """Folder of data with a NaN in the batch of BAD_STEP."""
  program_lib.write_data(tmp_path / "data", train=train_data(BAD_STEP))
  return tmp_path / "data"


def assert_finite(workdir):
  for step in steps(workdir):
    assert integrity.verify(str(path_of(workdir, step))) == []
    for name, value in tiny.arrays(workdir, step).items():
      assert np.isfinite(value).all(), (step, name)
  for step, row in tiny.rows(workdir).items():
    assert all(map(np.isfinite, row.values())), (step, row)


@pytest.mark.slow
def test_stop(program, workdir, data):
  process = program.run(workdir, *IN_ORDER, data=data, code=1)
  ids = ", ".join(map(str, range(32, 40)))
  expected = (
    "error: NotFinite: step 5 is not finite: loss nan, gradients that are not "
    r"finite: first of 3: first/kernel; examples "
    rf"{ids} \(the first is {data}/train\.npz, row 32\)\..*"
  )
  assert re.fullmatch(expected, process.last_line()), process.text()
  assert steps(workdir) == [2, 4]
  assert_finite(workdir)
  assert list(tiny.rows(workdir)) == [1, 3, 4]


@pytest.mark.slow
def test_rollback(program, tmp_path, data):
  options = (*IN_ORDER, "nonfinite=rollback", "ckpt_steps=3", "keep_ckpts=9")
  workdir = tmp_path / "run"
  # It does not return to a local checkpoint, of step 4 here: how far it goes
  # back, and what it skips, must not depend on these.
  local = ("local_ckpt_steps=1", f"local_ckpt_dir={tmp_path / 'hosts'}")
  process = program.run(workdir, *options, *local, "stop_at_steps=7", data=data)
  assert (
    "ROLLING BACK to step 3, skipping the batches of steps 4 to 5."
    in process.text()
  )
  # A later start does not use these batches either.
  program.run(workdir, *options, *local, "stop_at_steps=8", data=data)
  assert program_lib.host_state(workdir, 8)["batches_ahead"] == 2
  assert_finite(workdir)
  # The result is that of data without the two batches.
  rest = {
    name: np.concatenate([x[:24], x[40:]])
    for name, x in train_data(BAD_STEP).items()
  }
  program_lib.write_data(tmp_path / "rest", train=rest)
  other = tmp_path / "other"
  program.run(other, *options, "stop_at_steps=8", data=tmp_path / "rest")
  assert steps(workdir) == [3, 6, 7, 8] and steps(other) == [3, 6, 8]
  for step in steps(other):
    tiny.assert_same(tiny.arrays(workdir, step), tiny.arrays(other, step))
  rows, expected = tiny.rows(workdir), tiny.rows(other)
  for row in (*rows.values(), *expected.values()):
    row.pop("epoch", None)  # The other data has fewer examples.
  assert rows == expected


@pytest.mark.slow
def test_rollbacks_are_bounded(program, workdir, tmp_path):
  bad = train_data(4, 5, 8)
  program_lib.write_data(tmp_path / "bad", train=bad)
  options = (*IN_ORDER, "nonfinite=rollback", "max_nonfinite=2")
  process = program.run(workdir, *options, data=tmp_path / "bad", code=1)
  assert process.text().count("ROLLING BACK") == 2
  assert process.last_line().startswith("error: NotFinite: step ")
  assert_finite(workdir)


@pytest.mark.slow
def test_skip(program, workdir, data):
  each = ("ckpt_steps=1", "keep_ckpts=99", "nonfinite=skip")
  options = (*IN_ORDER, *each, "stop_at_steps=7")
  program.run(workdir, *options, data=data)
  before, after = tiny.arrays(workdir, 4), tiny.arrays(workdir, 5)
  assert (before.pop("step"), after.pop("step")) == (4, 5)
  tiny.assert_same(before, after)
  changed = tiny.arrays(workdir, 6)
  assert (changed["params/head/kernel"] != after["params/head/kernel"]).any()
  assert_finite(workdir)
  rows = tiny.rows(workdir)
  assert rows[6]["skipped_steps"] == 1 and "skipped_steps" not in rows[3]


@pytest.mark.slow
def test_skips_are_bounded(program, workdir, tmp_path):
  program_lib.write_data(tmp_path / "bad", train=train_data(4, 5, 8))
  options = (*IN_ORDER, "nonfinite=skip", "max_nonfinite=2")
  process = program.run(workdir, *options, data=tmp_path / "bad", code=1)
  assert process.last_line() == (
    "error: NotFinite: skipped 3 steps that were not finite, more than "
    "config.max_nonfinite=2; the first was step 4."
  )
  assert_finite(workdir)
  assert steps(workdir)[-1] < 10
