"""Parameters of published models, loaded into our models and exported again.

Open decoder_families.py first: each published architecture is a table of
fields, read in both directions, with rules (decoder_rules.py), and a table of
arrays (decoder_arrays.py). vit_families.py, two_tower_families.py,
bert_families.py, stage_families.py and t5_families.py (and t5x.py) have
the others. families.py reads and writes config.json with them, and
layer_patterns.py finds the period of layers that differ; tables.py loads and
exports arrays, of four bits too (mxfp4.py). blocks.py converts between stacked
and separate blocks; conversions.py restores dtypes and names. The modules in
bigtrain/models import this package.
"""
