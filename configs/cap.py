"""Cap B/16: CapPa (configs/cappa.py) without parallel prediction.

Command: python -m bigtrain.main --workdir=runs/cap \
  --config=configs/cap.py:tokenizer=c4_en.model
Hardware, result, source, needs: see configs/cappa.py.
"""

from configs import cappa, common


def get_config(arg=None):
  """The config. Arguments: as in cappa.py, without `parallel`."""
  arg = common.parse_arg(
    arg,
    variant="B/16",
    res=224,
    tokenizer="bytes",
    data_dir="",
    runlocal=False,
  )
  arg.parallel = 0.0
  return cappa.make(arg)
