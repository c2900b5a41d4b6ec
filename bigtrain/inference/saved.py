"""Reads a trained model: its config, the description of its data, its arrays.

The model is in a checkpoint, in an export of one, or in the folder of a
published model. `find` reads everything but the arrays, and `variables` reads
those.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import (
  added_rows,
  averages,
  folders,
  restore,
  warm_start,
)
from bigtrain.checkpoints.foreign import (
  parameter_files,
  peft_files,
  safetensors_files,
)
from bigtrain.checkpoints.manifest import Manifest
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.files import paths
from bigtrain.inference import generation_config
from bigtrain.models.published import (
  families,
  stage_families,
  t5_families,
  two_tower_families,
  vision_language_families,
  vit_families,
)
from bigtrain.objective import building, published_sizes, trained_adapters
from bigtrain.text import chat, pictures, tokenizers
from bigtrain.text import messages as chat_messages

# The sets of parameters in a train state.
WEIGHTS = ("params", "ema")
# (names of architectures in config.json, model, task); all others are decoders.
_PUBLISHED = (
  (t5_families.FAMILIES, "t5", "seq2seq"),
  (vit_families.FAMILIES, "vit", "classification"),
  (stage_families.CONVNEXT.families, "convnext", "classification"),
  (stage_families.SWIN.families, "swin", "classification"),
  (stage_families.BIT.families, "resnet", "classification"),
  (two_tower_families.FAMILIES, "two_towers", "contrastive"),
  (vision_language_families.KINDS, "vision_language", "language_modeling"),
)


class Saved(NamedTuple):
  """A trained model without its arrays."""

  path: str
  step: int
  config: dict[str, Any]
  data: dict[str, Any]  # See inputs/description.py; {} of older checkpoints.
  fingerprints: dict[str, str]  # Of the files of the ops, by path.
  manifest: Manifest | None  # None of exports and published models.
  # Default options of generation: those of a published model, or the end tokens
  # of the answers in the training set.
  generation: Mapping[str, Any] = {}

  @property
  def is_published(self) -> bool:
    return os.path.isdir(self.path) and self.manifest is None

  def adds_bos(self, tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether texts begin with the begin token, as in training."""
    published = self.is_published and tokenizer.adds_bos
    return self.data.get("prompts", {}).get("bos", published)

  def ids_of_chat(
    self,
    tokenizer: tokenizers.Tokenizer,
    messages: Sequence[chat.Message],
    template: str | None = None,
    num_pictures: int = 0,
  ) -> list[int]:
    """Token ids of a conversation, up to where the answer begins."""
    codec: Any = tokenizer
    prompts = self.data.get("prompts", {})
    chat_template = chat.get(
      template or prompts.get("template"), tokenizer.name
    )
    variables = prompts.get("variables", {})
    if options := prompts.get("pictures"):
      how = pictures.get(options, tokenizer, "pictures")
      messages = how.messages(chat_template, messages, num_pictures)
      codec = pictures.Tokenizer(tokenizer, how)
    # As in training: what the template would not write is refused.
    messages = chat_messages.readable(
      chat_template,
      messages,
      ignore_fields=prompts.get("ignore_fields", ()),
      **variables,
    )
    text = chat_template.render(
      messages, add_generation_prompt=True, **variables
    )
    return codec.encode(text, special=True).tolist()


def find(
  path: str,
  step: int | None,
  key: str = "bigtrain.load",
  allow_unread: Sequence[str] = (),
) -> Saved:
  """Finds the checkpoint or the export of a path; reads no arrays.

  `key` names the caller in messages.
  """
  if path.endswith((".npz", ".safetensors")):
    return _find_export(paths.absolute(path), key)
  if safetensors_files.is_folder(paths.absolute(path)):
    if step is not None:
      raise ConfigError(
        f"step={step}: {path} is not a workdir, so it has no steps."
      )
    return _find_published(paths.absolute(path), key, allow_unread)
  directory = folders.find_named(path, step, key)
  content = folders.read_manifest(directory)
  host = content.host_state
  if not host.config or "model_name" not in host.config:
    raise ConfigError(f"{key}: {directory}: no config is saved in it.")
  return Saved(
    directory,
    content.step,
    host.config,
    host.data,
    host.fingerprints,
    manifest=content,
    generation=_generation(host.data),
  )


def _generation(data: Mapping[str, Any]) -> dict[str, Any]:
  return {"eos_id": data["end_ids"]} if data.get("end_ids") else {}


