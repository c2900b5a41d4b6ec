"""Runs that differ in hparams share one program; others do not."""

import jax
import pytest

from bigtrain import main


def program(config, folder):
  """Text of the update."""

  def on_update(run, update_fn, specs, compile_update):
    return str(jax.make_jaxpr(update_fn)(*specs))

  return main.train(config, str(folder), on_update=on_update)


@pytest.mark.parametrize(
  "changes, shared",
  [
    ({"lr": 0.5}, True),
    ({"wd": 0.7}, True),
    ({"seed": 3}, True),
    ({"total_steps": 9}, True),
    ({"log_steps": 4}, True),
    ({"schedule": {"decay_type": "cosine", "warmup_steps": 2}}, True),
    ({"grad_clip_norm": 0.5}, False),
    ({"wd": 0.0}, False),
  ],
)
def test_runs_that_differ_in_hparams_share_one_program(
  tiny_config, tmp_path, changes, shared
):
  base = {"evals": {}, "wd": 0.1, "grad_clip_norm": 1.0}
  one = program(tiny_config(base), tmp_path)
  other = program(tiny_config(base | changes), tmp_path)
  assert (one == other) == shared
  assert not list(tmp_path.iterdir())
