"""Benchmark 12: updates judged by the compilers of TPUs and GPUs.

libtpu and jax's CUDA plugin compile the update, as main builds it, for devices
that are absent, and tools.plan reads the program. Every compilation of a
program gives the same figures, so one is enough.

For TPUs, the time of a step is the cycles that the compiler estimates, plus the
time in which the step waits for transfers at the published bandwidth. That
leaves out the host, and kernels (Pallas), which the compiler does not know. The
GPU's compiler estimates no times; the script reports its memory and products.

Sharded updates are compared with unsharded updates of the same batch. ViTs are
compared with big_vision's and decoders with MaxText's, compiled for the same
chips with the same batch:

  BIG_VISION=folder     a checkout of github.com/google-research/big_vision;
                        needs einops
  MAXTEXT=folder        a checkout of github.com/AI-Hypercomputer/maxtext
  MAXTEXT_PYTHON=path   a Python with its requirements and our jax[tpu]
  python -m benchmarks.compilers --only=vit_b16,llama_1b

Layers are under scan, so the time to compile does not depend on their number.

`--only=delta_rule` compiles the gated delta rule of a layer of Qwen3-Next, in
plain JAX and as kernels, see delta_rule_compiled.py.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks import measure, peer_process

_NUMBER = 12


class Peer(NamedTuple):
  """Another program's update, for the same chips.

  Attributes:
    name: name of the program.
    script: module of benchmarks that compiles it.
    source: its repository on GitHub.
    folder: where its modules are in a checkout of it.
    modules: packages that it needs in our environment; None if it needs its own
      Python.
    options: options of the script.
    target: target for our seconds per step over the peer's.
  """

  name: str
  script: str
  source: str
  folder: str
  modules: tuple[str, ...] | None
  options: dict[str, Any]
  target: str

  @property
  def variable(self) -> str:
    """The environment variable that names the checkout."""
    return self.name.upper()


class Case(NamedTuple):
  """An update to compile.

  Attributes:
    config: config file, with arguments.
    hardware: entry of bigtrain/tools/plan/hardware.py.
    devices: number of devices.
    batch_size: examples per step; None for the config's.
    changes: changes of the config, such as "model.scan=True".
    fsdp: number of devices that share a state; None for the config's.
    replica_too: whether to compare it with an unsharded state.
    peer: the program to compare with, if any.
    features: features of the data, if the config does not determine them, see
      tools.plan.
    tasks: names of the tasks of config.task to keep, from the first step on;
      None for all, as at the end of a run.
  """

  config: str
  hardware: str
  devices: int
  batch_size: int | None
  changes: tuple[str, ...] = ()
  fsdp: int | None = None
  replica_too: bool = False
  peer: Peer | None = None
  features: Mapping[str, str] | None = None
  tasks: tuple[str, ...] | None = None


_SCAN = "model.scan=True"
_V5E = ("tpu_v5e", 16)
_V5P = ("tpu_v5p", 64)
_H100 = ("h100", 64)
_H100S = ("h100", 256)


def _vit(variant: str, policy: str, policy_of_peer: str) -> Case:
  """A ViT as big_vision has it: no class token, dropout or mixup."""
  changes = (
    _SCAN,
    f"model.remat_policy={policy}",
    "model.pool_type=gap",
    "loss.mixup_alpha=0.0",
  )
  model = dict(
    variant=variant,
    num_classes=1000,
    pool_type="gap",
    posemb="learn",
    dtype_mm="bfloat16",
    scan=True,
    remat_policy=policy_of_peer,
  )
  peer = Peer(
    name="big_vision",
    script="peer_big_vision_compiled",
    source="google-research/big_vision",
    folder="",
    modules=("einops",),
    options=dict(
      trainer="vit", topology="v5e:4x4", batch_size=1024, model=model
    ),
    target="<= 0.95",
  )
  config = f"vit_i1k.py:{variant},aug=none,reg=0.0"
  return Case(config, *_V5E, 1024, changes, fsdp=1, peer=peer)


# Rows of 384 tokens, of which 256 are the picture's. big_vision's decoder only
# runs in float32, whose products a TPU rounds to bfloat16 as well.
_BV_PALIGEMMA = Peer(
  name="big_vision",
  script="peer_big_vision_compiled",
  source="google-research/big_vision",
  folder="",
  modules=("einops", "orbax.checkpoint"),
  options=dict(
    trainer="paligemma",
    topology="v5e:4x4",
    batch_size=256,
    text_length=128,
    model=dict(
      img=dict(
        variant="So400m/14",
        pool_type="none",
        scan=True,
        dtype_mm="bfloat16",
      ),
      llm=dict(variant="gemma2_2b", vocab_size=257_152),
    ),
  ),
  target="<= 0.95",
)


def _maxtext(chips: str, length: int, fsdp: int = 8, **options: Any) -> Peer:
  """A decoder of MaxText, one sequence a chip, `fsdp` chips to a state."""
  defaults = dict(
    compile_topology=chips,
    compile_topology_num_slices=1,
    max_target_length=length,
    per_device_batch_size=1,
    ici_fsdp_parallelism=fsdp,
    ici_data_parallelism=-1,
    allow_split_physical_axes=True,
    attention="flash",
    remat_policy="full",
  )
  return Peer(
    name="MaxText",
    script="peer_maxtext_compiled",
    source="AI-Hypercomputer/maxtext",
    folder="src",
    modules=None,
    options={**defaults, **options},
    target="<= 1.0",
  )


# MaxText has no Gemma 3 of this size: its 4B with the dimensions of the 1B.
_GEMMA3_1B = dict(
  model_name="gemma3-4b",
  override_model_config=True,
  base_num_decoder_layers=26,
  base_emb_dim=1152,
  base_num_query_heads=4,
  base_num_kv_heads=1,
  base_mlp_dim=6912,
  sliding_window_size=512,
  rope_linear_scaling_factor=1.0,
)
# No token is dropped. Experts' products are megablox's in both programs, with
# the same tiles, and the compiler knows the cycles of neither.
_GPT_OSS_20B = dict(
  model_name="gpt-oss-20b",
  per_device_batch_size=8,
  sparse_matmul=True,
  megablox=True,
)


def _stack(model: str, depth: int, **options: Any) -> Peer:
  """The first layers of a model of MaxText, without dropped tokens."""
  return _maxtext(
    "v5p-128",
    4096,
    64,
    model_name=model,
    override_model_config=True,
    base_num_decoder_layers=depth,
    sparse_matmul=True,
    megablox=True,
    **options,
  )


def _stacks(
  name: str, config: str, peer: Peer, experts: int, *changes: str
) -> dict[str, Case]:
  """The first layers of a model with experts, which are gathered or exchanged.

  A device has one sequence, so the head's logits fit at once.
  """
  changes = (*changes, "loss.chunk=4096")
  axis = (*changes, "model.moe={'axis': 'fsdp'}")
  gathered = (*changes, "model.moe={'axis': None}")
  chips = Case(config, *_V5P, 64, gathered, fsdp=64, peer=peer)
  gpus = Case(config, *_H100S, 256, gathered, fsdp=256)
  over = min(256, experts)
  return {
    name: chips,
    f"{name}_axis": chips._replace(changes=axis),
    f"{name}_gpu": gpus,
    f"{name}_axis_gpu": gpus._replace(changes=axis, fsdp=over),
  }


def _packed(length: int, **pictures: str) -> dict[str, str]:
  """Features of packed rows with pictures, of which the config has no data."""
  words = dict.fromkeys(("tokens", "targets", "segments", "positions"), "int32")
  kinds = {**words, "loss_mask": "float32"}
  return {k: f"{kind}[{length}]" for k, kind in kinds.items()} | pictures


def _siglip2() -> dict[str, Case]:
  """SigLIP 2 with all its tasks, as at the end of a run, and with some."""
  whole = Case(
    "siglip2.py",
    "tpu_v5e",
    256,
    32_768,
    features={
      "image": "jpeg[480,640,3]",
      "captions/text": "text[?]",
      "objects/bbox": "float32[?,4]",
      "objects/label": "int64[?]",
    },
  )
  return {
    "siglip2": whole,
    "siglip2_first": whole._replace(tasks=("contrast", "locca")),
    "siglip2_contrast": whole._replace(tasks=("contrast",)),
    "siglip2_locca": whole._replace(tasks=("locca",)),
    "siglip2_distill": whole._replace(tasks=("distill",)),
  }


# Remat policies: what a layer keeps for its backward pass. The second needs
# less memory and does not recompute the softmax; big_vision has no such policy.
_DOTS = "dots_with_no_batch_dims_saveable"
_INNER = "inner_projections_and_attention_saveable"
CASES = {
  "vit_b16": _vit("B/16", _INNER, _DOTS),
  "vit_l16": _vit("L/16", _INNER, _DOTS),
  "siglip": Case("siglip.py", *_V5E, 1024, replica_too=True),
  "t5_1_1_base": Case("t5_1_1_base.py", *_V5E, 256, (_SCAN,), replica_too=True),
  "cappa": Case("cappa.py", *_V5E, 512, replica_too=True),
  "gpt2_124m": Case("gpt2_124m.py", *_V5E, 128, (_SCAN,)),
  "llama_1b": Case("llama_1b.py", *_V5E, 16),
  "llama_1b_v5p": Case("llama_1b.py", "tpu_v5p", 8, 8),
  "llama_8b": Case(
    "llama_8b.py",
    *_V5P,
    64,
    peer=_maxtext("v5p-128", 8192, model_name="llama3.1-8b"),
  ),
  "mixtral_8x7b": Case("mixtral_8x7b.py", *_V5P, 64),
  # A chip has one sequence, so the head's logits fit at once.
  "gemma3_1b": Case(
    "gemma3_1b.py",
    *_V5E,
    16,
    ("loss.chunk=4096",),
    peer=_maxtext("v5e-16", 4096, **_GEMMA3_1B),
  ),
  **_stacks(
    "deepseek_v3",
    "deepseek_v3.py",
    _stack("deepseek3-671b", 4, n_routing_groups=8, topk_routing_group=4),
    256,
    *("model.depth=4", "model.mtp=0", "loss.mtp_weight=0.0"),
    "mesh.tensor=1",
  ),
  **_stacks(
    "qwen3_next",
    "qwen3_next_80b.py",
    _stack("qwen3-next-80b-a3b", 4),
    512,
    "model.depth=4",
  ),
  **_stacks(
    "gemma4_26b",
    "gemma4_26b_a4b.py",
    _stack("gemma4-26b", 6),
    128,
    "model.depth=6",
  ),
  **_siglip2(),
  "paligemma2_3b": Case(
    "paligemma2_3b.py",
    *_V5E,
    256,
    ("model_init=None",),
    peer=_BV_PALIGEMMA,
    features=_packed(384, prefix="bool[384]", image="float32[1,224,224,3]"),
  ),
  "gpt_oss_20b": Case(
    "gpt_oss_20b.py",
    *_V5P,
    512,
    peer=_maxtext("v5p-128", 4096, 64, **_GPT_OSS_20B),
  ),
  "dinov2_gpu": Case("dinov2.py", *_H100, 2048),
  # A class token makes 197 tokens, an odd number.
  "vit_b16_gpu": Case("vit_i1k.py:B/16,reg=0.0", *_H100, 4096, (_SCAN,)),
  "llama_8b_gpu": Case("llama_8b.py", *_H100, 64),
  "qwen3_vl_8b_gpu": Case(
    "qwen3_vl_2b.py:size=8b",
    *_H100,
    64,
    ("model_init=None",),
    # The patches of up to 1,024 image tokens.
    features=_packed(4096, image="float32[1,4096,1536]", shapes="int32[1,2]"),
  ),
  "mixtral_8x7b_gpu": Case("mixtral_8x7b.py", *_H100, 64),
}
_DELTA_RULE = "delta_rule"


def main() -> None:
  """Prints the figures of each case."""
  args = measure.arguments(__doc__, only="names of cases, separated by commas")
  known = [*CASES, _DELTA_RULE]
  names = args.only.split(",") if args.only else known
  if any(name not in known for name in names):
    sys.exit(f"--only={args.only}: expected some of {', '.join(known)}.")
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # No search for devices.
  if args.quick:
    names = [name for name in names if name in ("siglip", "vit_b16_gpu")]
  if _DELTA_RULE in names:
    names.remove(_DELTA_RULE)
    _report_delta_rule()
  for name in names:
    case = CASES[name]
    title = f"{name}, {case.batch_size} on {case.devices} {case.hardware}"
    if reason := missing(compiler(case.hardware)):
      measure.skip(_NUMBER, title, reason)
      continue
    figures = compiled(case, args.quick)
    secs = _report(title, figures)
    if args.quick:
      continue
    if case.replica_too:
      unsharded = compiled(case._replace(fsdp=1))
      unsharded_secs = _report(f"{title}, unsharded", unsharded)
      name = "step, sharded / unsharded"
      _compare(name, title, secs, unsharded_secs, "<= 1.1")
    if case.peer:
      _compare_with_peer(case.peer, title, case, figures)


def compiler(hardware: str) -> str:
  """Name of the compiler of an entry of hardware.py."""
  return "tpu" if hardware.startswith("tpu") else "gpu"


def missing(compiler: str) -> str:
  """Why a compiler cannot run, with what to install, or ""."""
  package, extra = {
    "tpu": ("libtpu", "tpu"),
    "gpu": ("jax_cuda13_plugin", "cuda"),
  }[compiler]
  reason = measure.missing(package)
  return reason and f"{reason} (make install EXTRAS={extra})"


def compiled(case: Case, quick: bool = False) -> dict[str, Any]:
  """Compiles a case; returns its figures by tools.plan."""
  from bigtrain.config import loading
  from bigtrain.tools.plan import plan

  config = _runlocal(case.config) if quick else case.config
  path = f"{measure.ROOT}/configs/{config}"
  changes = [*case.changes]
  if case.tasks:
    known = loading.load(path)["task"]
    tasks = {name: {**known[name], "from_percent": 0} for name in case.tasks}
    changes.append(f"task={tasks!r}")
  if case.batch_size:
    changes.append(f"input.batch_size={case.batch_size}")
  (figures,) = plan.plan(
    path,
    [case.devices],
    changes,
    fsdp=[case.fsdp],
    features=case.features,
    hardware_name=case.hardware,
    compiler=compiler(case.hardware),
  )
  return figures


def _runlocal(config: str) -> str:
  """The config with the argument that makes it tiny."""
  separator = "," if ":" in config else ":"
  return f"{config}{separator}runlocal"


def _report(title: str, figures: dict[str, Any]) -> float | None:
  """Prints the figures; returns the seconds of a step, if known."""
  for name, unit, value in _named(figures):
    measure.report(_NUMBER, f"{name}: {title}", [value], unit=unit)
  if not figures["fits"]:
    peak = figures["peak_bytes"] / 1e9
    limit = peak / figures["memory_fraction"]
    reason = f"{peak:.1f} GB do not fit in {limit:.1f}"
    measure.skip(_NUMBER, f"memory: {title}", reason)
  return figures["compiler_secs"]


def _named(figures: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
  """Yields (name, unit, value)."""
  if figures["cycles"]:
    runs = sum(figures["cycles"]["kernels"].values())
    without = f", without {runs} runs of kernels" if runs else ""
    yield f"step{without}", "s", figures["compiler_secs"]
    yield "waiting for transfers", "s", figures["cycles"]["exposed_secs"]
    yield f"MFU{without}", "ratio", figures["compiler_mfu"]
  if figures["products"]:
    runs = sum(figures["products"]["kernels"].values())
    without = f" without {runs} runs of attention kernels" if runs else ""
    ratio = figures["product_flops"] / figures["executed_flops"]
    yield f"products{without} / FLOPs that the model asks for", "ratio", ratio
    sent, hidden = (
      figures["products"][f"{x}_bytes"] for x in ("sent", "hidden")
    )
    if sent:
      yield (
        "sent while products or attention run / sent",
        "ratio",
        hidden / sent,
      )
  yield "temporary memory", "GB", figures["memory"]["temporary_bytes"] / 1e9
  yield "peak memory", "GB", figures["peak_bytes"] / 1e9
  yield "sent", "GB", sum(figures["sent_bytes"].values()) / 1e9


def _compare(
  name: str, title: str, ours: float | None, other: float | None, target: str
) -> None:
  """Prints the ratio of two figures, if both are known."""
  if ours and other:
    measure.report(_NUMBER, f"{name}: {title}", [ours / other], target=target)


def _compare_with_peer(
  peer: Peer, title: str, case: Case, figures: Mapping[str, Any]
) -> None:
  """Compiles a peer's update for the same chips, and compares."""
  name = f"ours / {peer.name}"
  if reason := _missing_peer(peer):
    measure.skip(_NUMBER, f"step, {name}: {title}", reason)
    return
  totals, memory = _compiled_peer(peer, case.hardware)
  runs = sum(totals.kernels.values())
  without = f", without {runs} runs of kernels" if runs else ""
  measure.report(
    _NUMBER,
    f"step of {peer.name}{without}: {title}",
    [totals.secs],
    unit="s",
  )
  ours = figures["compiler_secs"]
  _compare(f"step{without}, {name}", title, ours, totals.secs, peer.target)
  for key in ("temporary_bytes", "peak_bytes"):
    what = f"{key.removesuffix('_bytes')} memory, {name}"
    ours = figures["memory"][key]
    _compare(what, title, ours, memory[key], "<= 1.0")
  # Both from the final text: the bytes in `figures` come from the text before
  # XLA's last passes, which is not available for the peer.
  ours = figures["cycles"]["sent_bytes"]
  _compare(f"sent, {name}", title, ours, totals.sent_bytes, "<= 1.0")


