"""Benchmark 5: time to compile the update, and step time with scan.

Layers under `scan` compile once, so 48 layers should compile as fast as 12. The
steps should be as fast as with unrolled layers.
"""

import functools
from typing import Any

from benchmarks import measure

_DEVICES = 8
_DECODER = "width=384,vocab_size=50304,length=128"


def main() -> None:
  """Prints the ratios; with --devices only seconds, for the parent process."""
  args = measure.arguments(
    __doc__,
    devices="simulate this number of devices, and print only the seconds",
  )
  if args.devices:
    measure.simulate_devices(int(args.devices))
    print(_compile_secs(args.quick))
    return
  measure.simulate_devices(1)
  _depth(args.quick, args.repeats)
  if not args.quick:
    _depth(args.quick, args.repeats, decoder=True)
  _scan(args.quick, args.repeats)
  _devices(args.quick, args.repeats)


def _depth(quick: bool, repeats: int, decoder: bool = False) -> None:
  shallow, deep = (1, 1) if quick else (12, 48)

  def run(depth: int) -> float:
    return _compile_secs(quick, depth=depth, decoder=decoder)

  # --quick compiles once and compares the result with itself.
  compile_secs = functools.cache(run) if quick else run
  secs = measure.interleave(
    {
      "deep": lambda: compile_secs(deep),
      "shallow": lambda: compile_secs(shallow),
    },
    repeats,
    warm_ups=not quick,
  )
  name = f"compile time, {deep} / {shallow} layers under scan"
  pairs = measure.ratios(secs["deep"], secs["shallow"])
  model = _decoder_name() if decoder else _model(quick)
  measure.report(5, f"{name}: {model}", pairs, target="<= 1.3")


def _scan(quick: bool, repeats: int) -> None:
  from benchmarks import program

  scanned = program.build(_config(quick, scan=True))
  unrolled = program.build(_config(quick, scan=False))
  steps = 2 if quick else 15
  secs = measure.interleave(
    {
      "scan": lambda: scanned.run(steps),
      "unrolled": lambda: unrolled.run(steps),
    },
    repeats,
  )
  pairs = measure.ratios(secs["scan"], secs["unrolled"])
  name = f"step time, scan / unrolled layers: {_model(quick)}"
  measure.report(5, name, pairs, target="<= 1.03")


def _devices(quick: bool, repeats: int) -> None:
  def child(devices: int) -> float:
    flags = [f"--devices={devices}", *(["--quick"] if quick else [])]
    command = ("-m", "benchmarks.compile_time", *flags)
    return float(list(measure.lines(*command))[-1])

  number = 1 if quick else _DEVICES
  secs = measure.interleave(
    {
      "several": lambda: child(number),
      "one": lambda: _compile_secs(quick) if quick else child(1),
    },
    repeats,
    warm_ups=0,  # Each call starts a new process.
  )
  pairs = measure.ratios(secs["several"], secs["one"])
  name = f"compile time, {number} simulated devices / 1: {_model(quick)}"
  measure.report(5, name, pairs, target="<= 1.5")


def _compile_secs(
  quick: bool, depth: int | None = None, decoder: bool = False
) -> float:
  from benchmarks import program

  if decoder:
    config = _decoder_config(depth)
  else:
    config = _config(quick, scan=True, depth=depth)
  return program.build(config, state=False).compile_secs


def _decoder_config(depth: int | None) -> Any:
  from benchmarks import synthetic_text

  return synthetic_text.get_config(
    f"kind=decoder,{_DECODER},depth={depth},scan=True,batch_size={_DEVICES}"
  )


def _decoder_name() -> str:
  return f"GPT-2 of width 384, {_DEVICES} x 128 tokens"


def _config(quick: bool, scan: bool, depth: int | None = None) -> Any:
  from benchmarks import synthetic

  size = "mu/16,size=16" if quick else "S/16,size=64"
  config = synthetic.get_config(
    f"{size},depth={depth},scan={scan},batch_size={_DEVICES}"
  )
  if quick:  # Halves the time to compile.
    config.update(optimizer=dict(name="sgd"), weight_stats="none")
  return config


def _model(quick: bool) -> str:
  return "mu/16" if quick else f"ViT-S/16, {_DEVICES} images of 64 x 64"


if __name__ == "__main__":
  main()
