"""Stages of layers on simulated devices, compared with one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_any_mesh
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from support import any_mesh

from bigtrain import main, sharding
from bigtrain.models.layers import stages as stages_lib

# {config: mesh}.
_SPECS = {
  "llama_8b:runlocal": "sequence=2,tensor=2,pipeline=2",
  "mixtral_8x7b:runlocal": "fsdp=2,tensor=2,pipeline=2",
  "digits:runlocal": "replica=2,pipeline=4",
  "digits_siglip:runlocal": "fsdp=2,pipeline=4",
  "digits_captions:runlocal": "replica=2,fsdp=2,pipeline=2",
  "pydoc_t5:runlocal": "fsdp=2,tensor=2,pipeline=2",
}


@functools.cache
def _config(spec, dropout=0.0, **fields):
  config = any_mesh.load(spec, vocab_size=320, packed=True, dropout=dropout)
  config["input"]["batch_size"] = 16
  model = dict(config["model"])
  towers = [name for name in ("image", "text") if name in model]
  layers = dict(depth=4, scan=True, **fields)
  for name in towers:
    model[name] = {**model[name], **layers}
  config["model"] = model if towers else {**model, **layers}
  if config["model_name"] == "cappa":
    config["model"]["decoder_depth"] = 4
  return config


def _sizes(mesh):
  return {a: int(n) for a, n in (part.split("=") for part in mesh.split(","))}


@pytest.mark.parametrize(
  ("spec", "mesh"),
  [
    pytest.param(*case, marks=[pytest.mark.slow] * (case[0][:7] != "digits:"))
    for case in _SPECS.items()
  ],
)
def test_stages_have_the_loss_and_the_gradients_of_one_device(spec, mesh):
  test_any_mesh.check_case((spec, _config(spec), _sizes(mesh), 1, None))


@st.composite
def _cases(draw, spec):
  config = _config(spec)
  rounds = draw(st.sampled_from([1, 2]))
  stages = draw(st.sampled_from([2, 4] if rounds == 1 else [2]))
  left = 8 // stages
  tensor = draw(st.sampled_from([n for n in (1, 2) if left % n == 0]))
  left //= tensor
  sequence = draw(st.sampled_from([n for n in (1, 2) if left % n == 0]))
  fsdp = draw(
    st.sampled_from([n for n in (1, 2, 4) if left // sequence % n == 0])
  )
  microbatches = draw(st.sampled_from([1, 2]))
  rows = 16 // microbatches // (left // sequence)
  sizes = dict(replica=left // sequence // fsdp, fsdp=fsdp, sequence=sequence)
  sizes |= dict(tensor=tensor, pipeline=stages, pipeline_rounds=rounds)
  most = [n for n in range(stages, rows + 1, stages) if rows % n == 0]
  sizes["pipeline_microbatches"] = draw(st.sampled_from(most))
  axis = draw(st.sampled_from(any_mesh.expert_axes(config, dict(fsdp=fsdp))))
  return spec, config, sizes, microbatches, axis


@pytest.mark.mesh
@pytest.mark.parametrize("spec", _SPECS)
@settings(max_examples=7, **test_any_mesh._FIXED)
@given(st.data())
def test_forty_cases_of_stages(spec, data):
  test_any_mesh.check_case(data.draw(_cases(spec)))


_KEEPS_NOTHING = jax.checkpoint_policies.nothing_saveable
_SHIFT_N = jnp.arange(16.0)  # As long as the batch.


def _layer(w_DD, index, key, x, shared):
  shift_N, factor_B, scale = shared
  y = jnp.tanh(x @ w_DD * scale + shift_N[index]) * factor_B[:, None]
  if key is not None:
    y *= jax.random.bernoulli(key, 0.5, y.shape)
  return x + y, (jnp.sum(y), jnp.sum(jnp.abs(y)))


def _in_stages(w, x, factor_B, scale, key=None):
  """(x, reports, sums) of 16 layers; an argument is as long as the batch."""
  shared = (_SHIFT_N, factor_B, scale)
  schedule = sharding.schedule(len(x))
  assert schedule is not None
  merge = functools.partial(jax.tree.map, lambda r: jnp.sum(r, axis=0))
  x, (reports, sums) = stages_lib.run(
    _layer, merge, w, key, x, shared, 1, schedule, _KEEPS_NOTHING
  )
  return x, reports, sums


def _in_turn(w, x, factor_B, scale):
  reports = []
  for i, w_DD in enumerate(w):
    x, report = _layer(w_DD, i, None, x, (_SHIFT_N, factor_B, scale))
    reports.append(report)
  return x, *map(jnp.stack, zip(*reports))


def _arguments():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return normal(16, 6, 6), normal(16, 6), normal(16), np.float32(0.2)


def _mesh(**sizes):
  number = sizes["pipeline"] * sizes["fsdp"] * sizes.get("replica", 1)
  return sharding.make_mesh(**sizes, devices=jax.devices()[:number])


@pytest.mark.parametrize(
  ("stages", "rounds", "microbatches", "fsdp"),
  [
    pytest.param(4, 2, 4, 1, marks=pytest.mark.slow),
    pytest.param(4, 4, 8, 2, marks=pytest.mark.slow),
    *[(2, 4, 4, 2), (4, 1, 16, 1), (8, 2, 8, 1)],
  ],
)
def test_every_schedule_is_the_same_function(
  stages, rounds, microbatches, fsdp
):
  def loss(of, *args):
    x, reports, sums = of(*args)
    return jnp.sum(x**2) + jnp.sum(reports), (x, reports, sums)

  of_all = dict(argnums=(1, 2, 3, 4), has_aux=True)
  args = _arguments()
  want = jax.jit(jax.grad(loss, **of_all), static_argnums=0)(_in_turn, *args)
  mesh = _mesh(
    pipeline=stages,
    fsdp=fsdp,
    replica=2 if microbatches == 4 else 1,
    pipeline_rounds=rounds,
    pipeline_microbatches=microbatches,
  )
  gradient = jax.jit(jax.grad(loss, **of_all), static_argnums=0)
  with jax.set_mesh(mesh):
    got = gradient(_in_stages, *args)
    program = str(gradient.trace(_in_stages, *args).jaxpr)
  # Weights are selected again, and not kept for each tick.
  ticks, layers = rounds * microbatches + stages - 1, 16 // (stages * rounds)
  assert f"f32[{ticks},{layers},6,6]" not in program
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3)
  jax.tree.map(close, got, want)


def test_dropout_is_that_of_the_key_and_differs_between_microbatches():
  w, x, factor_B, scale = _arguments()
  x, factor_B = np.repeat(x[:1], 16, 0), np.repeat(factor_B[:1], 16)
  with jax.set_mesh(_mesh(pipeline=2, fsdp=2, pipeline_microbatches=4)):
    run = jax.jit(_in_stages)
    first, again, other = (
      run(w, x, factor_B, scale, jax.random.key(i))[0] for i in (0, 0, 1)
    )
  np.testing.assert_array_equal(first, again)
  assert not np.allclose(first, other)
  assert len({row.tobytes() for row in np.asarray(first)}) == 16


def _run(workdir, **changes):
  fields = dict(vocab_size=259, width=16, mlp_dim=32, num_heads=2, depth=4)
  config = dict(
    seed=0,
    total_steps=3,
    log_steps=1,
    ckpt_steps=1,
    task="language_modeling",
    input=dict(
      data=dict(type="text", name="pydoc", split="train", length=16),
      batch_size=8,
    ),
    model_name="decoder",
    model=dict(variant="llama", max_len=64, scan=True, **fields),
    optimizer=dict(name="sgd", momentum=0.9),
    schedule=[(".*/query/.*", None), (".*", dict(decay_type="constant"))],
    lr=0.1,
    compile_cache=False,
    tensorboard=False,
  )
  main.train({**config, **changes}, str(workdir))
  return tiny.arrays(workdir)


@pytest.mark.slow
def test_a_run_with_frozen_layers_resumes_on_other_stages(tmp_path):
  want = _run(tmp_path / "whole", mesh=dict(fsdp=8))
  for stop, mesh in (
    (1, dict(pipeline=4)),
    (2, dict(pipeline=2, pipeline_rounds=2)),
    (None, dict(replica=2)),
  ):
    got = _run(tmp_path / "cut", mesh=mesh, stop_at_steps=stop)
  assert got.keys() == want.keys()
  for name, x in got.items():
    np.testing.assert_allclose(x, want[name], 1e-4, 1e-5, err_msg=name)
