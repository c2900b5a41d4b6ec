"""Accuracy and loss of classifiers against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny.evaluating import build, context

from bigtrain import sharding
from bigtrain.settings import ConfigError

N, C = 21, 7  # Batches of 8: the last has 5 examples.
RNG = np.random.default_rng(0)
# With ties, and rows whose best class is not the first one.
LOGITS = RNG.integers(-3, 4, size=(N, C)).astype(np.float32)
LABELS = RNG.integers(0, C, size=N)
DATA = dict(
  type="arrays",
  arrays=dict(x=LOGITS, labels=LABELS, id=np.arange(N) + 100),
)


def predict(variables, batch):
  """The logits are in the data."""
  return variables["scale"] * batch["x"]


VARIABLES = {"scale": jnp.float32(1.0)}


def cross_entropy(logits, labels):
  shifted = logits - logits.max(-1, keepdims=True)
  log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  return -(log_probs * labels).sum(-1)


def top_k(logits, labels, k):
  """Of equal logits the lower class comes first."""
  best = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
  return np.mean([label in row for row, label in zip(best, labels)])


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("batch_size", [8, 16, 32])
def test_results_are_exact_for_any_mesh_and_batch_size(mesh, batch_size):
  evaluator = build(
    "classification",
    predict,
    context(mesh=sharding.make_mesh(*mesh), batch_size=batch_size),
    data=DATA,
    top_k=(1, 3, 5, 99),
  )
  results = evaluator.run(VARIABLES, step=1)
  one_hot = np.eye(C)[LABELS]
  assert results == pytest.approx(
    {
      "loss": cross_entropy(LOGITS, one_hot).mean(),
      "acc": top_k(LOGITS, LABELS, 1),
      "top3_acc": top_k(LOGITS, LABELS, 3),
      "top5_acc": top_k(LOGITS, LABELS, 5),
    },
    rel=1e-6,
  )
  # A second run with other variables keeps nothing of the first.
  assert evaluator.run({"scale": jnp.float32(0)}, step=2)[
    "loss"
  ] == pytest.approx(np.log(C))


def test_several_labels_and_sigmoid():
  labels = RNG.integers(0, 2, size=(N, C)).astype(np.float32)
  arrays = dict(x=LOGITS, several=labels)
  results = build(
    "classification",
    predict,
    data=dict(type="arrays", arrays=arrays),
    loss="sigmoid_xent",
    label_key="several",
  ).run(VARIABLES, step=1)
  p = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
  loss = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).sum(-1).mean()
  hits = labels[np.arange(N), LOGITS.argmax(-1)].mean()
  assert results["loss"] == pytest.approx(loss, rel=1e-6)
  assert results["acc"] == pytest.approx(hits)
  assert set(results) == {"loss", "acc", "top5_acc"}


def test_num_examples():
  evaluator = build("classification", predict, data=DATA, num_examples=10)
  results = evaluator.run(VARIABLES, step=1)
  assert results["acc"] == pytest.approx(top_k(LOGITS[:10], LABELS[:10], 1))


def test_logits_of_low_precision_are_compared_in_float32():
  def low(variables, batch):
    return (batch["x"] * 100).astype(jnp.bfloat16)

  results = build("classification", low, data=DATA).run({}, 1)
  rounded = np.asarray((LOGITS * 100).astype(jnp.bfloat16), np.float32)
  loss = cross_entropy(rounded, np.eye(C)[LABELS]).mean()
  assert results["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(loss="softmax"), r"val.loss: .* mean 'softmax_xent'"),
    (dict(label_key="label"), r"evals.val: .*'label'.* mean 'labels'"),
    (dict(num_examples=99), r"val.num_examples: .* at most 21, got 99"),
    (dict(batch_size=12), r"config.evals.val.batch_size=12"),
  ],
)
def test_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    build("classification", predict, data=DATA, **options).run(VARIABLES, 1)
