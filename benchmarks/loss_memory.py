"""Benchmark 9: memory of a training step, from the compiled update.

With eight times the vocabulary, parameters, gradients and optimizer state grow,
but logits must not: a full array of logits would be by far the largest. A
second comparison is with big_vision, at equal batch. Nothing is executed: XLA
plans the memory when it compiles.

BIG_VISION=folder adds a checkout of big_vision.
"""

import math
from typing import Any

from benchmarks import measure, program, step_rate, synthetic, synthetic_text

_MIB = 2**20


def main() -> None:
  """Prints the ratios of the captioner and the decoder."""
  args = measure.arguments(__doc__)
  vocabularies = (256, 32) if args.quick else (262_144, 32_768)
  if args.quick:
    kinds = {
      "CapPa-mu/16": "kind=captioner,variant=mu/16,depth=1,decoder_depth=1,"
      "size=16,length=4,batch_size=2"
    }
  else:
    kinds = {
      "CapPa-S/16, 64 images of 224 x 224, 64 tokens": (
        "kind=captioner,size=224,batch_size=64,scan=True"
      ),
      "GPT-2 124M, 8 x 1024 tokens": (
        "kind=decoder,length=1024,batch_size=8,scan=True"
      ),
    }
  for name, argument in kinds.items():
    _vocabulary(name, argument, vocabularies)
  _big_vision(args.quick)


def _vocabulary(name: str, argument: str, sizes: tuple[int, int]) -> None:
  used = []
  for vocab_size in sizes:
    config = synthetic_text.get_config(f"{argument},vocab_size={vocab_size}")
    temp, params, _ = _bytes(config)
    used.append((temp, temp - params))
  large, small = used
  what = f"V={sizes[0]} / V={sizes[1]}: {name}"
  measure.report(
    9,
    f"peak memory less parameters and state, {what}",
    [large[0] / small[0]],
    target="<= 1.1",
  )
  measure.report(
    9,
    f"peak memory less parameters, state and gradients, {what}",
    [large[1] / small[1]],
  )
  for vocab_size, (temp, _) in zip(sizes, used):
    measure.report(
      9,
      f"peak memory less parameters and state, V={vocab_size}: {name}",
      [temp / _MIB],
      unit="MiB",
    )


def _bytes(config: Any) -> tuple[int, int, int]:
  """Returns the bytes of (temporary memory, parameters, whole state)."""
  import jax

  update = program.build(config, state=False).update
  (state, *_), _ = update.args_info
  size = lambda tree: sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
  temp = update.memory_analysis().temp_size_in_bytes
  return temp, size(state["params"]), size(state)


def _big_vision(quick: bool) -> None:
  vit = dict(variant="S/16", size=224, batch_size=32)
  captioner = dict(variant="S/16", depth=12, decoder_depth=6)
  captioner |= dict(vocab_size=32_000, length=64, size=224, batch_size=32)
  argument = ",".join(f"{n}={v}" for n, v in captioner.items())
  models = {
    "ViT-S/16, 32 images of 224 x 224": (
      step_rate.big_vision_vit(vit, "float32"),
      lambda: synthetic.get_config("S/16,size=224,batch_size=32"),
    ),
    "CapPa-S/16, 32 images of 224 x 224, 64 tokens": (
      step_rate.big_vision_captioner(captioner),
      lambda: synthetic_text.get_config(f"kind=captioner,{argument}"),
    ),
  }
  for name, (options, config) in models.items():
    name = f"peak memory of a step, ours / big_vision: {name}"
    options["memory_only"] = True
    peer, reason = step_rate.start_big_vision(options, quick)
    if reason:
      measure.skip(9, name, reason)
      continue
    theirs = peer.ready["temp_bytes"] + peer.ready["state_bytes"]
    peer.close()
    temp, _, state = _bytes(config())
    measure.report(9, name, [(temp + state) / theirs], target="<= 1.0")


if __name__ == "__main__":
  main()
