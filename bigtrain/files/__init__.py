"""Files in local folders and object stores.

Open paths.py first: it has one interface for both. objects.py is its client for
object stores, disk.py handles local disks, and picture_sizes.py reads the sizes
of pictures. Any package may import this one. It imports only bigtrain.config,
and tensorstore when an object store is used.
"""
