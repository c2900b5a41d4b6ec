"""Makes t5x_adafactor.npz: stacked T5 layers in T5X's Adafactor.

  python tests/golden/t5x_adafactor.py t5x/t5x/adafactor.py

The argument is that file of a checkout of github.com/google-research/t5x. The
rest of T5X, which the file imports for a base class and the names of
parameters, is not needed. The result has the parameters after training;
tests/optim/test_adafactor.py trains on the same arrays.
"""

import pathlib
import sys
import types

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
NUM_STEPS = 4
LR = 0.05
MIN_DIM_SIZE_TO_FACTOR = 4
MOMENTUM = 0.9
# Shapes, and T5X's names of the dimensions.
PARAMS = {
  "blocks/attention/query/kernel": ((3, 6, 2, 5), "layers embed heads kv"),
  "blocks/attention/out/kernel": ((3, 2, 5, 6), "layers heads kv embed"),
  "blocks/attention_norm/scale": ((3, 6), "layers embed"),
  "blocks/mlp/up/kernel": ((3, 6, 9), "layers embed mlp"),
  "blocks/mlp/down/kernel": ((3, 9, 6), "layers mlp embed"),
  "relative_bias/embedding": ((8, 2), "relpos_buckets heads"),
  "token_embedding": ((11, 6), "vocab embed"),
}


def array(name: str, step: int) -> np.ndarray:
  """Returns the parameter (step 0) or its gradient in step 1, 2, ...

  The layers differ in size, so that scales and clipping do.
  """
  shape, dims = PARAMS[name]
  values = np.random.default_rng([step, *name.encode()]).normal(size=shape)
  if dims.startswith("layers"):
    sizes = np.array([0.01, 1.0, 10.0]) ** (1 if step == 0 else -1)
    values *= sizes.reshape(-1, *[1] * (len(shape) - 1))
  return values.astype(np.float32)


def load(path: str):
  """The module, with the two modules that it imports from T5X in short."""
  import flax.struct

  utils = types.ModuleType("t5x.utils")
  utils.flatten_dict_string_keys = dict
  optimizers = types.ModuleType("t5x.optimizers")

  class OptimizerDef:
    def __init__(self, hyper_params):
      self.hyper_params = hyper_params

  @flax.struct.dataclass
  class OptimizerState:
    step: object
    param_states: object

  optimizers.OptimizerDef = OptimizerDef
  optimizers.OptimizerState = OptimizerState
  package = types.ModuleType("t5x")
  package.utils = utils
  sys.modules |= {"t5x": package, "t5x.utils": utils}
  sys.modules["t5x.optimizers"] = optimizers
  module = types.ModuleType("adafactor")
  sys.modules["adafactor"] = module
  exec(compile(pathlib.Path(path).read_text(), path, "exec"), module.__dict__)
  return module


def main() -> None:
  module = load(sys.argv[1])
  import jax.numpy as jnp

  rules = module.standard_logical_factor_rules()
  result = {}
  for kind, beta1 in (("plain", None), ("momentum", MOMENTUM)):
    optimizer = module.Adafactor(
      LR,
      beta1=beta1,
      min_dim_size_to_factor=MIN_DIM_SIZE_TO_FACTOR,
      logical_factor_rules=rules,
    )
    # What set_param_axes does with T5X's own trees.
    none, row, column = (
      getattr(module.FactorDim, name) for name in ("NONE", "ROW", "COLUMN")
    )
    factors = {}
    for name, (_, dims) in PARAMS.items():
      rule = tuple(rules[dim] for dim in dims.split())
      if row not in rule or column not in rule:
        rule = tuple(none if r in (row, column) else r for r in rule)
      factors[name] = rule
    optimizer.hyper_params = optimizer.hyper_params.replace(factor_map=factors)
    params = {name: jnp.asarray(array(name, 0)) for name in PARAMS}
    states = {n: optimizer.init_param_state(p, n) for n, p in params.items()}
    for step in range(NUM_STEPS):
      for name in PARAMS:
        params[name], states[name] = optimizer.apply_param_gradient(
          step,
          optimizer.hyper_params,
          params[name],
          states[name],
          jnp.asarray(array(name, step + 1)),
          name,
        )
    result |= {f"{kind}/{n}": np.asarray(p) for n, p in params.items()}
  np.savez(PATH, **result)


if __name__ == "__main__":
  main()
