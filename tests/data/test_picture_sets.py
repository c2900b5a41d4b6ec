"""COCO, VQA v2 and tables of questions, in the layouts of their own files."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image
from support import mask_weights

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import prompts, supervised
from bigtrain.pp import mask_codes
from bigtrain.text import coco_masks

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PICTURES = dict(tokens=1, pp="value_range(0, 1)")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """Pictures with names as in COCO, VQA v2, DocVQA and ChartQA."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)
  for name, value in (
    ("train2017/000000000009.jpg", 9),
    ("train2017/000000000025.jpg", 25),
    ("train2014/COCO_train2014_000000000009.jpg", 9),
    ("documents/xnbl0037_1.png", 37),
    ("png/41699051005347.png", 41),
    ("text/0054c91397f2fe05.jpg", 54),
  ):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)
  np.savez(tmp_path / "vae.npz", **mask_weights.arrays())
  return tmp_path


COCO = dict(
  info={},
  licenses=[],
  images=[
    dict(id=9, file_name="000000000009.jpg", height=40, width=80),
    dict(id=25, file_name="000000000025.jpg", height=10, width=10),
    dict(id=30, file_name="000000000030.jpg", height=10, width=10),
  ],
)
CAPTIONS = COCO | dict(
  annotations=[
    dict(id=1, image_id=25, caption="A cat."),
    dict(id=2, image_id=9, caption="A dog\n on grass."),
    dict(id=3, image_id=9, caption="A dog."),
  ]
)


def instance(number, image, category, bbox, polygon=None, **others):
  x, y, w, h = bbox
  corners = [x, y, x + w, y, x + w, y + h, x, y + h]
  return (
    dict(
      id=number,
      image_id=image,
      category_id=category,
      bbox=bbox,
      area=w * h,
      iscrowd=0,
      segmentation=[polygon or corners],
    )
    | others
  )


INSTANCES = COCO | dict(
  categories=[dict(id=17, name="cat"), dict(id=18, name="dog")],
  annotations=[
    instance(1, 9, 18, [8.0, 10.0, 40.0, 20.0]),
    instance(2, 9, 17, [0.0, 0.0, 20.0, 20.0]),
    instance(3, 9, 18, [60.0, 20.0, 20.0, 20.0]),
    instance(4, 9, 18, [0, 0, 80, 40], iscrowd=1),
    instance(5, 25, 17, [0.0, 5.0, 5.0, 5.0]),
  ],
)
QUESTIONS = dict(
  data_subtype="train2014",
  questions=[
    dict(image_id=9, question="Is it raining?", question_id=9000),
    dict(image_id=9, question="What is it?", question_id=9001),
  ],
)
ANSWERS = dict(
  data_subtype="train2014",
  annotations=[
    dict(
      question_id=9000,
      image_id=9,
      multiple_choice_answer="yes",
      answers=[
        dict(answer="yes" if i < 7 else "no", answer_id=i + 1)
        for i in range(10)
      ],
    ),
    dict(
      question_id=9001,
      image_id=9,
      multiple_choice_answer="dog",
      answers=[dict(answer="dog", answer_id=i + 1) for i in range(10)],
    ),
  ],
)


def source(dataset, cls=supervised.Source, **options):
  options = dict(length=250, pictures=PICTURES, template=None) | options
  return cls("bytes", dataset=dataset, **options)


def write(**files):
  for name, content in files.items():
    pathlib.Path(f"{name}.json").write_text(json.dumps(content))


def texts(made):
  """(prompt, answer, value of the picture, weight) of each row."""
  batch = made.read(np.arange(len(made)))
  result = []
  for b in range(len(made)):
    ids, weight = batch["targets"][b], batch["loss_mask"][b]
    has_loss = weight != 0
    answer = made._coder.decode(ids[has_loss][:-1])
    prompt = made._coder.decode(ids[: has_loss.argmax()])
    value = round(float(batch["image"][b].mean()) * 255)
    result.append((prompt, answer, value, round(float(weight.max()), 3)))
  return result


