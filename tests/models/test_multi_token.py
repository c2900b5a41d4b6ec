"""Modules that predict further tokens: their losses, training and drafts.

tests/models/published/test_prediction.py compares them with transformers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import any_mesh, random_variables

from bigtrain import main
from bigtrain.arrays import packed, trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.reports import log_entries
from bigtrain.tasks import language_modeling as task

V, B, L, WEIGHT = 29, 2, 12, 0.5


@functools.cache
def made(mtp=2):
  """(model, variables)."""
  model = decoder.Model(
    variant="deepseek_mu", vocab_size=V, mtp=mtp, init_std=0.3, depth=2
  )
  return model, random_variables.of(model, jnp.zeros((1, L), int))


@functools.cache
def outputs_in_training():
  """What model.apply returns beside the logits for the tokens of batch_of()."""
  model, variables = made()
  apply = functools.partial(model.apply, train=True, mutable=["step_sums"])
  (_, out), _ = jax.jit(apply)(variables, batch_of()["tokens"])
  return out


def batch_of(rows=B, length=L, seed=0):
  rng = np.random.default_rng(seed)
  text = jnp.asarray(rng.integers(1, V, (rows, length + 1)))
  return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def loss_of(batch, mtp=2):
  model, variables = made(mtp)
  fn = functools.partial(
    task.loss_fn,
    model=model,
    train=True,
    mtp_weight=WEIGHT,
    load_balance=0.0,
    router_z=0.0,
  )
  return jax.jit(fn)(variables, batch, jax.random.key(0))[0]


def test_values_ahead_end_with_the_document():
  x = jnp.asarray([[1, 2, 3, 4, 5, 6]])
  segments = jnp.asarray([[1, 1, 1, 2, 2, 0]])
  ahead = lambda *args: packed.ahead(x, *args).tolist()[0]
  assert ahead(None, 1) == [2, 3, 4, 5, 6, 0]
  assert ahead(None, 7) == [0] * 6
  assert ahead(segments, 1) == [2, 3, 0, 5, 0, 0]
  assert ahead(segments, 2) == [3, 0, 0, 0, 0, 0]


def test_the_loss_is_that_of_the_definition():
  model, variables = made()
  batch = batch_of()
  metrics = loss_of(batch)
  kernel = model.head_kernel(variables["params"])
  further = 0.0
  for number, hidden in enumerate(outputs_in_training()["mtp"], 1):
    log_probs = jax.nn.log_softmax(hidden[:, :-number] @ kernel)
    targets = batch["targets"][:, number:, None]
    loss = -jnp.sum(jnp.take_along_axis(log_probs, targets, axis=-1))
    total, weight = metrics[f"mtp_loss/{number}"]
    np.testing.assert_allclose(total, loss, rtol=1e-5)
    assert weight == B * (L - number)
    further += loss / 2
  nll, weight = metrics["nll"]
  total, total_weight = metrics["loss"]
  assert total_weight == weight == B * L
  np.testing.assert_allclose(total, nll + WEIGHT * further, rtol=1e-5)
  # Outside of training the modules do not run.
  _, out = jax.eval_shape(model.apply, variables, batch["tokens"])
  assert "mtp" not in out


@pytest.mark.slow
def test_packed_documents_have_the_losses_of_single_ones():
  batch, sizes = batch_of(), ((7, 4), (1, 8))
  rows = [[1] * a + [2] * b + [0] * (L - a - b) for a, b in sizes]
  both = loss_of(batch | {"segments": jnp.asarray(rows)})
  sums = {}
  for row, row_sizes in enumerate(sizes):
    start = 0
    for size in row_sizes:
      part = (slice(row, row + 1), slice(start, start + size))
      alone = loss_of({name: x[part] for name, x in batch.items()})
      for name in ("loss", "nll", "mtp_loss/1", "mtp_loss/2"):
        sums.setdefault(name, []).append(alone[name])
      start += size
  for name, pairs in sums.items():
    expected = np.sum(np.asarray(pairs), axis=0)
    np.testing.assert_allclose(both[name], expected, rtol=1e-5, err_msg=name)


def config_of(**changes):
  config = any_mesh.load("pydoc_lm:moe,runlocal", packed=True, dropout=0.0)
  experts = dict(
    num_experts=4,
    top_k=2,
    score="sigmoid",
    selection_bias=True,
    bias_rate=0.25,
    router_init_std=1.0,
    mlp_dim=8,
  )
  latents = dict(q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=8)
  own = dict(
    vocab_size=264,
    width=16,
    mlp_dim=16,
    num_heads=2,
    depth=4,
    scan=True,
    qk_norm=None,
    mla=latents,
    moe=experts,
    mtp=1,
  )
  config["loss"] = dict(mtp_weight=WEIGHT, load_balance=0.0)
  return config | {"model": config["model"] | own | changes}


@functools.cache
def trained(microbatches=1, **sizes):
  sizes = dict(replica=1, fsdp=1, sequence=1, tensor=1) | sizes
  *_, state = any_mesh.train(config_of(), sizes, microbatches)
  return dict(trees.flatten_with_names(state))


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    dict(microbatches=4, fsdp=2),
    dict(fsdp=2, tensor=2, sequence=2),
    dict(replica=2, fsdp=2, pipeline=2),
  ],
)
def test_meshes_and_microbatches_do_not_change_training(sizes):
  got, want = trained(**sizes), trained()
  assert any("mtp/blocks_0" in name for name in want)
  for name, x in want.items():
    if "router_state" in name:
      np.testing.assert_array_equal(got[name], x, name)
      assert np.abs(x).max() > 0, name
    elif "params/" in name:
      np.testing.assert_allclose(got[name], x, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_run_logs_and_resumes(tmp_path):
  config = config_of(depth=1) | dict(total_steps=4, ckpt_steps=2, log_steps=2)
  main.train(config, str(tmp_path / "whole"))
  main.train(config | {"stop_at_steps": 2}, str(tmp_path / "parts"))
  main.train(config, str(tmp_path / "parts"))
  whole, parts = (
    log_entries.read(str(tmp_path / name)) for name in ("whole", "parts")
  )
  names = ("loss", "nll", "mtp_loss/1", "mtp_accuracy/1", "experts/max_bias")
  for own, other in zip(parts, whole, strict=True):
    assert [own[name] for name in names] == [other[name] for name in names]
  assert whole[-1]["experts/peak_1"] >= 1  # The module's layer.


@functools.cache
def generated(drafts, eos_id):
  model, variables = made()
  prompts = np.asarray(batch_of(3, 9)["tokens"]).copy()
  prompts[1, 6:] = 0
  prompts[2, 3:] = 0
  fn = functools.partial(
    task.generate, model=model, max_new=10, eos_id=eos_id, drafts=drafts
  )
  return np.asarray(jax.jit(fn)(variables, {"tokens": prompts}))


@pytest.mark.parametrize("drafts", [1, 2])
@pytest.mark.parametrize("eos_id", [None, (3, 7)])
def test_drafts_do_not_change_the_tokens(drafts, eos_id):
  expected = generated(0, eos_id)
  np.testing.assert_array_equal(generated(drafts, eos_id), expected)


@pytest.mark.slow
def test_the_weight_of_further_tokens_may_follow_a_schedule(tmp_path):
  # DeepSeek V3 lowers it late in training; here it falls to 0.
  weight = dict(at_steps=[0, 2], values=[WEIGHT, 0.0], shape="stair")
  config = config_of(moe=None) | dict(
    loss=dict(mtp_weight=weight), total_steps=4, log_steps=1, evals={}
  )
  main.train(config, tmp_path)
  rows = log_entries.read(str(tmp_path))
  differences = [row["loss"] - row["nll"] for row in rows if "loss" in row]
  assert min(differences[:2]) > 1
  assert differences[2:] == [0, 0]


def test_drafts_see_what_the_modules_see_in_training():
  model, variables = made()
  tokens = batch_of()["tokens"]
  out = outputs_in_training()
  draft = jax.jit(functools.partial(model.draft, variables), static_argnums=0)
  cache = model.init_draft_cache(B, L)
  hidden = out["pre_logits"]
  for number, expected in enumerate(out["mtp"]):
    ahead = jnp.roll(tokens, -number - 1, axis=1)
    parts, start = [], 0
    for size in (5, 5, 1, 1):
      part = slice(start, start + size)
      part_hidden, cache = draft(
        number, hidden[:, part], ahead[:, part], cache, start
      )
      parts.append(part_hidden)
      start += size
    hidden = jnp.concatenate(parts, axis=1)
    # In training, a document's last tokens have nothing to predict.
    end = L - number - 1
    np.testing.assert_allclose(hidden[:, :end], expected[:, :end], atol=2e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(drafts=3), "drafts=3: expected at most config.model.mtp=2"),
    (dict(drafts=1, temperature=0.5), "expected greedy decoding"),
    (dict(drafts=1, num_beams=2), "expected greedy decoding"),
    (dict(drafts=1, repetition_penalty=2.0), "expected greedy decoding"),
  ],
)
def test_drafts_that_cannot_be_made(options, message):
  model, variables = made()
  with pytest.raises(ConfigError, match=message):
    task.generate(
      variables, {"tokens": batch_of()["tokens"]}, model=model, **options
    )


def test_drafts_need_layers_without_a_window():
  model = decoder.Model(
    variant="llama_mu", vocab_size=V, window=4, mtp=1, depth=1
  )
  with pytest.raises(ConfigError, match="layers that see all positions"):
    model.init_draft_cache(1, 8)


def test_texts_have_more_tokens_than_modules():
  with pytest.raises(ConfigError, match="mtp=2: expected at most 1, because"):
    decoder.Model(variant="llama_mu", vocab_size=V, max_len=2, mtp=2)


def test_classes_have_no_further_tokens():
  with pytest.raises(ConfigError, match="mtp=1: expected 0 with num_classes=2"):
    decoder.Model(variant="llama_mu", vocab_size=V, num_classes=2, mtp=1)
