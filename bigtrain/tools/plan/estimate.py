"""How long a step takes on some hardware, from what a program does and sends.

  compute    = executed FLOPs / (devices * peak * efficiency)
  network    = sum over collectives of hardware.seconds
  a step     = the larger of both, if all of it overlaps, or
               their sum, if nothing does

The formulae of the `formula` entry need no compiler. With S parameters that
are split over `fsdp`, b bytes of the compute type, m microbatches, F the size
of `fsdp` and R that of `replica`, each device sends

  all-gather       2 m b S (F-1)/F         weights, forward and backward
  reduce-scatter   m b S (F-1)/F           gradients
  all-reduce       2 m b S/F (R-1)/R       its part of them, over replicas

They leave out what is added up whole, such as gradients of embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.tools.plan import collectives
from bigtrain.tools.plan import hardware as hardware_lib

# Of the peak, by matrix products as large as those of models that are worth a
# cluster; what published runs reach where the network is no limit.
EFFICIENCY = 0.6

_BYTES = {"bfloat16": 2, "float16": 2}


def row(
  facts: Mapping[str, Any],
  config: Mapping[str, Any],
  hardware: hardware_lib.Hardware,
  efficiency: float = EFFICIENCY,
) -> dict[str, Any]:
  """Everything about one mesh, as JSON has it.

  Args:
    facts: of footprint.measure, with the program's memory, model_flops, and
      devices, replica, fsdp, batch_size, microbatches.
    config: the model's dtype is read from it.
    hardware: see hardware.TABLE.
    efficiency: share of the peak that matrix products reach.

  Returns:
    The facts, and: peak_bytes, fits; sent_bytes {kind: of each device a step};
    formula {kind: the same}; secs {compute, link, network, overlapped,
    in_turn}; and of a step that overlaps: examples_per_sec, tokens_per_sec,
    mfu.
  """
  devices, memory = facts["devices"], facts["memory"]
  found = collectives.from_json(facts["collectives"])
  peak_bytes = (
    memory["argument_bytes"]
    + memory["output_bytes"]
    - memory["alias_bytes"]
    + memory["temporary_bytes"]
  )
  sent = dict.fromkeys(collectives.KINDS, 0.0)
  link = network = waits = 0.0
  for one in found:
    sent[one.kind] += one.sent_bytes
    costs = hardware_lib.seconds(one, hardware)
    link += costs.link_secs
    network += costs.network_secs
    waits += costs.secs
  peak = devices * hardware.peak_flops
  compute = facts["executed_flops"] / (peak * efficiency)
  step = max(compute, waits)
  examples_per_sec = facts["batch_size"] / step
  tokens = facts["tokens_per_example"]
  return {
    **facts,
    "peak_bytes": peak_bytes,
    "fits": peak_bytes <= hardware.memory_bytes,
    "memory_fraction": peak_bytes / hardware.memory_bytes,
    "sent_bytes": sent,
    "formula": formula(facts, config),
    "secs": {
      "compute": compute,
      "link": link,
      "network": network,
      "overlapped": step,
      "in_turn": compute + waits,
    },
    "examples_per_sec": examples_per_sec,
    "tokens_per_sec": tokens and examples_per_sec * tokens,
    "mfu": facts["model_flops"] / (peak * step),
  }


def formula(
  facts: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, float]:
  """Bytes that each device sends in a step, by the formulae above."""
  width = _BYTES.get(config.get("model", {}).get("dtype", "float32"), 4)
  sharded, times = facts["sharded_parameters"], facts["microbatches"]
  fsdp, replica = facts["fsdp"], facts["replica"]
  passes = times * width * sharded
  return {
    "all-gather": 2 * passes * (fsdp - 1) / fsdp,
    "reduce-scatter": passes * (fsdp - 1) / fsdp,
    "all-reduce": 2 * passes / fsdp * (replica - 1) / replica,
  }


def alike(
  compiled: Sequence[Mapping[str, Any]], mesh: Mapping[str, int]
) -> Mapping[str, Any] | None:
  """The largest mesh that `mesh` can be extrapolated from, if there is one.

  Args:
    compiled: facts; smaller meshes first.
    mesh: devices, replica, fsdp, batch_size and microbatches.
  """

  def shape(of: Mapping[str, int]) -> tuple[Any, ...]:
    at_once = of["batch_size"] / (of["devices"] * of["microbatches"])
    return at_once, of["replica"] > 1, of["fsdp"] > 1

  found = [one for one in compiled if shape(one) == shape(mesh)]
  return found[-1] if found else None


def compare(guess: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
  """Relative errors of an extrapolated row about a mesh that was compiled."""
  sent = [sum(r["sent_bytes"].values()) for r in (guess, row)]
  return {
    "memory": guess["peak_bytes"] / row["peak_bytes"] - 1,
    "sent": sent[0] / sent[1] - 1 if sent[1] else 0.0,
  }


def extrapolate(
  compiled: Mapping[str, Any], mesh: Mapping[str, int]
) -> dict[str, Any]:
  """Facts about a mesh that was not compiled, from those of a smaller one.

  With the same examples on a device at a time, what a collective sends does
  not depend on how many devices there are: its groups grow, it runs once for
  each microbatch, and a device's part of what is split over `fsdp` is so many
  times smaller. So is the state. Temporaries stay as they are.

  Args:
    compiled: see `alike`.
    mesh: devices, replica, fsdp, batch_size and microbatches.
  """
  devices = mesh["devices"]
  times = mesh["microbatches"] / compiled["microbatches"]
  finer = mesh["fsdp"] / compiled["fsdp"]
  found = []
  for one in collectives.from_json(compiled["collectives"]):
    if one.group_size == compiled["devices"] and compiled["replica"] > 1:
      group, stride, share = devices, 1, 1.0
    elif one.stride == compiled["fsdp"] > 1:
      group, stride, share = mesh["replica"], mesh["fsdp"], finer
    elif compiled["fsdp"] > 1:
      group, stride, share = mesh["fsdp"], 1, 1.0
    else:
      group, stride, share = devices, 1, 1.0
    found.append(
      one._replace(
        group_size=group,
        stride=stride,
        runs=round(one.runs * times),
        nbytes=round(one.nbytes * times / share),
      )
    )
  state = {n: x / finer for n, x in compiled["state_bytes"].items()}
  less = sum(compiled["state_bytes"].values()) - sum(state.values())
  memory = {
    **compiled["memory"],
    "argument_bytes": compiled["memory"]["argument_bytes"] - less,
    "output_bytes": compiled["memory"]["output_bytes"] - less,
    "alias_bytes": compiled["memory"]["alias_bytes"] - less,
  }
  more = mesh["batch_size"] / compiled["batch_size"]
  return {
    **compiled,
    **mesh,
    "figures": f"from {compiled['devices']:,}",
    "state_bytes": state,
    "memory": memory,
    "batch_bytes": compiled["batch_bytes"]
    * (more * compiled["devices"] / devices),
    "collectives": collectives.to_json(found),
    "model_flops": compiled["model_flops"] * more,
    "executed_flops": compiled["executed_flops"] * more,
  }