def test_captions_of_coco():
  write(captions=CAPTIONS)
  spec = dict(name="coco_captions", path="captions.json", images="train2017")
  assert texts(source(spec)) == [
    ("caption en\n", "A dog on grass.", 9, 0.5),
    ("caption en\n", "A dog.", 9, 0.5),
    ("caption en\n", "A cat.", 25, 1.0),
  ]
  # For an evaluation, all of a picture's captions are references.
  made = source(spec, references=3)
  batch = made.read(np.arange(2))
  assert batch["references"].shape == (2, 3, 250)
  decoded = [
    [made._coder.decode(x[: (x > 2).sum()]) for x in own]
    for own in batch["references"]
  ]
  assert decoded == [["A dog on grass.", "A dog.", ""], ["A cat.", "", ""]]
  assert batch["image"].shape == (2, 1, 4, 4, 3)
  assert len(source(spec, references=3, slice="[1:]")) == 1


def test_boxes_of_coco():
  write(instances=INSTANCES)
  spec = dict(name="coco_detection", path="instances.json", images="train2017")
  dogs = (
    "<loc0256><loc0102><loc0767><loc0614> dog ; "
    "<loc0512><loc0767><loc1023><loc1023> dog"
  )
  cat = "<loc0000><loc0000><loc0512><loc0256> cat"
  small = "<loc0512><loc0000><loc1023><loc0512> cat"
  assert texts(source(spec)) == [
    ("detect dog ; cat\n", f"{dogs} ; {cat}", 9, 1.0),
    ("detect cat\n", small, 25, 1.0),
  ]
  assert [x[:2] for x in texts(source(spec | dict(per="class")))] == [
    ("detect dog\n", dogs),
    ("detect cat\n", cat),
    ("detect cat\n", small),
  ]
  one = texts(source(spec | dict(boxes="json", prompt="Find: {classes}")))[1]
  assert one[0] == "Find: cat\n"
  assert json.loads(one[1]) == [
    {"bbox_2d": [0, 500, 500, 1000], "label": "cat"}
  ]


def test_masks_of_coco():
  write(instances=INSTANCES)
  spec = dict(
    name="coco_segmentation",
    path="instances.json",
    images="train2017",
    mask_coder="vae.npz",
  )
  rows = texts(source(spec, length=600))
  assert [x[0] for x in rows] == [
    "segment dog\n",
    "segment cat\n",
    "segment cat\n",
  ]
  first, second = rows[0][1].split(" ; ")
  assert first.startswith("<loc0256><loc0102><loc0767><loc0614><seg")
  assert first.count("<seg") == second.count("<seg") == 16
  # What the codes of a whole box are, and what they are decoded to.
  coder = mask_codes.load("vae.npz", "weights")
  codes = coder.codes(np.ones((1, 64, 64)))[0]
  assert first.endswith("".join(f"<seg{x:03d}>" for x in codes) + " dog")
  made = source(spec, length=600, references=True, masks=True)
  batch = made.read(np.arange(3))
  assert batch["mask_size"].tolist() == [[40, 80], [40, 80], [10, 10]]
  mask = coco_masks.of_runs(batch["mask_runs"][0], (40, 80))
  want = np.zeros((40, 80), bool)
  want[10:30, 8:48] = want[20:, 60:] = True
  np.testing.assert_array_equal(mask, want)
  last = source(spec, length=600, references=True, masks=True, slice="[2:]")
  assert last.read(np.arange(1))["mask_size"].tolist() == [[10, 10]]


