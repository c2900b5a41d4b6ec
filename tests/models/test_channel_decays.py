"""Recurrent layers with a decay for each channel, as in Kimi Linear.

Among latent attention without positions.
"""

import functools

import pytest
from support import decoder_checks as checks

from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder

pytestmark = pytest.mark.usefixtures("float64_models")

RECURRENT = dict(
  num_heads=2,
  key_dim=8,
  value_dim=6,
  decay_rank=5,
  gate_rank=4,
  gate="sigmoid",
)
SIZES = dict(
  variant="llama_mu",
  vocab_size=checks.VOCAB,
  init_std=0.2,
  scan=True,
  dtype="float64",
  posemb="none",
  num_kv_heads=4,
  head_dim=12,
  mla=dict(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6),
  kinds={"linear": dict(deltanet=RECURRENT), "full": {}},
  layers=("linear", "full"),
  depth=4,
)


@functools.cache
def made():
  model = decoder.Model(**SIZES)
  return model, checks.variables(model)


@pytest.mark.slow
def test_generation_by_steps_and_in_parts():
  checks.check_generation(*made())


def test_packed_documents_give_the_logits_of_single_ones():
  checks.check_packed(*made())


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  [
    dict(fsdp=2, sequence=2, tensor=2),
    dict(fsdp=2, pipeline=2, sequence=2),
  ],
)
def test_any_mesh_has_the_gradients_of_one_device(mesh):
  """With rematerialisation there, and without it here."""
  model, weights = made()
  one = checks.loss_and_grads(model, weights, True, fsdp=1)
  remat = model.clone(remat_policy="nothing_saveable")
  result = checks.loss_and_grads(remat, weights, True, **mesh)
  checks.check_gradients(result, one)


WRONG = {
  "gate": (
    dict(gate="tanh"),
    r"config\.model\.kinds\.linear\.deltanet\.gate: unknown 'tanh'.*silu",
  ),
  "rank": (dict(decay_rank=0), r"deltanet\.decay_rank.*at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_errors(case):
  changes, message = WRONG[case]
  kinds = {"linear": dict(deltanet=RECURRENT | changes), "full": {}}
  with pytest.raises(ConfigError, match=message):
    decoder.Model(**SIZES | dict(kinds=kinds))
