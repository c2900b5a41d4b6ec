"""The golden folders of Hugging Face's layouts, and models of their sizes.

golden/make_hf.py and golden/make_t5.py made the folders.
"""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.models import decoder, t5
from bigtrain.objective import building, published_sizes

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
SIZES = dict(vocab_size=61, width=24, depth=2)
# The same sizes as in the scripts.
DECODERS = {
  "gpt2": SIZES | dict(variant="gpt2", num_heads=3, max_len=48),
  "llama": SIZES
  | dict(
    variant="llama",
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=40,
    max_len=64,
    rope_scaling=dict(
      type="llama3",
      factor=4.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_len=32,
    ),
  ),
  "mixtral": SIZES
  | dict(
    variant="llama",
    num_heads=6,
    num_kv_heads=2,
    mlp_dim=40,
    max_len=64,
    rope_theta=1e6,
    moe=dict(num_experts=4, top_k=2),
  ),
}
T5_SIZES = dict(
  vocab_size=30,
  width=12,
  num_heads=3,
  head_dim=5,
  mlp_dim=24,
  num_buckets=8,
  max_distance=20,
)
T5S = {
  "t5": T5_SIZES | dict(variant="t5", depth=2, decoder_depth=3),
  "t5_1_1": T5_SIZES | dict(variant="t5_1_1", depth=2, decoder_depth=3),
  "switch": T5_SIZES
  | dict(
    variant="t5",
    depth=4,
    decoder_depth=2,
    moe=dict(num_experts=4, top_k=1, every=2, jitter=0.01),
  ),
}
MODELS = DECODERS | T5S


def module_of(layout):
  return t5 if layout in T5S else decoder


def name_of(layout):
  """config.model_name of the models in a layout."""
  return module_of(layout).__name__.rpartition(".")[2]


def model_of(layout, **changes):
  return module_of(layout).Model(**MODELS[layout] | changes)


_SHAPES = {}  # Tracing a model takes most of a test's time.


def shapes_of(model, *example, **features):
  """The shapes of a model's variables, traced once for each model."""
  key = type(model), repr(model)
  if key not in _SHAPES:
    init = functools.partial(model.init, **features)
    _SHAPES[key] = dict(jax.eval_shape(init, jax.random.key(0), *example))
  return _SHAPES[key]


def placed(shapes, devices=1, rules=sharding.DEFAULT_RULES):
  """The shapes with shardings over a number of devices."""
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  places, _ = sharding.state_shardings(shapes, mesh, rules)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    places,
  )


def like_of(model, devices=1):
  """Returns the parameters' shapes, sharded over a number of devices."""
  example = [np.zeros((1, 2), np.int32)] * (2 if hasattr(model, "begin") else 1)
  shapes = shapes_of(model, *example)["params"]
  return placed(shapes, devices, ((".*", "fsdp(min_size=1)"),))


def opened(folder, **options):
  """(module, model) of a published folder as a config reads it."""
  model = dict(published=str(folder), **options)
  config = settings.Config(dict(model_name="decoder", model=model))
  return building.model(published_sizes.with_published_sizes(config))


def variables_of(module, model, path, names=None):
  """The variables of a published file, or of a config.model_init.

  `names`: only these collections.
  """
  shapes = shapes_of(model, jnp.zeros((1, 2), jnp.int32))
  like = placed({name: shapes[name] for name in names or shapes})
  source = path if isinstance(path, dict) else str(path)
  return warm_start.load_variables(source, like, init=dict, module=module)


def export(module, model, variables, folder, layout=None, origin=None):
  """Writes a model's published folder; returns its config and arrays.

  Args:
    origin: the folder that the model began with, whose layout comes first.
  """
  if origin:
    origin = json.loads((origin / "config.json").read_text())["model_type"]
  variables = dict(variables)
  tree = variables.pop("params") | variables
  flat = dict(trees.flatten_with_names(tree))
  shapes = {name: x.shape for name, x in flat.items()}
  config, tensors = module.to_published(model, shapes, layout, origin)
  config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
  if config.get("model_type") == "cwm":
    config["bos_token_id"] = 0  # The library refuses None.
  (folder / "config.json").write_text(json.dumps(config))
  arrays = {
    tensor.name: tensor.build(
      [np.asarray(flat[name][index]) for name, index in tensor.parts]
    )
    for tensor in tensors
  }
  write(folder, arrays)
  return config, arrays


def load(layout, model, devices=1, path=None, **source):
  params, _ = warm_start.load_params(
    dict(path=str(path or GOLDEN / f"hf_{layout}"), **source),
    like_of(model, devices),
    convert=module_of(layout).from_published,
  )
  return params


def arrays_of(layout):
  """Returns the arrays of a golden folder, by name."""
  return safetensors_files.read(str(GOLDEN / f"hf_{layout}"))


def write(folder, arrays):
  """Writes a folder's model.safetensors; returns the folder."""
  specs = {n: (x.shape, x.dtype.name) for n, x in arrays.items()}
  file = str(folder / safetensors_files.MODEL)
  safetensors_files.write(file, specs, arrays.values(), {"format": "pt"})
  return folder


def copy(layout, folder, remove=(), **changes):
  """Copies a golden folder, with changes of config.json; returns the copy."""
  source = GOLDEN / f"hf_{layout}"
  shutil.copy(source / safetensors_files.MODEL, folder)
  values = json.loads((source / "config.json").read_text()) | changes
  values = {key: x for key, x in values.items() if key not in remove}
  (folder / "config.json").write_text(json.dumps(values))
  return folder
