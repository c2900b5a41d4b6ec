"""Benchmark 10: bytes of train state on each of 8 devices.

With fsdp=8 a device should hold an eighth of the parameters and of Adam's
moments, plus the arrays that are too small to shard. The bytes are counted from
the arrays of a state of main.py on 8 simulated devices, and from the shardings
alone, which must give the same.
"""

from typing import Any

from benchmarks import measure

_DEVICES = 8


def main() -> None:
  """Prints the largest fraction on a device, for each model."""
  args = measure.arguments(__doc__)
  devices = 2 if args.quick else _DEVICES
  measure.simulate_devices(devices)
  from benchmarks import program, synthetic
  from bigtrain import sharding

  models = ["mu/16"] if args.quick else ["S/16", "B/16"]
  for model in models:
    size = 16 if args.quick else 224
    config = synthetic.get_config(f"{model},size={size}")
    config.mesh = dict(replica=1, fsdp=devices)
    state = program.build(config, update=False).state
    held, whole = _bytes(state)
    mesh = sharding.make_mesh(fsdp=devices)
    layout, _ = sharding.state_shardings(state, mesh)
    planned = sharding.bytes_per_device(state, layout)
    for source, part in (("arrays", max(held)), ("layout", planned)):
      measure.report(
        10,
        f"bytes of a device / (whole state / {devices}), by {source}: "
        f"ViT-{model}, adam",
        [part * devices / whole],
        target="<= 1.05",
      )
    measure.report(
      10, f"whole state: ViT-{model}, adam", [whole / 2**20], unit="MiB"
    )
    del state


def _bytes(state: Any) -> tuple[list[int], int]:
  """Returns (bytes on each device, bytes of the whole state)."""
  import jax

  held = dict.fromkeys(jax.devices(), 0)
  whole = 0
  for array in jax.tree.leaves(state):
    whole += array.nbytes
    for shard in array.addressable_shards:
      held[shard.device] += shard.data.nbytes
  return list(held.values()), whole


if __name__ == "__main__":
  main()
