"""The contrastive task: microbatches, devices, padding and options."""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_losses
from support import processes

from bigtrain import metrics, sharding
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.named_features import Features
from bigtrain.models.layers import pooling
from bigtrain.objective import gradients, microbatching
from bigtrain.reports import writers
from bigtrain.step import keys
from bigtrain.tasks import contrastive as task

B, L = 32, 5
RNG = np.random.default_rng(0)
BATCH = {
  "image": RNG.normal(size=(B, 4, 4, 1)).astype(np.float32),
  "labels": RNG.integers(0, 11, size=(B, L)).astype(np.int32),
}


class Towers(nn.Module):
  """A minimal model; transformers would take minutes to compile."""

  vocab_size: int = 11

  @nn.compact
  def __call__(self, image=None, text=None, *, train=False):
    del train
    z_image = z_text = None
    out = {}
    if image is not None:
      out["img/pre_logits"] = image.reshape(len(image), -1)
      z_image = pooling.normalise(
        nn.Dense(8, name="img")(out["img/pre_logits"])
      )
    if text is not None:
      rows = nn.Embed(self.vocab_size, 8, name="txt")(text)
      z_text = pooling.normalise(jnp.tanh(rows).sum(1))
    self.param("t", nn.initializers.constant(np.log(4.0)), (1,))
    self.param("b", nn.initializers.constant(-2.0), (1,))
    return z_image, z_text, out


MODEL = Towers()


@pytest.fixture(scope="module")
def params():
  return jax.jit(MODEL.init)(jax.random.key(0), **task.inputs(BATCH))["params"]


def dense_loss(params, batch, kind):
  """Computes the papers' formulas with the logits of all pairs."""
  image, text, _ = MODEL.apply({"params": params}, **task.inputs(batch))
  logits = jnp.exp(params["t"]) * image @ text.T
  if kind == "softmax":
    rows = jnp.diag(jax.nn.log_softmax(logits, axis=1))
    columns = jnp.diag(jax.nn.log_softmax(logits, axis=0))
    return -jnp.mean(rows + columns) / 2
  signs = 2 * jnp.eye(len(image)) - 1
  logits = logits + params["b"]
  return -jnp.sum(jax.nn.log_sigmoid(signs * logits)) / len(image)


@pytest.fixture(scope="module")
def expected(params):
  return {
    kind: jax.device_get(
      jax.jit(
        jax.value_and_grad(lambda p, kind=kind: dense_loss(p, BATCH, kind))
      )(params)
    )
    for kind in task.KINDS
  }


def gradients_of(
  params, mesh_sizes, microbatches, kind, trainable=None, **extra
):
  """Returns (gradients, pairs) of a training step."""
  mesh = sharding.make_mesh(
    *mesh_sizes, devices=jax.devices()[: mesh_sizes[0] * mesh_sizes[1]]
  )
  trainable = trainable or jax.tree.map(lambda _: True, params)
  options = dict(kind=kind, chunk=6)

  def loss_fn(variables, batch, rng):
    return task.loss_fn(
      variables, batch, rng, model=MODEL, train=True, **options
    )

  @jax.jit
  def fn(params, batch):
    return gradients.make(
      loss_fn,
      trainable=trainable,
      microbatches=microbatches,
      mesh=mesh,
      two_pass=gradients.two_pass_loss(task, MODEL, options),
    )({"params": params, "step": 0, **extra}, batch)[:2]

  with jax.set_mesh(mesh):
    batch = jax.device_put(BATCH, sharding.batch(mesh))
    params = jax.device_put(params, sharding.replicated(mesh))
    return jax.device_get(fn(params, batch))


def assert_close(grads, others):
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# Several numbers of microbatches on one device and on eight, for both losses.
@pytest.mark.parametrize(
  ("kind", "mesh_sizes", "microbatches"),
  [
    ("sigmoid", (1, 1), 1),
    ("sigmoid", (2, 4), 2),
    ("sigmoid", (1, 8), 4),
    ("softmax", (2, 4), 4),
    ("softmax", (1, 1), 2),
  ],
)
def test_loss_and_gradients_equal_the_dense_formulas(
  params, expected, kind, mesh_sizes, microbatches
):
  loss, grads = expected[kind]
  actual, pairs = gradients_of(params, mesh_sizes, microbatches, kind)
  assert metrics.means(pairs)["loss"] == pytest.approx(loss, rel=1e-5)
  assert pairs["loss"][1] == B
  if kind == "softmax":  # The softmax loss has no bias.
    np.testing.assert_array_equal(actual["b"], 0)
  assert_close(actual, grads)


def test_locked_towers_and_scaled_losses(params, expected):
  """LiT: frozen parameters have no gradient, the others the same as before."""
  trainable = jax.tree.map(lambda _: True, params)
  trainable["img"] = jax.tree.map(lambda _: False, params["img"])
  actual, _ = gradients_of(
    params,
    (2, 4),
    2,
    "sigmoid",
    trainable,
    loss_scale={"scale": jnp.float32(2.0**10)},
  )
  assert set(actual) == {"txt", "t", "b"}
  grads = {k: v for k, v in expected["sigmoid"][1].items() if k != "img"}
  assert_close(actual, grads)


class Counting(nn.Module):
  """Two linear towers with batch statistics and dropout."""

  @nn.compact
  def __call__(self, image=None, text=None, *, train=False):
    x = nn.Dense(3, name="x")(image.reshape(len(image), -1))
    mean = self.variable("stats", "mean", jnp.zeros, (3,))
    if train:
      mean.value += 0.1 * jax.lax.stop_gradient(x.mean(0))
    x = nn.Dropout(0.5)(x - mean.value, deterministic=not train)
    y = nn.Embed(11, 3)(text).sum(1)
    self.param("t", nn.initializers.zeros, (1,))
    return x, y, {}


