"""Data sources; a config names one by its module, such as type="tokens".

Each module has a class Source with a length that reads examples by index; open
arrays.py first. formats/ holds the code that reads files. The input pipeline
finds sources by name, through bigtrain.parts; only a source that builds on
another one imports it. Sources import formats, bigtrain.files and bigtrain.pp.
"""
