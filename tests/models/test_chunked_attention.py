"""Layers whose attention stays within chunks, as in Llama 4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import decoder_checks as checks

from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.layers import masks

pytestmark = pytest.mark.usefixtures("float64_models")

CHUNK = 6
SIZES = dict(
  variant="llama_mu",
  vocab_size=checks.VOCAB,
  init_std=0.2,
  scan=True,
  dtype="float64",
  rope_interleaved=True,
  qk_norm_after_rope=True,
  kinds={
    "chunked": dict(chunk=CHUNK, qk_norm="l2"),
    "full": dict(
      posemb="none",
      query_scale=dict(beta=0.3, original_len=4, log="log1p"),
      moe=dict(
        num_experts=4,
        top_k=2,
        score="sigmoid",
        normalize=False,
        scale_input=True,
        shared_experts=1,
        mlp_dim=16,
      ),
    ),
  },
  layers=("chunked", "full"),
  depth=4,
)


@functools.cache
def made(**changes):
  model = decoder.Model(**SIZES | changes)
  return model, checks.variables(model)


def seen(mask, queries, positions, **numbers):
  """The matrix of which positions the queries attend to."""
  q = jnp.zeros((len(positions), queries, 1))
  chunked = masks.in_chunks(mask, CHUNK, q, positions.shape[1], **numbers)
  start = numbers["first"]
  return chunked.matrix(queries, positions.shape[1], start or 0)


def test_positions_see_their_chunk_of_each_document():
  sizes = 14, 3, 8  # Of two documents, and padding.
  segments = jnp.repeat(jnp.asarray([1, 2, 0]), jnp.asarray(sizes))[None]
  mask = masks.within_documents(segments, causal=True)
  matrix = seen(mask, 25, segments, start=None, first=None)[0]
  places = np.concatenate([np.arange(n) for n in sizes])
  expected = np.zeros((25, 25), bool)
  for i in range(17):
    for j in range(i + 1):
      same = segments[0, i] == segments[0, j]
      expected[i, j] = same and places[i] // CHUNK == places[j] // CHUNK
  np.testing.assert_array_equal(matrix[:17], expected[:17])


def test_chunks_count_from_the_start_of_a_text_in_a_cache():
  mask = masks.Mask(causal=True)
  matrix = seen(mask, 4, jnp.zeros((1, 20)), start=9, first=9)[0]
  i, j = np.arange(9, 13)[:, None], np.arange(20)[None]
  expected = (j <= i) & (i // CHUNK == j // CHUNK)
  np.testing.assert_array_equal(matrix, expected)


@pytest.mark.slow
def test_generation_by_steps_and_in_parts():
  checks.check_generation(*made())
  caches = made()[0].init_cache(1, 30).groups
  assert [x.k_BNSGK.shape[2] for x in caches] == [CHUNK, 30]


@pytest.mark.slow
def test_packed_documents_give_the_logits_of_single_ones():
  checks.check_packed(*made())


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "attention"),
  [
    (dict(fsdp=2, sequence=2, tensor=2), "blockwise"),
    (dict(fsdp=2, pipeline=2, sequence=2), "ring"),
  ],
)
def test_any_mesh_has_the_gradients_of_one_device(mesh, attention):
  """With rematerialisation there, and without it here."""
  model, weights = made()
  one = checks.loss_and_grads(model, weights, True, fsdp=1)
  split = model.clone(remat_policy="nothing_saveable", attention=attention)
  result = checks.loss_and_grads(split, weights, True, **mesh)
  checks.check_gradients(result, one)


def test_a_chunk_longer_than_the_text_changes_nothing():
  model, weights = made()
  kinds = {**model.kinds, "chunked": dict(chunk=100, qk_norm="l2")}
  wide = model.clone(kinds=kinds)
  kinds = {**model.kinds, "chunked": dict(qk_norm="l2")}
  plain = model.clone(kinds=kinds)
  text = checks.tokens(1)
  results = [jax.jit(m.apply)(weights, text)[0] for m in (model, wide, plain)]
  np.testing.assert_array_equal(results[1], results[2])
  assert np.abs(results[0] - results[1]).max() > 0.1


WRONG = {
  "size": (dict(chunk=0), r"config\.model\.chunk.*at least 1"),
  "window": (
    dict(kinds={"a": dict(chunk=4, window=3)}),
    r"config\.model\.kinds\.a\.chunk=4: expected None with .*a\.window",
  ),
  "norm": (
    dict(kinds={"a": dict(qk_norm="l1")}),
    r"config\.model\.kinds\.a\.qk_norm: unknown 'l1'.*l2",
  ),
  "shared": (
    dict(kinds={"a": dict(chunk=4, shares_kv=True)}),
    r"kinds\.a\.shares_kv=True: expected False with .*a\.chunk",
  ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_errors(case):
  changes, message = WRONG[case]
  changes = dict(layers=tuple(changes.get("kinds", ()))) | changes
  with pytest.raises(ConfigError, match=message):
    decoder.Model(**SIZES | dict(kinds={}) | changes)


def test_a_prefix_is_refused():
  model, _ = made()
  with pytest.raises(ConfigError, match=r"prefix: .* config\.model\.chunk"):
    model.init(jax.random.key(0), checks.tokens(1), prefix=jnp.ones(1))
