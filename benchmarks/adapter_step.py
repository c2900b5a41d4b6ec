"""Benchmark 1: steps per second with LoRA, against transformers and PEFT.

A model of SmolLM2-135M's shape, adapters on all kernels of its blocks, texts
of which every token has a loss; Adam, and clipping by the global norm. The
compiled update of main.py takes turns with PEFT's steps, as its users run them
and with torch.compile. CPU time is that of the process, which a busy machine
changes less.

With --pictures=smolvlm, a model of SmolVLM-256M's shape reads a picture of 512
pixels before each text, with adapters on the kernels that its published recipe
names: those of the decoder's blocks, and of queries, keys and values of the
tower.

PEFT_PYTHON names an interpreter with torch, transformers and peft, if this one
lacks them.
"""

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import measure, peer_process, synthetic_pictures

RANK = 16
_CPU = dict(
  width=576,
  depth=30,
  num_heads=9,
  num_kv_heads=3,
  mlp_dim=1536,
  vocab_size=49_152,
)
# 12 of the 32 layers of Llama 3 8B.
GPU = dict(
  width=4096,
  depth=12,
  num_heads=32,
  num_kv_heads=8,
  mlp_dim=14_336,
  vocab_size=128_256,
)
QUICK = dict(
  width=64, depth=1, num_heads=2, num_kv_heads=1, mlp_dim=64, vocab_size=64
)


def main() -> None:
  """Prints two ratios for each way to run the peer."""
  args = measure.arguments(
    __doc__, pictures="smolvlm for a model with pictures"
  )
  with tempfile.TemporaryDirectory() as folder:
    _measure(args, folder)


def _measure(args: Any, folder: str) -> None:
  import jax

  from benchmarks import program

  batch = dict(batch_size=2, length=8 if args.quick else 256)
  steps = 1 if args.quick else 2
  model = QUICK if args.quick else _CPU
  config_of_run = functools.partial(config_of, model, **batch)
  name = f"Llama of {model['depth']} layers, width {model['width']}, LoRA of "
  options_of_peer: dict[str, Any] = dict(model=model, rank=RANK)
  if args.pictures:
    model = (
      synthetic_pictures.QUICK if args.quick else synthetic_pictures.SMOLVLM
    )
    batch["length"] += synthetic_pictures.image_tokens(model["image_size"])
    synthetic_pictures.write_config(folder, model)
    config_of_run = functools.partial(with_pictures, folder, model, **batch)
    name = f"SmolVLM of {model['depth']} and {model['image_depth']} layers, a "
    name += f"picture of {model['image_size']} pixels, LoRA of "
    options_of_peer = dict(model=model, rank=RANK, folder=folder)
  name += f"rank {RANK}, {batch['batch_size']} x {batch['length']} tokens, "
  name += "float32"
  peers: dict[str, peer_process.Peer] = {}
  try:
    for how in ("eager", "compiled"):
      options = options_of_peer | dict(compiled=how == "compiled")
      peer, reason = _start(options | batch, args.quick)
      if peer is None:
        figure = f"step rate, ours / PEFT {how}: {name}"
        measure.skip(1, figure, reason)
      else:
        peers[how] = peer
    ours = program.build(config_of_run())
    number = sum(x.size for x in jax.tree.leaves(ours.state["params"]))
    for peer in peers.values():
      if peer.ready["parameters"] != number:
        raise ValueError(
          f"{number} parameters of adapters, but PEFT has "
          f"{peer.ready['parameters']}."
        )
    calls: dict[str, Callable[[], Any]] = {
      "ours": lambda: measure.timed_with_cpu(ours.run, steps)
    }
    for how, peer in peers.items():
      calls[how] = functools.partial(peer.run, steps)
    turns = measure.interleave(calls, args.repeats)
  finally:
    for peer in peers.values():
      peer.close()
  for k, what in enumerate(("step rate", "CPU time of a step")):
    of_kind = {how: [turn[k] for turn in x] for how, x in turns.items()}
    for how in peers:
      ratios = measure.ratios(of_kind[how], of_kind["ours"])
      direction = "ours / PEFT" if k == 0 else "PEFT's / ours"
      label = f"{what}, {direction} {how}: {name}"
      measure.report(1, label, ratios, target=">= 1.0")
  secs = [turn[0] / steps for turn in turns["ours"]]
  measure.report(1, f"step: {name}", secs, unit="s")


def config_of(
  model: dict[str, int],
  length: int,
  batch_size: int,
  dtype: str = "float32",
) -> Any:
  """Returns our config.

  Args:
    model: sizes of a Llama.
    length: tokens of a text.
    batch_size: number of texts.
    dtype: dtype of the computation and, unless float32, of the frozen kernels.
  """
  from benchmarks import synthetic_text

  sizes = f"vocab_size={model['vocab_size']},length={length}"
  config = synthetic_text.get_config(
    f"kind=decoder,variant=llama,{sizes},batch_size={batch_size},dtype={dtype}"
  )
  config.model = dict(
    variant="llama",
    tied_head=True,
    rope_theta=100_000.0,
    dtype=dtype,
    **model,
  )
  targets = r".*/(query|key|value|out|gate|up|down)/kernel"
  config.adapters = dict(targets=targets, rank=RANK, alpha=2 * RANK, base=dtype)
  config.wd = 0.0
  return config


def with_pictures(
  folder: str, model: dict[str, int], length: int, batch_size: int
) -> Any:
  """Returns our config of the SmolVLM whose config.json a folder has."""
  config = config_of(QUICK, length, batch_size)
  config.input.data = dict(
    type="benchmarks.synthetic_pictures",
    vocab_size=model["vocab_size"],
    length=length,
    size=model["image_size"],
  )
  config.model_name = "vision_language"
  config.model = dict(published=folder, dtype="float32")
  text, image = "query|key|value|out|gate|up|down", "query|key|value"
  targets = rf"(llm/.*/({text})|img/.*/({image}))/kernel"
  config.adapters = dict(
    targets=targets, rank=RANK, alpha=2 * RANK, base="float32"
  )
  return config


def _start(
  options: dict[str, Any], quick: bool
) -> tuple[peer_process.Peer | None, str]:
  python = os.environ.get("PEFT_PYTHON", "")
  reason = "" if python else measure.missing("torch", "transformers", "peft")
  reason = reason or ("not in --quick" if quick else "")
  if reason:
    return None, reason
  env = peer_process.environment() | {"HF_HUB_OFFLINE": "1"}
  try:
    python = python or sys.executable
    return peer_process.Peer("peer_peft_step", options, env, python), ""
  except RuntimeError as e:  # The compiler may not work on this machine.
    return None, f"failed: {str(e).strip().splitlines()[-1]}"


if __name__ == "__main__":
  main()
