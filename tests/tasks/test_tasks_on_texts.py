"""Tasks on texts: the same on any mesh, in microbatches, and after a restart.

Preferences, rewards, classes, embeddings and teachers: CASES has their configs.
"""

import functools
import json

import jax
import numpy as np
import pytest
import tiny
from support import any_mesh, cases

import bigtrain
from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.data import supervised
from bigtrain.models import decoder
from bigtrain.tasks import language_modeling

ROWS = [
  {
    "text": f"{i} and {i % 3}",
    "pair": "x" * (i % 5 + 1),
    "label": i % 3,
    "number": i / 8,
    "prompt": f"{i}+1=",
    "completion": "z" * (i % 6 + 1),
    "chosen": "y" * (i % 7 + 1),
    "rejected": "n" * (i % 4 + 1),
    "others": ["m" * (i % 3 + 1), f"{i}"],
  }
  for i in range(24)
]
PAIR = "strfmt('{text}: {pair}')|tokenize(max_len=24, pad=-1, key_result='%s')"
TEXT = PAIR % "tokens"
PAIRS = dict(
  type="supervised",
  tokenizer="bytes",
  length=24,
  preferences=True,
  rows="preference",
)
SIZES = dict(
  variant="llama", vocab_size=264, width=16, depth=1, num_heads=2, mlp_dim=24
)
TEACHER = dict(model_name="decoder", model=SIZES, model_init=None)
# {name: (changes of the config, changes of the model)}.
CASES = {
  "preference": (
    dict(
      task="preference",
      loss=dict(kind="sigmoid", beta=1.0),
      input=dict(data=PAIRS),
      teacher=TEACHER,
    ),
    {},
  ),
  "reward": (
    dict(
      task="preference",
      loss=dict(kind="reward", center=0.01),
      input=dict(data=PAIRS),
    ),
    dict(num_classes=1),
  ),
  "classes": (
    dict(
      task="classification",
      input=dict(
        data=dict(type="jsonl"),
        pp=TEXT + "|copy('label', 'labels')|keep('tokens', 'labels')",
      ),
    ),
    dict(num_classes=3, pool="mean"),
  ),
  "regression": (
    dict(
      task="classification",
      loss=dict(kind="squared_error"),
      lr=0.01,
      input=dict(
        data=dict(type="jsonl"),
        pp=TEXT + "|copy('number', 'labels')|keep('tokens', 'labels')",
      ),
    ),
    dict(num_classes=1),
  ),
  "embeddings": (
    dict(
      task="text_embedding",
      loss=dict(widths=[4, 16], temperature=0.5),
      input=dict(
        data=dict(type="jsonl"),
        pp="tokenize(max_len=9, pad=-1, key_result='query')"
        "|tokenize(max_len=9, pad=-1, key='pair', key_result='positive')"
        "|tokenize(max_len=5, pad=-1, key='others', key_result='negative')"
        "|keep('query', 'positive', 'negative')",
      ),
    ),
    dict(pool="mean"),
  ),
  "distillation": (
    dict(
      task="language_modeling",
      loss=dict(distill=dict(beta=0.5, nll=0.1), chunk=5),
      input=dict(
        data=dict(
          type="supervised",
          tokenizer="bytes",
          length=32,
          pack=True,
          rows="prompt_completion",
        )
      ),
      teacher=dict(big=TEACHER, small=TEACHER),
    ),
    {},
  ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  file = folder / "rows.jsonl"
  file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    yield str(file)


def config_of(name, path, **more):
  changes, model = json.loads(json.dumps(CASES[name]))
  changes["input"] |= dict(batch_size=8)
  changes["input"]["data"]["path"] = path
  config = dict(
    seed=0,
    total_steps=4,
    log_steps=1,
    ckpt_steps=2,
    model_name="decoder",
    model=SIZES | model,
    optimizer=dict(name="sgd", momentum=0.9),
    schedule=dict(decay_type="constant"),
    lr=0.1,
    wd=0.0,
    compile_cache=False,
    tensorboard=False,
    evals={},
  )
  return config | changes | more


@functools.cache
def steps(name, path, sizes, microbatches):
  config = config_of(name, path, mesh={})
  return any_mesh.train(config, dict(sizes), microbatches)


@pytest.mark.parametrize(
  ("name", "sizes", "microbatches"),
  [
    ("reward", (("fsdp", 1),), 4),
    *(
      pytest.param(
        name, (("replica", 2), ("fsdp", 2)), 2, marks=pytest.mark.slow
      )
      for name in CASES
    ),
  ],
)
def test_microbatches_and_devices_change_nothing(
  name, sizes, microbatches, path
):
  want_pairs, want_grads, want_state = steps(name, path, (("fsdp", 1),), 1)
  pairs, grads, state = steps(name, path, sizes, microbatches)
  for ours, theirs in zip(pairs, want_pairs, strict=True):
    assert ours.keys() == theirs.keys() >= {"loss"}
    for key, pair in ours.items():
      np.testing.assert_allclose(pair, theirs[key], 1e-4, 1e-6, err_msg=key)
  for got, want in ((grads, want_grads), (state, want_state)):
    for (key, a), (_, b) in zip(
      *(trees.flatten_with_names(tree) for tree in (got, want))
    ):
      a, b = np.asarray(a, float), np.asarray(b, float)
      np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_a_whole_one(name, path, tmp_path):
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(config_of(name, path), str(whole))
  for stop in (2, None):
    main.train(config_of(name, path, stop_at_steps=stop), str(cut))
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(cut))
  rows = tiny.rows(whole)
  assert rows == tiny.rows(cut)
  assert rows[4]["loss"] < rows[1]["loss"]


@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [
    ("reward", {"model.num_classes": None}, "config.model.num_classes=1"),
    ("regression", {"model.num_classes": 3}, "class numbers are integers"),
    ("classes", {"model.num_classes": 2}, "config.model.num_classes=2 allows"),
    ("classes", {"loss": dict(mixup_alpha=0.2)}, "texts.* cannot be blended"),
    ("classes", {"task": "language_modeling"}, "targets"),
    ("distillation", {"teacher": None}, "config.loss.distill: expected config"),
    ("reward", {"teacher": dict(a=TEACHER)}, "'language_modeling' do"),
    ("distillation", {"model.vocab_size": 280}, "vocab_size of 'big': exp"),
    ("distillation", {"loss": dict(distill=dict(bta=1))}, "distill.bta: unkn"),
  ],
)
def test_mistakes(name, changes, message, path, tmp_path):
  config = config_of(name, path)
  for key, value in changes.items():
    *folder, last = key.split(".")
    (config[folder[0]] if folder else config)[last] = value
  with pytest.raises(ConfigError, match=message):
    main.train(config, str(tmp_path))


