"""Packing, any mesh, resumed runs and adapters, with pictures of any size.

The models are those of golden/vision_language with more ids, for the tokenizers
and processors of golden/picture_processors.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from PIL import Image
from support import any_mesh, rounding

import bigtrain
from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config.settings import Config
from bigtrain.data import supervised
from bigtrain.objective import building, published_sizes
from bigtrain.tasks import language_modeling
from bigtrain.tools import checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# {family: the folder with its processor}.
FAMILIES = {
  "qwen3_vl": "qwen3_vl",
  "qwen2_5_vl": "qwen3_vl",
  "smolvlm": "smolvlm",
  "gemma4": "gemma4",
  "llava_onevision": "llava_onevision",
}
NUM_ROWS = 24
LENGTH = 160


@pytest.fixture(scope="session", autouse=True)
def folder(tmp_path_factory):
  """A folder of rows, with configs of the families."""
  result = tmp_path_factory.mktemp("any_size")
  rng = np.random.default_rng(0)
  lines = []
  for i in range(NUM_ROWS):
    names = [f"{i}-{n}.png" for n in range(1 + i % 2)]
    for name in names:
      size = rng.integers(12, 24, 2)
      pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
      Image.fromarray(pixels).save(result / name)
    answer = "a seven" if i % 3 else "three"
    lines.append(dict(prompt="left?", completion=answer, images=names))
  (result / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
  for family in FAMILIES:
    (result / family).mkdir()
    path = GOLDEN / "vision_language" / family / "config.json"
    values = json.loads(path.read_text())
    _adapt(values, FAMILIES[family])
    (result / family / "config.json").write_text(json.dumps(values))
  return result


def _adapt(values, processor):
  """Changes a config for the ids and pictures of a processor."""
  path = GOLDEN / "picture_processors" / processor / "config.json"
  own = json.loads(path.read_text())
  if values["model_type"] in ("gemma4", "llava_onevision"):
    values["vision_config"] |= own.pop("vision_config")
  del own["model_type"]
  own.pop("vision_config", None)
  values |= own
  text = values["text_config"]
  text |= dict(vocab_size=304, max_position_embeddings=192)
  text["num_hidden_layers"] = 4  # Which two stages divide.
  if values["model_type"] == "gemma4":
    text["layer_types"] = ["sliding_attention", "full_attention"] * 2
    of_globals = text["per_layer_config"].pop("2")
    text["per_layer_config"] = {"1": of_globals, "3": of_globals}
    values["vision_config"]["position_embedding_size"] = 32
  elif "layer_types" in text:
    text["layer_types"] = ["full_attention"] * 4
  if values["model_type"] == "qwen2_5_vl":
    # Two periods of a layer with windows and one without.
    values["vision_config"]["fullatt_block_indexes"] = [1, 3]


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def data_of(folder, family, **others):
  processor = str(GOLDEN / "picture_processors" / FAMILIES[family])
  return dict(
    type="supervised",
    path=str(folder / "rows.jsonl"),
    tokenizer=processor,
    pictures=processor,
    length=LENGTH,
    **others,
  )


def config_of(folder, family, pack=False, **changes):
  config = dict(
    task="language_modeling",
    input=dict(data=data_of(folder, family, pack=pack), batch_size=8),
    model_name="vision_language",
    model=dict(published=str(folder / family), dtype="float32", scan=True),
    optimizer=dict(name="sgd", momentum=0.9),
    schedule=dict(decay_type="constant"),
    lr=0.01,
    wd=0.0,
    seed=0,
    mesh=dict(replica=1, fsdp=-1),
    evals={},
    log_steps=1,
    ckpt_steps=2,
    total_steps=4,
    tensorboard=False,
  )
  return config | changes


@functools.cache
def steps(folder, family, sizes, microbatches, pack):
  config = Config(config_of(folder, family, pack, mesh={}))
  config = published_sizes.with_published_sizes(config).to_dict()
  return any_mesh.train(config, dict(sizes), microbatches)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
  """whole(family): workdir of a finished run."""

  @functools.cache
  def run_of(family):
    workdir = tmp_path_factory.mktemp("whole") / family
    main.train(config_of(folder, family, pack=True), str(workdir))
    return workdir

  return run_of


ALONE = (("fsdp", 1),)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
  ("sizes", "microbatches", "pack"),
  [
    ((("fsdp", 2), ("tensor", 2)), 4, False),
    ((("fsdp", 2), ("pipeline", 2)), 2, True),
  ],
)
def test_microbatches_and_devices_change_nothing(
  family, sizes, microbatches, pack, folder
):
  any_mesh.check_same(
    steps(folder, family, sizes, microbatches, pack),
    steps(folder, family, ALONE, 1, pack),
    least_tokens=20,
  )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_loss_and_gradients_of_rows_alone(family, folder):
  config = Config(config_of(folder, family))
  _, model = building.model(published_sizes.with_published_sizes(config))
  batches = []
  for pack in (False, True):
    options = data_of(folder, family, pack=pack)
    del options["type"]
    source = supervised.Source(**options)
    batches.append(source.read(np.arange(len(source))))
  alone, packed = batches
  assert len(packed["tokens"]) < len(alone["tokens"])
  inputs = language_modeling.inputs(jax.tree.map(jnp.asarray, alone))
  params = jax.jit(model.init)(jax.random.key(0), **inputs)

  def loss(params, batch):
    pairs, _ = language_modeling.loss_fn(
      params, batch, None, model=model, train=False
    )
    return pairs["loss"][0]

  compute = jax.jit(jax.value_and_grad(loss))
  (want, wanted), (got, grads) = (compute(params, batch) for batch in batches)
  np.testing.assert_allclose(got, want, 1e-5)
  # The gradient of a key's bias is nothing but rounding.
  atol = 1e-5 * max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
  for (key, a), (_, b) in zip(
    *(trees.flatten_with_names(tree) for tree in (grads, wanted)), strict=True
  ):
    np.testing.assert_allclose(a, b, 1e-4, atol, err_msg=key)


# Patches, and tiles: a run's state has nothing else of its family.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_resumed_run_equals_a_whole_one(family, whole, folder, tmp_path):
  for stop in (2, None):
    config = config_of(folder, family, pack=True, stop_at_steps=stop)
    main.train(config, str(tmp_path))
  tiny.assert_same(tiny.arrays(whole(family)), tiny.arrays(tmp_path))
  assert tiny.rows(whole(family)) == tiny.rows(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_both_parts_merge(family, whole, folder, tmp_path):
  base = str(whole(family))
  run, merged = (str(tmp_path / x) for x in ("run", "merged.npz"))
  config = config_of(
    folder,
    family,
    total_steps=2,
    model_init=base,
    adapters=dict(
      targets=r".*(qkv|query|value|up|out)/kernel", rank=2, alpha=4
    ),
  )
  main.train(config, run)
  checkpoint.main(["export", run, merged, "--prefix=params"])
  options = data_of(folder, family)
  del options["type"]
  source = supervised.Source(**options)
  batch = source.read(np.arange(4))
  features = {n: batch[n] for n in ("tokens", "image", "shapes") if n in batch}
  outputs = [
    bigtrain.load(path).run("logits", features) for path in (run, base)
  ]
  assert np.abs(outputs[0] - outputs[1]).max() > 1e-4
  predictor = bigtrain.load(merged)

  def of_merged(variables):
    predictor.variables = variables
    return [predictor.run("logits", features)]

  rounding.assert_close(of_merged, predictor.variables, outputs[:1])
  names = dict(trees.flatten_with_names(bigtrain.load(run).params))
  assert {name.split("/")[0] for name in names} >= {"img", "llm"}
