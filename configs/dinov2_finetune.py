"""Fine-tunes a published DINOv2 as a classifier, with layer-wise rates.

Command: python -m bigtrain.main --workdir=runs/dinov2_pets \
  --config=configs/dinov2_finetune.py:oxford_iiit_pet,init=dinov2-base
Hardware: 8 accelerators with 80 GB for B/14 and a batch of 512.
Result: not measured. Published on ImageNet: 84.5% top-1 of a linear classifier
on the features of B/14; fine-tuning lifts g/14 from 86.5% to 88.5%.
Source: Oquab et al. 2023, "DINOv2", arxiv.org/abs/2304.07193, for the model and
the results, and Bao et al. 2021, "BEiT", arxiv.org/abs/2106.08254, for rates
that decay from layer to layer.

`init` is a folder of Hugging Face, such as facebook/dinov2-base. Needs the data
set, prepared by tensorflow-datasets.
"""

from configs import common, transfer


def get_config(arg=None):
  """Data, lengths and evaluations are those of transfer.py.

  Arguments:
    dataset: a key of transfer.TASKS.
    init: folder of the published model; default: dinov2-base, or none with
      `runlocal`.
    variant: its size; S/14, B/14, L/14.
    layer_decay: factor of the learning rate from a layer to the one below.
    data_dir: folder of the data set.
    runlocal: a tiny run, for tests; on made-up data without `data_dir`.
  """
  arg = common.parse_arg(
    arg,
    dataset="oxford_iiit_pet",
    init="",
    variant="B/14",
    layer_decay=0.75,
    data_dir="",
    runlocal=False,
  )
  given = [f"dataset={arg.dataset}", "res=224", "resize=256", "variant=B/16"]
  given += [f"data_dir={arg.data_dir}"] + ["runlocal"] * arg.runlocal
  config = transfer.get_config(",".join(given))

  config.model.update(
    variant=arg.variant if not arg.runlocal else "mu/16",
    class_token=True,
    posemb_class=True,
    mlp="gelu_erf",
    layer_scale=1.0,
    drop_path=0.1,
  )
  if arg.init or not arg.runlocal:
    path = arg.init or "dinov2-base"
    config.model_init = dict(path=path, allow_missing=["head/.*"])

  config.optimizer = dict(name="adam", mu_dtype="bfloat16")
  config.lr = 1e-3
  config.wd = 0.05
  config.wd_coupling = "lr"
  size = arg.variant.partition("/")[0]
  depth = {"S": 12, "B": 12, "L": 24}[size] if not arg.runlocal else 1
  mults = [
    (rf"Transformer/encoderblock_{i}/.*", arg.layer_decay ** (depth - i))
    for i in range(depth)
  ]
  config.lr_mults = [
    *mults,
    ("(embedding/.*|pos_embedding|cls)", arg.layer_decay ** (depth + 1)),
  ]
  return config