def _missing_peer(peer: Peer) -> str:
  """Why a peer cannot run, with what to install, or ""."""
  if peer.variable not in os.environ:
    return (
      f"{peer.variable} is not set: git clone "
      f"https://github.com/{peer.source}, then {peer.variable}=FOLDER"
    )
  if peer.modules is not None:
    return measure.missing(*peer.modules)
  python = f"{peer.variable}_PYTHON"
  if python not in os.environ:
    return f"{python} is not set: a Python with {peer.name}'s requirements"
  return ""


def _report_delta_rule() -> None:
  """Prints the figures of the gated delta rule with each backend."""
  title = "delta rule of a layer of Qwen3-Next, 1 on 1 tpu_v5p"
  if reason := missing("tpu"):
    measure.skip(_NUMBER, title, reason)
    return
  secs: dict[str, dict[str, float]] = {}
  for backend in ("xla", "pallas"):
    with tempfile.TemporaryDirectory() as folder:
      finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.delta_rule_compiled"]
        + [backend, folder],
        env=measure.environment(),
        capture_output=True,
        text=True,
        check=False,
      )
    if finished.returncode:
      raise RuntimeError(f"{backend}: {finished.stderr[-1000:]}")
    figures = json.loads(finished.stdout.splitlines()[-1])
    for part, values in figures.items():
      what = f"{part}, backend {backend!r}"
      measure.report(_NUMBER, f"{what}: {title}", [values["secs"]], unit="s")
      kernels = [values["kernel_secs"]]
      measure.report(_NUMBER, f"kernels of {what}: {title}", kernels, unit="s")
    secs[backend] = {part: values["secs"] for part, values in figures.items()}
  for part, value in secs["pallas"].items():
    name = f"{part}, 'pallas' / 'xla'"
    _compare(name, title, value, secs["xla"][part], "<= 0.5")


