"""The train step of a decoder of MaxText, compiled for absent TPUs.

For compilers.py. MaxText's own train_compile builds and compiles the step, and
this module keeps what it makes.

  python -m benchmarks.peer_maxtext_compiled OPTIONS TEXT

OPTIONS is JSON: the arguments of train_compile by name. The program is written
to the file TEXT, and its memory printed.
"""

import json
import os
import sys
import tempfile
from typing import Any

from maxtext import configs
from maxtext.trainers.pre_train import train_compile

from bigtrain.runtime import device_memory


def main() -> None:
  """Compiles the step of the options on the command line."""
  options = json.loads(sys.argv[1])
  compile_step = train_compile.jit_and_compile
  memory = []

  def keep(*args: Any) -> Any:
    program = compile_step(*args)
    memory.append(device_memory.memory_bytes(program))
    with open(sys.argv[2], "w") as file:
      file.write(program.as_text())
    return program

  train_compile.jit_and_compile = keep
  (folder,) = configs.__path__
  with tempfile.TemporaryDirectory() as scratch:
    options |= dict(
      run_name="compiled",
      base_output_directory=scratch,
      enable_checkpointing=False,
      dataset_type="synthetic",
    )
    words = [f"{name}={value}" for name, value in options.items()]
    train_compile.main([__file__, os.path.join(folder, "base.yml"), *words])
  print(json.dumps(memory[0]))


if __name__ == "__main__":
  main()
