"""Generation by models whose rotation depends on the length: published_lengths.

golden/make_lengths.py made the folders: transformers continued each prompt
alone. Here they are one batch, and each text still has its own frequencies.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN, opened, variables_of
from support import rounding

from bigtrain.arrays import trees
from bigtrain.tasks import language_modeling, policy_gradient
from bigtrain.tools import generate as tool

pytestmark = pytest.mark.golden

FOLDERS = sorted(path.name for path in (GOLDEN / "published_lengths").iterdir())
# Length above which a text has other frequencies.
LENGTH = 12


@functools.cache
def loaded(name):
  """(model, variables, reference)."""
  folder = GOLDEN / "published_lengths" / name
  module, model = opened(folder, max_len=64, scan=True)
  variables = variables_of(module, model, folder)
  return model, variables, dict(np.load(folder / "reference.npz"))


def generate(name, prompts, **options):
  model, variables, expected = loaded(name)
  run = functools.partial(
    language_modeling.generate,
    model=model,
    max_new=expected["generated"].shape[1],
    eos_id=None,
    pad_id=-1,
    **options,
  )
  return jax.jit(run)(variables, {"tokens": prompts})


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_of_each_prompt_alone(name):
  expected = loaded(name)[2]
  new = generate(name, expected["prompt"])
  np.testing.assert_array_equal(new, expected["generated"])


def test_rounding_decides_no_token():
  """And a whole pass over each text has the same tokens, up to the length."""
  model, variables, expected = loaded("phi3")
  apply = jax.jit(lambda v, tokens: model.apply(v, tokens)[0][:, -1])
  for prompt, new in zip(expected["prompt"], expected["generated"]):
    text = np.concatenate([prompt[prompt >= 0], new])
    for end in (LENGTH, LENGTH + 1, LENGTH + 2):
      start = len(text) - len(new)
      if start <= end < len(text):
        logits = lambda v, end=end, text=text: apply(v, text[None, :end])
        rounding.assert_clear(logits, variables)
        assert np.argmax(logits(variables)) == text[end]


def test_beams_and_the_command_line_read_again():
  model, variables, expected = loaded("phi3")
  beams = generate("phi3", expected["prompt"], num_beams=2)
  alone = [
    generate("phi3", row[None, row >= 0], num_beams=2)[0]
    for row in expected["prompt"][1:3]
  ]
  np.testing.assert_array_equal(beams[1:3], alone)
  options = dict(temperature=0.0, top_k=0, top_p=1.0)
  for prompt, new in zip(expected["prompt"][:2], expected["generated"]):
    ids = prompt[prompt >= 0].tolist()
    rules = lambda logits, *_: logits
    tokens = tool._sample(variables, model, ids, len(new), 0, options, rules)
    assert [*tokens] == new.tolist()


def test_rollouts_read_again():
  model, variables, expected = loaded("phi3")
  lengths = (expected["prompt"] >= 0).sum(1).astype(np.int32)
  batch = dict(prompt=np.maximum(expected["prompt"], 0), prompt_length=lengths)
  run = functools.partial(
    policy_gradient.rollout,
    model=model,
    eos_ids=(),
    samples=2,
    max_new=16,
    temperature=1e-4,
  )
  made = jax.jit(run)(variables, batch, jax.random.key(0))
  for length, targets, new in zip(
    lengths, made["targets"], expected["generated"]
  ):
    for answer in targets:
      np.testing.assert_array_equal(answer[length - 1 :][:16], new)


def test_padding_does_not_lengthen_a_text():
  model, variables, _ = loaded("phi3")
  tokens = np.arange(20)[None]
  real = jnp.arange(20)[None] < 8
  padded = model.apply(variables, tokens, real=real)[0][:, :8]
  alone = model.apply(variables, tokens[:, :8])[0]
  np.testing.assert_allclose(padded, alone, rtol=1e-5, atol=1e-5)
  whole = model.apply(variables, tokens)[0][:, :8]
  assert np.abs(whole - alone).max() > 1e-2


def test_short_texts_and_other_models_read_once():
  """The program has no second pass where no text can reach the length."""
  model, _, _ = loaded("phi3")
  assert model.init_cache(2, LENGTH).text.switches == ()
  assert model.init_cache(2, LENGTH + 1).text.switches == (LENGTH,)
  assert model.clone(rope_scaling=None).init_cache(2, 40).text is None
  names = trees.names(model.clone(rope_scaling=None).init_cache(2, 40))
  assert len(names) == 2