def _compiled_peer(
  peer: Peer, hardware_name: str
) -> tuple[Any, dict[str, int]]:
  """Returns (cycles.Cycles, memory) of a peer's update.

  Raises:
    RuntimeError: it does not compile.
  """
  from bigtrain.sharding import absent
  from bigtrain.tools.plan import cycles, hardware, hlo

  target = hardware.find(hardware_name)
  folder = os.path.join(os.environ[peer.variable], peer.folder)
  python = os.environ.get(f"{peer.variable}_PYTHON", sys.executable)
  # DECOUPLE_GCLOUD: MaxText then needs no packages of Google Cloud.
  env = {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", **absent.NO_TPU}
  with tempfile.TemporaryDirectory() as scratch:
    path = os.path.join(scratch, "text")
    finished = subprocess.run(
      [
        python,
        "-m",
        f"benchmarks.{peer.script}",
        json.dumps(peer.options),
        path,
      ],
      env=peer_process.environment(folder) | env,
      capture_output=True,
      text=True,
      check=False,
    )
    if finished.returncode:
      raise RuntimeError(f"{peer.name}: {finished.stderr[-1000:]}")
    with open(path) as file:
      text = file.read()
  totals = cycles.cycles(
    hlo.Module(text),
    target.clock_hertz,
    target.flops_per_cycle,
    lambda collective: hardware.seconds(collective, target).secs,
  )
  return totals, json.loads(finished.stdout.splitlines()[-1])


if __name__ == "__main__":
  main()
