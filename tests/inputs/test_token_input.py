"""Token sources in the whole input pipeline, up to the devices."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config import lengths as lengths_lib
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.data import text
from bigtrain.evaluation import evaluations as evaluators
from bigtrain.inputs import eval_input, pipeline
from bigtrain.models import decoder
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
  """40 windows of 16 tokens each of a text of x and of a file of ids 20."""
  folder = tmp_path_factory.mktemp("corpora")
  (folder / "x.txt").write_text("x" * 640)
  (folder / "20.bin").write_bytes(np.full(641, 20, np.uint16).tobytes())
  return folder


def test_mixtures_follow_their_weights(corpora):
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
  assert train.tokens_per_example == 16
  batches = [jax.device_get(b) for b in train.start(0, 128)]
  first = np.concatenate([b["targets"][:, 0] for b in batches])
  # Exact over a block of the schedule, which is 4096 rows.
  assert abs(np.mean(first == 20) - 0.25) < 0.03
  assert set(first) == {20, ord("x") + 3}
  again = jax.device_get(next(iter(train.start(100, 101))))
  for name, value in again.items():
    np.testing.assert_array_equal(value, batches[100][name])


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_contains_every_byte_once(packing, tmp_path):
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
  unpacked = sum(-(-(3 + i) // 8) for i in range(30))
  assert len(source) == (-(-len(rows) // 8) if packing else unpacked)


def test_lengths_in_tokens_and_epochs_count_windows(corpora):
  data = dict(type="text", path=str(corpora / "x.txt"), length=16)
  train = make(data)
  units = lengths_lib.Units(
    batch_size=8,
    examples_per_epoch=train.num_examples,
    tokens_per_example=train.tokens_per_example,
  )
  lengths = dict(total_tokens=16 * 8 * 7)
  assert lengths_lib.steps(lengths, "total", units) == 7
  assert lengths_lib.steps(dict(total_epochs=2), "total", units) == 10


def test_evaluation_contains_every_byte_once(corpora):
  data = dict(type="text", name="pydoc", split="test", length=200)
  evaluation = eval_input.make_eval(
    data=data, pp="", batch_size=16, mesh=sharding.make_mesh()
  )
  total, targets = 0.0, 0
  for batch in evaluation.batches():
    batch = jax.device_get(batch)
    total += (batch["num_bytes"] * batch["_mask"]).sum()
    targets += (batch["loss_mask"] * batch["_mask"][:, None]).sum()
  (size,) = text.Source(200, name="pydoc", split="test")._sizes
  assert total == targets == size
  assert evaluation.vocab_sizes == {"tokens": 259, "targets": 259}


def test_a_smaller_vocabulary_is_an_error_before_anything_compiles(
  corpora,
):
  model = {"tokens": 200, "targets": 200}
  message = r"config.evals.val: .*'tokens' go up to 258.*vocabulary has 200"
  with pytest.raises(ConfigError, match=message):
    data = dict(type="text", path="not opened", length=16)
    eval_input.check(data=data, vocab_sizes=model, path="config.evals.val")
  # Opening the source adds the vocabulary of its manifest or options.
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
  with pytest.raises(ConfigError, match=message):
    evaluators.Batches(context, data).map(lambda variables, batch: batch)


_NO_TENSORFLOW = """
import sys
import jax
from bigtrain import main, sharding
from bigtrain.config import settings
from bigtrain.inputs import eval_input, pipeline
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
train = pipeline.make_train(cfg, seed=0, mesh=mesh)
next(iter(train.start(0, 1)))
pack = dict(type="text", path=folder + "/x.txt", length=16, packing=True)
evaluation = eval_input.make_eval(data=pack, pp="", batch_size=8, mesh=mesh)
assert len(list(evaluation.batches())) == evaluation.num_batches == 5
heavy = {"tensorflow", "torch", "tokenizers", "sentencepiece", "pyarrow"}
print(sorted(heavy & set(sys.modules)))
"""


def test_token_sources_import_nothing_heavy(corpora):
  command = [sys.executable, "-c", _NO_TENSORFLOW, str(corpora)]
  process = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert process.returncode == 0, process.stderr
  assert process.stdout.splitlines()[-1] == "[]"


_CONFIGS_WITHOUT_TENSORFLOW = """
import pathlib, sys
from bigtrain import main, sharding
from bigtrain.config import loading, modules, settings
from bigtrain.inputs import eval_input, pipeline
from bigtrain.tools import tokenize
folder = pathlib.Path(sys.argv[1])
(folder / "a.txt").write_text("What is read, token by token. " * 2000)
for name in ("train", "val", "c4_train", "c4_validation"):
  code = tokenize.main(
    ["--tokenizer=bytes", f"--output={folder / name}", "--processes=1"]
    + [str(folder / "a.txt")]
  )
  assert not code
