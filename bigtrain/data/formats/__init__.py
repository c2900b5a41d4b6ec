"""Readers and writers of file formats, for the sources in bigtrain/data.

files.py finds files and reads them by position; open it first. row_files has
what sources of rows share. tfrecord, tar_files, token_files, documents and
arrow_columns know one format each. windows plans fixed-length windows over
token ids, packing puts documents into windows, and splits parses
"train[:99%]". Sources, the input pipeline and tools may import these modules;
no config can name them.
"""