def test_both_passes_see_the_same_dropout_and_statistics():
  model = Counting()
  init = jax.jit(model.init)
  variables = dict(init(jax.random.key(0), **task.inputs(BATCH)))
  params = variables.pop("params")
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  rng = keys.step_key(0, 0)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def plain(params):
    parts = microbatching.split(BATCH, 2, mesh)
    mutable, embeddings = variables, []
    for i in range(2):
      part = {k: v[i] for k, v in parts.items()}
      z, mutable = task.embed_fn(
        {"params": params, **mutable},
        part,
        jax.random.fold_in(rng, i),
        model=model,
        train=True,
      )
      embeddings.append(z)
    whole = {
      k: jnp.stack([z[k] for z in embeddings], 1).reshape(B, 3)
      for k in ("image", "text")
    }
    pairs = task.embeddings_loss_fn(params, whole, BATCH, kind="softmax")
    return metrics.means(pairs)["loss"], mutable

  @jax.jit
  def in_two_passes(params):
    return gradients.make(
      None,
      trainable=jax.tree.map(lambda _: True, params),
      microbatches=2,
      mesh=mesh,
      two_pass=gradients.two_pass_loss(task, model, {"kind": "softmax"}),
    )({"params": params, "mutable": variables, "step": 0}, BATCH)

  (loss, mutable), grads = plain(params)
  actual, pairs, new_mutable = in_two_passes(params)
  assert metrics.means(pairs)["loss"] == pytest.approx(float(loss), rel=1e-5)
  assert_close(actual, grads)
  assert_close(new_mutable, mutable)


@pytest.mark.slow
@pytest.mark.golden
def test_golden_losses(tmp_path):
  """Compares the first steps of digits_siglip with recorded ones.

  After an intended change, run tests/golden/make_losses.py; see its docstring.
  """
  actual = make_losses.make(
    str(tmp_path),
    "digits_siglip",
    mesh=dict(replica=2, fsdp=4),
    microbatches=2,
    compile_cache=False,
  )
  golden = json.loads(make_losses.FILES["digits_siglip"].read_text())
  np.testing.assert_allclose(actual["loss"], golden["loss"], rtol=1e-4)
  np.testing.assert_allclose(
    actual["grad_norm"], golden["grad_norm"], rtol=1e-3
  )


@pytest.mark.results
def test_digits_siglip_reaches_its_result(tmp_path):
  command = processes.main_command("configs/digits_siglip.py", tmp_path)
  ended = processes.run(command, timeout=1200)
  assert ended.returncode == 0, ended.stderr[-3000:]
  rows = writers.read_rows(str(tmp_path))
  assert rows[-1]["zeroshot/acc"] >= 0.95


def test_predictions_and_padding(params):
  variables = {"params": params}
  fns = task.predict_fns(MODEL)
  image, text, out = MODEL.apply(variables, **task.inputs(BATCH))
  np.testing.assert_allclose(fns["image"](variables, BATCH), image, rtol=1e-5)
  np.testing.assert_allclose(fns["text"](variables, BATCH), text, rtol=1e-5)
  np.testing.assert_allclose(
    fns["pre_logits"](variables, BATCH), out["img/pre_logits"], rtol=1e-5
  )
  assert set(fns["embed"](variables, {"image": BATCH["image"]})) == {"image"}
  several = BATCH["labels"].reshape(B // 2, 2, L)
  actual = fns["embed"](variables, {"labels": several})
  assert set(actual) == {"text"}
  np.testing.assert_allclose(
    actual["text"].reshape(B, -1), text, rtol=1e-4, atol=1e-6
  )
  # Padding matches nothing, even if it is not finite.
  real = {k: v[:20] for k, v in BATCH.items()}
  mask = np.float32(np.arange(B) < 20)
  spoilt = np.where(mask[:, None, None, None] > 0, BATCH["image"], np.nan)
  pairs = fns["loss"](variables, {**BATCH, "image": spoilt, "_mask": mask})
  means = metrics.means(pairs)
  assert means["loss"] == pytest.approx(
    float(dense_loss(params, real, "sigmoid")), rel=1e-5
  )
  assert pairs["loss"][1] == 20
  assert means["temperature"] == pytest.approx(4.0)
  assert means["bias"] == pytest.approx(-2.0)
  scores = image[:20] @ text[:20].T
  hits = (scores.argmax(1) == np.arange(20)).mean()
  assert means["accuracy"] == pytest.approx(hits)


def test_vocab_sizes():
  assert task.vocab_sizes(MODEL) == {"labels": 11}
  assert task.vocab_sizes(Counting()) == {}


@pytest.mark.parametrize(
  ("changes", "options", "message"),
  [
    ({}, dict(kind="sigmod"), "config.loss.kind: .* mean 'sigmoid'"),
    (
      {"labels": None},
      {},
      "config.input: after pp, the examples have no feature 'labels'",
    ),
    ({"image": None}, {}, "no feature 'image'"),
    ({"b": None}, {}, "bias_init: the sigmoid loss needs a bias"),
  ],
)
def test_invalid_options_and_batches(params, changes, options, message):
  drop = lambda tree: {k: v for k, v in tree.items() if k not in changes}
  with pytest.raises(ConfigError, match=message):
    pairs = task.embeddings_loss_fn(
      drop(params),
      {"image": jnp.ones((2, 3)), "text": jnp.ones((2, 3))},
      {},
      **options,
    )
    task.inputs(Features(drop(BATCH), "config.input"))
    raise AssertionError(pairs)
