"""Greedy decoding by our predictor, of a published folder."""

import json
import sys
import time

import jax
import numpy as np

import bigtrain
from benchmarks import peer_decode, peer_process


def main() -> None:
  """Loads the folder of the options on the command line, and serves it."""
  options = json.loads(sys.argv[1])
  peer_decode.wait_for(options["folder"])
  predictor = bigtrain.load(options["folder"])
  prompts_BL = np.asarray(peer_decode.prompts(options), np.int32)

  def run(max_new: int) -> dict[str, float]:
    start_secs = time.perf_counter()
    new_BL = predictor.run(
      "generate", {"tokens": prompts_BL}, max_new=max_new, pad_id=-1
    )
    assert new_BL.shape == (len(prompts_BL), max_new)
    return {"secs": time.perf_counter() - start_secs}

  peer_process.serve({"platform": jax.devices()[0].platform}, run)


if __name__ == "__main__":
  main()
