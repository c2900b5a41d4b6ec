"""Estimates the time of a step from the FLOPs and traffic of a program.

  compute    = executed FLOPs / (devices * peak * efficiency)
  network    = sum over collectives of hardware.seconds
  step       = the larger of both with perfect overlap, else their sum

"Facts" are what is known about the program on one mesh. They come from
program.py, which compiles it, from search.py, which has formulae for memory, or
from `extrapolate` here. `from_facts` adds the estimates to them.
"""

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bigtrain.runtime import device_memory
from bigtrain.tools.plan import collectives, formulae, groups, meshes
from bigtrain.tools.plan.collectives import Collective
from bigtrain.tools.plan.hardware import Hardware, seconds

# Fraction of the peak that large matrix products reach, as in published runs
# that the network does not limit.
EFFICIENCY = 0.6

# Figures of a program or of a mesh, as values of JSON.
Facts = Mapping[str, Any]


def from_facts(
  facts: Facts,
  config: Mapping[str, Any],
  target: Hardware,
  efficiency: float = EFFICIENCY,
) -> dict[str, Any]:
  """Returns the facts about a mesh together with all estimates.

  Bytes are those of each device, by kind or axes and per step. The compiler's
  figures leave out kernels. Rates assume perfect overlap.
  """
  # The TPU's compiler places each buffer; the others only add them up.
  peak_bytes = device_memory.needed_bytes(
    facts["memory"], by_peak=facts["compiler"] == "tpu"
  )
  sent = [Collective(**one) for one in facts["collectives"]]
  times = [seconds(_with_one_group(one, facts), target) for one in sent]
  link_secs = sum(time.link_secs for time in times)
  network_secs = sum(time.network_secs for time in times)
  sending_secs = sum(time.secs for time in times)

  peak_flops = facts["devices"] * target.peak_flops
  product_flops = None  # Known only from the GPU's compiler.
  if facts["products"]:
    product_flops = facts["products"]["flops"] * facts["devices"]
  executed_flops = max(facts["executed_flops"], product_flops or 0)
  compute_secs = executed_flops / (peak_flops * efficiency)
  step_secs = max(compute_secs, sending_secs)
  examples_per_sec = facts["batch_size"] / step_secs
  tokens_per_sec = None
  if facts["tokens_per_example"]:
    tokens_per_sec = examples_per_sec * facts["tokens_per_example"]

  compiler_secs = compiler_mfu = None  # Known only from the TPU's compiler.
  if cycles := facts["cycles"]:
    compiler_secs = cycles["compute_secs"] + cycles["exposed_secs"]
    compiler_mfu = facts["model_flops"] / (peak_flops * compiler_secs)

  by_formula = formulae.traffic(facts, formulae.blocks(config), config)
  return {
    **facts,
    "peak_bytes": peak_bytes,
    "compiler_secs": compiler_secs,
    "compiler_mfu": compiler_mfu,
    "product_flops": product_flops,
    "fits": peak_bytes <= target.memory_bytes,
    "memory_fraction": peak_bytes / target.memory_bytes,
    "sent_bytes": _sum_by_kind(sent, collectives.KINDS),
    # Every program gathers, scatters and reduces, so those lines of the table
    # always have a formula, even if it is 0.
    "formula": _sum_by_kind(
      itertools.chain(*by_formula.values()), collectives.KINDS[:3]
    ),
    "sent_by_axis": _sum_by_axes(sent, facts),
    "formula_by_axis": {
      axes: sum(one.sent_bytes for one in ones)
      for axes, ones in by_formula.items()
    },
    "remat_policy": config.get("model", {}).get("remat_policy", "none"),
    "opt_sharding": config.get("opt_sharding", "fsdp"),
    "secs": {
      "compute": compute_secs,
      "link": link_secs,
      "network": network_secs,
      "overlapped": step_secs,
      "in_turn": compute_secs + sending_secs,
    },
    "examples_per_sec": examples_per_sec,
    "tokens_per_sec": tokens_per_sec,
    "mfu": facts["model_flops"] / (peak_flops * step_secs),
  }


def _with_one_group(one: Collective, mesh: Mapping[str, int]) -> Collective:
  """A permute has the pairs of all groups; this gives it one group's size."""
  if one.kind != "collective-permute":
    return one
  return one.over(groups.over_axes(one.axes(mesh), mesh))


