"""Benchmark 1: steps per second, against peers with the same model and batch.

The compiled update of main.py takes turns with big_vision's and with torch,
each in its own process, on resident batches. All use Adam, weight decay and
clipping by the global norm. --only=vit,rope chooses models.

BIG_VISION=folder adds a checkout of big_vision. TORCH_PYTHON names an
interpreter with torch and timm, if this one lacks them.
"""

import functools
import os
import sys
from typing import Any, NamedTuple

from benchmarks import measure, peer_process

_CLASSES = 1000


class Case(NamedTuple):
  """One of our models with a batch, and options of the peers' scripts."""

  name: str
  config: Any
  big_vision: dict[str, Any] | None = None  # None: no such peer.
  torch: dict[str, Any] | None = None
  # The config without the option whose cost is measured.
  without: Any = None


class Sizes(NamedTuple):
  """Sizes of a benchmark.

  Attributes:
    steps: steps per turn.
    dtype: dtype of the computation, where the peer supports several.
    cases: {name of a case: sizes of its model and batch}.
  """

  steps: int
  dtype: str
  cases: dict[str, dict[str, Any]]


def _image(size: int, batch_size: int, **model: Any) -> dict[str, Any]:
  return dict(**model, size=size, batch_size=batch_size)


# Without the captioner, which is slow; loss_memory.py covers it in --quick.
QUICK = Sizes(
  steps=1,
  dtype="float32",
  cases=dict(
    vit=_image(16, 8, variant="mu/16"),
    decoder=dict(width=64, depth=1, vocab_size=64, length=8, batch_size=2),
  ),
)
# Options of each case: for all machines, more for CPUs, more for GPUs.
_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = dict(
  vit=({}, _image(96, 8, variant="S/16"), _image(224, 256, variant="B/16")),
  decoder=(
    dict(vocab_size=50_304),
    dict(width=384, depth=6, length=256, batch_size=2),
    dict(width=768, depth=12, length=1024, batch_size=32),
  ),
  captioner=(
    dict(variant="S/16", vocab_size=32_000),
    _image(64, 8, depth=6, decoder_depth=3, length=32),
    _image(224, 128, depth=12, decoder_depth=6, length=64),
  ),
  llama=(
    {},
    dict(
      vocab_size=32_000,
      width=512,
      depth=6,
      num_kv_heads=2,
      length=256,
      batch_size=2,
    ),
    dict(  # Of Llama 3.2 1B.
      vocab_size=128_256,
      width=2048,
      depth=16,
      num_kv_heads=8,
      mlp_dim=8192,
      tied_head=True,
      length=4096,
      batch_size=4,
    ),
  ),
  dinov2=({}, _image(98, 8), _image(224, 256)),
  convnext=(
    {},
    _image(128, 8, variant="tiny"),
    _image(224, 128, variant="base"),
  ),
  mixer=({}, _image(224, 4), _image(224, 256)),
  bit=({}, _image(128, 8), _image(224, 128)),
  rope=({}, _image(224, 4), _image(224, 256)),
)
CPU = Sizes(
  steps=3,
  dtype="float32",
  cases={name: {**both, **cpu} for name, (both, cpu, _) in _OPTIONS.items()},
)
GPU = Sizes(
  steps=20,
  dtype="bfloat16",
  cases={name: {**both, **gpu} for name, (both, _, gpu) in _OPTIONS.items()},
)


def main() -> None:
  """Prints a ratio per model and peer."""
  args = measure.arguments(__doc__, only="names of cases, separated by commas")
  names = args.only.split(",") if args.only else [*_CASES]
  if not {*names} <= {*_CASES}:
    sys.exit(f"--only={args.only}: expected some of {', '.join(_CASES)}.")
  # Leaves GPU memory for the peers.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  import jax

  from bigtrain.runtime import host_memory

  host_memory.keep_freed()  # Before the first use of a device.
  on_cpu = jax.devices()[0].platform == "cpu"
  if args.quick:
    sizes = QUICK
  else:
    sizes = CPU if on_cpu else GPU
  for name in names:
    if name in sizes.cases:
      _compare(case_of(name, sizes), sizes.steps, on_cpu, args)


def case_of(name: str, sizes: Sizes) -> Case:
  """Returns a case, one of the keys of `sizes.cases`."""
  return _CASES[name](sizes.cases[name], sizes.dtype)


