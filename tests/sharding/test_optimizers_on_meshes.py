"""Runs with optimizers that see whole matrices, and with ZeRO-1, on meshes.

Each run changes its mesh half way, and ends like a run on one device.
"""

import functools

import jax
import numpy as np
import pytest
import tiny
from support import compile_cache

from bigtrain import main, sharding
from bigtrain.arrays import trees

CONFIG = dict(
  total_steps=4,
  log_steps=1,
  ckpt_steps=2,
  keep_ckpts=2,
  compile_cache=str(compile_cache.FOLDER),
  tensorboard=False,
  task="language_modeling",
  model_name="decoder",
  model=dict(
    variant="llama",
    vocab_size=64,
    width=64,
    mlp_dim=128,
    depth=1,
    num_heads=4,
    max_len=32,
  ),
  input=dict(
    data=dict(
      type="synthetic",
      features=dict(tokens="int32[16] < 64", targets="int32[16] < 64"),
      num_examples=64,
    ),
    batch_size=16,
  ),
  lr=1e-2,
  wd=1e-3,
  grad_clip_norm=1.0,
  schedule=dict(decay_type="constant"),
  evals={},
  hooks=dict(note=dict(type=f"{__name__}.Note")),
)
OPTIMIZERS = {
  # Some gradients of this model are rounding alone; epsilon keeps their updates
  # small.
  "adam": dict(name="adam", eps=1e-3),
  "adafactor": dict(name="adafactor", min_dim_size_to_factor=32, momentum=0.9),
  "muon": dict(name="muon", consistent_rms=0.2),
}


class Note:
  """Keeps the first state of a run, and the parts that devices have of it."""

  first = None
  parts = None

  def __init__(self, *, context):
    self._context = context
    Note.first = None

  def before_step(self, step):
    if Note.first is None:
      named = dict(trees.flatten_with_names(self._context.state))
      Note.first = {n: np.asarray(x) for n, x in named.items()}
      Note.parts = {
        n: x.size // int(np.prod(x.sharding.shard_shape(x.shape)))
        for n, x in named.items()
      }


def train(workdir, optimizer, **changes):
  config = {**CONFIG, "optimizer": OPTIMIZERS[optimizer], **changes}
  main.train(config, str(workdir))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
  """one_device(optimizer): folder of the run on one device."""

  @functools.cache
  def run(optimizer):
    workdir = tmp_path_factory.mktemp(optimizer)
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
      one = functools.partial(sharding.make_mesh, devices=devices)
      patch.setattr(sharding, "from_config", lambda _: one())
      train(workdir, optimizer)
    return workdir

  return run


@pytest.mark.slow
@pytest.mark.parametrize(
  ("optimizer", "first", "second", "state"),
  [
    ("adafactor", dict(fsdp=2, tensor=4), dict(replica=4, tensor=2), "fsdp"),
    ("muon", dict(fsdp=2, tensor=4), dict(replica=4, tensor=2), "fsdp"),
    ("adam", dict(replica=4, fsdp=2), dict(replica=2, fsdp=4), "replica"),
    ("adafactor", dict(replica=4, fsdp=2), dict(replica=8), "replica"),
  ],
)
def test_a_run_that_changes_its_mesh(
  tmp_path, one_device, optimizer, first, second, state
):
  changes = {"opt_sharding": state}
  train(tmp_path, optimizer, mesh=first, stop_at_steps=2, **changes)
  assert tiny.checkpoint_steps(tmp_path) == [2]
  saved = tiny.arrays(tmp_path)
  train(tmp_path, optimizer, mesh=second, **changes)
  tiny.assert_same({n: Note.first[n] for n in saved}, saved)
  if state == "replica":
    large = [n for n in Note.parts if Note.first[n].size >= 1024]
    parts = {n.partition("/")[0]: Note.parts[n] for n in large}
    assert parts == {"params": second.get("fsdp", 1), "opt": 8}
  alone = one_device(optimizer)
  rows, want_rows = tiny.rows(tmp_path), tiny.rows(alone)
  assert rows.keys() == want_rows.keys() == {1, 2, 3, 4}
  for step, want in want_rows.items():
    for name in ("loss", "grad_norm", "param_norm", "update_norm"):
      assert rows[step][name] == pytest.approx(want[name], rel=1e-5), name
  got, want = tiny.arrays(tmp_path), tiny.arrays(alone)
  assert got.keys() == want.keys()
  for name, x in want.items():
    error = np.abs(got[name].astype(float) - x).max(initial=0)
    assert error <= 1e-5 * np.abs(x).max(initial=0), name
