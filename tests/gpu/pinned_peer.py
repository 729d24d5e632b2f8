"""A process that maps memory of another, registers it with CUDA, and on request adds one to every byte of it on the device.

python pinned_peer.py FD SIZE
"""

from __future__ import annotations

import mmap
import sys

import torch

from stepwell.transfer.torch_memory import _given_bytes


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    fd, size_bytes = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(0)
    bytes_B = _given_bytes(memoryview(mmap.mmap(fd, size_bytes)), pinned=True)
    say("pinned" if bytes_B.is_pinned() else "not pinned")
    sys.stdin.readline()
    device_B = bytes_B.to("cuda", non_blocking=True)
    device_B += 1
    bytes_B.copy_(device_B, non_blocking=True)
    torch.cuda.synchronize()
    say("done")


if __name__ == "__main__":
    main()