def test_questions_of_vqa_v2():
  write(questions=QUESTIONS, annotations=ANSWERS)
  spec = dict(
    name="vqa_v2",
    questions="questions.json",
    annotations="annotations.json",
    images="train2014",
  )
  raining, what = "answer en Is it raining?\n", "answer en What is it?\n"
  assert texts(source(spec)) == [
    (raining, "yes", 9, 0.7),
    (raining, "no", 9, 0.3),
    (what, "dog", 9, 1.0),
  ]
  majority = spec | dict(answers="majority", images="train2017")
  assert [x[1:] for x in texts(source(majority))] == [
    ("yes", 9, 1.0),
    ("dog", 9, 1.0),
  ]
  # Ten people answered, which the accuracy of VQA counts.
  batch = source(spec, references=10).read(np.arange(2))
  assert (batch["references"][:, :, 0] > 2).sum() == 20
  # Rewards see all answers.
  made = source(spec, prompts.Source, rewards=f"{__name__}.share")
  batch = dict(targets=np.zeros((1, 1, 4), int), loss_mask=np.zeros((1, 1, 4)))
  assert len(made) == 2
  assert made.judge(np.asarray([0]), batch)["reward"] == pytest.approx(0.7)


def share(answers, row):
  return [row["completion"].count("yes") / len(row["completion"])] * len(
    answers
  )


def test_tables_of_questions():
  """DocVQA's, ChartQA's and TextVQA's JSON; Parquet as on the hub."""
  import pyarrow as pa
  from pyarrow import parquet

  doc = dict(
    questionId=337,
    question="what is the date?",
    image="documents/xnbl0037_1.png",
    answers=["1/8/93"],
    data_split="train",
  )
  chart = dict(imgname="41699051005347.png", query="How many?", label="14")
  text = dict(
    question="what is the brand?",
    image_id="0054c91397f2fe05",
    answers=["nous les gosses"] * 3 + ["dakota"],
  )
  write(doc=dict(dataset_name="docvqa", data=[doc]), chart=[chart])
  write(text=dict(data=[text]))
  table = dict(
    question=["what is it?"],
    answers=[["a", "b"]],
    image=[
      {
        "bytes": pathlib.Path("documents/xnbl0037_1.png").read_bytes(),
        "path": None,
      }
    ],
  )
  parquet.write_table(pa.table(table), "table.parquet")
  read = lambda path, **others: texts(
    source(dict(name="questions", path=path, **others))
  )
  date = "answer en what is the date?\n"
  assert read("doc.json") == [(date, "1/8/93", 37, 1.0)]
  assert read("chart.json", images="png") == [
    ("answer en How many?\n", "14", 41, 1.0)
  ]
  assert [x[1:] for x in read("text.json", images="text")] == [
    ("nous les gosses", 54, 0.75),
    ("dakota", 54, 0.25),
  ]
  assert read("table.parquet", prompt="{question}") == [
    ("what is it?\n", "a", 37, 0.5),
    ("what is it?\n", "b", 37, 0.5),
  ]


def test_conversations_and_paligemma_s_prompts():
  write(captions=CAPTIONS)
  spec = dict(name="coco_captions", path="captions.json", images="train2017")
  for family, chat, wanted in (
    ("paligemma", False, "caption en\n"),
    ("qwen3_vl", True, "Describe the picture."),
  ):
    folder = str(GOLDEN / "picture_processors" / family)
    made = supervised.Source(
      folder, 250, dataset=spec | dict(chat=chat), pictures=folder
    )
    text = "".join(x for x, _ in made.first_example())
    assert text.count(wanted) == 1 and "\n\n" not in text
    assert len(made) == 3