def _compare(case: Case, steps: int, on_cpu: bool, args: Any) -> None:
  import jax

  from benchmarks import program

  peers = {"big_vision": start_big_vision, "torch": _start_torch}
  targets = {"big_vision": ">= 1.1", "torch": ">= 1.0" if on_cpu else ">= 1.1"}
  started: dict[str, peer_process.Peer] = {}
  try:
    for peer, start in peers.items():
      options = getattr(case, peer)
      if options is None:
        continue
      process, reason = start(options, args.quick)
      if process is None:
        label = f"step rate, ours / {peer}: {case.name}"
        measure.skip(1, label, reason)
      else:
        started[peer] = process
    if not started and case.without is None and not args.quick:
      return
    if args.quick:  # Halves the time to compile.
      case.config.update(optimizer=dict(name="sgd"), weight_stats="none")
    ours = program.build(case.config)
    num_parameters = sum(x.size for x in jax.tree.leaves(ours.state["params"]))
    for peer, process in started.items():
      if process.ready["parameters"] != num_parameters:
        raise ValueError(
          f"{case.name}: {num_parameters} parameters, but the model of {peer} "
          f"has {process.ready['parameters']}."
        )
    # Functions from a number of steps to (seconds, CPU seconds).
    runs = {peer: process.run for peer, process in started.items()}
    runs["ours"] = functools.partial(measure.timed_with_cpu, ours.run)
    if case.without is not None:
      without = program.build(case.without)
      runs["without"] = functools.partial(measure.timed_with_cpu, without.run)
    turns = measure.interleave(
      {name: functools.partial(run, steps) for name, run in runs.items()},
      args.repeats,
    )
  finally:
    for process in started.values():
      process.close()
  # Per step.
  secs, cpu_secs = {}, {}
  for name, measured in turns.items():
    secs[name] = [wall / steps for wall, _ in measured]
    cpu_secs[name] = [cpu / steps for _, cpu in measured]
  for peer, process in started.items():
    how = process.ready.get("how")
    label = f"{peer} {how}" if how else peer
    target = targets[peer]
    values = measure.ratios(secs[peer], secs["ours"])
    name = f"step rate, ours / {label}: {case.name}"
    measure.report(1, name, values, target=target)
    if on_cpu:
      values = measure.ratios(cpu_secs[peer], cpu_secs["ours"])
      name = f"CPU time of a step, {label}'s / ours: {case.name}"
      measure.report(1, name, values, target=target)
  if case.without is not None:
    values = measure.ratios(secs["ours"], secs["without"])
    measure.report(1, f"step, {case.name}", values, target="<= 1.05")
  measure.report(1, f"step: {case.name}", secs["ours"], unit="s")


def _images(
  name: str, model_name: str, options: dict[str, Any], dtype: str, **model: Any
) -> Case:
  """A classifier, without peers yet; `options` has size and batch_size."""
  from benchmarks import synthetic

  size, batch_size = options["size"], options["batch_size"]
  config = synthetic.get_config(f"size={size},batch_size={batch_size}")
  config.model_name = model_name
  config.model = dict(num_classes=_CLASSES, dtype=dtype, **model)
  name += f", {batch_size} images of {size} x {size}, {dtype}"
  return Case(name, config)


