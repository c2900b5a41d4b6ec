"""Training on pictures: any mesh, resumed runs, adapters, frozen towers."""

import collections
import functools

import numpy as np
import pytest
import tiny
from support import any_mesh

import bigtrain
from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.tools import checkpoint

CONFIG = "vlm_digits:runlocal"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
  # The rows are made once for all tests.
  cache = tmp_path_factory.getbasetemp() / "cache"
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    yield


@functools.cache
def steps(sizes, microbatches, pack):
  config = any_mesh.load(CONFIG, packed=pack, small=True, dropout=0)
  return any_mesh.train(config, dict(sizes), microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("sizes", "microbatches", "pack"),
  [
    ((("fsdp", 2),), 4, False),
    ((("fsdp", 4), ("tensor", 2)), 2, True),
    ((("replica", 2), ("fsdp", 2), ("sequence", 2)), 1, True),
  ],
)
def test_microbatches_and_devices_change_nothing(sizes, microbatches, pack):
  any_mesh.check_same(
    steps(sizes, microbatches, pack),
    steps((("fsdp", 1),), 1, pack),
    least_tokens=50,
  )


def tiny_run(**changes):
  config = loading.load(f"{any_mesh.CONFIGS}/vlm_digits.py:runlocal")
  small = dict(width=16, depth=1, num_heads=2)
  config["model"]["image"] |= small | dict(mlp_dim=24)
  config["model"]["text"] |= small | dict(mlp_dim=24)
  config["evals"] = {}
  config |= dict(log_steps=1, ckpt_steps=2, tensorboard=False)
  return config | changes


@pytest.fixture(scope="module")
def frozen_tower_run(cache, tmp_path_factory):
  """Folder of a run of two steps, with the checkpoints of both."""
  config = tiny_run(total_steps=2, ckpt_steps=1, keep_ckpts=2)
  warm = dict(decay_type="constant")
  config["schedule"] = [("img/.*", None), (".*", warm)]
  config["lr_mults"] = [("projector/.*", 0.1)]
  config |= dict(wd=0.0, optimizer=dict(name="adam"), grad_clip_norm=None)
  folder = tmp_path_factory.mktemp("frozen_tower")
  main.train(config, str(folder))
  return folder


def params_of(workdir, step=None):
  arrays = tiny.arrays(workdir, step)
  return {n: np.asarray(x) for n, x in arrays.items()}


@pytest.mark.slow
def test_a_resumed_run_equals_a_whole_one_and_answers(tmp_path):
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(tiny_run(), str(whole))
  for stop in (2, None):
    main.train(tiny_run(stop_at_steps=stop), str(cut))
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(cut))
  assert tiny.rows(whole) == tiny.rows(cut)
  # The run knows how its prompts and pictures are prepared.
  model = bigtrain.load(str(whole))
  picture = np.zeros((8, 8), np.uint8)
  prompt = dict(text="What is the sum? ", images=[picture, picture + 200])
  assert {*model.generate(prompt, max_new=3)} == {"text"}
  texts = model.generate([prompt, dict(text="?", images=picture)], max_new=3)
  assert len(texts) == 2


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      dict(projector=dict(merge=1)),
      "tokens=4: the model makes 16 image tokens ",
    ),
    (dict(image_token=258), "image_token=258: .* config.input have the id 259"),
  ],
)
def test_data_for_another_model_are_refused(tmp_path, changes, message):
  config = tiny_run()
  config["model"] |= changes
  with pytest.raises(ConfigError, match=message):
    main.train(config, str(tmp_path))


@pytest.mark.slow
def test_a_tower_freezes_and_trains_at_another_rate(frozen_tower_run):
  first, last = (params_of(frozen_tower_run, step) for step in (1, 2))
  moved = dict.fromkeys(("img", "projector", "llm"), 0.0)
  for name, x in first.items():
    if name.startswith("params/"):
      part = name.split("/")[1]
      moved[part] = max(moved[part], np.abs(x - last[name]).max())
  assert moved["img"] == 0
  # Adam's steps are as large as the rate.
  assert 0 < moved["projector"] < 0.3 * moved["llm"]


@pytest.mark.slow
def test_parts_start_from_sources_of_their_own(tmp_path):
  """As a projector is trained between a tower and a decoder."""
  first, second = tmp_path / "first", tmp_path / "second"
  main.train(tiny_run(total_steps=1), str(first))
  main.train(tiny_run(total_steps=1, seed=1), str(second))
  of_part = lambda path, part: dict(
    path=str(path),
    rename=[(rf"{part}/(.*)", r"\1"), ("(img|projector|llm)/.*", None)],
  )
  parts = dict(img=of_part(first, "img"), llm=of_part(second, "llm"))
  init = dict(parts=parts, allow_missing=["projector/.*"])
  config = tiny_run(total_steps=1, lr=0.0, wd=0.0, model_init=init)
  main.train(config, str(tmp_path / "run"))
  arrays = params_of(tmp_path / "run")
  sources = dict(img=params_of(first), llm=params_of(second))
  compared = collections.Counter()
  for name, x in arrays.items():
    tree, _, rest = name.partition("/")
    part = rest.split("/")[0]
    if tree == "params" and part in sources:
      np.testing.assert_array_equal(x, sources[part][name], err_msg=name)
      compared[part] += 1
  assert min(compared.values()) > 5
  for changes, message in (
    (dict(allow_missing=[]), "parts: no source of 2 array"),
    (dict(allow_missing="projector/.*"), "allow_missing: expected a list of"),
    (dict(parts=dict(parts, imgs="x")), "parts.imgs: unknown key"),
    (dict(parts=dict(img=of_part(first, "llm"))), "parts.img: .*does not fit"),
  ):
    config["model_init"] = init | changes
    with pytest.raises(ConfigError, match=f"(?s){message}"):
      main.train(config, str(tmp_path / "wrong"))


@pytest.mark.slow
def test_adapters_of_both_parts_merge(frozen_tower_run, tmp_path):
  base = frozen_tower_run
  config = tiny_run(
    total_steps=2,
    model_init=str(base),
    adapters=dict(targets=r".*(query|value|up|head)/kernel", rank=2, alpha=4),
  )
  main.train(config, str(tmp_path / "run"))
  merged = str(tmp_path / "merged.npz")
  checkpoint.main(["export", str(tmp_path / "run"), merged, "--prefix=params"])
  tokens = np.tile([259] * 8 + [5, 6, 7, 8], (2, 1))
  image = np.random.default_rng(0).normal(size=(2, 2, 8, 8, 3))
  features = dict(tokens=tokens, image=image.astype(np.float32))
  outputs = [
    bigtrain.load(path).run("logits", features)
    for path in (str(tmp_path / "run"), merged, str(base))
  ]
  np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-5)
  assert np.abs(outputs[0] - outputs[2]).max() > 1e-3
  names = dict(
    trees.flatten_with_names(bigtrain.load(str(tmp_path / "run")).params)
  )
  assert {name.split("/")[0] for name in names} == {"img", "llm"}