@pytest.mark.slow
def test_trained_models_read_texts(path, tmp_path):
  main.train(config_of("classes", path), str(tmp_path / "classes"))
  pp = "tokenize(max_len=24, pad=-1, key_result='tokens')"
  model = bigtrain.load(str(tmp_path / "classes"), pp_text=pp)
  one, two = model.predict(["1 and 1: xx", "2 and 2: xxx"])
  assert {*one} == {"label", "index", "score", "top"} and len(two["top"]) == 3
  main.train(config_of("embeddings", path), str(tmp_path / "embeddings"))
  model = bigtrain.load(str(tmp_path / "embeddings"))
  assert model.predict("1 and 1")["embedding"].shape == (16,)


@pytest.mark.slow
def test_packed_rows_are_taught_like_others(path):
  model = decoder.Model(**SIZES)
  losses = []
  for pack in (False, True):
    source = supervised.Source(
      "bytes", 32, path, pack=pack, rows="prompt_completion"
    )
    batch = source.read(np.arange(len(source)))
    if not losses:
      inputs = language_modeling.inputs(batch)
      student, teacher = (
        jax.jit(model.init)(jax.random.key(i), **inputs) for i in range(2)
      )
    pairs, _ = language_modeling.loss_fn(
      {**student, "teacher": teacher},
      batch,
      None,
      model=model,
      train=False,
      teacher=model,
      distill=dict(beta=0.5),
    )
    losses.append(pairs["loss"][0] / pairs["loss"][1])
    # The file of all likely tokens is the same teacher.
    file = language_modeling.likely(teacher, batch, model=model, top_k=264)
    pairs, _ = language_modeling.loss_fn(
      student,
      {**batch, **file},
      None,
      model=model,
      train=False,
      distill=dict(beta=0.5),
    )
    losses.append(pairs["loss"][0] / pairs["loss"][1])
  assert losses[0] > 1e-3
  np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.parametrize("kind", cases.quick(["reference", "likely"], "likely"))
def test_columns_are_computed_once(kind, path, tmp_path):
  """Training with a column is training with the model that made it."""
  if kind == "reference":
    config = config_of("reward", path, loss=dict(kind="sigmoid"))
    config["model"] = SIZES
  else:
    config = config_of("distillation", path, loss=dict(distill={}))
  config |= dict(teacher=TEACHER, total_steps=2)
  data = config["input"]["data"]
  first = config | dict(eval_only=True)
  if kind == "likely":
    first |= dict(teacher=None, loss={})
  evals = dict(x=dict(type="columns", pred=kind, data=data, batch_size=8))
  if kind == "likely":
    evals["x"]["pred_kw"] = dict(top_k=264)
  main.train(first | dict(evals=evals), str(tmp_path / "first"))
  file = str(tmp_path / "first" / "columns" / "x.npz")
  main.train(config, str(tmp_path / "live"))
  columned = {k: x for k, x in config.items() if k != "teacher"}
  columned["input"] = config["input"] | dict(
    data=dict(type="arrays", path=file)
  )
  main.train(columned, str(tmp_path / "columns"))
  live, others = (tiny.rows(tmp_path / name) for name in ("live", "columns"))
  for step in (1, 2):
    np.testing.assert_allclose(others[step]["loss"], live[step]["loss"], 1e-5)
