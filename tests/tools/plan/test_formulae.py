"""The formulae of traffic against a program for all axes."""

import functools

import pytest

from bigtrain.tools.plan import formulae, groups, plan, table

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
    MESH,
    input=dict(
      data=dict(type="tokens", path="nowhere", length=256), batch_size=16
    ),
  )
"""
MESH = "mesh=dict(replica=1, fsdp=2, sequence=2, tensor=2)"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
  """planned(keys): the row of the config with these keys for its mesh.

  Further arguments are changes of the config.
  """

  @functools.cache
  def row_of(keys, *changes):
    path = tmp_path_factory.mktemp("plan") / "config.py"
    path.write_text(CONFIG.replace("MESH", keys))
    (row,) = plan.plan(str(path), [8], changes)
    return row

  return row_of


@pytest.mark.slow
def test_a_program_sends_over_each_axis_what_the_formulae_say(planned):
  row = planned(MESH)
  sent, formula = row["sent_by_axis"], row["formula_by_axis"]
  for axis in ("fsdp", "sequence", "tensor"):
    assert sent[axis] == pytest.approx(formula[axis], rel=0.05)
  # The gradients of the norms, and numbers of the loss.
  others = sum(n for axes, n in sent.items() if axes not in formula)
  assert others < 0.01 * sum(sent.values())


@pytest.mark.slow
def test_a_ring_sends_what_the_formulae_say(planned):
  mesh = "mesh=dict(replica=1, fsdp=2, sequence=4)"
  row = planned(mesh, "model.attention=ring", "model.dtype=bfloat16")
  sent, formula = row["sent_by_axis"], row["formula_by_axis"]
  assert sent["sequence"] == pytest.approx(formula["sequence"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    "replica=2, pipeline=2, fsdp=2",
    "pipeline=2, pipeline_rounds=2, fsdp=1, sequence=2, tensor=2",
    "pipeline=4, pipeline_microbatches=4, fsdp=2",
  ],
)
def test_stages_send_what_the_formulae_say(planned, sizes):
  row = planned(f"mesh=dict({sizes})")
  sent, formula = row["sent_by_axis"], row["formula_by_axis"]
  assert "pipeline" in formula
  for axes, nbytes in formula.items():
    assert sent[axes] == pytest.approx(nbytes, rel=0.05), axes
  others = sum(n for axes, n in sent.items() if axes not in formula)
  assert others < 0.01 * sum(sent.values())
  assert row["model_flops"] == planned(MESH)["model_flops"]


@pytest.mark.slow
def test_a_program_with_zero_1_sends_what_the_formulae_say(planned):
  row = planned("mesh=dict(replica=4, fsdp=2), opt_sharding='replica'")
  sent, formula = row["sent_by_axis"], row["formula_by_axis"]
  assert formula.keys() == {"fsdp", "replica", "replica, fsdp"}
  for axes, nbytes in formula.items():
    assert sent[axes] == pytest.approx(nbytes, rel=0.05), axes
  others = sum(n for axes, n in sent.items() if axes not in formula)
  assert others < 0.01 * sum(sent.values())
  lines = table.text("x.py", "h100", [row], 0.6).splitlines()
  at = next(i for i, x in enumerate(lines) if x.startswith("  over replica "))
  assert float(lines[at].split()[-1]) > 0
  assert lines[at + 1].startswith("    by formula")


def test_axes_of_groups_are_recognised():
  of = dict(replica=4, pipeline=1, fsdp=8, sequence=2, tensor=2)
  of_axes = {
    "tensor": groups.Group(2, 1),
    "sequence": groups.Group(2, 2),
    "fsdp": groups.Group(8, 4),
    "replica": groups.Group(4, 32),
    "replica, sequence": groups.Group(8, 2, inner=2, span=99),
  }
  for axes, group in of_axes.items():
    assert groups.over_axes(axes, of) == group
    assert groups.axes_of(group, of) == axes
  # The same devices in another order.
  group = groups.over_axes("fsdp, replica", of)
  assert groups.axes_of(group, of) == "replica, fsdp"


def test_the_hidden_units_of_a_tokens_experts_are_counted():
  of = dict(model_name="decoder", model=dict(variant="mixtral_8x7b"))
  of["model"]["vocab_size"] = 32_000
  blocks = formulae.blocks(of)
  # Two of the experts, and a gate beside each hidden unit.
  assert blocks.hidden == 14_336 * 2 * 2
  assert (blocks.vocab_size, blocks.tied) == (32_000, False)


def test_experts_on_fsdp_send_tokens_and_no_weights():
  facts = dict(
    replica=1,
    pipeline=1,
    fsdp=8,
    sequence=1,
    tensor=1,
    microbatches=2,
    batch_size=32,
    tokens_per_example=4096,
    sharded_parameters=47_000_000_000,
  )
  sent = []
  for axis in (None, "fsdp"):
    model = dict(variant="mixtral_8x7b", vocab_size=32_000, scan=True)
    model |= dict(dtype="bfloat16", moe=dict(axis=axis))
    config = dict(model_name="decoder", model=model)
    traffic = formulae.traffic(facts, formulae.blocks(config), config)
    sent.append({one.kind: 0 for one in traffic["fsdp"]})
    for one in traffic["fsdp"]:
      sent[-1][one.kind] += one.nbytes
  gathered, exchanged = sent
  # bfloat16, in two microbatches: experts' kernels forward and backward, and
  # their gradients.
  experts = 2 * 2 * 32 * 8 * 3 * 4096 * 14_336
  kind = "all-gather"
  assert gathered[kind] - exchanged[kind] == 2 * experts
  kind = "reduce-scatter"
  assert gathered[kind] - exchanged[kind] == experts
  # Two choices of 2 x 4,096 tokens: there and back, in the forward pass, its
  # repetition and the backward pass.
  tokens = 2 * 2 * 32 * 6 * 2 * 2 * 4096 * 4096
  kind = "all-to-all"
  assert exchanged[kind] - gathered[kind] == tokens


@pytest.mark.parametrize(
  ("tokens", "compiler", "kinds"),
  [
    (2**17, "gpu", {"all-gather", "reduce-scatter", "collective-permute"}),
    (2**20, "gpu", {"collective-permute"}),
    (2**20, "tpu", {"all-gather", "reduce-scatter", "collective-permute"}),
  ],
)
def test_keys_and_values_travel_as_auto_decides(tokens, compiler, kinds):
  facts = dict(
    replica=1,
    pipeline=1,
    fsdp=4,
    sequence=16,
    tensor=1,
    microbatches=1,
    batch_size=4,
    tokens_per_example=tokens,
    sharded_parameters=8_000_000_000,
    compiler=compiler,
  )
  model = dict(variant="llama_8b", vocab_size=128_256, dtype="bfloat16")
  config = dict(model_name="decoder", model=model)
  traffic = formulae.traffic(facts, formulae.blocks(config), config)
  assert {one.kind for one in traffic["sequence"]} - {"all-reduce"} == kinds
