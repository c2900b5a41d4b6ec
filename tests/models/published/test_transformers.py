"""Exported folders, opened by the library that they are for.

Needs the extra `transformers`: pip install -e ".[transformers]".
"""

import functools
import logging

import jax
import numpy as np
import pytest
from models.published.folders import (
  MODELS,
  like_of,
  model_of,
  module_of,
  name_of,
)

from bigtrain import parts, settings
from bigtrain.checkpoints import checkpointer, warm_start
from bigtrain.checkpoints.manifest import HostState
from bigtrain.tools import checkpoint as tool

REASON = "the extra `transformers` is not installed"
transformers = pytest.importorskip("transformers", reason=REASON)
torch = pytest.importorskip("torch", reason=REASON)

LINEAR = dict(type="linear", factor=2.0)
# {case: (layout, changes of the model)}.
CASES = {
  **{layout: (layout, {}) for layout in MODELS},
  "llama, tied": ("llama", dict(tied_head=True)),
  "llama, linear": ("llama", dict(rope_scaling=LINEAR, rope_theta=2e4)),
  "llama, plain": ("llama", dict(rope_scaling=None, norm_eps=1e-3)),
  "mixtral, window": ("mixtral", dict(window=7, head_dim=6)),
  "mixtral, tied": ("mixtral", dict(tied_head=True)),
  "t5, untied": ("t5", dict(tied_head=False)),
  "t5_1_1, tied": ("t5_1_1", dict(tied_head=True)),
  "switch, untied": ("switch", dict(tied_head=False)),
  "switch, all layers": (
    "switch",
    dict(moe=dict(num_experts=3, top_k=1, every=1)),
  ),
}


def export(layout, model, folder):
  """Exports random parameters; returns (parameters, the folder)."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (rng.normal(size=x.shape) * 0.3 + (x.ndim < 2)).astype(x.dtype),
    like_of(model),
  )
  fields = type(model).__dataclass_fields__
  options = {
    name: getattr(model, name)
    for name in fields
    if name not in ("parent", "name", "variant", "moe", "rope_scaling")
  }
  if model.moe is not None:
    options["moe"] = model.moe._asdict()
  if getattr(model, "rope_scaling", None):
    options["rope_scaling"] = dict(model.rope_scaling)
  config = {"model_name": name_of(layout), "model": options}
  workdir, out = str(folder / "run"), str(folder / "out")
  saver = checkpointer.Checkpointer(workdir)
  state = {"params": params, "step": np.int32(1)}
  saver.save(1, state, HostState(config=config))
  saver.close()
  assert tool.main(["export", workdir, out, f"--layout={layout}"]) == 0
  return params, out


def inputs_of(layout, vocab_size):
  """Returns the model's arguments and those of transformers."""
  rng = np.random.default_rng(1)
  tokens = functools.partial(rng.integers, 1, vocab_size)
  if module_of(layout).__name__.endswith("decoder"):
    text = tokens(size=(2, 24))
    return (text,), dict(input_ids=text)
  inputs, targets = tokens(size=(2, 25)), tokens(size=(2, 22))
  inputs[1, 17:] = 0
  before = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
  theirs = dict(
    input_ids=inputs,
    attention_mask=(inputs != 0).astype(np.int64),
    decoder_input_ids=before,
  )
  return (inputs, targets), theirs


@pytest.mark.parametrize("case", CASES)
def test_exports_open_with_equal_logits(case, tmp_path, caplog):
  layout, changes = CASES[case]
  model = model_of(layout, **changes)
  params, out = export(layout, model, tmp_path)
  ours, theirs = inputs_of(layout, model.vocab_size)
  expected, _ = jax.jit(model.apply)({"params": params}, *ours)

  kind = transformers.AutoModelForCausalLM
  if len(ours) == 2:
    kind = transformers.AutoModelForSeq2SeqLM
  transformers.utils.logging.enable_propagation()
  with caplog.at_level(logging.WARNING):
    opened, info = kind.from_pretrained(
      out, output_loading_info=True, attn_implementation="eager"
    )
  assert not any(info.values()), info
  for words in ("newly initialized", "MISSING", "UNEXPECTED", "MISMATCH"):
    assert words not in caplog.text
  with torch.no_grad():
    tensors = {name: torch.from_numpy(x) for name, x in theirs.items()}
    logits = opened.eval()(**tensors).logits.numpy()
  scale = np.abs(expected).max()
  np.testing.assert_allclose(logits, expected, atol=1e-5 * scale, rtol=0)

  # The export is a published folder for us, too.
  config = settings.Config(
    dict(model_name=name_of(layout), model=dict(published=out))
  )
  module, again = parts.model(parts.with_published_sizes(config))
  warm_start.check_published(out, module, again)
  loaded, _ = warm_start.load_params(
    out, like_of(again), convert=module.from_published
  )
  jax.tree.map(np.testing.assert_array_equal, params, loaded)
