"""config.qk_clip: steps after which no head has logits far above tau."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import any_mesh

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.checkpoints.foreign import parameter_files
from bigtrain.config import lengths, settings
from bigtrain.config.errors import ConfigError
from bigtrain.metrics import Largest
from bigtrain.models import decoder
from bigtrain.objective import qk_clip
from bigtrain.optim import chain, views

# Two layers in a loop after another one; heads in groups.
MODEL = dict(
  vocab_size=264,
  width=16,
  mlp_dim=8,
  depth=3,
  scan=True,
  num_heads=4,
  num_kv_heads=2,
  qk_norm=None,
  init_std=0.3,
  first_layers=("full",),
  kinds=dict(full={}),
  layers=("full",),
)
LATENTS = dict(
  num_kv_heads=None,
  mla=dict(kv_rank=6, nope_dim=4, rope_dim=2, v_dim=4, q_rank=None),
)


def config_of(tau=0.1, **changes):
  config = any_mesh.load("pydoc_lm:runlocal", packed=True, dropout=0.0)
  model = {**config["model"], **MODEL, **changes}
  return {**config, "model": model, "qk_clip": dict(tau=tau)}


@functools.cache
def trained(text="{}", microbatches=1, **sizes):
  """(parameters after three steps, largest logits of each step by layer)."""
  sizes = dict(replica=1, fsdp=1, sequence=1, tensor=1) | sizes
  config = config_of(**json.loads(text))
  pairs, _, state = any_mesh.train(config, sizes, microbatches)
  assert "mutable" not in state
  logits = np.stack([step["attention_logit"][0] for step in pairs])
  return dict(trees.flatten_with_names(state["params"])), logits


def same(text="{}", **sizes):
  got, want = trained(text, **sizes), trained(text)
  np.testing.assert_allclose(got[1], want[1], rtol=2e-4)
  for name, x in want[0].items():
    np.testing.assert_allclose(got[0][name], x, atol=2e-5, err_msg=name)


def test_clipping_changes_the_parameters():
  clipped, logits = trained()
  free, free_logits = trained('{"tau": 1e6}')
  assert (free_logits > 0.1).all()
  name = "blocks/attention/query/kernel"
  ratio = np.linalg.norm(clipped[name]) / np.linalg.norm(free[name])
  assert ratio < 0.7
  # Keys that heads share are not clipped, and differ by the training alone.
  name = "blocks/attention/key/kernel"
  ratio = np.linalg.norm(clipped[name]) / np.linalg.norm(free[name])
  assert 0.9 < ratio < 1.1
  np.testing.assert_allclose(logits[0], free_logits[0], rtol=1e-6)
  assert (logits[1:] < 0.5 * free_logits[1:]).all()


@pytest.mark.parametrize(
  "sizes",
  [
    dict(fsdp=8, microbatches=2),
    pytest.param(dict(microbatches=4), marks=pytest.mark.slow),
    pytest.param(dict(fsdp=2, sequence=2, tensor=2), marks=pytest.mark.slow),
    pytest.param(
      dict(replica=2, fsdp=2, pipeline=2, microbatches=2),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_devices_and_microbatches_change_nothing(sizes):
  same(**sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(fsdp=4, tensor=2), dict(sequence=4)])
def test_the_same_for_latent_attention(sizes):
  same(json.dumps(LATENTS), microbatches=2, **sizes)


@pytest.mark.slow
def test_remat_and_unrolled_layers_change_nothing():
  text = '{"scan": false, "remat_policy": "nothing_saveable"}'
  want, logits = trained()
  got, got_logits = trained(text)
  # blocks/0, blocks/1, blocks_0, and blocks_0, blocks_1, blocks_2.
  np.testing.assert_allclose(got_logits, logits[:, [2, 0, 1]], rtol=1e-4)
  name = "attention/query/kernel"
  for i in range(2):
    looped = want[f"blocks/{name}"][i]
    np.testing.assert_allclose(got[f"blocks_{i + 1}/{name}"], looped, atol=2e-5)
  got, _ = trained('{"remat_policy": "nothing_saveable(every=2)"}')
  np.testing.assert_allclose(
    got[f"blocks/{name}"], want[f"blocks/{name}"], atol=2e-5
  )


def longest_run(tau):
  """The largest logit of each of 60 steps of Muon at a large learning rate."""
  model = decoder.Model(
    variant="llama",
    vocab_size=17,
    width=32,
    depth=1,
    num_heads=2,
    num_kv_heads=2,
    mlp_dim=32,
    attention_logits=True,
  )
  rng = np.random.default_rng(0)
  tokens_SBL = jnp.asarray(rng.integers(0, 17, (60, 8, 16)))
  params = model.init(jax.random.key(0), tokens_SBL[0])["params"]
  config = dict(optimizer=dict(name="muon", consistent_rms=0.2), lr=0.1, wd=0.0)
  optimizer = chain.make(
    settings.Config(config),
    params,
    lengths.Units(60, 8, None, None),
    views.of_model(decoder, model, params),
    qk_clip=qk_clip.QkClip(tau).clipped,
  )

  def loss_fn(params, tokens_BL):
    (logits_BLV, _), state = model.apply(
      {"params": params}, tokens_BL, train=True, mutable=["step_largest"]
    )
    # Text that repeats itself four tokens later.
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits_BLV, jnp.roll(tokens_BL, 4, axis=1)
    )
    return jnp.mean(losses[:, 4:]), state["step_largest"]

  def step(carry, tokens_BL):
    params, opt = carry
    grads, logits = jax.grad(loss_fn, has_aux=True)(params, tokens_BL)
    updates, opt = optimizer.tx.update(
      grads, opt, params, step=0, logits=logits
    )
    largest = jnp.max(jnp.stack(jax.tree.leaves(logits)))
    return (optax.apply_updates(params, updates), opt), largest

  carry = params, optimizer.tx.init(params)
  run = jax.jit(lambda carry: jax.lax.scan(step, carry, tokens_SBL))
  return np.asarray(run(carry)[1])


def test_logits_that_would_grow_stay_near_tau():
  free, clipped = longest_run(1e9), longest_run(10.0)
  assert free[-10:].min() > 100
  # The logits of a step are those before its clip, and of other examples.
  assert clipped[-40:].max() < 20


def read(workdir):
  file = parameter_files.open_file(
    str(workdir), step=None, prefix="params", key="workdir"
  )
  return file.read([*file.specs])


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path):
  config = config_of() | dict(total_steps=4, ckpt_steps=2, log_steps=4)
  whole = main.train(config, str(tmp_path / "whole"))
  main.train(config | {"stop_at_steps": 2}, str(tmp_path / "parts"))
  parts = main.train(config, str(tmp_path / "parts"))
  np.testing.assert_equal(read(tmp_path / "parts"), read(tmp_path / "whole"))
  names = [name for name in whole if name.startswith("attention_logit_max")]
  layers = ["", "/blocks/0", "/blocks/1", "/blocks_0"]
  assert names == [f"attention_logit_max{layer}" for layer in layers]
  # The largest since the last log step, also before the interruption.
  assert [parts[name] for name in names] == [whole[name] for name in names]
  assert whole[names[0]] == max(whole[name] for name in names[1:])


def test_a_metric_of_largest_values():
  first = Largest.of(jnp.asarray([1.0, -2.0, -jnp.inf]), ("a", "b", "c"))
  second = Largest.of(jnp.asarray([-3.0, -1.0, -jnp.inf]), ("a", "b", "c"))
  nothing = jax.tree.map(jnp.zeros_like, first)
  expected = {"max": 1.0, "max/a": 1.0, "max/b": -1.0}
  assert Largest.value([first.merge(second)]) == expected
  assert (
    Largest.value([nothing.merge(first).merge(nothing), second]) == expected
  )
  assert Largest.value([nothing]) == {}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(qk_clip=dict(tau=-1.0)), "config.qk_clip.tau: expected"),
    (dict(qk_clip=dict(alpha=2)), "config.qk_clip.alpha: expected"),
    (dict(qk_clip=dict(taw=1.0)), "config.qk_clip.*taw.*tau"),
    (dict(model=dict(qk_norm="head")), "config.model.qk_norm='head'"),
    (dict(model=dict(keys_as_values=True)), "config.model.keys_as_values"),
    (dict(model=dict(qkv_clip=8.0)), "config.model.qkv_clip=8.0"),
    (dict(optimizer=dict(name="schedule_free_sgd")), "without a wrapper"),
    (
      dict(schedule=[(".*query.*", None), (".*", dict(decay_type="constant"))]),
      "query/kernel does not train",
    ),
  ],
)
def test_mistakes_are_named(changes, message, tmp_path):
  config = config_of()
  config["model"] = {**config["model"], **changes.pop("model", {})}
  with pytest.raises(ConfigError, match=message):
    main.train(config | changes, str(tmp_path / "run"))
  assert not (tmp_path / "run").exists()


def test_models_without_attention_logits_are_refused(tmp_path):
  config = any_mesh.load("digits") | {"qk_clip": {}}
  with pytest.raises(ConfigError, match="'vit' reports no logits"):
    main.train(config, str(tmp_path / "run"))