def _find_export(path: str, key: str) -> Saved:
  if not os.path.isfile(path):
    raise ConfigError(f"{key}: no such file: {path}.")
  try:
    about = json.loads(paths.read_bytes(f"{path}.json"))
    generation = _generation(about["data"])
    return Saved(path, manifest=None, generation=generation, **about)
  except (OSError, ValueError, TypeError, KeyError) as e:
    raise ConfigError(
      f"{key}: {path}: expected {os.path.basename(path)}.json beside it, as "
      f"bigtrain.tools.checkpoint export writes it ({e}). To train from this "
      "file, use config.model_init."
    ) from e


def _find_published(path: str, key: str, allow_unread: Sequence[str]) -> Saved:
  values = families.read_json(path)[1] or {}
  if not values:
    raise ConfigError(
      f"{key}: {path}: expected {families.FILE} beside the weights, with a "
      "model_type."
    )
  model_name, task = "decoder", "language_modeling"
  for kinds, *known in _PUBLISHED:
    if values["model_type"] in kinds:
      model_name, task = known
  # Half precision would overflow in models that were trained in bfloat16.
  dtype = values.get("dtype", values.get("torch_dtype"))
  options = {"published": path}
  if model_name != "two_towers":  # Each tower has a dtype of its own.
    options["dtype"] = "bfloat16" if dtype == "bfloat16" else "float32"
  config: dict[str, Any] = {
    "task": task,
    "model_name": model_name,
    "model": options,
    "model_init": {"path": path, "allow_unread": [*allow_unread]},
  }
  config = published_sizes.with_published_sizes(
    settings.Config(config)
  ).to_dict()
  # The ops that the folder describes, as those of an evaluation of this name.
  processor = os.path.join(path, "preprocessor_config.json")
  if os.path.isfile(processor) or "pretrained_cfg" in values:
    pp = f"decode|published({path!r})"
    config["evals"] = {"published": {"pp": pp, "data": {}}}
  data: dict[str, Any] = {}
  if any(os.path.isfile(os.path.join(path, x)) for x in tokenizers.NAMES):
    data["tokenizer"] = {"name": path}
    if model_name == "vision_language":
      data["prompts"] = _picture_prompts(path, config["model"])
  if config["model"].get("num_classes") and values.get("id2label"):
    names = {int(i): name for i, name in values["id2label"].items()}
    data["class_names"] = {"labels": [names[i] for i in sorted(names)]}
  return Saved(
    path,
    step=0,
    config=config,
    data=data,
    fingerprints={},
    manifest=None,
    generation=generation_config.options(
      os.path.join(path, generation_config.FILE),
      _json_of(path, generation_config.FILE),
      values.get("eos_token_id"),
      task,
    ),
  )


def _picture_prompts(path: str, model: Mapping[str, Any]) -> dict[str, Any]:
  """Options that write prompts as in training; see data/supervised.py."""
  tokenizer = tokenizers.get(path)
  prompts: dict[str, Any] = {
    "bos": tokenizer.adds_bos,
    "prefix": model["mask"] == "prefix",
  }
  try:
    how = pictures.of_folder(path, tokenizer, "bigtrain.load")
  except ConfigError:
    return prompts  # The model reads only texts.
  return {**prompts, "pictures": how._asdict()}


def _json_of(folder: str, name: str) -> dict[str, Any]:
  path = os.path.join(folder, name)
  try:
    content = json.loads(paths.read_bytes(path))
  except FileNotFoundError:
    return {}
  except (OSError, ValueError) as e:
    raise ConfigError(f"{path}: cannot be read: {e}") from e
  return content if isinstance(content, dict) else {}


def variables(
  saved: Saved, weights: str, mesh: Mesh, *, with_base: bool = True
) -> dict[str, Any]:
  """Reads the model's variables, sharded over all devices.

  Args:
    weights: "params" or "ema".
    with_base: of a run with adapters, whether to load the base model too.
  """
  if saved.is_published:
    return _published_variables(saved, weights, mesh)
  if saved.manifest is not None:
    shapes = {
      name: jax.ShapeDtypeStruct(array.shape, saved.manifest.state_dtype(name))
      for name, array in saved.manifest.arrays.items()
    }
    specs = _placed(shapes, weights, mesh)
    names = dict(zip(specs, specs))
    arrays = restore.load(saved.path, saved.manifest, names, specs)
  else:
    file = parameter_files.open_file(
      saved.path, step=None, prefix="", key="bigtrain.load"
    )
    specs = _placed(file.specs, weights, mesh)
    arrays = {
      name: jax.device_put(value[...], specs[name].sharding)
      for name, value in file.read([*specs]).items()
    }
  tree = trees.from_flat(arrays)
  params = averages.evaluation_form(tree[weights], tree.get("opt", {}))
  result = {"params": params, **tree.get("mutable", {})}
  if saved.config.get("adapters") and saved.manifest and with_base:
    about = saved.manifest.host_state.base
    result["base"] = trained_adapters.load_base(
      saved.config, about, params, mesh
    )
  return result


