"""Models that read pictures against transformers: golden/vision_language.

golden/make_vision_language.py made the folders: small models, their logits and
losses, the gradients of these, and the tokens that they generate.
"""

import functools
import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import GOLDEN, export, placed, shapes_of
from support import cases, rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.objective import building, published_sizes
from bigtrain.tasks import language_modeling

pytestmark = pytest.mark.golden

FOLDERS = GOLDEN / "vision_language"
FAMILIES = sorted(path.name for path in FOLDERS.iterdir())


def opened(folder, init=None, **options):
  config = settings.Config(
    dict(
      model_name="vision_language",
      model=dict(published=str(folder), **options),
      **({} if init is None else {"model_init": init}),
    )
  )
  return building.model(published_sizes.with_published_sizes(config))


@functools.cache
def reference(family):
  return dict(np.load(FOLDERS / family / "reference.npz"))


def batch_of(family):
  """What a user's batch has for the example of a folder."""
  expected = reference(family)
  ids, image = expected["input_ids"], expected["image"]
  batch = dict(
    tokens=ids[:, :-1],
    targets=ids[:, 1:],
    loss_mask=(expected["labels"][:, 1:] != -100).astype(np.float32),
    image=image[:, 0] if image.shape[1] == 1 else image,
  )
  if "shapes" in expected:
    batch["shapes"] = expected["shapes"]
  if expected["prefix"].size:
    batch["prefix"] = expected["prefix"]
  return jax.tree.map(jnp.asarray, batch)


def params_of(module, model, batch, path, devices=1):
  shapes = shapes_of(model, **language_modeling.inputs(batch))
  like = placed(shapes["params"], devices)
  convert = module.from_published
  return warm_start.load_params(str(path), like, convert=convert)[0]


@pytest.mark.parametrize(
  "family", cases.quick(FAMILIES, "paligemma2", "gemma3")
)
def test_logits_losses_and_gradients(family):
  folder = FOLDERS / family
  module, model = opened(folder, scan=True)
  batch, expected = batch_of(family), reference(family)
  warm_start.check_published(str(folder), module, model)
  params = params_of(module, model, batch, folder)
  # The tokens after the last target matter too, and its logits.
  arguments = {
    **language_modeling.inputs(batch),
    "tokens": expected["input_ids"],
  }
  del arguments["real"]

  def loss(params):
    metrics, _ = language_modeling.loss_fn(
      {"params": params}, batch, None, model=model, train=False
    )
    # Without the losses of experts.
    total, weight = metrics.get("nll", metrics["loss"])
    return total / weight

  @jax.jit
  def run(params):
    value, grads = jax.value_and_grad(loss)(params)
    logits, _ = model.apply({"params": params}, **arguments)
    return {"loss": value, "grads": grads, "logits": logits}

  gradients = folder / "gradients.safetensors"
  published = {
    "loss": expected["loss"],
    "grads": params_of(module, model, batch, gradients),
    "logits": expected["logits"],
  }
  rounding.assert_close(run, params, published)


@pytest.mark.parametrize(
  "family", cases.quick(FAMILIES, "paligemma2", "gemma3")
)
def test_generated_tokens(family):
  folder = FOLDERS / family
  module, model = opened(folder)
  batch, expected = batch_of(family), reference(family)
  params = params_of(module, model, batch, folder)
  number = expected["generated"].shape[1]
  prompt = {n: x for n, x in batch.items() if n not in ("targets", "loss_mask")}
  prompt["tokens"] = expected["input_ids"][:, :-number]
  generate = functools.partial(
    language_modeling.generate,
    model=model,
    max_new=number,
    eos_id=None,
    pad_id=-1,
  )
  new = jax.jit(generate)({"params": params}, prompt)
  np.testing.assert_array_equal(new, expected["generated"])


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_are_what_was_read(family, tmp_path):
  folder = FOLDERS / family
  module, model = opened(folder, scan=True)
  params = params_of(module, model, batch_of(family), folder)
  flat = dict(trees.flatten_with_names(params))
  shapes = {name: x.shape for name, x in flat.items()}
  config, tensors = module.to_published(model, shapes)
  arrays = safetensors_files.read(str(folder))
  assert {tensor.name for tensor in tensors} == set(arrays)
  for tensor in tensors:
    pieces = [np.asarray(flat[name])[index] for name, index in tensor.parts]
    value = tensor.build(pieces)
    assert value.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(value, arrays[tensor.name], tensor.name)
  published = json.loads((folder / "config.json").read_text())
  parts = ("text_config", "vision_config")
  # The key outside of text_config decides.
  config["text_config"].pop("tie_word_embeddings")
  skipped = {*parts, "vision_feature_layer"}
  if family in ("gemma3", "aya_vision", "cohere2_vision", "llava_next"):
    # Their heads ignore these keys of the decoder.
    skipped |= {"logit_scale", "logits_scaling", "final_logit_softcapping"}
  if family == "internvl":  # Sizes as pairs; of the initialization.
    skipped |= {"image_size", "patch_size", "layer_scale_init_value"}
  for mine, theirs in [
    (config, published),
    *[(config[name], published[name]) for name in parts],
  ]:
    for key in set(mine) & set(theirs) - skipped:
      assert mine[key] == theirs[key], key
  (tmp_path / "config.json").write_text(json.dumps(config))
  warm_start.check_published(str(folder), module, opened(tmp_path)[1])


