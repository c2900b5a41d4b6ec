"""Data sources; a config names one by its module, such as type="tokens".

Each module has a class Source with a length that reads examples by index; open
arrays.py first. Some attributes are optional: `ids`, the class numbers of all
examples by feature; `class_names`, the names of these classes by feature;
`vocab_sizes`, the largest id + 1 by feature; and `tokenizer`, the name and the
fingerprint of the one that made the tokens. So is the static method
`read_class_names`: it takes the arguments of Source and returns `class_names`
without reading examples.

formats/ holds the code that reads files. The input pipeline finds sources by
name, through bigtrain.parts; only a source that builds on another one imports
it. Sources import formats, bigtrain.files and bigtrain.pp.
"""
