"""NaFlex: a ViT-S/16 on ILSVRC-2012 with images in their own aspect ratio.

Command: python -m bigtrain.main --config=configs/naflex.py \
  --workdir=runs/naflex [--config.total_epochs=300]
Hardware: 8 accelerators with 80 GB, as vit_s16_i1k.py.
Result: not measured. Published for the method, as the last tenth of SigLIP 2:
78.5% zero-shot accuracy on ImageNet of B/16, and 83.5% of So400m/16.
Source: Tschannen et al. 2025, "SigLIP 2", arxiv.org/abs/2502.14786, section
2.4.2, for the images and their lengths, and vit_s16_i1k.py for the rest.

Each step draws one of `LENGTHS`. Its images have at most so many patches of
16 x 16 pixels, without distortion. Padding is 1.7% of the tokens, measured on
26 photographs of scikit-image, cropped as here, at 128 to 1024 patches.

Needs imagenet2012, prepared by tensorflow-datasets.
"""

from configs import common, vit_s16_i1k

# SigLIP 2 also draws 784 and 1024.
LENGTHS = (128, 256, 576)


def get_config(arg=None):
  """The config.

  Arguments:
    length: patches of an image in evaluations, at most.
    data_dir: folder of the data sets.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(arg, length=256, data_dir="", runlocal=False)
  length, lengths = (arg.length, LENGTHS) if not arg.runlocal else (16, (9, 16))
  given = ["runlocal"] * arg.runlocal + [f"data_dir={arg.data_dir}"]
  config = vit_s16_i1k.get_config(",".join(given))

  # Patches of several shapes cannot be blended.
  config.loss = dict(kind="softmax_xent", label_smoothing=0.1)
  grid = round(length**0.5)
  config.model.posemb = "learn"
  config.model.posemb_grid = (grid, grid)
  end = "|copy('label','labels')|keep('image','shapes','labels')"
  config.input.flexi = dict(length=dict(values=lengths))
  config.input.pp = (
    "decode|inception_crop(ratio_min=0.5,ratio_max=2.0)|flip_lr|randaug(2,10)"
    "|value_range(-1,1)|naflex(16,{length})" + end
  )
  for evaluation in config.evals.values():
    evaluation.pp = f"decode|value_range(-1,1)|naflex(16,{length})" + end
  return config