mesh = sharding.make_mesh()
num_configs = 0
for path in sorted(pathlib.Path("configs").glob("*.py")):
  if "tokens" not in path.read_text():
    continue
  # They take no folder of tokens.
  if path.stem in ("common", "vlm_digits", "qwen3_vl_2b"):
    continue
  key = "data_dir" if "data_dir" in path.read_text() else "data"
  config = loading.load(f"{path}:{key}={folder}")
  if config["input"]["data"]["type"] != "tokens":
    continue
  num_configs += 1
  config["input"]["batch_size"] = 8
  modules.find_module("tasks", config["task"], "task")
  modules.find_module("models", config["model_name"], "model_name")
  tracked = settings.Config(config)
  train = pipeline.make_train(tracked.input, seed=0, mesh=mesh)
  batches = train.start(0, 1)
  next(batches)
  batches.close()
  options = config["evals"]["val"]
  modules.find_module("evaluators", options["type"], "type")
  evaluation = eval_input.make_eval(
    data=options["data"],
    pp=options.get("pp", ""),
    batch_size=8,
    num_examples=8,
    mesh=mesh,
  )
  next(iter(evaluation.batches()))
print(num_configs, "tensorflow" in sys.modules, file=sys.stderr)
"""


def test_configs_with_token_files_do_not_import_tensorflow(tmp_path):
  root = pathlib.Path(__file__).parent.parent.parent
  process = subprocess.run(
    [sys.executable, "-c", _CONFIGS_WITHOUT_TENSORFLOW, str(tmp_path)],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert process.returncode == 0, process.stderr
  number, imported = process.stderr.split()[-2:]
  assert int(number) >= 7 and imported == "False"


@pytest.mark.slow
def test_packing_changes_neither_loss_nor_gradients(tmp_path):
  """For a decoder, over the same documents of the source `text`."""
  for i, size in enumerate((9, 4, 30, 2, 17, 5, 11)):
    rng = np.random.default_rng(i)
    raw = rng.integers(97, 123, size, np.uint8).tobytes()
    (tmp_path / f"{i}.txt").write_bytes(raw)
  path = str(tmp_path / "*.txt")
  model = decoder.Model(
    variant="llama", vocab_size=259, width=16, depth=1, num_heads=2, max_len=12
  )
  results = []
  for packing in (False, True):
    source = text.Source(12, path, packing=packing)
    batch = source.read(np.arange(len(source)))

    def loss(variables, batch=batch):
      pairs, _ = language_modeling.loss_fn(
        variables, batch, None, model=model, train=False
      )
      total, weight = pairs["loss"]
      return total / weight, weight

    if not results:
      inputs = language_modeling.inputs(batch)
      variables = jax.jit(model.init)(jax.random.key(0), **inputs)
    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    results.append((len(batch["tokens"]), grad(variables)))
  (rows, ((loss_a, weight_a), grads_a)), (fewer, packed) = results
  (loss_b, weight_b), grads_b = packed
  assert fewer < rows and weight_a == weight_b == 78
  np.testing.assert_allclose(loss_a, loss_b, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(grads_a), jax.tree.leaves(grads_b)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
