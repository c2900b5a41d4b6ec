"""NaFlex: a ViT-S/16 on ILSVRC-2012 that sees images in their own shapes.

Command: python -m bigtrain.main --config=configs/naflex.py \
  --workdir=runs/naflex [--config.total_epochs=300]
Hardware: 8 accelerators with 80 GB, as vit_s16_i1k.py.
Result: not measured. Published for the method, as the last tenth of SigLIP 2:
78.5% zero-shot accuracy on ImageNet of B/16, and 83.5% of So400m/16.
Source: Tschannen et al. 2025, "SigLIP 2", arxiv.org/abs/2502.14786, section
2.4.2, for the images, and vit_s16_i1k.py for the rest. Images have at most
`max_patches` patches of 16 x 16, without distortion; of these, 4% are padding
for images of many shapes.

Needs imagenet2012, prepared by tensorflow-datasets.
"""

from configs import common, vit_s16_i1k


def get_config(arg=None):
  """The config.

  Arguments:
    max_patches: length of the sequence.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(arg, max_patches=256, data_dir="", runlocal=False)
  patches = arg.max_patches if not arg.runlocal else 16
  given = ["runlocal"] * arg.runlocal + [f"data_dir={arg.data_dir}"]
  config = vit_s16_i1k.get_config(",".join(given))

  # Patches of several shapes cannot be blended.
  config.loss = dict(kind="softmax_xent", label_smoothing=0.1)
  grid = round(patches**0.5)
  config.model.posemb = "learn"
  config.model.posemb_grid = (grid, grid)
  end = f"naflex(16,{patches})|copy('label','labels')"
  end += "|keep('image','shapes','labels')"
  config.input.pp = (
    "decode|inception_crop(ratio_min=0.5,ratio_max=2.0)|flip_lr|randaug(2,10)"
    f"|value_range(-1,1)|{end}"
  )
  for evaluation in config.evals.values():
    evaluation.pp = f"decode|value_range(-1,1)|{end}"
  return config
