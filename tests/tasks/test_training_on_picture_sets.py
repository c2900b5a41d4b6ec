"""A run on COCO's files, whose evaluations read all references and masks."""

import json

import numpy as np
import pytest
import tiny
from PIL import Image
from support import any_mesh, mask_weights

from bigtrain import main
from bigtrain.config import loading

SIDE = 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)
  rng = np.random.default_rng(0)
  images, captions, instances = [], [], []
  for i in range(20):
    name = f"{i:012d}.jpg"
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / name)
    images.append(dict(id=i, file_name=name, height=SIDE, width=SIDE))
    for n in range(1 + i % 3):
      captions.append(dict(id=3 * i + n, image_id=i, caption=f"a {i} {n}"))
    corners = [1, 1, 6, 1, 6, 7, 1, 7]
    box = dict(id=i, image_id=i, category_id=1, bbox=[1, 1, 5, 6], iscrowd=0)
    instances.append(box | dict(segmentation=[corners]))
  both = dict(images=images, categories=[dict(id=1, name="cat")])
  for name, annotations in (("captions", captions), ("instances", instances)):
    content = both | dict(annotations=annotations)
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
  np.savez(tmp_path / "vae.npz", **mask_weights.arrays())
  return tmp_path


@pytest.mark.slow
def test_a_run_on_coco_with_its_evaluations(folder):
  config = loading.load(f"{any_mesh.CONFIGS}/vlm_digits.py:runlocal")
  small = dict(width=16, depth=1, num_heads=2, mlp_dim=24)
  config["model"]["image"] |= small
  config["model"]["text"] |= small

  def rows(name, path, length=32, **options):
    return dict(
      type="supervised",
      dataset=dict(name=name, path=path, **options.pop("more", {})),
      tokenizer="bytes",
      length=length,
      pictures=dict(tokens=4, pp="value_range(-1, 1)"),
      **options,
    )

  generate = dict(pred="generate", pred_kw=dict(max_new=8, eos_id=2))
  masks = rows(
    "coco_segmentation",
    "instances.json",
    length=300,
    more=dict(mask_coder="vae.npz"),
    references=True,
    masks=True,
    slice="[:10]",
  )
  config |= dict(
    input=dict(data=rows("coco_captions", "captions.json"), batch_size=8),
    evals=dict(
      captions=dict(
        type="generate",
        data=rows("coco_captions", "captions.json", references=3),
        reference_key="references",
        prompt_key="tokens",
        metrics=["vqa", "exact_match"],
        log_percent=100,
        **generate,
      ),
      masks=dict(
        type="mask_overlap",
        data=masks,
        mask_coder="vae.npz",
        log_percent=100,
        **generate,
      ),
    ),
    log_steps=1,
    ckpt_steps=2,
    total_steps=2,
    tensorboard=False,
  )
  main.train(config, "run")
  row = {}
  for each in tiny.rows(folder / "run").values():
    row |= each
  assert row["captions/num_examples"] == 20
  assert row["masks/num_examples"] == 10
  assert row["masks/invalid"] == 1 and row["masks/miou"] == 0
  (file,) = (folder / "run" / "generations").iterdir()
  written = [json.loads(line) for line in file.read_text().splitlines()]
  assert written[2]["references"] == ["a 2 0", "a 2 1", "a 2 2"]
  assert "caption en\n" in written[2]["prompt"]