def patches_of(known):
  """Patches of all pictures behind each other, and their grids."""
  shapes = known["shapes"].reshape(-1, 2)
  patches = [
    x[: rows * columns]
    for x, (rows, columns) in zip(
      known["image"].reshape(-1, *known["image"].shape[2:]), shapes
    )
  ]
  real = shapes[:, 0] > 0
  grids = np.pad(shapes[real], ((0, 0), (1, 0)), constant_values=1)
  return np.concatenate(patches), grids.astype(np.int64)


def gemma4_pictures(image, shapes):
  """Arguments of Gemma 4: patches with padding, and (column, row) of each."""
  is_real = shapes[..., 0] > 0
  places = np.full((*image.shape[:3], 2), -1)
  for index in np.argwhere(is_real):
    rows, columns = shapes[tuple(index)]
    row, column = np.divmod(np.arange(rows * columns), columns)
    places[(*index, slice(rows * columns))] = np.stack([column, row], axis=-1)
  return dict(pixel_values=image[is_real], image_position_ids=places[is_real])


def padded_pictures(family, known):
  """Arguments of Pixtral's tower: pixels with padding, and their sizes."""
  config = json.loads((FOLDERS / family / "config.json").read_text())
  m = config.get("spatial_merge_size", 1)
  sides = 4 * known["shapes"].max(axis=(0, 1))
  pixels, sizes = [], []
  for index in np.argwhere(known["shapes"][..., 0]):
    rows, columns = known["shapes"][tuple(index)]
    # The places of the patches, which are in squares; what is left comes last.
    place = np.arange(rows * columns).reshape(rows, columns)
    R, K = rows // m * m, columns // m * m
    squares = place[:R, :K].reshape(R // m, m, K // m, m).swapaxes(1, 2)
    parts = squares, place[:, K:], place[R:, :K]
    order = np.concatenate([part.reshape(-1) for part in parts])
    x = np.zeros((rows * columns, 3, 4, 4), np.float32)
    x[order] = known["image"][tuple(index)][: len(order)].reshape(x.shape)
    x = x.reshape(rows, columns, 3, 4, 4).transpose(2, 0, 3, 1, 4)
    x = x.reshape(3, 4 * rows, 4 * columns)
    free = sides - x.shape[1:]
    pixels.append(np.pad(x, ((0, 0), (0, free[0]), (0, free[1]))))
    sizes.append(x.shape[1:])
  return dict(pixel_values=np.stack(pixels), image_sizes=np.asarray(sizes))


def tiled_pictures(known):
  """Arguments of LLaVA-NeXT and OneVision: the views of each picture."""
  pictures, numbers = [], []
  for views, layout in zip(known["image"], known["shapes"]):
    first = np.flatnonzero(layout[:, 2])
    numbers.append(len(first))
    for n in first:
      pictures.append(views[n : n + 1 + layout[n, 0] * layout[n, 1]])
  most = max(map(len, pictures))
  pixels = [np.pad(x, ((0, most - len(x)), *[(0, 0)] * 3)) for x in pictures]
  result = dict(
    pixel_values=np.stack(pixels).transpose(0, 1, 4, 2, 3),
    image_sizes=known["image_sizes"],
  )
  if max(numbers) > 1:
    result["batch_num_images"] = np.asarray(numbers)
  return result


@pytest.mark.parametrize(
  "family", ["llava_onevision", "llava_onevision_pictures", "llava_next"]
)
def test_views_are_tiles_if_the_number_of_image_tokens_says_so(family):
  """A batch need not say which views are tiles."""
  module, model = opened(FOLDERS / family)
  batch = batch_of(family)
  params = params_of(module, model, batch, FOLDERS / family)
  given = language_modeling.inputs(batch)
  apply = jax.jit(lambda given: model.apply({"params": params}, **given)[0])
  expected = apply(given)
  del given["shapes"]
  # Two programs, which may round in different ways.
  atol = 1e-4 * np.abs(expected).max()
  np.testing.assert_allclose(apply(given), expected, rtol=0, atol=atol)


@pytest.mark.published
def test_transformers_opens_exports(tmp_path):
  """With other weights than those of the folder that was read."""
  expected = {}
  for family in FAMILIES:
    module, model = opened(FOLDERS / family, scan=True)
    batch, known = batch_of(family), reference(family)
    params = params_of(module, model, batch, FOLDERS / family)
    params = jax.tree.map(lambda x: x * 1.05, params)
    out = tmp_path / family
    out.mkdir()
    export(module, model, {"params": params}, out)
    ids, image = known["input_ids"], known["image"]
    token = model.image_token
    types = (ids == token).astype(np.int64)
    if family.startswith("gemma4"):
      inputs = gemma4_pictures(image, known["shapes"])
      image = inputs["pixel_values"]
      inputs["mm_token_type_ids"] = types
    elif family in ("mistral3", "lighton_ocr"):
      image = image.reshape(-1, *image.shape[2:]).transpose(0, 3, 1, 2)
      inputs = dict(image_sizes=np.asarray([image.shape[2:]] * len(image)))
    elif family in ("llava_pixtral", "lighton_ocr_partial"):
      inputs = padded_pictures(family, known)
      image = inputs["pixel_values"]
    elif "image_sizes" in known:
      inputs = tiled_pictures(known)
      image = inputs["pixel_values"]
    elif "shapes" in known:
      image, grids = patches_of(known)
      inputs = dict(image_grid_thw=grids)
      if family != "exaone4_5":
        inputs["mm_token_type_ids"] = types
    else:
      image = image.transpose(0, 1, 4, 2, 3)
      if family not in ("idefics3", "smolvlm"):
        image = image.reshape(-1, *image.shape[2:])
      inputs = {}
    inputs |= dict(input_ids=ids, pixel_values=image)
    if known["prefix"].size:
      types = np.arange(ids.shape[1]) >= known["prefix"][:, None]
    if family in ("paligemma", "paligemma2", "gemma3"):
      inputs["token_type_ids"] = types.astype(np.int64)
    np.savez(out / "inputs.npz", **inputs)
    arguments = {**language_modeling.inputs(batch), "tokens": ids}
    del arguments["real"]
    expected[out] = model.apply({"params": params}, **arguments)[0]
  python = os.environ.get("PUBLISHED_PYTHON", "build/published/bin/python")
  script = GOLDEN / "open_exports.py"
  subprocess.run([python, script, *expected], check=True)
  for out, logits in expected.items():
    actual = np.load(out / "logits.npy")
    np.testing.assert_allclose(
      actual, logits, rtol=0, atol=5e-4, err_msg=out.name
    )


@pytest.mark.parametrize(
  "rename",
  [
    # As in files of other versions of transformers.
    {"vision_tower.": "vision_tower.vision_model."},
    {
      "language_model.model.": "model.language_model.",
      "language_model.lm_head.": "lm_head.",
      "vision_tower.": "model.vision_tower.vision_model.",
      "multi_modal_projector.": "model.multi_modal_projector.",
    },
  ],
)
def test_names_of_older_and_newer_files(rename, tmp_path):
  folder = FOLDERS / "llava"
  module, model = opened(folder)
  batch = batch_of("llava")
  expected = params_of(module, model, batch, folder)

  def renamed(name):
    for old, new in rename.items():
      if name.startswith(old):
        return new + name.removeprefix(old)
    return name

  arrays = {
    renamed(n): x for n, x in safetensors_files.read(str(folder)).items()
  }
  specs = {n: (x.shape, x.dtype.name) for n, x in arrays.items()}
  file = str(tmp_path / safetensors_files.MODEL)
  safetensors_files.write(file, specs, arrays.values(), {"format": "pt"})
  params = params_of(module, model, batch, tmp_path)
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def write_config(folder, family, change):
  values = json.loads((FOLDERS / family / "config.json").read_text())
  change(values)
  (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
  ("family", "change", "message"),
  [
    (
      "llava",
      lambda x: x["vision_config"].update(model_type="internvl_vision"),
      "vision_config.model_type='internvl_vision': expected 'clip_vision_mode",
    ),
    (
      "llava_pixtral",
      lambda x: x.update(vision_feature_layer=-2),
      "vision_feature_layer=-2: the model computes only -1",
    ),
    (
      "llava",
      lambda x: x.update(vision_feature_layer=[-2, -5]),
      r"vision_feature_layer=\[-2, -5\]: expected the number of a layer",
    ),
    (
      "llava_siglip",
      lambda x: x.update(vision_feature_select_strategy="default"),
      "expected 'full' for a tower without a class token",
    ),
    (
      "gemma3",
      lambda x: x.update(mm_tokens_per_image=9),
      "mm_tokens_per_image=9: expected the square of a divisor of 4",
    ),
    (
      "paligemma",
      lambda x: x.update(audio_config={}),
      "audio_config=.*unknown key of model_type='paligemma'",
    ),
    (
      "gemma4",
      lambda x: x.update(vision_config=None),
      "vision_config: missing: expected a model that reads pictures",
    ),
    (
      "mistral3",
      lambda x: x.update(vision_feature_layer=-2),
      "vision_feature_layer=-2: the model computes only -1",
    ),
    (
      "internvl",
      lambda x: x["vision_config"].update(use_qk_norm=True),
      "vision_config: use_qk_norm=True: the model computes only False",
    ),
    (
      "llava",
      lambda x: x["text_config"].update(model_type="qwen3_vl_text"),
      "text_config.model_type='qwen3_vl_text': expected",
    ),
    (
      "qwen3_vl",
      lambda x: x["vision_config"].update(num_position_embeddings=10),
      "num_position_embeddings=10: expected a square",
    ),
    (
      "paligemma",
      lambda x: x.update(model_type="qwen2_audio", text_config=None),
      "'qwen2_audio'.*does not compute this family. It needs towers for sounds",
    ),
    (
      "paligemma",
      lambda x: x.update(model_type="made_up", text_config=None),
      "does not compute the architecture 'made_up'.*paligemma, gemma3",
    ),
  ],
)
def test_what_it_does_not_compute_is_refused_by_name(
  family, change, message, tmp_path
):
  write_config(tmp_path, family, change)
  with pytest.raises(ConfigError, match=message):
    opened(tmp_path)


def test_gemma4_loads_without_its_parts_for_sounds(tmp_path):
  folder = FOLDERS / "gemma4"
  write_config(tmp_path, "gemma4", lambda x: x.update(audio_config={"a": 1}))
  arrays = safetensors_files.read(str(folder))
  sounds = np.zeros((3, 2), np.float32)
  names = "audio_tower.layers.0.weight", "embed_audio.projection.weight"
  arrays |= {f"model.{name}": sounds for name in names}
  specs = {n: (x.shape, x.dtype.name) for n, x in arrays.items()}
  file = str(tmp_path / safetensors_files.MODEL)
  safetensors_files.write(file, specs, arrays.values(), {"format": "pt"})
  module, model = opened(tmp_path)
  batch = batch_of("gemma4")
  params = params_of(module, model, batch, tmp_path)
  expected = params_of(module, model, batch, folder)
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_files_of_smolvlm_as_published(tmp_path):
  """With keys of its decoder that nothing reads, and an older name."""

  def change(values):
    values |= dict(image_seq_len=1, use_reentrant_checkpointing=False)
    values["vision_config"]["model_type"] = "smolvlm"
    values["text_config"] |= dict(
      neftune_noise_alpha=0.0,
      pixel_shuffle_factor=4,
      qk_layer_norms=False,
      use_resampler=False,
      unknown=1,
    )

  write_config(tmp_path, "smolvlm", change)
  with pytest.raises(ConfigError, match="text_config: unknown=1: unknown key"):
    opened(tmp_path)
  init = dict(path=str(tmp_path), allow_unread=["unknown"])
  assert opened(tmp_path, init)[1] == opened(FOLDERS / "smolvlm")[1]


def test_flat_files_of_qwen(tmp_path):
  """Older files have the decoder's keys beside those of the tower."""

  def flatten(values):
    text = values.pop("text_config")
    del text["model_type"], values["vision_config"]["model_type"]
    rope = text.pop("rope_parameters")
    sections, text["rope_theta"] = rope["mrope_section"], rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": sections}
    values |= text

  write_config(tmp_path, "qwen2_5_vl", flatten)
  assert opened(tmp_path)[1] == opened(FOLDERS / "qwen2_5_vl")[1]


def test_options_of_training_may_be_added_to_a_folder_s():
  _, model = opened(
    FOLDERS / "gemma3",
    dtype="bfloat16",
    image=dict(remat_policy="nothing_saveable"),
    text=dict(dropout=0.1),
  )
  assert model.text_decoder().dtype == "bfloat16"
  assert model.text_decoder().dropout == 0.1
  assert model.image_tower().remat_policy == "nothing_saveable"
  with pytest.raises(ConfigError, match="config.model.text.*width.*24"):
    opened(FOLDERS / "gemma3", text=dict(width=24))
