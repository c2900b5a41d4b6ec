"""Small disks that tests fill up; only root can mount them."""

import subprocess


def mount(folder, size, *options):
  """Mounts a disk of this size at `folder`; returns whether that worked."""
  options = ",".join([*options, f"size={size}"])
  command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
  return not subprocess.call(command, stderr=subprocess.DEVNULL)


def unmount(folder):
  """Unmounts the disk, or lets the kernel do so once it is no longer in use.

  A program that indexes the machine's files may be using it at any moment.
  """
  subprocess.check_call(["umount", "--lazy", str(folder)])
