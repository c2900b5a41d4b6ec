"""SigLIP 2's sum of tasks: costs, steps before the late task, and resuming."""

import pathlib

import jax
import pytest
import tiny
from support import objectives

from bigtrain import main
from bigtrain.config import loading

FILE = pathlib.Path(__file__).parent.parent / "configs" / "siglip2.py"
TASKS = ("contrast", "locca", "distill")


def config(tasks=TASKS, **changes):
  """The run on digits, with few small steps and some of its tasks."""
  result = loading.load(f"{FILE}:runlocal")
  result.update(
    total_steps=10,
    log_steps=1,
    ckpt_steps=8,
    keep_ckpts=9,
    evals={},
    schedule=dict(decay_type="cosine", warmup_steps=2),
  )
  result["input"]["batch_size"] = 16
  for tower in ("image", "text"):
    sizes = dict(width=16, depth=1, mlp_dim=16, num_heads=2)
    result["model"][tower].update(sizes)
  result["model"]["out_dim"] = (None, 16)
  result["task"] = {name: result["task"][name] for name in tasks}
  if tasks == ("distill",):
    del result["task"]["distill"]["from_percent"]
  return result | changes


def gradient_flops(tasks, step):
  """FLOPs of the gradients of a step, before XLA changes the program."""
  mesh = objectives.make_mesh(fsdp=1)
  with jax.set_mesh(mesh):
    one = objectives.build(config(tasks), mesh)
    params = one.params_spec
    compute = one.gradients_fn(jax.tree.map(lambda _: True, params))
    batches = one.train_input.start(step, step + 1)
    batch = next(batches)
    batches.close()
    state = {
      "params": params,
      "step": jax.ShapeDtypeStruct((), "int32"),
      **one.hparams(step),
      **jax.eval_shape(one.init_task_state, params),
    }
    return jax.jit(compute).lower(state, batch).cost_analysis()["flops"]


@pytest.mark.slow
def test_steps_cost_what_their_tasks_cost():
  """The late task costs nothing before it begins, and then its own FLOPs."""
  early = gradient_flops(TASKS, 0)
  assert early == pytest.approx(
    gradient_flops(("contrast", "locca"), 0), rel=1e-3
  )
  late = gradient_flops(TASKS, 8)
  parts = sum(gradient_flops((name,), 0) for name in TASKS)
  assert 1.2 * early < late < 1.1 * parts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("siglip2") / "whole"
  main.train(config(), str(folder))
  return folder


@pytest.mark.slow
def test_the_late_task_leaves_the_steps_before_as_they_were(whole, tmp_path):
  early = config(("contrast", "locca"), stop_at_steps=8)
  main.train(early, str(tmp_path / "early"))
  first = tiny.arrays(whole, step=8)
  second = tiny.arrays(tmp_path / "early", step=8)
  tiny.assert_same({name: first[name] for name in second}, second)
  assert all(name.startswith("tasks/") for name in first.keys() - second.keys())
  rows, others = tiny.rows(whole), tiny.rows(tmp_path / "early")
  for step in range(1, 9):
    for name in ("loss", "contrast/loss", "locca/loss"):
      assert rows[step][name] == others[step][name]
  assert "distill/loss" not in rows[8] and rows[9]["distill/loss"] > 0


@pytest.mark.slow
def test_a_run_stopped_in_the_last_fifth_continues_bit_for_bit(whole, tmp_path):
  for stop in (9, None):
    main.train(config(stop_at_steps=stop), str(tmp_path))
  first = tiny.arrays(whole)
  tiny.assert_same(tiny.arrays(tmp_path), first)
  assert any(name.startswith("tasks/distill/teacher/img") for name in first)
  assert not any(name.startswith("tasks/distill/teacher/txt") for name in first)
  assert tiny.rows(tmp_path) == tiny.rows(whole)
