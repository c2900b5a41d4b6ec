"""Shows, verifies, exports and imports checkpoints.

  python -m bigtrain.tools.checkpoint show   PATH
  python -m bigtrain.tools.checkpoint verify PATH
  python -m bigtrain.tools.checkpoint export PATH OUT.npz --prefix=params
  python -m bigtrain.tools.checkpoint export PATH FOLDER --format=hf
  python -m bigtrain.tools.checkpoint export PATH OUT --format=stablehlo
  python -m bigtrain.tools.checkpoint export PATH OUT --format=onnx
  python -m bigtrain.tools.checkpoint import PATH WORKDIR --config=FILE.py

PATH is a workdir or one of its checkpoints, such as run/checkpoints/00000100.
For `import`, it is anything that config.model_init can read, such as a
checkpoint of T5X or big_vision. `show` and `verify` do not import jax.

Exit codes: 0; 1 for a checkpoint that is damaged or cannot be read; 2 for a
wrong argument.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from bigtrain.checkpoints import folders, integrity
from bigtrain.checkpoints.manifest import Array, DamagedError
from bigtrain.config.errors import ConfigError
from bigtrain.files import disk, paths
from bigtrain.tools import arguments, exits

# Trees of parameters that a model can be exported with.
_WEIGHTS = ("params", "ema")


def show(path: str, step: int | None = None, depth: int | None = None) -> str:
  """Describes a checkpoint and its arrays, up to a depth of the tree."""
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  writer = manifest.writer
  lines = [
    f"{directory}: step {manifest.step:,}, {len(manifest.arrays):,} arrays, "
    f"{disk.size(manifest.num_bytes)}",
    f"written {writer.get('time')} on {writer.get('host')} by "
    f"{writer.get('processes')} process(es) with {writer.get('devices')} "
    f"device(s), jax {writer.get('jax')}",
  ]
  steps = folders.find_all(path)
  if len(steps) > 1:
    lines.append(f"steps in this workdir: {', '.join(map(str, steps))}")
  lines.append("")
  nodes = list(_nodes("", dict(manifest.arrays), 0, depth))
  width = max([len(name) for name, _, _ in nodes], default=0)
  for name, size, content in nodes:
    lines.append(f"{name:<{width}}  {size:>9}  {content}".rstrip())
  return "\n".join(lines)


def _nodes(
  prefix: str, arrays: dict[str, Array], level: int, depth: int | None
) -> Iterator[tuple[str, str, str]]:
  """Yields (indented name, size, content) of subtrees and arrays, in order."""
  heads = dict.fromkeys(
    name.removeprefix(prefix).split("/")[0] for name in arrays
  )
  for head in heads:
    indented = "  " * level + head
    if prefix + head in arrays:
      array = arrays[prefix + head]
      content = str(array)
      if array.sharding and any(array.sharding["spec"]):
        content += f"  sharded over {array.sharding['spec']}"
      yield indented, disk.size(array.num_bytes), content
      continue
    children = {
      name: array
      for name, array in arrays.items()
      if name.startswith(f"{prefix}{head}/")
    }
    count = sum(math.prod(a.shape) for a in children.values())
    size = sum(a.num_bytes for a in children.values())
    yield indented + "/", disk.size(size), f"{count:,} values"
    if depth is None or level + 1 < depth:
      yield from _nodes(f"{prefix}{head}/", children, level + 1, depth)


def verify(
  path: str, step: int | None = None
) -> dict[str, list[integrity.Problem]]:
  """Returns {directory: problems} of one checkpoint, or of all of a workdir."""
  if step is not None:
    directories = [folders.find(path, step)]
  else:
    try:
      directories = list(folders.find_all(path).values())
    except DamagedError:
      directories = [path]  # A checkpoint with a damaged manifest.
  return {directory: integrity.verify(directory) for directory in directories}


def _check(args: argparse.Namespace) -> None:
  """Makes paths absolute, and refuses arguments that cannot work."""
  args.path = paths.absolute(args.path)
  if args.command in ("import", "export"):
    args.out = paths.absolute(args.out)
  if args.command == "import":
    return  # Its PATH may be more than a file, such as NAME.bv of big_vision.
  if not paths.exists(args.path):
    raise ConfigError(f"{args.path}: no such file or directory.")
  if args.step is not None:
    folders.find_named(args.path, args.step, args.command)
  if args.command == "export":
    _check_export(args)


def _check_export(args: argparse.Namespace) -> None:
  if args.layout and not args.format:
    args.format = "hf"
  if args.format and args.prefix not in ("", *_WEIGHTS):
    raise ConfigError(
      f"--format={args.format}: expected params or ema as --prefix, got "
      f"{args.prefix!r}."
    )
  for name in ("layout", "dtype", "quantize", "max_shard_bytes", "drop_mtp"):
    if getattr(args, name) and args.format != "hf":
      raise ConfigError(f"--{name}: only with --format=hf.")
  if not args.format and not args.out.endswith((".npz", ".safetensors")):
    raise ConfigError(
      f"{args.out}: expected a name ending in .npz or .safetensors."
    )
  if os.path.lexists(args.out) and not args.overwrite:
    raise ConfigError(
      f"{args.out}: already exists; give --overwrite to replace it."
    )
  folder = os.path.dirname(args.out)
  if not os.path.isdir(folder):
    raise ConfigError(f"{args.out}: no such folder {folder}.")


def _report(problems: Mapping[str, Sequence[integrity.Problem]]) -> int:
  for directory, found in problems.items():
    for problem in found:
      print(f"DAMAGED {problem}")
    summary = f"{len(found)} problem(s)" if found else "intact"
    print(f"{directory}: {summary}")
  return 1 if any(problems.values()) else 0


def _parser() -> arguments.Parser:
  parser = arguments.Parser("checkpoint", __doc__)
  commands = parser.add_subparsers(
    dest="command", required=True, parser_class=arguments.OneLineParser
  )

  def add(
    name: str, text: str, default_step: str = "the newest"
  ) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument(
      "path",
      help="a workdir, or one of its checkpoints, such as "
      "run/checkpoints/00000100",
    )
    command.add_argument(
      "--step",
      type=int,
      help=f"step of the workdir's checkpoint (default: {default_step})",
    )
    return command

  show = add("show", "Prints the tree of arrays with shapes, dtypes and sizes.")
  show.add_argument(
    "--depth", type=int, help="number of levels to show (default: all)"
  )
  add(
    "verify",
    "Reads every byte and lists all damaged arrays.",
    default_step="all checkpoints",
  )
  _add_export_arguments(
    add(
      "export",
      "Writes arrays to one .npz or .safetensors file, or to a folder in a "
      "published layout.",
    )
  )
  importing = add(
    "import",
    "Writes a checkpoint of T5X, Mesh TensorFlow or big_vision, or a file of "
    "parameters, as a checkpoint of a new workdir.",
  )
  importing.add_argument("out", help="workdir to write")
  importing.add_argument(
    "--config",
    default="",
    help="FILE.py[:arguments]: the parameters get the names and shapes of its "
    "model, and the workdir its config.json (default: all arrays as they are)",
  )
  return parser


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "out",
    help="file to write, ending in .npz or .safetensors; a folder with "
    "--format",
  )
  parser.add_argument(
    "--prefix",
    default="",
    help="tree to export, such as params or ema (default: all arrays; with "
    "--format: params)",
  )
  parser.add_argument(
    "--layout",
    default="",
    help="with --format=hf: the layout, such as gpt2 or llama (default: that "
    "of the folder that the run started from, else the first one that can "
    "express the model)",
  )
  parser.add_argument(
    "--format",
    default="",
    choices=["", "hf", "peft", "stablehlo", "onnx"],
    help="hf: a folder that transformers opens, with adapters merged; peft: "
    "only the adapters; stablehlo: a predict function with its parameters, "
    "for jax only; onnx: the same for ONNX Runtime and others",
  )
  parser.add_argument(
    "--dtype",
    default="",
    choices=["", "float32", "bfloat16", "float16"],
    help="with --format=hf: dtype of the weights",
  )
  parser.add_argument(
    "--quantize",
    default="",
    choices=["", "fp8", "mxfp4"],
    help="with --format=hf: write matrices in blocks with scales: fp8, as "
    "DeepSeek V3 is published; mxfp4, the experts of gpt-oss",
  )
  parser.add_argument(
    "--max_shard_bytes",
    type=int,
    default=0,
    help="with --format=hf: split weights of more bytes into several files "
    "(default: one file)",
  )
  parser.add_argument(
    "--drop_mtp",
    action="store_true",
    help="with --format=hf: without the modules of config.model.mtp, which "
    "predict further tokens",
  )
  parser.add_argument(
    "--pred",
    default="",
    help="with --format=stablehlo or onnx: predict function to export "
    "(default: the first of caption, generate, logits, image, pre_logits that "
    "the task has)",
  )
  parser.add_argument(
    "--batch_size",
    type=int,
    help="with --format=stablehlo or onnx: number of examples of a call "
    "(default: any)",
  )
  parser.add_argument(
    "--platforms",
    default="cpu,cuda,tpu",
    help="with --format=stablehlo: platforms to run on (default: %(default)s)",
  )
  parser.add_argument(
    "--overwrite", action="store_true", help="replace an existing OUT"
  )


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args = _parser().parse_args(argv)
  _check(args)
  if args.command == "show":
    print(show(args.path, args.step, args.depth))
    return 0
  if args.command == "verify":
    return _report(verify(args.path, args.step))
  if args.command == "import":
    from bigtrain.tools import checkpoint_import

    written, count = checkpoint_import.run(
      args.path, args.out, args.config, args.step
    )
    print(f"{written}: {count} arrays")
    return 0
  count, size = _export(args)
  print(f"{args.out}: {count} arrays, {disk.size(size)}")
  return 0


def _export(args: argparse.Namespace) -> tuple[int, int]:
  """Writes the export; returns (number of arrays, bytes of the files)."""
  # These import jax, which `show` and `verify` do without.
  from bigtrain.inference import serving
  from bigtrain.tools import checkpoint_export

  path, out, step = args.path, args.out, args.step
  weights = args.prefix or "params"
  if args.format == "peft":
    return checkpoint_export.to_peft(path, out, weights, step)
  if args.format in serving.FORMATS:
    return serving.export(
      path,
      out,
      format=args.format,
      step=step,
      weights=weights,
      pred=args.pred,
      batch_size=args.batch_size,
      platforms=args.platforms.split(","),
    )
  if args.format == "hf":
    return checkpoint_export.to_layout(
      path,
      out,
      args.layout or None,
      weights,
      step,
      dtype=args.dtype,
      max_shard_bytes=args.max_shard_bytes,
      drop_mtp=args.drop_mtp,
      quantize=args.quantize,
    )
  count = checkpoint_export.to_file(path, out, args.prefix, step)
  return count, os.path.getsize(out)


if __name__ == "__main__":
  sys.exit(main())
