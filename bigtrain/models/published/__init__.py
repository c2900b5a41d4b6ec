"""Parameters of published models, loaded into our models and exported again.

Open decoder_families.toml first: each published architecture is a table of
fields, read in both directions, with rules (decoder_rules.py), and a table of
arrays. The other *_families.toml, with encoder_rules.py and the modules beside
them, have the rest. families.py reads them, and reads and writes
config.json with them; layer_patterns.py finds the period of layers that differ;
tables.py loads and exports arrays, of four bits too (mxfp4.py). blocks.py
converts between stacked and separate blocks; conversions.py restores dtypes and
names. The modules in bigtrain/models import this package.
"""
