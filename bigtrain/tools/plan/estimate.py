"""Estimates the time of a step from the FLOPs and traffic of a program.

  compute    = executed FLOPs / (devices * peak * efficiency); the FLOPs of the
               products that a GPU's compiler made, if they are more
  network    = sum over collectives of hardware.seconds
  step       = the larger of both, with perfect overlap, or
               their sum, without overlap

The entries `formula` and `formula_by_axis` need no compiler, see formulae.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.runtime import device_memory
from bigtrain.tools.plan import collectives, formulae, meshes
from bigtrain.tools.plan import hardware as hardware_lib

# Fraction of the peak that large matrix products reach, as in published runs
# that the network does not limit.
EFFICIENCY = 0.6


def row(
  facts: Mapping[str, Any],
  config: Mapping[str, Any],
  hardware: hardware_lib.Hardware,
  efficiency: float = EFFICIENCY,
) -> dict[str, Any]:
  """Returns all figures of one mesh, as a value of JSON.

  Args:
    facts: figures of the program: from footprint.measure, and also memory,
      model_flops, collectives, cycles, products, compiler, devices, the
      axes of the mesh, batch_size and microbatches.
    efficiency: fraction of the peak that matrix products reach.

  Returns:
    The facts and
    peak_bytes: peak memory of a device;
    memory_fraction: peak_bytes over the memory of a device;
    fits: whether that is at most 1;
    compiler_secs: time of a step by the compiler's cycles, without kernels, see
      cycles.py; None without cycles;
    compiler_mfu: MFU of a step of that time, or None;
    product_flops: FLOPs of the products in the program of a GPU, without those
      of attention kernels, see products.py; None without them;
    sent_bytes: {kind: bytes that each device sends per step};
    formula: the same by the formulae;
    sent_by_axis, formula_by_axis: {axes of the mesh: the same};
    remat_policy, opt_sharding: of the config;
    secs: {"compute", "link", "network", "overlapped", "in_turn"};
    examples_per_sec, tokens_per_sec, mfu: with perfect overlap.
  """
  devices = facts["devices"]
  # The TPU's compiler places each buffer; others only add them up.
  by_peak = facts["compiler"] == "tpu"
  peak_bytes = device_memory.needed_bytes(facts["memory"], by_peak)
  sent = dict.fromkeys(collectives.KINDS, 0.0)
  by_axis: dict[str, float] = {}
  link = network = communication = 0.0
  for collective in collectives.from_json(facts["collectives"]):
    sent[collective.kind] += collective.sent_bytes
    axes = formulae.axis_of(collective, facts)
    if collective.kind == "collective-permute":
      size, stride, *_ = formulae.group(axes, facts)
      collective = collective._replace(group_size=size, stride=stride)
    by_axis[axes] = by_axis.get(axes, 0.0) + collective.sent_bytes
    time = hardware_lib.seconds(collective, hardware)
    link += time.link_secs
    network += time.network_secs
    communication += time.secs
  peak = devices * hardware.peak_flops
  products = facts.get("products")
  product_flops = products and products["flops"] * devices
  executed_flops = max(facts["executed_flops"], product_flops or 0)
  compute = executed_flops / (peak * efficiency)
  step = max(compute, communication)
  examples_per_sec = facts["batch_size"] / step
  tokens = facts["tokens_per_example"]
  traffic = formulae.traffic(facts, formulae.blocks(config), config)
  cycles = facts["cycles"]
  compiler_secs = cycles and cycles["compute_secs"] + cycles["exposed_secs"]
  return {
    **facts,
    "peak_bytes": peak_bytes,
    "compiler_secs": compiler_secs,
    "compiler_mfu": compiler_secs
    and facts["model_flops"] / (peak * compiler_secs),
    "product_flops": product_flops,
    "fits": peak_bytes <= hardware.memory_bytes,
    "memory_fraction": peak_bytes / hardware.memory_bytes,
    "sent_bytes": sent,
    "formula": formulae.by_kind(traffic),
    "sent_by_axis": by_axis,
    "formula_by_axis": formulae.by_axis(traffic),
    "remat_policy": config.get("model", {}).get("remat_policy", "none"),
    "opt_sharding": config.get("opt_sharding", "fsdp"),
    "secs": {
      "compute": compute,
      "link": link,
      "network": network,
      "overlapped": step,
      "in_turn": compute + communication,
    },
    "examples_per_sec": examples_per_sec,
    "tokens_per_sec": tokens and examples_per_sec * tokens,
    "mfu": facts["model_flops"] / (peak * step),
  }


def basis(
  compiled: Sequence[Mapping[str, Any]], mesh: Mapping[str, int]
) -> Mapping[str, Any] | None:
  """Returns the facts to extrapolate to `mesh` from, or None."""

  def traits(of: Mapping[str, int]) -> tuple[Any, ...]:
    at_once = of["batch_size"] / (meshes.ways(of) * of["microbatches"])
    split = of["replica"] > 1, of["fsdp"] > 1
    return at_once, *split, of["sequence"], of["tensor"]

  similar = [facts for facts in compiled if traits(facts) == traits(mesh)]
  return similar[-1] if similar else None


def compare(guess: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns relative errors of an extrapolated row."""
  sent = [sum(r["sent_bytes"].values()) for r in (guess, row)]
  return {
    "memory": guess["peak_bytes"] / row["peak_bytes"] - 1,
    "sent": sent[0] / sent[1] - 1 if sent[1] else 0.0,
  }


