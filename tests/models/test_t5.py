"""T5: published sizes, scan and remat, documents, decoding, options."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import t5

V, S, L = 30, 9, 6
SIZES = dict(vocab_size=V, width=16, depth=2, decoder_depth=1, num_heads=4)


def tokens(shape, seed):
  return jnp.asarray(np.random.default_rng(seed).integers(1, V, shape))


INPUTS, TARGETS = tokens((2, S), 0).at[1, 7:].set(0), tokens((2, L), 1)


_made = {}


def made(**options):
  """Returns (model, variables)."""
  key = repr(options)  # Options may be dicts.
  if key not in _made:
    model = t5.Model(**SIZES | options)
    init = jax.jit(model.init)
    _made[key] = model, init(jax.random.key(0), INPUTS, TARGETS)
  return _made[key]


# Parameters of the released models, as counted by transformers.
@pytest.mark.parametrize(
  "variant, published",
  [
    ("t5_small", 60_506_624),
    ("t5_base", 222_903_552),
    ("t5_large", 737_668_096),
    ("t5_3b", 2_851_598_336),
    ("t5_1_1_small", 76_961_152),
    ("t5_1_1_base", 247_577_856),
  ],
)
def test_variants_have_the_published_number_of_parameters(variant, published):
  model = t5.Model(variant=variant, scan=True)
  shapes = jax.eval_shape(model.init, jax.random.key(0), INPUTS, TARGETS)
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == published


EXPERTS = dict(
  decoder_depth=4, moe=dict(num_experts=4, top_k=1, every=2, shared_experts=1)
)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, EXPERTS])
def test_scan_and_remat_do_not_change_loss_or_gradients(options):
  def run(scan, remat_policy):
    _, variables = made(scan=scan, **options)
    changes = dict(scan=scan, remat_policy=remat_policy)
    model = t5.Model(**SIZES | options | changes)

    def loss(params):
      logits, out = model.apply({"params": params}, INPUTS, TARGETS)
      return jnp.mean(logits**2), out["moe"]

    fn = jax.value_and_grad(loss, has_aux=True)
    return jax.jit(fn)(variables["params"])

  plain, grads = run(False, "none")
  scanned, scanned_grads = run(True, "nothing_saveable")
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), scanned, plain
  )
  like = dict(trees.flatten_with_names(scanned_grads))
  flat = dict(trees.flatten_with_names(grads))
  for name, value in t5.from_published(flat, like).items():
    np.testing.assert_allclose(value, like[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_token_sees_only_its_document_and_earlier_targets():
  """Tested by gradients of the hidden states by the embeddings."""
  inputs_segments = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0]])
  targets_segments = jnp.asarray([[1, 1, 2, 2, 2, 0]])
  model, variables = made()
  # Each position has another token, whose gradient is the position's.
  inputs, targets = jnp.arange(1, 10)[None], jnp.arange(10, 16)[None]

  @jax.jit
  @jax.jacrev
  def influence(embedding):
    params = variables["params"] | {"token_embedding": embedding}
    _, out = model.apply(
      {"params": params},
      inputs,
      targets,
      inputs_segments=inputs_segments,
      targets_segments=targets_segments,
      head=False,
    )
    return jnp.sum(jnp.sin(out["pre_logits"][0]), axis=-1)

  jacobian = influence(variables["params"]["token_embedding"])
  sees = np.abs(jacobian).max(-1) > 0
  for l, segment in enumerate([1, 1, 2, 2, 2]):
    expected = {*(1 + np.flatnonzero(inputs_segments[0] == segment))}
    before = [i for i in range(l) if targets_segments[0, i] == segment]
    expected |= {10 + i for i in before}
    expected.add(0)  # The token that begins the targets of a document.
    assert {*np.flatnonzero(sees[l])} == expected


@pytest.mark.parametrize(
  "options", [{}, pytest.param(EXPERTS, marks=pytest.mark.slow)]
)
def test_decoding_in_steps_gives_the_same_logits(options):
  model, variables = made(scan=True, **options)
  logits, _ = jax.jit(model.apply)(variables, INPUTS, TARGETS)
  begin = functools.partial(model.apply, method="begin")
  state = jax.jit(lambda v, x: begin(v, x, L))(variables, INPUTS)
  step = jax.jit(functools.partial(model.apply, method="step"))
  token = jnp.zeros(2, jnp.int32)
  for i in range(L):
    step_logits, state = step(variables, state, token, i)
    np.testing.assert_allclose(step_logits, logits[:, i], rtol=1e-4, atol=1e-5)
    token = TARGETS[:, i]


@pytest.mark.slow
def test_no_later_target_changes_a_logit():
  moe = dict(num_experts=4, top_k=2, capacity_factor=0.7, jitter=0.2)
  model, variables = made(depth=1, moe=moe)
  key = jax.random.key(0)
  run = jax.jit(
    lambda targets: model.apply(
      variables, inputs, targets, train=True, rngs={"dropout": key}
    )[0]
  )
  # Row t changes from target t on, which no logit up to t may see.
  inputs, before = jnp.tile(INPUTS[0], (L, 1)), np.tri(L, k=-1, dtype=bool)
  one = jnp.tile(TARGETS[0], (L, 1))
  two = jnp.where(before, one, TARGETS[1])
  old, new = (np.asarray(run(x)) for x in (one, two))
  same = np.tri(L, dtype=bool)
  np.testing.assert_array_equal(old[same], new[same])
  assert (old != new)[~same].any()


def test_bfloat16_computation_keeps_float32_logits_and_parameters():
  model = t5.Model(**SIZES, dtype="bfloat16", dropout=0.1)
  variables = jax.eval_shape(model.init, jax.random.key(0), INPUTS, TARGETS)
  logits, out = jax.eval_shape(
    functools.partial(model.apply, train=True),
    variables,
    INPUTS,
    TARGETS,
    rngs={"dropout": jax.random.key(0)},
  )
  assert logits.dtype == jnp.float32
  assert out["pre_logits"].dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(variant="t5_smal"), "model.variant: unknown 't5_smal'. Did you mean"),
    (dict(width=None), "config.model.width: missing"),
    (dict(num_heads=3), "num_heads: 3 does not divide the width 16"),
    (dict(depth=0), "config.model.depth: expected a whole number"),
    (dict(mlp="gelu"), "config.model.mlp: unknown 'gelu'"),
    (dict(dropout=1), "config.model.dropout: expected a number"),
    (dict(max_distance=16), "less than twice max_distance"),
    (dict(init_scale=0), "init_scale: expected a number above 0"),
    (dict(moe=dict(num_experts=2, every=2)), "does not divide decoder_depth=1"),
  ],
)
def test_wrong_options_are_errors(options, message):
  with pytest.raises(ConfigError, match=message):
    t5.Model(**SIZES | options)


def test_segments_of_one_side_only_are_an_error():
  model, variables = made()
  with pytest.raises(ConfigError, match="or neither"):
    model.apply(variables, INPUTS, TARGETS, inputs_segments=INPUTS)
