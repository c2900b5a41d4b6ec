"""The formulae of traffic against a program for all axes."""

import pytest

from bigtrain.tools.plan import collectives, formulae, plan

CONFIG = """
def get_config():
  return dict(
    total_steps=3,
    task="language_modeling",
    model_name="decoder",
    model=dict(
      variant="llama_mu", vocab_size=256, width=256, mlp_dim=512, depth=4,
      num_heads=8, num_kv_heads=4, max_len=512, scan=True,
      remat_policy="nothing_saveable",
    ),
    optimizer=dict(name="adam"),
    lr=1e-3,
    mesh=dict(replica=1, fsdp=2, sequence=2, tensor=2),
    input=dict(
      data=dict(type="tokens", path="nowhere", length=256), batch_size=16
    ),
  )
"""


@pytest.mark.slow
def test_a_program_sends_over_each_axis_what_the_formulae_say(tmp_path):
  path = tmp_path / "config.py"
  path.write_text(CONFIG)
  (row,) = plan.plan(str(path), [8])
  sent, formula = row["sent_by_axis"], row["formula_by_axis"]
  for axis in ("fsdp", "sequence", "tensor"):
    assert sent[axis] == pytest.approx(formula[axis], rel=0.05)
  # The gradients of the norms, and numbers of the loss.
  others = sum(n for axes, n in sent.items() if axes not in formula)
  assert others < 0.01 * sum(sent.values())


def test_axes_of_groups_are_recognised():
  of = dict(replica=4, fsdp=8, sequence=2, tensor=2)
  groups = {
    "tensor": (2, 1),
    "sequence": (2, 2),
    "fsdp": (8, 4),
    "replica": (4, 32),
    "replica, sequence": (8, 2, 2, 99),
  }
  for axes, group in groups.items():
    assert formulae.group(axes, of) == group
    size, stride, *gaps = group
    one = collectives.Collective("all-gather", size, stride, 1, 8, *gaps)
    assert formulae.axis_of(one, of) == axes


def test_the_hidden_units_of_a_tokens_experts_are_counted():
  of = dict(model_name="decoder", model=dict(variant="mixtral_8x7b"))
  of["model"]["vocab_size"] = 32_000
  blocks = formulae.blocks(of)
  # Two of the experts, and a gate beside each hidden unit.
  assert blocks.hidden == 14_336 * 2 * 2
  assert (blocks.vocab_size, blocks.tied) == (32_000, False)