def _sum_by_kind(
  sent: Iterable[Collective], kinds: Sequence[str]
) -> dict[str, float]:
  """{kind: bytes sent} of the kinds that occur and of those that are given."""
  sums = dict.fromkeys(kinds, 0.0)
  for one in sent:
    sums[one.kind] = sums.get(one.kind, 0.0) + one.sent_bytes
  return sums


def _sum_by_axes(
  sent: Iterable[Collective], mesh: Mapping[str, int]
) -> dict[str, float]:
  sums: dict[str, float] = collections.defaultdict(float)
  for one in sent:
    sums[one.axes(mesh)] += one.sent_bytes
  return sums


# Meshes that are too large to compile for.


def basis(compiled: Sequence[Facts], mesh: Mapping[str, int]) -> Facts | None:
  """The largest compiled mesh from which `mesh` can be extrapolated, or None.

  `compiled` is in ascending order.
  """
  similar = [facts for facts in compiled if _traits(facts) == _traits(mesh)]
  return similar[-1] if similar else None


def _traits(mesh: Mapping[str, int]) -> tuple[Any, ...]:
  """Properties in which meshes agree if their programs are alike."""
  ways = meshes.batch_ways(mesh)
  examples_at_once = mesh["batch_size"] / (ways * mesh["microbatches"])
  return (
    examples_at_once,
    mesh["replica"] > 1,
    mesh["fsdp"] > 1,
    mesh["pipeline"],
    mesh["sequence"],
    mesh["tensor"],
  )


def compare(guess: Facts, compiled: Facts) -> dict[str, float]:
  """Relative errors of an extrapolation."""
  guessed_sent = sum(guess["sent_bytes"].values())
  sent = sum(compiled["sent_bytes"].values())
  return {
    "memory": guess["peak_bytes"] / compiled["peak_bytes"] - 1,
    "sent": guessed_sent / sent - 1 if sent else 0.0,
  }


def extrapolate(compiled: Facts, mesh: Mapping[str, int]) -> dict[str, Any]:
  """Returns facts about a mesh that was not compiled, from a smaller mesh.

  With the same examples per device and microbatch, and the same `sequence` and
  `tensor`, a collective moves the same arrays on any number of devices: its
  groups grow, and it runs once per microbatch. Arrays that are sharded over
  `fsdp` shrink with its size. Temporary memory stays the same.
  """
  microbatch_ratio = mesh["microbatches"] / compiled["microbatches"]
  fsdp_ratio = mesh["fsdp"] / compiled["fsdp"]
  batch_ratio = mesh["batch_size"] / compiled["batch_size"]
  device_ratio = mesh["devices"] / compiled["devices"]

  scaled = []
  for one in (Collective(**one) for one in compiled["collectives"]):
    axes = one.axes(compiled)
    # Gradients that fsdp has split are summed over the other axes.
    sums_shards = "replica" in axes and "fsdp" not in axes
    nbytes = one.nbytes * microbatch_ratio / (fsdp_ratio if sums_shards else 1)
    scaled.append(
      one.over(groups.over_axes(axes, mesh))
      ._replace(runs=round(one.runs * microbatch_ratio), nbytes=round(nbytes))
      ._asdict()
    )

  state_bytes = {
    name: nbytes / fsdp_ratio
    for name, nbytes in compiled["state_bytes"].items()
  }
  saved_bytes = sum(compiled["state_bytes"].values())
  saved_bytes -= sum(state_bytes.values())
  memory = dict(compiled["memory"])
  for name in ("argument_bytes", "output_bytes", "alias_bytes", "peak_bytes"):
    memory[name] -= saved_bytes
  return {
    **compiled,
    **mesh,
    "figures": f"from {compiled['devices']:,}",
    "cycles": None,
    "products": None,
    "state_bytes": state_bytes,
    "host_state_bytes": compiled["host_state_bytes"] / fsdp_ratio,
    "memory": memory,
    "batch_bytes": compiled["batch_bytes"] * batch_ratio / device_ratio,
    "collectives": scaled,
    "model_flops": compiled["model_flops"] * batch_ratio,
    "executed_flops": compiled["executed_flops"] * batch_ratio,
  }
