"""A small student of the quickstart's ViT: distillation on digits.

Command:
  make train; python -m bigtrain.main \\
    --config=configs/digits_distill.py --workdir=runs/digits_distill
Hardware: any; two CPU cores need about a minute.
Result: 0.961 top-1 on the held-out fifth with 15,250 parameters, one seed; the
teacher of that run has 202,058 and 0.986.
Source: our own run. The recipe follows Beyer et al. 2021
(arxiv.org/abs/2106.05237): the same views for both models, strong mixup, no
labels, and many epochs.
"""

from configs import common, digits


def get_config(arg=None):
  """Arguments: teacher (its workdir), runlocal (a few steps, for tests).

  With runlocal the teacher has fresh parameters.
  """
  arg = common.parse_arg(arg, teacher="runs/digits", runlocal=False)
  # Input, lengths, optimizer and evaluation of the quickstart.
  config = digits.get_config("runlocal" if arg.runlocal else None)

  config.task = "distillation"
  config.loss = dict(distance="kl", temperature=1.0, mixup_alpha=1.0)
  config.teacher = dict(
    model_name=config.model_name,
    model=config.model.to_dict(),
    model_init=arg.teacher if not arg.runlocal else None,
  )
  # A fresh teacher whose head is zeros would teach nothing.
  config.teacher.model.head_zeroinit = not arg.runlocal

  config.model.update(width=24, depth=2, mlp_dim=96, num_heads=3)
  return config
