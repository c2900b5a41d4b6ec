"""config.qk_clip: every task of a decoder returns its largest logits."""

import functools
import json

import jax
import numpy as np
import pytest
import tiny
from support import any_mesh, policy_runs

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.losses import answers, token_losses
from bigtrain.models import decoder
from bigtrain.tasks import (
  classification,
  policy_gradient,
  preference,
  text_embedding,
)

B, K, L, V = 3, 2, 9, 31
RNG = np.random.default_rng(0)
TEXTS = RNG.integers(1, V, (B, K, L + 1)).astype(np.int32)
# Answers begin after three tokens, and end at several places.
MASK = np.arange(L) >= 2
MASK = MASK & (np.arange(L) < RNG.integers(4, L + 1, (B, K, 1)))
ANSWERS = dict(
  tokens=TEXTS[..., :-1],
  targets=TEXTS[..., 1:],
  loss_mask=MASK.astype(np.float32),
)
IDS = np.where(
  np.arange(L) < [[[9], [4]], [[6], [9]], [[3], [7]]], TEXTS[..., 1:], -1
)


@functools.cache
def model_of(**options):
  """(model that reports its logits, its variables)."""
  sizes = dict(vocab_size=V, width=16, mlp_dim=24, num_heads=2, depth=2)
  model = decoder.Model(
    variant="llama", **sizes, init_std=0.5, attention_logits=True, **options
  )
  tokens = np.zeros((1, 4), np.int32)
  return model, model.init(jax.random.key(0), tokens)


def largest_of(model, variables, tokens, real):
  """The largest logits of attention in a plain call of the model."""
  _, new = model.apply(
    variables, tokens, real=real, mutable=["step_largest"], train=False
  )
  return new["step_largest"]


def check(loss_fn, batch, texts, real, **options):
  """Compares what a loss returns with a call for all texts at once."""
  model, variables = model_of(**options.pop("model", {}))
  rng = jax.random.key(1)
  loss = functools.partial(loss_fn, model=model, **options)
  _, mutable = loss(variables, batch, rng, train=True)
  assert {*mutable} == {"step_largest"}
  want = largest_of(model, {"params": variables["params"]}, texts, real)
  got = mutable["step_largest"]
  assert max(x.max() for x in jax.tree.leaves(want)) > 0.01
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want
  )
  # Without the field, as before.
  plain = functools.partial(
    loss_fn, model=model.clone(attention_logits=False), **options
  )
  assert not plain(variables, batch, rng, train=True)[1]


REAL = token_losses.real_positions(answers.flat(MASK))


def test_preferences():
  check(
    preference.loss_fn,
    ANSWERS,
    answers.flat(ANSWERS["tokens"]),
    REAL,
    kind="orpo",
  )


def test_rewards():
  whole = np.pad(REAL, ((0, 0), (1, 0)), constant_values=True)
  texts = answers.flat(TEXTS)
  check(
    preference.loss_fn,
    ANSWERS,
    texts,
    whole,
    kind="reward",
    model=dict(num_classes=1),
  )


def test_policy_gradients():
  rewards = dict(
    log_probs=np.zeros((B, K, L), np.float32),
    truncated=np.zeros((B, K)),
    reward=RNG.normal(size=(B, K)).astype(np.float32),
    failed_rewards=np.zeros((B, K), np.float32),
  )
  tokens = answers.flat(ANSWERS["tokens"])
  check(policy_gradient.loss_fn, ANSWERS | rewards, tokens, REAL, max_new=L)


def test_embeddings():
  batch = dict(query=IDS[:, 0], positive=IDS[:, 1])
  ids = np.concatenate([batch["query"], batch["positive"]])
  check(text_embedding.loss_fn, batch, np.maximum(ids, 0), ids >= 0)


def test_classes():
  ids = IDS[:, 0]
  batch = dict(tokens=ids, labels=np.asarray([0, 2, 1]))
  check(
    classification.loss_fn,
    batch,
    np.maximum(ids, 0),
    ids >= 0,
    model=dict(num_classes=3),
  )


def test_embeddings_in_microbatches(tmp_path):
  """The two passes of the loss: the largest logits of all microbatches."""
  rows = [dict(text=f"{i}+{i % 3}", pair="x" * (i % 5 + 1)) for i in range(8)]
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = dict(
    task="text_embedding",
    model_name="decoder",
    model=dict(
      variant="llama",
      vocab_size=264,
      width=16,
      mlp_dim=24,
      num_heads=2,
      depth=1,
      init_std=0.5,
      pool="mean",
    ),
    input=dict(
      data=dict(type="jsonl", path=str(path)),
      pp="tokenize(max_len=6, pad=-1, key_result='query')"
      "|tokenize(max_len=6, pad=-1, key='pair', key_result='positive')"
      "|keep('query', 'positive')",
      batch_size=8,
    ),
    seed=0,
    total_steps=2,
    optimizer=dict(name="sgd"),
    lr=0.1,
    wd=0.0,
    schedule=dict(decay_type="constant"),
    evals={},
    qk_clip=dict(tau=0.1),
  )
  results = [
    any_mesh.train(config, dict(fsdp=devices), microbatches, steps=2)
    for devices, microbatches in ((1, 1), (2, 4))
  ]
  (whole, _, state), (parts, _, others) = results
  for ours, theirs in zip(parts, whole):
    np.testing.assert_allclose(
      ours["attention_logit"][0], theirs["attention_logit"][0], rtol=1e-5
    )
  assert whole[0]["attention_logit"][0].max() > 0.2
  for name, x in trees.flatten_with_names(state["params"]):
    want = dict(trees.flatten_with_names(others["params"]))[name]
    np.testing.assert_allclose(x, want, atol=2e-5, err_msg=name)


def run(config, folder):
  """(the last log entry, parameters by name)."""
  last = main.train(config, str(folder))
  return last, {n: np.asarray(x) for n, x in tiny.arrays(folder).items()}


def shrinks(config, folder, query):
  """Runs with a low and a high limit; the first has smaller queries."""
  low, clipped = run(config | dict(qk_clip=dict(tau=1e-3)), folder / "low")
  high, free = run(config | dict(qk_clip=dict(tau=1e6)), folder / "high")
  names = [name for name in low if name.startswith("attention_logit_max/")]
  assert names
  assert all(0 < low[name] < high[name] for name in names)
  ratio = np.linalg.norm(clipped[query]) / np.linalg.norm(free[query])
  assert ratio < 0.8
  return names


@pytest.mark.slow
def test_a_run_with_rollouts(tmp_path):
  config = policy_runs.config_of(total_steps=2)
  config["model"]["num_kv_heads"] = 1
  query = "params/blocks_0/attention/query/kernel"
  shrinks(config, tmp_path, query)


@pytest.mark.slow
def test_a_decoder_that_reads_pictures(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  config = loading.load(f"{any_mesh.CONFIGS}/vlm_digits.py:runlocal")
  small = dict(width=16, depth=1, num_heads=2, mlp_dim=24)
  config["model"]["image"] |= small
  config["model"]["text"] |= small | dict(num_kv_heads=1)
  config["evals"] = {}
  config |= dict(total_steps=2, log_steps=1, tensorboard=False)
  query = "params/llm/blocks_0/attention/query/kernel"
  names = shrinks(config, tmp_path, query)
  assert all("/llm/" in name for name in names)
  config["model"]["text"]["qk_norm"] = "head"
  with pytest.raises(ConfigError, match=r"config.model.text.qk_norm='head'"):
    main.train(config | dict(qk_clip={}), str(tmp_path / "norm"))