@pytest.mark.parametrize(
  ("spec", "content", "message"),
  [
    (dict(name="coco"), [], "dataset.name: .*'coco'.*coco_captions"),
    ("coco_captions", [], r"dataset='coco_captions': expected dict\(name"),
    (
      dict(name="coco_captions", path="x.json"),
      [dict(caption="a")],
      "x.json: expected COCO's captions, an object with images, annotations",
    ),
    (
      dict(name="coco_captions", path="x.json"),
      INSTANCES,
      "COCO's captions, whose annotations have caption, got id, image_id",
    ),
    (
      dict(name="coco_detection", path="x.json"),
      CAPTIONS | dict(annotations=[dict(bbox=[0, 0, 1, 1], image_id=7, id=3)]),
      "x.json, annotation 3: no picture has its image_id, 7",
    ),
    (
      dict(name="coco_detection", path="x.json", prompt="detect"),
      INSTANCES,
      "dataset.prompt='detect': expected a text with {classes}",
    ),
    (
      dict(name="coco_detection", path="x.json", per="box"),
      INSTANCES,
      "dataset.per.*'box'.*picture",
    ),
    (
      dict(name="coco_detection", paths="x.json"),
      INSTANCES,
      "dataset.paths: unknown key. Did you mean 'path'",
    ),
    (
      dict(name="coco_segmentation", path="x.json", mask_coder="png"),
      INSTANCES,
      "dataset.mask_coder=.*cannot be read",
    ),
    (
      dict(name="questions", path="x.json"),
      [dict(ask="?", answer="a", image="a.png")],
      r"x.json, row 0 .*no question: expected question or query, got ask",
    ),
    (
      dict(name="questions", path="x.json"),
      [dict(question="?", answer=None, image="a.png")],
      "x.json, row 0 .*no answer: expected answers or answer or label",
    ),
    (
      dict(name="questions", path="x.json"),
      [dict(question="?", answer="a", image="a.png")],
      "x.json, row 0 .*a.png: No such file",
    ),
    (
      dict(name="vqa_v2", questions="x.json", annotations="answers.json"),
      QUESTIONS
      | dict(questions=[dict(question_id=1, image_id=9, question="?")]),
      "x.json, question 1: .*answers.json has no answer to it",
    ),
    (
      dict(name="vqa_v2", questions="answers.json", annotations="x.json"),
      QUESTIONS,
      "answers.json: expected VQA v2's questions, an object with questions",
    ),
  ],
)
def test_mistakes_have_one_line(spec, content, message):
  write(x=content, answers=ANSWERS)
  with pytest.raises(ConfigError, match=message):
    source(spec)


def test_options_that_a_data_set_needs():
  write(captions=CAPTIONS)
  spec = dict(name="coco_captions", path="captions.json", images="train2017")
  for options, message in (
    (dict(pictures=None), "dataset: expected pictures=FOLDER"),
    (dict(path="x.jsonl"), "expected path, name or dataset"),
    (dict(masks=True), "masks=True: .*'coco_segmentation', got 'coco_captions"),
  ):
    with pytest.raises(ConfigError, match=message):
      source(spec, **options)


def test_run_lengths_are_those_of_coco():
  """Counted by hand: pycocotools' text of a mask of 3 x 4 pixels."""
  mask = np.zeros((3, 4), bool)
  mask[1:, 1] = mask[:2, 2] = True
  counts = [4, 4, 4]
  for given in (counts, "444"):
    got = coco_masks.decode(dict(size=[3, 4], counts=given), (3, 4), "here")
    np.testing.assert_array_equal(got, mask)
  # 4, 4, 3 and 1, which is 3 less than the number two before.
  got = coco_masks.decode(dict(size=[3, 4], counts="443M"), (3, 4), "here")
  assert coco_masks.runs(got).tolist() == [4, 4, 3, 1]
  assert coco_masks.runs(mask).tolist() == counts
  with pytest.raises(DataError, match="here: a mask of 12 pixels: expected 4"):
    coco_masks.decode(dict(counts=counts, size=[3, 4]), (4, 4), "here")
  polygon = [[0.6, 0.6, 3.4, 0.6, 3.4, 2.4, 0.6, 2.4]]
  got = coco_masks.decode(polygon, (3, 4), "here")
  # The centres of the pixels, at 0.5, 1.5 and so on, decide.
  assert np.argwhere(got).tolist() == [[1, 1], [1, 2]]
