"""The language modeling task: loss, packing, microbatches, generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import padding

from bigtrain import metrics, sharding
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.named_features import Features
from bigtrain.models import decoder
from bigtrain.objective import gradients
from bigtrain.tasks import language_modeling as task

V, L, B = 30, 10, 8
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model():
  return decoder.Model(
    variant="llama",
    vocab_size=V,
    width=16,
    depth=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    init_std=0.3,
    scan=True,
    logits_softcap=5.0,
  )


@pytest.fixture(scope="module")
def variables(model):
  return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, L), jnp.int32))


def texts(rows=B, length=L, seed=0):
  """Returns a batch of random texts."""
  rng = np.random.default_rng(seed)
  text = jnp.asarray(rng.integers(3, V, (rows, length + 1)), jnp.int32)
  return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def run(model, variables, batch, **options):
  fn = functools.partial(task.loss_fn, model=model, train=False, **options)
  pairs, mutable = jax.jit(lambda v, b: fn(v, b, None))(variables, batch)
  assert mutable == {}
  means = {name: x for name, x in pairs.items() if isinstance(x, tuple)}
  return {k: (float(s), float(w)) for k, (s, w) in means.items()}


def nll_of(model, variables, batch):
  """Returns (loss [B, L] by its definition, hits, log-probabilities)."""
  logits = jax.jit(lambda v, b: task.predict_fns(model)["logits"](v, b))(
    variables, batch
  )
  x = np.asarray(logits, np.float64)
  x -= np.log(np.exp(x).sum(-1, keepdims=True))
  targets = np.asarray(batch["targets"])
  nll = -np.take_along_axis(x, targets[..., None], -1)[..., 0]
  return nll, x.argmax(-1) == targets, x


@pytest.mark.parametrize("chunk", [None, 4])
def test_loss_and_accuracy_are_sums_over_tokens(model, variables, chunk):
  batch = texts()
  nll, hits, _ = nll_of(model, variables, batch)
  pairs = run(model, variables, batch, chunk=chunk)
  assert pairs["loss"] == pytest.approx((nll.sum(), B * L), rel=1e-5)
  assert pairs["accuracy"] == pytest.approx((hits.sum(), B * L))


def test_smoothing_and_z_loss(model, variables):
  batch = texts()
  nll, _, log_probs = nll_of(model, variables, batch)
  smooth = 0.9 * nll - 0.1 * log_probs.mean(-1)
  V = log_probs.shape[-1]
  others = 0.9 * nll - 0.1 / (V - 1) * (log_probs.sum(-1) + nll)
  options = dict(label_smoothing=0.1, z_loss=0.01)
  whole = run(model, variables, batch, **options)["loss"][0]
  chunked = run(model, variables, batch, chunk=3, **options)["loss"][0]
  assert whole == pytest.approx(chunked, rel=1e-5)
  plain = run(model, variables, batch, label_smoothing=0.1)["loss"][0]
  assert plain == pytest.approx(smooth.sum(), rel=1e-5)
  assert whole > plain + 0.1
  options = dict(label_smoothing=0.1, label_smoothing_over="others")
  plain = run(model, variables, batch, **options)["loss"][0]
  assert plain == pytest.approx(others.sum(), rel=1e-5)


def test_only_real_targets_count(model, variables):
  batch = texts()
  nll, _, _ = nll_of(model, variables, batch)
  mask = (RNG.random((B, L)) < 0.7).astype(np.float32)
  rows = np.array([1, 1, 0, 1, 1, 1, 1, 0], np.float32)
  batch |= {"loss_mask": jnp.asarray(mask), "_mask": jnp.asarray(rows)}
  batch["num_bytes"] = jnp.asarray(mask.sum(1) * 2)
  weight = mask * rows[:, None]
  pairs = jax.jit(task.predict_fns(model)["perplexity"])(variables, batch)
  assert pairs["loss"] == pytest.approx(
    ((nll * weight).sum(), weight.sum()), rel=1e-5
  )
  assert float(pairs["bytes"][0]) == 2 * weight.sum()
  scores = jax.jit(task.predict_fns(model)["score"])(variables, batch)
  np.testing.assert_allclose(
    scores["log_likelihood"], -(nll * weight).sum(1), rtol=1e-4, atol=1e-5
  )
  np.testing.assert_array_equal(scores["tokens"], weight.sum(1))


def test_only_targets_with_a_loss_have_logits(model, variables):
  batch = texts()
  answers = jnp.arange(L) >= L - 2
  batch["loss_mask"] = jnp.broadcast_to(answers, (B, L)).astype(jnp.float32)

  def gradients(**options):
    def total(v):
      pairs, _ = task.loss_fn(
        v, batch, None, model=model, train=False, chunk=2, **options
      )
      return pairs["loss"][0]

    fn = jax.value_and_grad(total)
    return str(jax.make_jaxpr(fn)(variables)), jax.jit(fn)(variables)

  text, want = gradients()
  sparse, got = gradients(only_weighted=True)
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5),
    want,
    got,
  )
  # The number of chunks depends on the data: a loop in place of a scan.
  assert " while[" in sparse and " while[" not in text


def test_score_marks_targets_that_greedy_decoding_predicts(model, variables):
  batch = texts()
  _, _, log_probs = nll_of(model, variables, batch)
  likeliest = jnp.asarray(log_probs.argmax(-1), jnp.int32)
  mask = np.zeros((B, L), np.float32)
  mask[:, 4:7] = 1
  targets = likeliest.at[:, 3].set(0).at[3, 5].add(1).at[:, 7:].set(0)
  batch |= {"targets": targets % V, "loss_mask": jnp.asarray(mask)}
  scores = jax.jit(task.predict_fns(model)["score"])(variables, batch)
  expected = [i != 3 for i in range(B)]
  assert np.asarray(scores["greedy"]).tolist() == expected


def test_packed_and_unpacked_have_the_same_loss_and_gradients(model, variables):
  """Compares rows of two documents with rows of one."""
  sizes = [(4, 6), (3, 5), (9, 1), (2, 2)]
  packed, alone = [], []
  rng = np.random.default_rng(1)
  for pair in sizes:
    row = np.zeros((3, L), np.int32)
    at = 0
    for number, size in enumerate(pair):
      text = rng.integers(3, V, size + 1)
      part = np.stack([text[:-1], text[1:], np.full(size, number + 1)])
      row[:, at : at + size] = part
      at += size
      single = np.zeros((3, L), np.int32)
      single[:, :size] = part
      alone.append(single)
    packed.append(row)

  def grads(rows):
    names = ("tokens", "targets", "segments")
    batch = dict(zip(names, jnp.asarray(np.stack(rows, axis=1))))

    def loss(variables):
      pairs, _ = task.loss_fn(variables, batch, None, model=model, train=False)
      return pairs["loss"][0] / pairs["loss"][1], pairs["loss"][1]

    (value, weight), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      variables
    )
    assert float(weight) == sum(map(sum, sizes))
    return float(value), grads

  value, expected = grads(alone)
  together, actual = grads(packed)
  assert together == pytest.approx(value, rel=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6),
    expected,
    actual,
  )


def test_microbatches_and_devices_change_nothing(model, variables):
  """The microbatches have different numbers of targets."""
  mask = (RNG.random((16, L)) < np.linspace(0.1, 1, 16)[:, None]) * 1.0
  batch = texts(rows=16) | {"loss_mask": jnp.asarray(mask, jnp.float32)}
  params = variables["params"]

  def gradients_of(microbatches, devices, **options):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    loss_fn = functools.partial(
      task.loss_fn, model=model, train=True, **options
    )
    with jax.set_mesh(mesh):
      placed = jax.device_put(batch, sharding.batch(mesh))
      grads, pairs, _ = jax.jit(
        lambda params, batch: gradients.make(
          loss_fn,
          trainable=jax.tree.map(lambda _: True, params),
          microbatches=microbatches,
          mesh=mesh,
        )({"params": params, "step": 0}, batch)
      )(params, placed)
    return grads, pairs["loss"]

  expected, loss = gradients_of(1, 1)
  actual, other = gradients_of(2, 8, chunk=4)
  assert tuple(map(float, other)) == pytest.approx(
    tuple(map(float, loss)), rel=1e-5
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-6),
    expected,
    jax.device_get(actual),
  )


GOLDEN = [4.0323982, 3.3150737, 2.9073875, 2.6046803]


@pytest.mark.golden
def test_golden_losses(model, variables):
  """After an intended change, update GOLDEN and give the reason."""
  batch = texts()

  @jax.jit
  def step(variables):
    def loss(variables):
      pairs, _ = task.loss_fn(
        variables,
        batch,
        jax.random.key(0),
        model=model,
        train=True,
        z_loss=1e-3,
      )
      return pairs["loss"][0] / pairs["loss"][1]

    value, grads = jax.value_and_grad(loss)(variables)
    return value, jax.tree.map(lambda p, g: p - 0.5 * g, variables, grads)

  losses = []
  for _ in GOLDEN:
    value, variables = step(variables)
    losses.append(float(value))
  assert losses == pytest.approx(GOLDEN, rel=1e-4), losses


PROMPTS = np.array([[5, 6, 7, 8], [9, 0, 0, 0], [0, 0, 0, 0], [4, 0, 11, 0]])
SHAPE = (len(PROMPTS), 4)


def by_hand(model, variables, prompt, max_new, eos_id):
  """Decodes one example greedily, without a cache."""
  forward = jax.jit(lambda t: model.apply(variables, t)[0])
  text = [int(t) for t in np.trim_zeros(prompt, "b")]
  new = []
  while text and len(new) < max_new and eos_id not in new:
    padded = jnp.asarray([text + new + [0] * (L - len(text + new))])
    logits = forward(padded)[0, len(text + new) - 1]
    new.append(int(jnp.argmax(logits)))
  return new + [0] * (max_new - len(new))


@pytest.fixture(scope="module")
def greedy(model, variables):
  fn = functools.partial(task.predict_fns(model)["generate"], max_new=6)
  batch = {"tokens": jnp.asarray(PROMPTS, jnp.int32)}
  return np.asarray(jax.jit(fn)(variables, batch))


def test_greedy_generation_matches_decoding_without_a_cache(
  model, variables, greedy
):
  # A prompt of padding stays empty. Padding inside a prompt is a token.
  expected = [by_hand(model, variables, p, 6, None) for p in PROMPTS]
  assert greedy.tolist() == expected and expected[0] != expected[1]


def test_generation_ends_at_the_eos(model, variables, greedy):
  eos_id = int(greedy[0, 2])
  fn = functools.partial(
    task.predict_fns(model)["generate"], max_new=6, eos_id=eos_id
  )
  tokens = jax.jit(fn)(variables, {"tokens": jnp.asarray(PROMPTS, jnp.int32)})
  for row, free in zip(np.asarray(tokens).tolist(), greedy.tolist()):
    end = free.index(eos_id) + 1 if eos_id in free else 6
    assert row == free[:end] + [0] * (6 - end)


@pytest.mark.parametrize(
  "options",
  [
    dict(num_beams=3),
    pytest.param(dict(temperature=1.0, top_k=9), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_windows_that_keep_a_few_positions_generate_the_same(options):
  """The prompts differ in length, and are longer than the windows."""
  model = decoder.Model(
    variant="llama",
    vocab_size=V,
    width=16,
    depth=3,
    num_heads=2,
    mlp_dim=24,
    init_std=0.5,
    scan=True,
    kinds={"local": dict(window=3), "global": dict(posemb="none")},
    layers=("local", "global"),
  )
  variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), "int32"))
  rng = np.random.default_rng(0)
  prompts = rng.integers(1, V, (4, 8)) * (np.arange(8) < [[8], [2], [5], [0]])
  batch = {"tokens": jnp.asarray(prompts, jnp.int32)}

  def draw(model):
    fn = functools.partial(task.generate, model=model, max_new=6, **options)
    return np.asarray(jax.jit(fn)(variables, batch))

  new = draw(model)
  np.testing.assert_array_equal(new, draw(Uncached(model)))
  assert len({*map(tuple, new)}) == 4


def test_a_wide_beam_search_finds_the_likeliest_continuation(model, variables):
  """Prompts of different lengths; with V beams two new tokens are exact."""
  fn = functools.partial(task.predict_fns(model)["generate"], max_new=2)
  batch = {"tokens": jnp.asarray(PROMPTS, jnp.int32)}
  wide = jax.jit(functools.partial(fn, num_beams=V))(variables, batch)
  forward = jax.jit(
    lambda text: jax.nn.log_softmax(model.apply(variables, text)[0])
  )
  pairs = np.stack(np.meshgrid(range(V), range(V)), -1).reshape(-1, 2)
  for row, prompt in zip(np.asarray(wide), PROMPTS):
    prompt = np.trim_zeros(prompt, "b")
    if not len(prompt):
      assert not row.any()
      continue
    text = np.zeros((V * V, 6), np.int32)
    n = len(prompt)
    text[:, :n], text[:, n : n + 2] = prompt, pairs
    log_p = np.asarray(forward(text))
    each = np.arange(len(text))
    score = log_p[each, n - 1, pairs[:, 0]] + log_p[each, n, pairs[:, 1]]
    assert row.tolist() == pairs[score.argmax()].tolist()
  with pytest.raises(ConfigError, match="num_beams=1 or temperature=0"):
    fn(variables, batch, num_beams=2, temperature=1.0)


class Uncached:
  """A model whose cache is the text so far, which it reads again each time."""

  def __init__(self, model):
    self._model = model

  def init_cache(self, batch_size, max_len):
    return jnp.zeros((batch_size, max_len), jnp.int32)

  def apply(self, variables, tokens, *, cache, start=0, real=None, head=True):
    cache = jax.lax.dynamic_update_slice(cache, tokens, (0, start))
    logits, _ = self._model.apply(variables, cache)
    size = tokens.shape[1]
    logits = jax.lax.dynamic_slice_in_dim(logits, start, size, axis=1)
    return logits, {"cache": cache}


@pytest.mark.slow
def test_samples_do_not_depend_on_devices_batch_order_or_cache(
  model, variables
):
  prompts = np.concatenate([PROMPTS, PROMPTS[:, ::-1]])

  def draw(devices, prompts, model=model):
    fn = functools.partial(
      task.generate, model=model, max_new=6, temperature=1.0, top_k=20
    )
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
      batch = {"tokens": jnp.asarray(prompts, jnp.int32)}
      placed = jax.device_put(batch, sharding.batch(mesh))
      return np.asarray(jax.jit(fn)(variables, placed))

  one = draw(1, prompts)
  assert (draw(8, prompts) == one).all()
  turned = np.roll(prompts, 3, axis=0)
  assert (draw(1, turned) == np.roll(one, 3, axis=0)).all()
  assert (one[[0, 1, 3]] != 0).any(axis=1).all()
  assert (draw(1, prompts, Uncached(model)) == one).all()


def test_missing_features_and_invalid_chunks(model, variables):
  with pytest.raises(ConfigError, match="no feature 'targets'"):
    data = {"tokens": texts()["tokens"]}
    run(model, variables, Features(data, "config.input"))
  with pytest.raises(ConfigError, match="loss.chunk"):
    run(model, variables, texts(), chunk=-1)


# Experts without and with a capacity, one or two of a token; packed rows.
ROUTING = [
  (None, False),
  *(
    pytest.param(moe, False, marks=pytest.mark.slow)
    for moe in (
      dict(top_k=1),
      dict(top_k=2, shared_experts=1),
      dict(top_k=1, capacity_factor=0.8),
      dict(top_k=2, capacity_factor=0.8, serve="choice"),
    )
  ),
  (dict(top_k=2, capacity_factor=0.8), True),
]


def masked_texts(packed):
  """Returns (a batch, its targets with a loss, its positions that matter)."""
  rows = np.arange(B) != 1
  weight = np.ones((B, L), np.float32)
  weight[2:6, 7:] = 0
  weight[6] = 0
  data = texts() | {"_mask": jnp.asarray(rows, jnp.float32)}
  if packed:
    numbers = 1 + (np.arange(L) > 3)
    data["segments"] = jnp.asarray(np.where(weight, numbers, 0))
  else:
    weight[:3, :4] = 0  # Prompts, which are context.
    data["loss_mask"] = jnp.asarray(weight)
  counted = (weight != 0) & rows[:, None]
  real = np.stack([counted[:, i:].any(1) for i in range(L)], axis=1)
  return data, counted, real


@pytest.mark.parametrize("moe, packed", ROUTING)
def test_masked_ids_change_neither_loss_nor_gradients(moe, packed):
  if moe:
    moe = moe | dict(num_experts=4, jitter=0.1, router_init_std=0.5)
  model = decoder.Model(
    variant="llama",
    vocab_size=V,
    width=8,
    depth=1,
    num_heads=2,
    mlp_dim=8,
    dropout=0.1,
    moe=moe,
  )
  data, counted, real = masked_texts(packed)
  other = texts(seed=1)
  changes = {
    "tokens": jnp.where(real, data["tokens"], other["tokens"]),
    "targets": jnp.where(counted, data["targets"], other["targets"]),
  }
  variables = jax.jit(model.init)(jax.random.key(0), data["tokens"])
  loss_fn = functools.partial(task.loss_fn, model=model)
  padding.assert_without_effect(loss_fn, variables, data, changes)


def test_prompts_are_context_and_what_follows_the_last_target_is_padding():
  for packed in (False, True):
    data, counted, expected = masked_texts(packed)
    real = np.asarray(task.inputs(data)["real"])
    np.testing.assert_array_equal(real, expected)
    assert (real != counted).any() != packed


def test_experts_add_losses_and_metrics():
  experts = decoder.Model(
    variant="llama",
    vocab_size=V,
    width=8,
    depth=1,
    num_heads=2,
    mlp_dim=8,
    moe=dict(num_experts=4, top_k=2),
  )
  batch = texts()
  variables = jax.jit(experts.init)(jax.random.key(0), batch["tokens"])
  pairs = run(experts, variables, batch, load_balance=0.5, router_z=0.25)
  mean = {name: total / weight for name, (total, weight) in pairs.items()}
  extra = 0.5 * mean["experts/load_balance"] + 0.25 * mean["experts/router_z"]
  assert mean["loss"] == pytest.approx(mean["nll"] + extra, rel=1e-5)
  loads = [mean[f"expert_load/{e}"] for e in range(4)]
  assert sum(loads) == pytest.approx(1) and mean["experts/dropped"] == 0
  nll, _, _ = nll_of(experts, variables, batch)
  assert mean["nll"] == pytest.approx(nll.mean(), rel=1e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_a_layer_that_is_out_of_balance_is_named(scan):
  experts = decoder.Model(
    variant="llama",
    vocab_size=V,
    width=8,
    depth=7,
    num_heads=2,
    mlp_dim=8,
    scan=scan,
    moe=dict(num_experts=4, top_k=1, score="sigmoid", selection_bias=True),
    kinds=dict(dense=dict(moe=None), experts={}),
    first_layers=("dense", "experts"),
    layers=("experts", "experts"),
  )
  batch = texts()
  variables = jax.jit(experts.init)(jax.random.key(0), batch["tokens"])
  bias = variables["router_state"]
  # Layer 5, whose third expert gets all tokens.
  if scan:
    stacked = bias["blocks"]["1"]["moe"]["selection_bias"]
    bias["blocks"]["1"]["moe"]["selection_bias"] = stacked.at[1, 2].set(3.0)
  else:
    bias["blocks_5"]["moe"]["selection_bias"] = jnp.asarray([0.0, 0, 3, 0])
  loss_fn = functools.partial(task.loss_fn, model=experts, train=False)
  pairs, _ = jax.jit(lambda v, b: loss_fn(v, b, None))(variables, batch)
  values = metrics.host_values([pairs, pairs])
  assert values["experts/peak_layer"] == 5
  assert values["experts/peak_expert"] == 2
  assert values["experts/peak_5"] == values["experts/peak_max"] == 4
  others = [values[f"experts/peak_{i}"] for i in (1, 2, 3, 4, 6)]
  assert 1 <= min(others) and max(others) < 4
  assert "experts/peak_0" not in values
  assert values["experts/max_bias"] == 3


def test_rounds_of_an_exchange_are_reported():
  experts = decoder.Model(
    variant="llama",
    vocab_size=V,
    width=8,
    depth=2,
    num_heads=2,
    mlp_dim=8,
    scan=True,
    moe=dict(
      num_experts=4,
      top_k=1,
      score="sigmoid",
      selection_bias=True,
      axis="fsdp",
      buffer_factor=0.1,
    ),
  )
  batch = texts(rows=8)
  with jax.set_mesh(sharding.make_mesh(fsdp=4, devices=jax.devices()[:4])):
    variables = jax.jit(experts.init)(jax.random.key(0), batch["tokens"])
    # The tokens of the second layer all choose the first expert.
    bias = variables["router_state"]["blocks"]["moe"]
    bias["selection_bias"] = bias["selection_bias"].at[1, 0].set(3.0)
    loss_fn = functools.partial(task.loss_fn, model=experts, train=False)
    pairs, _ = jax.jit(lambda v, b: loss_fn(v, b, None))(variables, batch)
    values = metrics.host_values([pairs])
  most = values["experts/max_rounds"]
  assert most > 1 and 1 <= values["experts/rounds"] < most


@pytest.mark.parametrize(
  "num_beams", [pytest.param(1, marks=pytest.mark.slow), 3]
)
def test_generation_where_devices_share_examples(model, variables, num_beams):
  prompts = {"tokens": texts()["tokens"].at[3, 7:].set(0)}
  fn = functools.partial(
    task.generate, model=model, max_new=5, num_beams=num_beams
  )
  expected = jax.jit(fn)(variables, prompts)
  mesh = sharding.make_mesh(fsdp=2, sequence=4)
  with jax.set_mesh(mesh):
    split = jax.device_put(prompts, sharding.batch(mesh))
    whole = jax.device_put(variables, sharding.replicated(mesh))
    actual = jax.jit(fn)(whole, split)
  np.testing.assert_array_equal(actual, expected)


def test_all_tokens_see_the_whole_prefix_and_only_it(model, variables):
  logits = jax.jit(task.predict_fns(model)["logits"])
  sizes = np.asarray([0, 1, 2, 4, 5, 7, 9, 10])
  batch = texts() | {"prefix": jnp.asarray(sizes)}
  before = np.asarray(logits(variables, batch))
  for at in range(L):
    changed = batch["tokens"].at[:, at].set(2)
    after = np.asarray(logits(variables, batch | {"tokens": changed}))
    moved = np.abs(after - before).max(-1) > 1e-6
    for row, size in enumerate(sizes):
      sees = np.arange(L) >= at if at >= size else np.ones(L, bool)
      assert moved[row].tolist() == sees.tolist(), (at, size)
  with pytest.raises(ConfigError, match="one text per example"):
    logits(variables, batch | {"segments": jnp.ones((B, L), jnp.int32)})
  window = model.clone(window=4)
  with pytest.raises(ConfigError, match="got config.model.window"):
    task.predict_fns(window)["logits"](variables, batch)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_prefix_model_generates_what_its_logits_say(
  model, variables, num_beams
):
  sizes, new = np.asarray([3, 6, 1, 5]), 4
  prompts = np.zeros((len(sizes), 6), np.int32)
  for row, size in zip(prompts, sizes):
    row[:size] = RNG.integers(3, V, size)
  batch = {"tokens": jnp.asarray(prompts), "prefix": jnp.zeros(4, jnp.int32)}
  fn = task.predict_fns(model)["generate"]
  options = dict(max_new=new, num_beams=num_beams)
  out = np.asarray(jax.jit(functools.partial(fn, **options))(variables, batch))
  logits = jax.jit(task.predict_fns(model)["logits"])
  whole = np.zeros((len(sizes), 6 + new), np.int32)
  for row, prompt, size, more in zip(whole, prompts, sizes, out):
    row[: size + new] = [*prompt[:size], *more]
  full = {"tokens": jnp.asarray(whole), "prefix": jnp.asarray(sizes)}
  scores = np.asarray(jax.nn.log_softmax(logits(variables, full)))
  if num_beams == 1:
    for row, size, more in zip(scores, sizes, out):
      assert row[size - 1 : size - 1 + new].argmax(-1).tolist() == more.tolist()
    return
  # By definition: all continuations of the two best after each token.
  row, size = whole[1], sizes[1]
  beams = [(0.0, [])]
  for _ in range(new):
    rows = np.zeros((len(beams), 6 + new), np.int32)
    for each, (_, more) in zip(rows, beams):
      each[: size + len(more)] = [*row[:size], *more]
    prefix = jnp.full(len(beams), size)
    batch = {"tokens": jnp.asarray(rows), "prefix": prefix}
    last = np.asarray(jax.nn.log_softmax(logits(variables, batch)))
    found = [
      (score + last[b, size - 1 + len(more), token], [*more, token])
      for b, (score, more) in enumerate(beams)
      for token in range(V)
    ]
    beams = sorted(found, key=lambda beam: -beam[0])[:2]
  assert out[1].tolist() == beams[0][1]
