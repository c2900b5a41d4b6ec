"""bigtrain.load of models that read pictures, and tools.generate."""

import json
import pathlib
import shutil

import numpy as np
import PIL.Image
import pytest

import bigtrain
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.tools import generate as tool

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = [
  *("paligemma", "gemma3", "gemma4", "llava", "qwen3_vl", "smolvlm"),
  *("vipllava", "deepseek_vl", "exaone4_5", "mistral3", "llava_pixtral"),
  *("lighton_ocr", "internvl", "aya_vision", "cohere2_vision", "qwen3_5"),
]
# {family: folder of its processor}, where the names differ.
PROCESSORS = {"qwen3_5": "qwen3_vl"}
# What does not depend on the family, or only on whether pictures have one size.
one_family = pytest.mark.parametrize("folder", ["paligemma"], indirect=True)
two_families = pytest.mark.parametrize(
  "folder", ["paligemma", "qwen3_vl"], indirect=True
)
QUESTION = "what is left of the three"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
  """A model of a golden folder with the processor of another one."""
  family = request.param
  folder = tmp_path_factory.mktemp("model") / family
  processor = PROCESSORS.get(family, family)
  shutil.copytree(GOLDEN / "picture_processors" / processor, folder)
  own = json.loads((folder / "config.json").read_text())
  source = GOLDEN / "vision_language" / family
  config = json.loads((source / "config.json").read_text())
  for name in own.keys() - {"vision_config", "model_type"}:
    config[name] = own[name]
  vocab_size = 400
  config["text_config"]["vocab_size"] = vocab_size
  config["text_config"]["max_position_embeddings"] = 256
  (folder / "config.json").write_text(json.dumps(config))
  from safetensors import numpy

  arrays = numpy.load_file(source / "model.safetensors")
  rng = np.random.default_rng(0)
  for name, array in arrays.items():
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
      shape = vocab_size, array.shape[1]
      arrays[name] = rng.normal(0, 1, shape).astype(np.float32)
  numpy.save_file(arrays, folder / "model.safetensors")
  return folder


def pictures_of(folder):
  with np.load(folder / "reference.npz") as file:
    return [file[f"picture {i}"] for i in range(2)]


@pytest.fixture(scope="module")
def model(folder):
  return bigtrain.load(folder)


def features_of(folder):
  """The pictures as transformers' processor has made them."""
  with np.load(folder / "reference.npz") as file:
    if "pixels" in file:
      return {"image": file["pixels"][None]}
    shapes = file["grids"][:, 1:]
    counts = shapes.prod(axis=1)
    patches = np.split(file["patches"], np.cumsum(counts)[:-1])
    most = counts.max()
    image = [np.pad(x, ((0, most - len(x)), (0, 0))) for x in patches]
    return {"image": np.stack(image)[None], "shapes": shapes[None]}


def test_prompts_have_the_ids_and_pixels_of_the_processor(
  model, folder, monkeypatch
):
  pictures = pictures_of(folder)
  with np.load(folder / "reference.npz") as file:
    ids = file["ids"]
  prompt = dict(text=QUESTION, images=pictures)
  answer_ids = model.tokenizer.encode("a seven")
  if folder.name == "paligemma":
    number = len(ids) - len(answer_ids) - 1
  else:
    content = [{"type": "image"}] * 2 + [{"type": "text", "text": QUESTION}]
    prompt = dict(
      messages=[{"role": "user", "content": content}], images=pictures
    )
    # Up to the answer and the end of its turn.
    number = len(ids) - len(answer_ids) - 2
  calls = []

  def run(pred, features, **options):
    calls.append((pred, features))
    return np.asarray([answer_ids])

  monkeypatch.setattr(model, "run", run)
  options = dict(max_new=6, eos_id=None)
  (answer,) = model.generate([prompt], **options)
  assert answer["text"] == model.tokenizer.decode(answer_ids)
  ((pred, features),) = calls
  assert pred == "generate"
  row = features["tokens"][0]
  np.testing.assert_array_equal(row[:number], ids[:number])
  assert (row[number:] == -1).all()
  assert ("prefix" in features) == (model.model.mask == "prefix")
  for name, expected in features_of(folder).items():
    actual = features[name][:, : expected.shape[1]]
    if name == "image" and "shapes" in features:
      actual = actual[:, :, : expected.shape[2]]
    np.testing.assert_allclose(actual, expected, atol=1e-5, err_msg=name)
    assert features[name].sum() == pytest.approx(actual.sum())  # Padding.


@two_families
def test_texts_of_several_lengths_are_as_alone(model, folder):
  pictures = pictures_of(folder)
  prompts = [
    dict(text=QUESTION, images=pictures),
    dict(text="how many", images=pictures[:1]),
    dict(text="what is left", images=pictures[1]),
  ]
  options = dict(max_new=5, eos_id=None)
  together = model.generate(prompts, **options)
  assert together == [model.generate(x, **options) for x in prompts]
  # The pictures matter.
  negatives = [255 - x for x in pictures]
  prompts[0]["images"] = negatives
  prompts[2]["images"] = negatives[1]
  changed = model.generate(prompts, **options)
  assert changed[0] != together[0] and changed[2] != together[2]
  assert changed[1] == together[1]


@pytest.mark.parametrize("folder", ["gemma4"], indirect=True)
def test_padded_patches_are_whole_squares_of_any_side(folder, tmp_path):
  for name in ("config.json", "preprocessor_config.json"):
    values = json.loads((folder / name).read_text())
    part = values.get("vision_config", values)
    part["pooling_kernel_size"] = 3
    (tmp_path / name).write_text(json.dumps(values))
  for path in folder.iterdir():
    if not (tmp_path / path.name).exists():
      shutil.copy(path, tmp_path)
  # 351 patches, which 384 would be enough for if 9 divided it.
  prompt = dict(text=QUESTION, images=pictures_of(folder)[1:])
  answer = bigtrain.load(tmp_path).generate(prompt, max_new=2, eos_id=None)
  assert answer["text"]


@one_family
def test_files_bytes_and_pil_are_the_same(model, folder, tmp_path):
  picture = pictures_of(folder)[0]
  image = PIL.Image.fromarray(picture)
  path = tmp_path / "a.png"
  image.save(path)
  forms = [picture, image, path, str(path), path.read_bytes()]
  results = [
    model.generate(dict(text=QUESTION, images=[x]), max_new=4) for x in forms
  ]
  assert all(result == results[0] for result in results)


@one_family
@pytest.mark.parametrize(
  ("prompt", "message"),
  [
    (dict(text="x", image=[1]), "image: unknown key. Did you mean 'images'"),
    (dict(text="x", images=["no.png"]), "no.png: No such file"),
    (dict(text="x", images=[np.zeros((3, 3))]), "expected paths, bytes"),
    (dict(text="x", images=[b"hello"]), "a picture"),
  ],
)
def test_mistakes_are_named(model, prompt, message):
  with pytest.raises((ConfigError, DataError), match=message):
    model.generate([prompt], max_new=4)


@one_family
def test_the_tool_reads_pictures(model, folder, tmp_path, capsys):
  path = tmp_path / "a.png"
  PIL.Image.fromarray(pictures_of(folder)[0]).save(path)
  expected = model.generate(
    dict(text=QUESTION, images=[path]), max_new=5, temperature=0.0
  )["text"]
  code = tool.main(
    [
      *(f"--model={folder}", f"--image={path}"),
      *(f"--prompt={QUESTION}", "--max_new=5", "--temperature=0"),
    ]
  )
  out, err = capsys.readouterr()
  assert (code, out) == (0, QUESTION + expected + "\n"), err
