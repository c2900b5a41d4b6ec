"""Token sources through the whole input, to the devices."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from bigtrain import lengths as lengths_lib
from bigtrain import settings, sharding
from bigtrain.data import text
from bigtrain.evaluation import evaluations as evaluators
from bigtrain.inputs import pipeline
from bigtrain.models import decoder
from bigtrain.settings import ConfigError
from bigtrain.tasks import language_modeling


def make(data=None, mesh=None, **kwargs):
  given = {"batch_size": 8, "data": data, **kwargs}
  if data is None:
    del given["data"]
  cfg = settings.Config({"input": given}).input
  mesh = mesh or sharding.make_mesh()
  return pipeline.make_train(cfg, seed=3, mesh=mesh)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
  """A text of x, and ids that are all 20, 40 windows of 16 of each."""
  folder = tmp_path_factory.mktemp("corpora")
  (folder / "x.txt").write_text("x" * 640)
  (folder / "20.bin").write_bytes(np.full(641, 20, np.uint16).tobytes())
  return folder


def test_mixtures_keep_their_weights(corpora):
  mixture = {
    "text": dict(
      data=dict(type="text", path=str(corpora / "x.txt"), length=16),
      weight=3,
      pp="drop('num_bytes')",
    ),
    "ids": dict(
      data=dict(type="tokens", path=str(corpora / "20.bin"), length=16),
      weight=1,
    ),
  }
  train = make(mixture=mixture)
  assert train.num_examples == 80
  assert pipeline.tokens_per_example(train.spec) == 16
  batches = [jax.device_get(b) for b in train.start(0, 128)]
  first = np.concatenate([b["targets"][:, 0] for b in batches])
  # Exact over a block of the schedule, 4096 rows.
  assert abs(np.mean(first == 20) - 0.25) < 0.03
  assert set(first) == {20, ord("x") + 3}
  again = jax.device_get(next(iter(train.start(100, 101))))
  for name, value in again.items():
    np.testing.assert_array_equal(value, batches[100][name])


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_has_every_byte_once(packing, tmp_path):
  for i in range(30):
    (tmp_path / f"{i:02}").write_bytes(bytes([i]) * (3 + i))
  data = dict(type="text", path=str(tmp_path / "*"), length=8, packing=packing)
  train = make(data, shuffle=True)
  source = text.Source(8, str(tmp_path / "*"), packing=packing)
  steps = -(-train.num_examples // 8)
  rows = np.concatenate(
    [jax.device_get(b)["targets"] for b in train.start(0, steps)]
  )[: len(source)]
  rows = rows[rows > 0] - 3
  assert np.bincount(rows).tolist() == [3 + i for i in range(30)]
  apart = sum(-(-(3 + i) // 8) for i in range(30))
  assert len(source) == (-(-len(rows) // 8) if packing else apart)


def test_units_count_the_tokens_of_windows(corpora):
  data = dict(type="text", path=str(corpora / "x.txt"), length=16)
  train = make(data)
  units = lengths_lib.Units(
    batch_size=8,
    examples_per_epoch=train.num_examples,
    tokens_per_example=pipeline.tokens_per_example(train.spec),
  )
  lengths = dict(total_tokens=16 * 8 * 7)
  assert lengths_lib.steps(lengths, "total", units) == 7
  assert lengths_lib.steps(dict(total_epochs=2), "total", units) == 10


def test_evaluation_reads_each_byte_once(corpora):
  data = dict(type="text", name="pydoc", split="test", length=200)
  found = pipeline.make_eval(
    data=data, pp="", batch_size=16, mesh=sharding.make_mesh()
  )
  total, targets = 0.0, 0
  for batch in found.batches():
    batch = jax.device_get(batch)
    total += (batch["num_bytes"] * batch["_mask"]).sum()
    targets += (batch["loss_mask"] * batch["_mask"][:, None]).sum()
  (size,) = text.Source(200, name="pydoc", split="test")._sizes
  assert total == targets == size
  assert found.vocab_sizes == {"tokens": 259, "targets": 259}


def test_a_model_with_fewer_ids_is_refused_before_anything_compiles(corpora):
  model = {"tokens": 200, "targets": 200}
  told = r"config.evals.val: .*'tokens' go up to 258.*vocabulary has 200"
  with pytest.raises(ConfigError, match=told):
    data = dict(type="text", path="not opened", length=16)
    pipeline.check(data=data, vocab_sizes=model, path="config.evals.val")
  # What a file's manifest or its options say is known when it is opened.
  ids = str(corpora / "20.bin")
  data = dict(type="tokens", path=ids, length=16, vocab_size=259)
  context = evaluators.Context(
    name="val",
    workdir="",
    mesh=sharding.make_mesh(),
    batch_size=8,
    pp_modules=(),
    progress=lambda done, batches: None,
    vocab_sizes=model,
  )
  with pytest.raises(ConfigError, match=told):
    evaluators.Batches(lambda v, batch: batch, context, data=data, pp="")


_NO_TENSORFLOW = """
import sys
import jax
from bigtrain import input_pipeline, main, settings, sharding
mesh = sharding.make_mesh()
folder = sys.argv[1]
options = dict(length=16, weight=1)
sources = [
  dict(type="text", name="pydoc", length=16, last="drop"),
  dict(type="tokens", path=folder + "/20.bin", length=16, last="drop"),
]
mixture = {str(i): dict(data=d, weight=1) for i, d in enumerate(sources)}
pp = "keep('tokens', 'targets')"
cfg = settings.Config(dict(batch_size=8, pp=pp, mixture=mixture))
train = input_pipeline.make_train(cfg, seed=0, mesh=mesh)
next(iter(train.start(0, 1)))
pack = dict(type="text", path=folder + "/x.txt", length=16, packing=True)
found = input_pipeline.make_eval(data=pack, pp="", batch_size=8, mesh=mesh)
assert len(list(found.batches())) == found.num_batches == 5
heavy = {"tensorflow", "torch", "tokenizers", "sentencepiece", "pyarrow"}
print(sorted(heavy & set(sys.modules)))
"""


def test_nothing_heavy_is_imported(corpora):
  command = [sys.executable, "-c", _NO_TENSORFLOW, str(corpora)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == "[]"


def test_packing_changes_neither_loss_nor_gradients(tmp_path):
  """Of a decoder, over the same documents, through the real sources."""
  for i, size in enumerate((9, 4, 30, 2, 17, 5, 11)):
    rng = np.random.default_rng(i)
    raw = rng.integers(97, 123, size, np.uint8).tobytes()
    (tmp_path / f"{i}.txt").write_bytes(raw)
  path = str(tmp_path / "*.txt")
  model = decoder.Model(
    variant="llama", vocab_size=259, width=16, depth=1, num_heads=2, max_len=12
  )
  found = []
  for packing in (False, True):
    source = text.Source(12, path, packing=packing)
    batch = source.read(np.arange(len(source)))

    def loss(variables, batch=batch):
      pairs, _ = language_modeling.loss_fn(
        variables, batch, None, model=model, train=False
      )
      total, weight = pairs["loss"]
      return total / weight, weight

    if not found:
      inputs = language_modeling.inputs(batch)
      variables = jax.jit(model.init)(jax.random.key(0), **inputs)
    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    found.append((len(batch["tokens"]), grad(variables)))
  (rows, ((loss_a, weight_a), grads_a)), (fewer, packed) = found
  (loss_b, weight_b), grads_b = packed
  assert fewer < rows and weight_a == weight_b == 78
  np.testing.assert_allclose(loss_a, loss_b, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(grads_a), jax.tree.leaves(grads_b)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
