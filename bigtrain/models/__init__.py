"""The models that a config can name by `model_name`.

Each module has a class `Model`, a flax module whose fields are the keys of
config.model. Most modules also have VARIANTS, the sizes for
`config.model.variant`; `param_dims` (see arrays/dims.py); and `from_published`,
which converts released parameters to the names and shapes of its argument
`like`. Names are joined by "/". Parameters without a match are returned as they
are, so that the caller can list them. A Model may have `check_data`, which
compares it with the properties that the training data declare.

Open vit.py first. layers/ holds the layers, published/ the conversion of
released parameters. The program finds models by name (config/modules.py).
"""