def with_adapter(
  saved: Saved, loaded: Mapping[str, Any], path: str, mesh: Mesh
) -> tuple[Saved, dict[str, Any]]:
  """Returns a loaded model with other adapters, which share its base."""
  path = paths.absolute(path)
  base = loaded.get("base", loaded["params"])
  if peft_files.is_folder(path):
    read = trained_adapters.read_peft(path, saved.config, base, mesh)
    config, params, base = read
  else:
    other = find(path, None, "adapter")
    if not other.config.get("adapters"):
      raise ConfigError(f"adapter={path!r}: expected a run with adapters.")
    config = {**saved.config, "adapters": other.config["adapters"]}
    init = other.config.get("model_init")
    if isinstance(init, Mapping) and init.get("new_rows"):
      rows = added_rows.AddedRows(**init["new_rows"])
      base = added_rows.extended(base, rows, mesh)
      config["model"] = {**config["model"], "vocab_size": rows.new_size}
      tokenizer = other.data.get("tokenizer", saved.data.get("tokenizer"))
      saved = saved._replace(data={**saved.data, "tokenizer": tokenizer})
    given = variables(other, "params", mesh, with_base=False)
    params = given["params"]
    own = saved.manifest.host_state.base if saved.manifest else {}
    expected = other.manifest.host_state.base if other.manifest else {}
    base = trained_adapters.base_of(params, base, own, expected)
  adapted = {**loaded, "params": params, "base": base}
  return saved._replace(config=config), adapted


def _published_variables(
  saved: Saved, weights: str, mesh: Mesh
) -> dict[str, Any]:
  if weights != "params":
    raise ConfigError(
      f"weights={weights!r}: expected 'params' of a published model."
    )
  module, model = building.model(settings.Config(saved.config))
  example = _example(saved)
  shapes = dict(jax.eval_shape(model.init, jax.random.key(0), *example))
  shapes["params"] = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, getattr(model, "dtype", x.dtype)),
    shapes["params"],
  )
  places, _ = sharding.state_shardings(shapes, mesh)
  return warm_start.load_variables(
    saved.config["model_init"],
    sharding.with_shardings(shapes, places),
    init=dict,
    module=module,
    key="bigtrain.load",
  )


def _example(saved: Saved) -> list[jax.Array]:
  """Inputs of a published model that its arrays' shapes depend on."""
  tokens = jnp.zeros((1, 2), jnp.int32)
  if saved.config["task"] in ("language_modeling", "seq2seq"):
    return [tokens] * (2 if saved.config["task"] == "seq2seq" else 1)
  values = families.read_json(saved.path)[1] or {}
  side = values.get("vision_config", values).get("image_size", 224)
  image = jnp.zeros((1, side, side, 3))
  if saved.config["task"] == "classification":
    return [image]
  length = 77 if values["model_type"] == "clip" else 64
  length = values["text_config"].get("max_position_embeddings", length)
  return [image, jnp.zeros((1, length), jnp.int32)]


def _placed(
  arrays: Mapping[str, Any], weights: str, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Specs of the arrays that `variables` needs, with their shardings."""
  tops = {name.partition("/")[0] for name in arrays}
  if weights not in WEIGHTS or weights not in tops:
    hint = did_you_mean(weights, tops & set(WEIGHTS))
    raise ConfigError(f"weights={weights!r}: not in the checkpoint.{hint}")
  needed = {
    name for name in arrays if name.partition("/")[0] in (weights, "mutable")
  }
  iterates = averages.averaged(arrays)
  if weights == "params" and iterates:
    # A schedule-free optimizer evaluates averages, which depend on its state.
    needed |= {*iterates.values(), *averages.STATE}
  shapes = {
    name: jax.ShapeDtypeStruct(array.shape, array.dtype)
    for name, array in arrays.items()
    if name in needed
  }
  # The run's own rules may demand a split that these devices cannot make.
  places, _ = sharding.state_shardings(shapes, mesh)
  return sharding.with_shardings(shapes, places)
