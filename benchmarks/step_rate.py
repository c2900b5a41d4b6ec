"""Benchmark 1: steps per second, against peers with the same model and batch.

The compiled update of main.py takes turns with big_vision's and with torch,
each in its own process, on resident batches. All use Adam, weight decay and
clipping by the global norm.

BIG_VISION=folder adds a checkout of big_vision. TORCH_PYTHON names an
interpreter with torch, if this one lacks it.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import measure, peer_process

_CLASSES = 1000


class Sizes(NamedTuple):
  """Sizes of models, batches and turns.

  Attributes:
    steps: steps per turn.
    dtype: dtype of the computation, where the peer supports several.
    vit: variant, size in pixels, batch_size.
    captioner: see big_vision_captioner.
    decoder: width, depth, vocab_size, length, batch_size.
    llama: the same and num_kv_heads.
  """

  steps: int
  dtype: str
  vit: dict[str, Any]
  captioner: dict[str, Any]
  decoder: dict[str, Any]
  llama: dict[str, Any]


_QUICK = Sizes(
  1,
  "float32",
  dict(variant="mu/16", size=16, batch_size=8),
  {},
  dict(width=64, depth=1, vocab_size=64, length=8, batch_size=2),
  {},
)
_CPU = Sizes(
  3,
  "float32",
  dict(variant="S/16", size=96, batch_size=8),
  dict(variant="S/16", depth=6, decoder_depth=3, vocab_size=32_000, length=32)
  | dict(size=64, batch_size=8),
  dict(width=384, depth=6, vocab_size=50_304, length=256, batch_size=2),
  dict(width=512, depth=6, num_kv_heads=2, vocab_size=32_000, length=256)
  | dict(batch_size=2),
)
_GPU = Sizes(
  20,
  "bfloat16",
  dict(variant="S/16", size=224, batch_size=256),
  dict(variant="S/16", depth=12, decoder_depth=6, vocab_size=32_000, length=64)
  | dict(size=224, batch_size=128),
  dict(width=768, depth=12, vocab_size=50_304, length=1024, batch_size=16),
  dict(width=1024, depth=12, num_kv_heads=4, vocab_size=32_000, length=1024)
  | dict(batch_size=16),
)


def main() -> None:
  """Prints a ratio per model and peer."""
  args = measure.arguments(__doc__)
  # Leaves GPU memory for the peers.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  import jax

  from bigtrain.runtime import host_memory

  host_memory.keep_freed()  # Before the first use of a device.
  on_cpu = jax.devices()[0].platform == "cpu"
  sizes = _QUICK if args.quick else _CPU if on_cpu else _GPU
  # The captioner is slowest; loss_memory.py covers it in --quick.
  models = [_vit, _decoder]
  if not args.quick:
    models += [_captioner, _llama]
  for model in models:
    name, config, big_vision, torch = model(sizes)
    target = ">= 1.0" if on_cpu else ">= 1.1"
    peers = {}
    if big_vision:
      peers["big_vision"] = (start_big_vision, big_vision, ">= 1.1")
    if torch:
      peers["torch"] = (_start_torch, torch, target)
    _compare(name, config, peers, sizes.steps, args)


def _compare(
  name: str, config: Any, peers: dict[str, Any], steps: int, args: Any
) -> None:
  import jax

  from benchmarks import program

  started: dict[str, peer_process.Peer] = {}
  try:
    for peer, (start, options, _) in peers.items():
      process, reason = start(options, args.quick)
      if reason:
        measure.skip(1, f"step rate, ours / {peer}: {name}", reason)
      else:
        started[peer] = process
    if not started and not args.quick:
      return
    if args.quick:  # Halves the time to compile.
      config.update(optimizer=dict(name="sgd"), weight_stats="none")
    ours = program.build(config)
    number = sum(x.size for x in jax.tree.leaves(ours.state["params"]))
    for peer, process in started.items():
      if process.ready["parameters"] != number:
        raise ValueError(
          f"{name}: {number} parameters, but the model of {peer} has "
          f"{process.ready['parameters']}."
        )
    runs = {"ours": ours.run} | {p: s.run for p, s in started.items()}

    def turn(run: Callable[[int], float]) -> Callable[[], float]:
      return lambda: run(steps) / steps

    calls = {name: turn(run) for name, run in runs.items()}
    secs = measure.interleave(calls, args.repeats)
  finally:
    for process in started.values():
      process.close()
  for peer, process in started.items():
    how = process.ready.get("how")
    label = f"{peer} {how}" if how else peer
    measure.report(
      1,
      f"step rate, ours / {label}: {name}",
      measure.ratios(secs[peer], secs["ours"]),
      target=peers[peer][2],
    )
  measure.report(1, f"step: {name}", secs["ours"], unit="s")


def _vit(sizes: Sizes) -> tuple[str, Any, Any, Any]:
  """Returns (name, our config, big_vision's options, torch's options)."""
  from benchmarks import synthetic
  from bigtrain.models import vit

  variant, size, batch_size = sizes.vit.values()
  config = synthetic.get_config(_argument(sizes.vit))
  config.model.dtype = sizes.dtype
  shape = vit.variant_sizes(variant)
  patch = shape.pop("patch_size")
  batch: dict[str, Any] = dict(size=size, batch_size=batch_size)
  name = f"ViT-{variant}, {batch_size} images of {size} x {size}, {sizes.dtype}"
  return (
    name,
    config,
    big_vision_vit(sizes.vit, sizes.dtype),
    batch
    | dict(
      dtype=sizes.dtype,
      model=shape
      | dict(length=(size // patch) ** 2, patch_size=patch)
      | dict(num_classes=_CLASSES),
    ),
  )


def big_vision_vit(options: dict[str, Any], dtype: str) -> dict[str, Any]:
  """Returns options of peer_big_vision_step.py for the model of synthetic.py.

  Args:
    options: variant, size, batch_size.
    dtype: dtype of the matrix products.
  """
  model = dict(
    num_classes=_CLASSES,
    variant=options["variant"],
    pool_type="gap",
    dtype_mm=dtype,
  )
  batch = {name: options[name] for name in ("size", "batch_size")}
  return dict(captions=False, model=model, **batch)


def _captioner(sizes: Sizes) -> tuple[str, Any, Any, Any]:
  from benchmarks import synthetic_text

  options = sizes.captioner
  config = synthetic_text.get_config(f"kind=captioner,{_argument(options)}")
  name = "CapPa-{variant}, {depth} + {decoder_depth} layers, V={vocab_size}, "
  name += "{batch_size} images of {size} x {size}, {length} tokens, float32"
  # There is no reference implementation for torch.
  return name.format(**options), config, big_vision_captioner(options), None


def big_vision_captioner(options: dict[str, Any]) -> dict[str, Any]:
  """Returns options of peer_big_vision_step.py for synthetic_text.py.

  Args:
    options: variant, depth, decoder_depth, vocab_size, length, size,
      batch_size.
  """
  from bigtrain.models import vit

  shape = vit.variant_sizes(options["variant"])
  model = dict(
    emb_dim=shape["width"],
    mlp_dim=shape["mlp_dim"],
    num_heads=shape["num_heads"],
    num_layers=options["depth"],
    patches=[shape["patch_size"]] * 2,
    decoder_num_layers=options["decoder_depth"],
    decoder_bias=False,
    vocab_size=options["vocab_size"],
    seq_len=options["length"],
    masked_pred_prob=0.75,
    masking_ratio=1.0,
  )
  batch = {name: options[name] for name in ("size", "batch_size")}
  return dict(captions=True, model=model, **batch)


def _decoder(sizes: Sizes) -> tuple[str, Any, Any, Any]:
  from benchmarks import synthetic_text

  options = sizes.decoder
  argument = f"kind=decoder,{_argument(options)},dtype={sizes.dtype}"
  config = synthetic_text.get_config(argument)
  model = {n: v for n, v in options.items() if n != "batch_size"}
  model |= _heads_and_mlp(options["width"])
  name = "GPT-2 of {depth} layer(s), width {width}, V={vocab_size}, "
  name += f"{{batch_size}} x {{length}} tokens, {sizes.dtype}"
  torch = dict(batch_size=options["batch_size"], dtype=sizes.dtype, model=model)
  return name.format(**options), config, None, torch


def _heads_and_mlp(width: int) -> dict[str, int]:
  """Returns num_heads and mlp_dim of a GPT-2."""
  return dict(num_heads=width // 64, mlp_dim=4 * width)


def _llama(sizes: Sizes) -> tuple[str, Any, Any, Any]:
  from benchmarks import synthetic_text

  options = sizes.llama
  argument = f"kind=decoder,variant=llama,{_argument(options)}"
  config = synthetic_text.get_config(f"{argument},dtype={sizes.dtype}")
  model = {n: v for n, v in options.items() if n != "batch_size"}
  model |= dict(num_heads=config.model.num_heads, mlp_dim=config.model.mlp_dim)
  name = (
    "Llama of {depth} layers, width {width}, {num_kv_heads} heads of keys, "
  )
  name += f"V={{vocab_size}}, {{batch_size}} x {{length}} tokens, {sizes.dtype}"
  torch = dict(batch_size=options["batch_size"], dtype=sizes.dtype, model=model)
  return name.format(**options), config, None, torch


def _argument(options: dict[str, Any]) -> str:
  return ",".join(f"{name}={value}" for name, value in options.items())


def start_big_vision(
  options: dict[str, Any], quick: bool
) -> tuple[peer_process.Peer | None, str]:
  """Returns (the process or None, "" or the reason for None)."""
  checkout = os.environ.get("BIG_VISION", "")
  reason = "" if checkout else "BIG_VISION is not set"
  reason = reason or measure.missing("einops")
  reason = reason or ("not in --quick" if quick else "")
  if reason:
    return None, reason
  env = peer_process.environment(checkout)
  return _start("peer_big_vision_step", options, env, sys.executable)


def _start_torch(
  options: dict[str, Any], quick: bool
) -> tuple[peer_process.Peer | None, str]:
  python = os.environ.get("TORCH_PYTHON", "")
  reason = "" if python else measure.missing("torch")
  reason = reason or ("not in --quick" if quick else "")
  if reason:
    return None, reason
  env = peer_process.environment()
  return _start("peer_torch_step", options, env, python or sys.executable)


def _start(
  script: str, options: dict[str, Any], env: dict[str, str], python: str
) -> tuple[peer_process.Peer | None, str]:
  try:
    return peer_process.Peer(script, options, env, python), ""
  except RuntimeError as e:  # The installed peer may be incompatible.
    return None, f"failed: {str(e).strip().splitlines()[-1]}"


if __name__ == "__main__":
  main()
