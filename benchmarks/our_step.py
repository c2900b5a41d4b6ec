"""Steps of our compiled update, for peer_process.py.

The update is traced at the start, and compiled in the first turn: XLA times
kernels for a GPU when it compiles, so nothing else should use the GPU then.
"""

import json
import sys
import time
from typing import Any

import jax
import ml_collections

from benchmarks import peer_process, program
from bigtrain.reports import flops
from bigtrain.runtime import device_memory


def main() -> None:
  """Serves the update of the config on the command line."""
  config = ml_collections.ConfigDict(json.loads(sys.argv[1])["config"])
  built = program.build(config, state=False, update=False, facts=True)
  device = jax.devices()[0]

  def run(steps: int) -> dict[str, Any]:
    if built.update is None:
      built.compile()
      built.fill()
    cpu_secs = time.process_time()
    secs = built.run(steps)
    stats = device.memory_stats() or {}
    memory = device_memory.memory_bytes(built.update)
    return {
      "secs": secs,
      "cpu_secs": time.process_time() - cpu_secs,
      "compile_secs": built.compile_secs,
      "planned_bytes": device_memory.needed_bytes(memory),
      "peak_bytes": stats.get("peak_bytes_in_use"),
    }

  ready = {
    "parameters": built.facts["parameters"],
    "model_flops": built.facts["model_flops"],
    "platform": device.platform,
    "peak_flops": flops.peak_flops(device),
  }
  peer_process.serve(ready, run)


if __name__ == "__main__":
  main()
