"""config.qk_clip with prefixes and pictures: only visible pairs count."""

import functools
import json

import jax
import numpy as np
import pytest
from models import test_vision_language as pictures
from support import any_mesh

from bigtrain.arrays import trees
from bigtrain.tasks import language_modeling

WINDOWS = {"blocks_0": 4, "blocks_1": None}


def groups_of(mask, batch):
  """The number of the group that each token sees as a whole; 0 for none."""
  tokens, segments = np.asarray(batch["tokens"]), np.asarray(batch["segments"])
  if mask == "prefix":
    return np.asarray(batch["prefix"]) * segments
  is_image = tokens == pictures.IMAGE
  begins = is_image & ~np.pad(is_image[:, :-1], ((0, 0), (1, 0)))
  return np.cumsum(begins, axis=1) * is_image * (mask == "image")


def visible_pairs(mask, batch, window):
  """Whether token i sees token j, for each pair of a row, by the definition."""
  segments, groups = np.asarray(batch["segments"]), groups_of(mask, batch)
  B, L = segments.shape
  visible = np.zeros((B, L, L), bool)
  for b, i, j in np.ndindex(B, L, L):
    before = j <= i and (window is None or j > i - window)
    shared = groups[b, i] == groups[b, j] != 0
    same = segments[b, i] == segments[b, j] != 0
    visible[b, i, j] = same and (before or shared)
  return visible


@pytest.mark.parametrize(
  "mask",
  [
    "image",
    pytest.param("prefix", marks=pytest.mark.slow),
    pytest.param("causal", marks=pytest.mark.slow),
  ],
)
def test_the_largest_logits_are_those_of_visible_pairs(mask):
  rng = np.random.default_rng(3)
  numbers = [(1, 2), (2, 2), (1, 3)]
  texts = [pictures.text_of(rng, n, words) for n, words in numbers]
  # Two texts in a row, padding, and a row without a text.
  prefix = 6 if mask == "prefix" else None
  batch = pictures.batch_of(texts, [[2, 0], [1], []], 2, prefix)
  text = {**pictures.TEXT, "posemb": "none", "init_std": 0.5}
  model = pictures.model_of(mask, text=text, attention_logits=True)
  example = language_modeling.inputs(batch)
  shapes = jax.eval_shape(lambda k: model.init(k, **example), jax.random.key(0))
  draw = lambda p: rng.normal(0, 0.3, p.shape).astype(p.dtype)

  @jax.jit
  def run(params):
    _, mutable = language_modeling.loss_fn(
      {"params": params}, batch, jax.random.key(1), model=model, train=True
    )
    _, states = model.apply(
      {"params": params},
      **example,
      capture_intermediates=lambda module, _: module.name in ("query", "key"),
      mutable=["intermediates"],
    )
    return mutable["step_largest"]["llm"], states["intermediates"]["llm"]

  visible, causal = (
    {name: visible_pairs(kind, batch, x) for name, x in WINDOWS.items()}
    for kind in (mask, "causal")
  )
  # Whether some largest logit is of a pair that is not in order.
  differs = False
  for _ in range(12):
    largest, intermediates = run(jax.tree.map(draw, shapes["params"]))
    for block in WINDOWS:
      attention = intermediates[block]["attention"]
      q_BLHK, k_BSHK = (
        np.asarray(attention[name]["__call__"][0], float)
        for name in ("query", "key")
      )
      scores = np.einsum("blhk,bshk->hbls", q_BLHK, k_BSHK)
      scores /= np.sqrt(q_BLHK.shape[-1])
      expected = scores[:, visible[block]].max(axis=1)
      got = largest[block]["attention"]["largest"]
      np.testing.assert_allclose(got, expected, rtol=1e-5)
      in_order = scores[:, causal[block]].max(axis=1)
      differs |= (expected > in_order + 1e-3).any()
  assert differs == (mask != "causal")


@functools.cache
def trained(mask, microbatches=1, **sizes):
  """(parameters after three steps, largest logits of each step by layer)."""
  sizes = dict(replica=1, fsdp=1, sequence=1, tensor=1) | sizes
  config = any_mesh.load("vlm_digits:runlocal", dropout=0.0)
  config["input"]["batch_size"] = 32
  config["input"]["data"]["prefix"] = mask == "prefix"
  small = dict(width=16, depth=1, num_heads=2, mlp_dim=24)
  config["model"]["image"] |= small
  text = small | dict(num_kv_heads=1, init_std=0.3)
  config["model"]["text"] |= text
  config["model"]["mask"] = mask
  config["qk_clip"] = dict(tau=0.1)
  config = json.loads(json.dumps(config))
  pairs, _, state = any_mesh.train(config, sizes, microbatches)
  logits = np.stack([step["attention_logit"][0] for step in pairs])
  return dict(trees.flatten_with_names(state["params"])), logits


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mask", "sizes"),
  [
    ("prefix", dict(fsdp=8, microbatches=4)),
    ("image", dict(fsdp=2, sequence=2, tensor=2, microbatches=4)),
    ("image", dict(microbatches=4)),
    ("prefix", dict(fsdp=8)),
    ("image", dict(fsdp=8)),
  ],
  ids=str,
)
def test_devices_and_microbatches_change_nothing(mask, sizes):
  params, logits = trained(mask)
  assert (logits[0] > 0.1).all()  # It is clipped.
  got_params, got = trained(mask, **sizes)
  np.testing.assert_allclose(got, logits, rtol=2e-4)
  for name, x in params.items():
    np.testing.assert_allclose(got_params[name], x, atol=2e-5, err_msg=name)