def extrapolate(
  compiled: Mapping[str, Any], mesh: Mapping[str, int]
) -> dict[str, Any]:
  """Returns facts about a mesh that was not compiled, from a smaller mesh.

  With the same number of examples per device and microbatch, and the same sizes
  of `sequence` and `tensor`, a collective moves
  the same arrays on any number of devices: its groups grow, and it runs once
  per microbatch. Arrays that are sharded over `fsdp`, among them the state,
  shrink with the size of `fsdp`. Temporary memory stays the same.
  """
  devices = mesh["devices"]
  microbatch_ratio = mesh["microbatches"] / compiled["microbatches"]
  fsdp_ratio = mesh["fsdp"] / compiled["fsdp"]
  batch_ratio = mesh["batch_size"] / compiled["batch_size"]
  scaled = []
  for one in collectives.from_json(compiled["collectives"]):
    axes = formulae.axis_of(one, compiled)
    group, stride, inner, span = (*formulae.group(axes, mesh), 0, 0)[:4]
    # Sums of what fsdp splits, its gradients, are over other axes.
    over_replica = "replica" in axes and "fsdp" not in axes
    shrinkage = fsdp_ratio if over_replica else 1.0
    scaled.append(
      one._replace(
        group_size=group,
        stride=stride,
        runs=round(one.runs * microbatch_ratio),
        nbytes=round(one.nbytes * microbatch_ratio / shrinkage),
        inner=inner,
        span=span,
      )
    )
  state = {n: x / fsdp_ratio for n, x in compiled["state_bytes"].items()}
  saved = sum(compiled["state_bytes"].values()) - sum(state.values())
  memory = {
    **compiled["memory"],
    "argument_bytes": compiled["memory"]["argument_bytes"] - saved,
    "output_bytes": compiled["memory"]["output_bytes"] - saved,
    "alias_bytes": compiled["memory"]["alias_bytes"] - saved,
    "peak_bytes": compiled["memory"]["peak_bytes"] - saved,
  }
  return {
    **compiled,
    **mesh,
    "figures": f"from {compiled['devices']:,}",
    # Of the compiled program only.
    "cycles": None,
    "products": None,
    "state_bytes": state,
    "host_state_bytes": compiled["host_state_bytes"] / fsdp_ratio,
    "memory": memory,
    "batch_bytes": compiled["batch_bytes"]
    * (batch_ratio * compiled["devices"] / devices),
    "collectives": collectives.to_json(scaled),
    "model_flops": compiled["model_flops"] * batch_ratio,
    "executed_flops": compiled["executed_flops"] * batch_ratio,
  }