def _vit(options: dict[str, Any], dtype: str) -> Case:
  from bigtrain.models import vit

  variant = options["variant"]
  sizes = vit.variant_sizes(variant)
  num_patches = (options["size"] // sizes["patch_size"]) ** 2
  torch = {**sizes, "length": num_patches, "num_classes": _CLASSES}
  case = _images(f"ViT-{variant}", "vit", options, dtype, variant=variant)
  return case._replace(
    big_vision=big_vision_vit(options, dtype),
    torch=_batch(options) | dict(dtype=dtype, model=torch),
  )


def _batch(options: dict[str, Any]) -> dict[str, Any]:
  return {name: options[name] for name in ("size", "batch_size")}


def _dinov2(options: dict[str, Any], dtype: str) -> Case:
  model = dict(
    variant="S/14",
    pool_type="tok",
    posemb_class=True,
    mlp="gelu_erf",
    layer_scale=1e-5,
  )
  case = _images("DINOv2-S/14", "vit", options, dtype, **model)
  timm = dict(timm="vit_small_patch14_dinov2", img_size=options["size"])
  return case._replace(torch=_timm(options, dtype, **timm))


def _convnext(options: dict[str, Any], dtype: str) -> Case:
  variant = options["variant"]
  model = dict(variant=variant, layer_scale=1e-6)
  timm: dict[str, Any] = dict(timm=f"convnext_{variant}")
  if "depths" in options:  # Tiny sizes.
    depths, widths = options["depths"], options["widths"]
    model |= dict(depths=depths, widths=widths)
    timm |= dict(depths=depths, dims=widths)
  name = f"ConvNeXt-{variant[0].upper()}"
  case = _images(name, "convnext", options, dtype, **model)
  return case._replace(torch=_timm(options, dtype, **timm))


def _timm(options: dict[str, Any], dtype: str, **model: Any) -> dict[str, Any]:
  model = dict(num_classes=_CLASSES, **model)
  return _batch(options) | dict(dtype=dtype, model=model)


def _mixer(options: dict[str, Any], dtype: str) -> Case:
  model = dict(variant="Mixer-S/16")
  case = _images("Mixer-S/16", "vit", options, dtype, **model)
  return case._replace(
    big_vision=_big_vision("mlp_mixer", options, variant="S/16")
  )


def _bit(options: dict[str, Any], dtype: str) -> Case:
  case = _images("BiT-R50x1", "resnet", options, dtype, norm="bit")
  return case._replace(big_vision=_big_vision("bit", options))


def _rope(options: dict[str, Any], dtype: str) -> Case:
  name = "ViT-S/16 with 2D rotary / learned positions"
  model: dict[str, Any] = dict(variant="S/16")
  learned = _images(name, "vit", options, dtype, **model)
  model |= dict(posemb="none", rope={})
  rotary = _images(name, "vit", options, dtype, **model)
  return rotary._replace(without=learned.config)


def big_vision_vit(options: dict[str, Any], dtype: str) -> dict[str, Any]:
  """Returns options of peer_big_vision_step.py for the model of synthetic.py.

  Args:
    options: variant, size, batch_size.
    dtype: dtype of the matrix products.
  """
  model = dict(variant=options["variant"], pool_type="gap", dtype_mm=dtype)
  return _big_vision("vit", options, **model)


def _big_vision(
  module: str, options: dict[str, Any], **model: Any
) -> dict[str, Any]:
  model = dict(num_classes=_CLASSES, **model)
  return dict(module=module, model=model, **_batch(options))


def _captioner(options: dict[str, Any], dtype: str) -> Case:
  from benchmarks import synthetic_text

  del dtype  # big_vision's computes in float32.
  config = synthetic_text.get_config(f"kind=captioner,{_argument(options)}")
  name = "CapPa-{variant}, {depth} + {decoder_depth} layers, V={vocab_size}, "
  name += "{batch_size} images of {size} x {size}, {length} tokens, float32"
  peer = big_vision_captioner(options)
  return Case(name.format(**options), config, peer)


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
  return dict(module="proj.cappa.cappa", model=model, **_batch(options))


def _decoder(options: dict[str, Any], dtype: str) -> Case:
  name = "GPT-2 of {depth} layer(s), width {width}, V={vocab_size}"
  width = options["width"]
  return _texts(
    name, "", options, dtype, num_heads=width // 64, mlp_dim=4 * width
  )


def _llama(options: dict[str, Any], dtype: str) -> Case:
  name = "Llama of {depth} layers, width {width}, {num_kv_heads} heads of keys"
  return _texts(name + ", V={vocab_size}", "variant=llama,", options, dtype)


def _texts(
  name: str, variant: str, options: dict[str, Any], dtype: str, **model: Any
) -> Case:
  from benchmarks import synthetic_text

  argument = f"kind=decoder,{variant}{_argument(options)},dtype={dtype}"
  config = synthetic_text.get_config(argument)
  if variant:
    model |= dict(
      num_heads=config.model.num_heads, mlp_dim=config.model.mlp_dim
    )
  model |= {n: v for n, v in options.items() if n != "batch_size"}
  name += ", {batch_size} x {length} tokens, " + dtype
  torch = dict(batch_size=options["batch_size"], dtype=dtype, model=model)
  return Case(name.format(**options), config, torch=torch)


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
  python = python or sys.executable
  return _start("peer_torch_step", options, torch_environment(), python)


def torch_environment() -> dict[str, str]:
  """Returns the environment of peer_torch_step.py.

  timm imports torchvision, although these models use nothing of it; the folder
  has a stand-in.
  """
  return peer_process.environment(os.path.join(measure.ROOT, "tests/golden"))


def _start(
  script: str, options: dict[str, Any], env: dict[str, str], python: str
) -> tuple[peer_process.Peer | None, str]:
  try:
    return peer_process.Peer(script, options, env, python), ""
  except RuntimeError as e:  # The installed peer may be incompatible.
    return None, f"failed: {str(e).strip().splitlines()[-1]}"


_CASES = dict(
  vit=_vit,
  decoder=_decoder,
  captioner=_captioner,
  llama=_llama,
  dinov2=_dinov2,
  convnext=_convnext,
  mixer=_mixer,
  bit=_bit,
  rope=_rope,
)

if __name__ == "__main__":
  main()
