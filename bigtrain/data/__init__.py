"""Data sources. A config names one by its module, such as type="tokens".

Each module has a class Source; open arrays.py first. A source has

- `len(source)`, the number of examples.
- `spec`: {feature: (dtype, shape) of one example}. The dtype is `bytes` for
  strings; sizes that vary between examples are None.
- `read(indices)`: {feature: [B, ...]}, arrays of objects where sizes vary.
- `where(index)`: file and position of an example, for messages.
- `fingerprint()`: digest of the data and of the options that select it.

and may have

- `ids`: {feature: class numbers of all examples}.
- `class_names`: {feature: names by number}.
- `vocab_sizes`: {feature: largest id + 1}.
- `tokenizer`: name and fingerprint of the tokenizer that made the tokens.
- `fingerprints`: {path: digest} of files that must not change before a resume.
- `read_class_names`, a static method with the arguments of Source, which
  returns `class_names` without reading examples.

formats/ reads files; hidden files are never examples (`files.split_hidden`).
Sources import formats, bigtrain.files and bigtrain.pp.
"""
