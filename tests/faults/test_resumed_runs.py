"""Faults 22, 23, 25 and 27: a resumed run ends like an undisturbed one."""

import json
import signal

import jax
import numpy as np
import pytest
import tiny

from bigtrain import sharding
from bigtrain.checkpoints import folders, restore
from faults import program as program_lib
from faults.program import assert_same_run, path_of, steps


def kills(workdir, step, newest):
  """Change: SIGKILL before a step, once the previous checkpoint is complete."""
  file = str(path_of(workdir, newest))
  hook = dict(type="faults.waiting.Kill", step=step, file=file)
  return f"hooks={dict(kill=hook)}"


@pytest.mark.slow
def test_killed_between_checkpoints_twice(program, workdir, undisturbed):
  every_five = "ckpt_steps=5"
  for step, newest in ((9, 5), (19, 15)):
    hook = kills(workdir, step, newest)
    process = program.start(workdir, every_five, hook)
    assert process.wait() == -signal.SIGKILL, process.text()
    assert steps(workdir)[-1] == newest
    # Rows of the lost steps exist and will be written again.
    assert max(tiny.rows(workdir)) > newest
  process = program.run(workdir, every_five)
  assert "resumed from step 15 of this workdir" in process.text()
  assert_same_run(workdir, undisturbed, 24)
  starts = json.loads((workdir / "run.json").read_text())["starts"]
  assert len(starts) == 3


def ids(row):
  return [row[f"id_{i}"] for i in range(8)]


@pytest.mark.slow
def test_same_examples_wherever_a_run_is_stopped(program, tmp_path):
  each = ("log_steps=1", "total_steps=20", "keep_ckpts=100")
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  program.run(whole, *each, model="vit")
  hook = kills(parts, 6, 4)
  process = program.start(parts, *each, hook, model="vit")
  assert process.wait() == -signal.SIGKILL, process.text()
  for stop in (7, 12, 15):
    program.run(parts, *each, f"stop_at_steps={stop}", model="vit")
    assert steps(parts)[-1] == stop
  program.run(parts, *each, model="vit")
  assert_same_run(parts, whole, 20)
  # Two epochs, each with every example once.
  rows = tiny.rows(parts)
  seen = [i for step in range(1, 21) for i in ids(rows[step])]
  all_ids = list(range(1000, 1000 + program_lib.NUM_TRAIN))
  assert sorted(seen[:80]) == sorted(seen[80:]) == all_ids
  assert seen[:80] != seen[80:]


def restored(workdir, step, mesh):
  """The state of a checkpoint on a mesh, with arrays sharded if possible."""
  directory = folders.find(str(workdir), step)
  arrays = folders.read_manifest(directory).arrays
  spec = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()
  }
  layout, _ = sharding.state_shardings(
    spec, mesh, [(".*", "fsdp(min_size=16)")]
  )
  like = {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout[name])
    for name, x in spec.items()
  }
  state, _ = restore.restore(directory, like)
  return jax.tree.map(np.asarray, state)


@pytest.mark.slow
def test_resume_on_other_numbers_of_devices(program, workdir, undisturbed):
  program.run(workdir, "stop_at_steps=8")
  for devices, stop in ((4, 16), (2, 24)):
    process = program.run(workdir, f"stop_at_steps={stop}", devices=devices)
    assert f"fsdp={devices}" in process.text()
  rows, expected = tiny.rows(workdir), tiny.rows(undisturbed)
  assert list(rows) == list(expected)
  for step, row in expected.items():
    for name, value in row.items():
      if name.startswith("id_"):
        assert rows[step][name] == value, (step, name)
      else:
        # Other meshes sum over the examples in another order.
        assert rows[step][name] == pytest.approx(value, rel=1e-3), (step, name)
  # Every mesh restores the same bits.
  for step in steps(workdir):
    plain = tiny.arrays(workdir, step)
    for replica, fsdp in ((1, 1), (1, 2), (2, 2), (1, 8)):
      devices = jax.devices()[: replica * fsdp]
      mesh = sharding.make_mesh(replica, fsdp, devices=devices)
      tiny.assert_same(restored(workdir, step, mesh), plain)


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 24])
def test_signal_and_kill_during_an_evaluation(
  program, workdir, undisturbed, tmp_path, step
):
  flag = tmp_path / "evaluates"
  slow = dict(
    type="faults.waiting", pred="logits", log_steps=step, flag=str(flag)
  )
  evaluates = f"evals.slow={slow}"
  # Fault 27: a signal interrupts the evaluation.
  process = program.start(workdir, evaluates)
  process.until_file(flag)
  process.send(signal.SIGTERM)
  assert process.wait(30) == 75, process.text()
  assert process.last_line() == f"preempted: saved step {step} of 24"
  assert "slow/step" not in tiny.rows(workdir).get(step, {})
  # Fault 25: a kill, too. The earlier evaluation is not repeated.
  flag.unlink()
  process = program.start(workdir, evaluates)
  process.until_file(flag)
  process.kill()
  assert "evaluating val" not in process.text()
  assert steps(workdir)[-1] == step
  program.run(workdir, evaluates)
  rows = tiny.rows(workdir)
  due = range(step, 25, step)
  assert [rows[s].pop("slow/step") for s in due] == list(due)
  assert rows == tiny.rows(undisturbed)
  program_lib.assert_same_state(workdir, undisturbed, 24)
