"""The models that a config can name by `model_name`.

Each module has a class `Model`, a flax module whose fields are the keys of
config.model. Most have VARIANTS, sizes for `config.model.variant`; `param_dims`
(arrays/dims.py); and `from_published`, which converts released parameters to
the names and shapes of `like`. Names are joined by "/". Parameters without a
match stay as they are, for the caller to list. A Model may have `check_data`,
which compares it with the properties that the training data declare.

Open vit.py first. layers/ holds the layers, published/ the conversion of
released parameters. The program finds models by name (config/modules.py).
"""
