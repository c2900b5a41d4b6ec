"""The decoder: what positions see, options, the cache, published sizes."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from support import cases

from bigtrain.arrays import trees
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.published import blocks
from bigtrain.objective import building
from bigtrain.optim import views as optim_views

V, L = 40, 12
SIZES = dict(vocab_size=V, width=16, depth=2, num_heads=4, max_len=L)
STYLES = {
  "gpt2": dict(variant="gpt2"),
  "llama": dict(variant="llama", num_kv_heads=2, mlp_dim=24),
  "options": dict(
    variant="llama",
    num_kv_heads=1,
    head_dim=6,
    qk_norm=True,
    window=3,
    attention_softcap=2.0,
    logits_softcap=3.0,
    scan=True,
  ),
}


@functools.cache
def made(style, **changes):
  """Returns (model, variables); the large init makes positions matter."""
  model = decoder.Model(**SIZES | STYLES[style] | dict(init_std=0.3) | changes)
  return model, jax.jit(model.init)(jax.random.key(0), tokens())


def tokens(batch=2, seed=0):
  """Returns random tokens, all different within a row."""
  rng = np.random.default_rng(seed)
  return jnp.asarray([rng.permutation(V)[:L] for _ in range(batch)])


def logits_of(model, variables, tokens, **kwargs):
  run = jax.jit(lambda v, t, kw: model.apply(v, t, **kw)[0])
  return np.asarray(run(variables, tokens, kwargs))


# Of the released models: GPT-2 as counted by transformers, the others from the
# safetensors of their model cards.
@pytest.mark.parametrize(
  "variant, published",
  [
    ("gpt2_124m", 124_439_808),
    ("gpt2_355m", 354_823_168),
    ("gpt2_774m", 774_030_080),
    ("gpt2_1558m", 1_557_611_200),
    ("llama_1b", 1_235_814_400),
    ("llama_8b", 8_030_261_248),
    ("llama_70b", 70_553_706_496),
    ("mixtral_8x7b", 46_702_792_704),
    ("qwen3_0_6b", 596_049_920),
    ("gemma3_1b", 999_885_952),
    ("smollm3_3b", 3_075_098_624),
    ("gpt_oss_20b", 20_914_757_184),
    # Counted by transformers.
    ("qwen3_next_80b", 79_674_391_296),
    ("qwen3_235b", 235_093_634_560),
    ("qwen3_5_9b", 8_953_803_264),
    ("gemma4_26b_a4b", 25_233_141_760 + 30),  # With the layers' scalars.
    # Counted by transformers for the sizes of their config.json.
    ("deepseek_v3", 671_026_404_352),
    ("kimi_k2", 1_026_408_209_408),
  ],
)
def test_variants_have_the_published_number_of_parameters(variant, published):
  model = decoder.Model(variant=variant, scan=True)
  shapes = jax.eval_shape(
    model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
  )
  leaves = jax.tree.leaves(shapes["params"])
  assert sum(math.prod(x.shape) for x in leaves) == published


@pytest.mark.slow
def test_scan_and_remat_do_not_change_loss_or_gradients():
  def loss_and_grads(scan, remat_policy):
    model, variables = made("llama", scan=scan, remat_policy=remat_policy)

    def loss(variables):
      logits, _ = model.apply(variables, tokens())
      return jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss))(variables)
    blocks = grads["params"]
    if not scan:
      each = [blocks[f"blocks_{i}"] for i in range(2)]
      blocks = {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *each)}
    return float(value), blocks["blocks"]

  value, grads = loss_and_grads(False, "none")
  other, other_grads = loss_and_grads(True, "nothing_saveable")
  assert other == pytest.approx(value, rel=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
    grads,
    other_grads,
  )


@functools.cache
def _gradients(**changes):
  """Returns a compiled function: gradients of the tokens' embeddings.

  Its arguments are the segments and a mask of the positions whose logits are
  differentiated.
  """
  model, variables = made("llama", **changes)
  t = tokens(1)

  @jax.jit
  def run(segments, of):
    def total(embedding):
      params = variables["params"] | {"token_embedding": embedding}
      logits, _ = model.apply({"params": params}, t, segments=segments)
      return jnp.sum(jnp.sin(logits[0]) * of[:, None])

    return jax.grad(total)(variables["params"]["token_embedding"])[t[0]]

  return run


def _influence(of, documents=((1, L),), **changes):
  """The positions whose embeddings the logits at `of` depend on."""
  segments = jnp.asarray([[d for d, size in documents for _ in range(size)]])
  of = jnp.isin(jnp.arange(L), jnp.asarray(of))
  grads = np.asarray(_gradients(**changes)(segments, of))
  return np.flatnonzero(np.abs(grads).max(axis=-1)).tolist()


def test_a_token_sees_itself_and_earlier_tokens():
  assert _influence([5]) == [0, 1, 2, 3, 4, 5]


def test_no_token_sees_another_document():
  documents = ((1, 4), (2, 5), (0, 3))
  assert _influence([8], documents) == [4, 5, 6, 7, 8]
  assert _influence([0, 1, 2, 3], documents) == [0, 1, 2, 3]


EXPERTS = dict(num_experts=4, jitter=0.2, router_init_std=1.0)
CAUSAL = {
  "gpt2": dict(variant="gpt2", dropout=0.1, depth=1),
  "window, caps": STYLES["options"] | dict(scan=False, depth=1),
  "window, caps, scan": STYLES["options"],
  "one expert": dict(moe=EXPERTS | dict(top_k=1, dropout=0.1), depth=1),
  "two experts, one shared, scan": dict(
    moe=EXPERTS | dict(top_k=2, shared_experts=1), scan=True
  ),
  "capacity, one expert": dict(
    moe=EXPERTS | dict(top_k=1, capacity_factor=0.7, dropout=0.1), depth=1
  ),
  "capacity, two experts, scan": dict(
    moe=EXPERTS | dict(top_k=2, capacity_factor=0.7), scan=True
  ),
}


def _changed_logits(**options):
  """Returns which logits change if row t - 1 has other tokens from t on.

  Returns:
    bool [L - 1, L, V] without segments and with, bool [L - 1, L]: whether a
    position is before its row's t.
  """
  sizes = SIZES | STYLES["llama"] | dict(init_std=0.3)
  model = decoder.Model(**sizes | options)
  row, other = tokens(2)
  variables = jax.jit(model.init)(jax.random.key(0), row[None])
  segments = jnp.tile(jnp.asarray([1] * 5 + [2] * 4 + [3] * 3), (L - 1, 1))

  @jax.jit
  def run(text):
    apply = lambda **kwargs: model.apply(
      variables,
      text,
      train=True,
      rngs={"dropout": jax.random.key(0)},
      **kwargs,
    )[0]
    return apply(), apply(segments=segments)

  text = jnp.tile(row, (L - 1, 1))
  before = np.arange(L) < np.arange(1, L)[:, None]
  old, new = (run(x) for x in (text, jnp.where(before, text, other)))
  return *(np.asarray(a != b) for a, b in zip(old, new)), before


def test_some_options_of_a_variants_experts_may_change():
  model = functools.partial(decoder.Model, variant="deepseek_mu", vocab_size=8)
  of_variant = model().moe
  assert model(moe=dict(axis="fsdp")).moe == of_variant._replace(axis="fsdp")
  whole = model(moe=dict(num_experts=4)).moe
  assert whole.num_experts == 4 and whole.score == "softmax"


@pytest.mark.parametrize(
  "name",
  cases.quick(
    CAUSAL, "gpt2", "window, caps, scan", "capacity, two experts, scan"
  ),
)
def test_no_later_token_changes_a_logit(name):
  alone, packed, before = _changed_logits(**CAUSAL[name])
  assert alone[~before].any() and packed[~before].any()
  assert not alone[before].any() and not packed[before].any()


@pytest.mark.slow
def test_first_choices_that_are_served_first_see_later_tokens():
  moe = EXPERTS | dict(top_k=2, capacity_factor=0.7, serve="choice")
  alone, _, before = _changed_logits(moe=moe)
  assert alone[before].any()


def test_a_window_limits_the_tokens_seen():
  shallow = dict(depth=1, window=3)
  assert _influence([7], **shallow) == [5, 6, 7]
  assert _influence([7], ((1, 6), (2, 6)), **shallow) == [6, 7]


@pytest.mark.parametrize(
  "style", [pytest.param("gpt2", marks=pytest.mark.slow), "options"]
)
def test_packed_documents_give_the_logits_of_single_documents(style):
  model, variables = made(style)
  first, second = tokens(seed=1)[0], tokens(seed=2)[0]
  packed = jnp.concatenate([first[:5], second[:4], first[:3]])[None]
  segments = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3])
  together = logits_of(model, variables, packed, segments=segments)[0]
  # Later tokens have no influence, as tested above.
  alone = logits_of(model, variables, jnp.stack([first, second]))
  np.testing.assert_allclose(together[:5], alone[0, :5], atol=2e-5)
  np.testing.assert_allclose(together[5:9], alone[1, :4], atol=2e-5)
  if style == "gpt2":
    positions = jnp.asarray([[*range(5), *range(4), *range(3)]])
    same = logits_of(
      model, variables, packed, segments=segments, positions=positions
    )
    np.testing.assert_array_equal(together, same[0])


@pytest.mark.parametrize("style", cases.quick(["gpt2", "options"], "options"))
def test_decoding_with_the_cache_gives_the_same_logits(style):
  model, variables = made(style)
  t = tokens()
  whole = logits_of(model, variables, t)
  step = jax.jit(lambda t, c, s: model.apply(variables, t, cache=c, start=s))
  logits, out = step(t[:, :5], model.init_cache(2, L), 0)
  parts = [logits]
  for i in range(5, L):
    logits, out = step(t[:, i : i + 1], out["cache"], i)
    parts.append(logits)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, atol=2e-5)


def test_reading_a_prompt_into_the_cache_drops_no_token():
  sizes = SIZES | STYLES["llama"] | dict(depth=1)
  plain = decoder.Model(**sizes, moe=EXPERTS)
  limited = decoder.Model(**sizes, moe=EXPERTS | dict(capacity_factor=0.5))
  variables = jax.jit(plain.init)(jax.random.key(0), tokens())
  read = jax.jit(
    lambda t: limited.apply(variables, t, cache=limited.init_cache(2, L))
  )
  logits, out = read(tokens())
  whole = logits_of(plain, variables, tokens())
  np.testing.assert_allclose(logits, whole, atol=2e-5)
  assert out["moe"]["dropped"] == 0


def test_rotary_positions_are_relative():
  model, variables = made("llama")
  here = logits_of(model, variables, tokens())
  positions = jnp.arange(L)[None] + 50
  there = logits_of(model, variables, tokens(), positions=positions)
  np.testing.assert_allclose(here, there, atol=1e-4)
  stretched = logits_of(model, variables, tokens(), positions=2 * positions)
  assert np.abs(here - stretched).max() > 0.01


def test_a_softcap_bounds_the_logits():
  model, variables = made("options", attention_softcap=None)
  loud = jax.tree.map(lambda x: 20 * x, variables)
  capped = logits_of(model, loud, tokens())
  assert 2.9 < np.abs(capped).max() <= 3


def test_bfloat16_is_close_and_its_logits_are_float32():
  model, variables = made("llama")
  exact = logits_of(model, variables, tokens())
  low = decoder.Model(
    **SIZES | STYLES["llama"] | dict(init_std=0.3, dtype="bfloat16")
  )
  logits = logits_of(low, variables, tokens())
  assert logits.dtype == np.float32
  assert 0 < np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_dropout_acts_only_in_training():
  model, variables = made("gpt2", dropout=0.5, depth=1)

  @functools.partial(jax.jit, static_argnums=1)
  def run(seed, train):
    rngs = {"dropout": jax.random.key(seed)}
    return model.apply(variables, tokens(), rngs=rngs, train=train)[0]

  assert (run(1, False) == run(2, False)).all()
  assert (run(1, True) != run(2, True)).any()


def test_embedding_multipliers_are_rounded_as_the_embeddings():
  """Gemma's root of 3072, 55.43, is 55.5 in bfloat16."""
  model = decoder.Model(
    **SIZES | dict(width=3072, depth=1, head_dim=4, mlp_dim=4),
    variant="llama",
    embed_multiplier="sqrt_width",
    dtype="bfloat16",
  )
  t = tokens()
  shapes = jax.eval_shape(model.init, jax.random.key(0), t)
  params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes["params"])
  steps = 1 + jnp.arange(128) / 128  # All values of bfloat16 from 1 to 2.
  params["token_embedding"] = jnp.tile(steps, (V, 3072 // 128))
  _, state = model.apply(
    {"params": params},
    t,
    capture_intermediates=lambda module, _: module.name == "Dropout_0",
  )
  (x_BLD,) = state["intermediates"]["Dropout_0"]["__call__"]
  expected = (steps * 55.5).astype(jnp.bfloat16)
  np.testing.assert_array_equal(x_BLD[0, 0, :128], expected)
  assert (expected != (steps * 3072**0.5).astype(jnp.bfloat16)).any()


def test_kinds_can_be_changed_at_the_command_line():
  config = ml_collections.ConfigDict(
    dict(
      model_name="decoder",
      model=SIZES
      | dict(
        kinds=dict(local=dict(window=4), all=dict(moe=None)),
        layers=("local", "all"),
      ),
    )
  )
  loading.override(config, "model.kinds.local.window=2")
  loading.override(config, "model.kinds.all.num_kv_heads=2")
  config = settings.Config(config)
  _, model = building.model(config)
  assert model.kinds["local"]["window"] == 2
  assert model.kinds["all"]["num_kv_heads"] == 2
  config.check_all_read()
  again = json.loads(settings.to_json(config.to_dict()))
  _, model = building.model(settings.Config(again))
  assert model.layers == ("local", "all")
  again["model"]["kinds"]["local"]["windw"] = 2
  with pytest.raises(ConfigError, match="windw.*'window'"):
    building.model(settings.Config(again))


def test_options_of_latent_attention_change_those_of_a_variant():
  build = functools.partial(decoder.Model, "deepseek_mu", vocab_size=V)
  plain, changed = build(), build(mla=dict(v_dim=16))
  assert changed.mla == plain.mla._replace(v_dim=16)
  # Complete ones replace them: here without a rank of the queries.
  options = dict(kv_rank=8, nope_dim=4, rope_dim=4, v_dim=8)
  assert plain.mla.q_rank and build(mla=options).mla.q_rank is None
  with pytest.raises(ConfigError, match="mla.kv_rnk: .*mean 'kv_rank'"):
    build(mla=dict(kv_rnk=8))


def test_kinds_of_a_variant_can_be_changed_one_by_one():
  def model_of(**kinds):
    model = dict(variant="qwen3_next_mu", vocab_size=V, kinds=kinds)
    config = dict(model_name="decoder", model=model)
    return building.model(settings.Config(config))[1]

  plain = decoder.VARIANTS["qwen3_next_mu"]["kinds"]
  model = model_of(linear=dict(deltanet=dict(conv_width=2)))
  linear = model.kinds["linear"]["deltanet"]
  assert linear["conv_width"] == 2
  heads = plain["linear"]["deltanet"]["num_heads"]
  assert linear["num_heads"] == heads
  assert dict(model.kinds["full"]) == plain["full"]
  # Kinds that are all given replace those of the variant.
  model = model_of(linear=dict(window=2), full={})
  assert model.kinds["linear"] == dict(window=2)
  with pytest.raises(ConfigError, match="kinds.liner: .*mean 'linear'"):
    model_of(liner=dict(window=2))


@pytest.mark.slow
def test_the_same_key_initialises_a_loop_and_unrolled_layers_alike():
  options = STYLES["llama"] | dict(
    depth=4,
    kinds={"dense": {}, "a": dict(window=2), "b": dict(num_kv_heads=4)},
    layers=("a", "b"),
    first_layers=("dense",),
  )
  made = [
    jax.jit(decoder.Model(**SIZES | options, scan=scan).init)(
      jax.random.key(0), tokens()
    )["params"]
    for scan in (False, True)
  ]
  separate, stacked = (
    {n: np.asarray(x) for n, x in trees.flatten_with_names(params)}
    for params in made
  )
  again = blocks.restack_blocks(stacked, separate, block="blocks")
  assert again.keys() == separate.keys()
  jax.tree.map(np.testing.assert_array_equal, again, separate)
  kernel = separate["blocks_0/mlp/up/kernel"]
  assert all(
    (kernel != separate[f"blocks_{i}/mlp/up/kernel"]).all() for i in range(1, 4)
  )
  views = optim_views.of_model(
    decoder, decoder.Model(**SIZES | options), made[1]
  )
  assert views["blocks/1/attention/key/kernel"].stack == (0,)
  assert views["blocks_0/attention/key/kernel"].stack == ()


def test_token_ids_outside_the_vocabulary_give_nan():
  model, variables = made("gpt2")
  bad = tokens().at[0, 3].set(V)
  logits = logits_of(model, variables, bad)
  assert np.isnan(logits[0, 3:]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(variant="gpt2_124M"), "variant.*'gpt2_124m'"),
    (dict(width=None), "width: missing"),
    (dict(max_len=None), "max_len: missing"),
    (dict(num_heads=3), "num_heads: 3 does not divide the width 16"),
    (dict(num_kv_heads=3), "num_kv_heads: 3 does not divide"),
    (dict(depth=0), "depth: expected a whole"),
    (dict(window=0), "window: expected a whole"),
    (dict(norm="rms"), "norm: unknown 'rms'"),
    (dict(posemb="rope", head_dim=3), "head_dim: rotary"),
    (dict(rope_scaling=dict(factor=2)), "rope_scaling: unknown type"),
    (
      dict(rope_scaling=dict(type="linear", fctor=2.0)),
      "rope_scaling.fctor: unknown key of type 'linear'. Did you mean 'factor'",
    ),
    (
      dict(rope_scaling=dict(type="yarn", factor=2.0)),
      "rope_scaling: type 'yarn' needs factor, original_len; missing: orig",
    ),
    (
      dict(
        posemb="rope",
        rope_scaling=dict(
          type="longrope",
          short_factor=(1.0,),
          long_factor=(1.0, 2.0),
          original_len=8,
        ),
      ),
      "rope_scaling.short_factor: expected 2 numbers",
    ),
    (dict(posemb="rope", rope_fraction=0.3), "head_dim: rotary .* got 1, of"),
    (dict(norm_at="psot"), "norm_at: unknown 'psot'. Did you mean 'post'"),
    (dict(norm_at="post", parallel=True), "norm_at: expected 'pre' with"),
    (dict(norm_offset=0.5), "norm_offset: expected 0 or 1"),
    (dict(use_bias=("qvk",)), "use_bias: unknown 'qvk'. Did you mean 'qkv'"),
    (dict(use_bias="qkv"), "use_bias: expected a list of names"),
    (dict(qk_norm="heads"), "qk_norm: unknown 'heads'. Did you mean 'head'"),
    (dict(qkv_clip=0), "qkv_clip: expected a number above 0"),
    (dict(embed_multiplier="sqrt"), "embed_multiplier: unknown 'sqrt'"),
    (dict(residual_multiplier=0), "residual_multiplier: expected a number"),
    (dict(query_scale=dict(beta=0.1)), "query_scale.original_len: missing"),
    (dict(kinds=dict(local={})), "layers: missing"),
    (dict(layers=("local",)), "layers: unknown 'local'"),
    (
      dict(kinds=dict(local=dict(windw=2)), layers=("local",)),
      "kinds.local.windw: unknown key. Did you mean 'window'",
    ),
    (
      dict(kinds=dict(local=dict(window=0)), layers=("local",)),
      "kinds.local.window: expected a whole number",
    ),
    (
      dict(
        kinds=dict(
          a=dict(moe=EXPERTS), b=dict(moe=EXPERTS | {"num_experts": 2})
        ),
        layers=("a", "b"),
      ),
      "same moe.num_experts in all kinds with experts, got 2, 4",
    ),
    (
      dict(kinds=dict(local={}), layers=("loacl",)),
      "layers: unknown 'loacl'. Did you mean 'local'",
    ),
    (
      dict(kinds=dict(local={}), layers=(), first_layers=("local",) * 3),
      "first_layers: 3 layers, but depth=2",
    ),
    (dict(remat_policy="all"), "remat_policy"),
    (dict(dropout=1.0), "dropout"),
  ],
)
def test_wrong_options_are_errors(changes, message):
  with pytest.raises(ConfigError, match=message):
    decoder.Model(**SIZES | changes)


def test_texts_that_are_too_long_are_errors():
  model, variables = made("gpt2")
  with pytest.raises(ConfigError, match="texts of 13 tokens"):
    model.apply(variables, jnp.zeros((1, 13), jnp.int32))
  with pytest.raises(ConfigError, match="max_len=13: the model has only 12"):
    model.init_cache(1, 13)
