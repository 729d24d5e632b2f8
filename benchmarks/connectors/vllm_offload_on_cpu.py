"""vLLM's own offloading (OffloadingConnector: host tier, then files) on machines without a GPU, for comparison.

vLLM 0.32 refuses a CPU as the device, since its copies run on CUDA's streams. Here they are plain copies, made at once; the
scheduler's side, the host tier, the files and their threads are vLLM's. Named as `spec_name` and `spec_module_path`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class OffloadOnCpu(TieringOffloadingSpec):
    """Chunks of one block each."""

    def get_worker(self, kv_caches: Any) -> Any:
        assert self.blocks_per_chunk == 1, "blocks and chunks are of one size here"
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = PlainCopies(kv_caches, region)
        return self._worker


class PlainCopies(OffloadingWorker):
    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region, self._groups = region, kv_caches.group_data_refs
        self._device = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._host = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, self._device, self._host, src_spec.group_sizes)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """`expedited` is of vLLM 0.33: copies that a step waits for. All are made at once here."""
        return self._copy(job_id, src_spec, dst_spec, self._host, self._device, dst_spec.group_sizes)

    def _copy(self, job_id: int, source: Any, target: Any, read: Any, written: Any, sizes: Any) -> bool:
        began, at, moved = time.perf_counter(), 0, 0
        for size, refs in zip(sizes, self._groups, strict=True):
            blocks = torch.from_numpy(source.block_ids[at : at + size]).long()
            places = torch.from_numpy(target.block_ids[at : at + size]).long()
            for ref in refs if size else ():
                width = ref.page_size_bytes
                written[ref.tensor_idx][places, :width] = read[ref.tensor_idx][blocks, :width]
                moved += size * width
            at += size
        took_s = time.perf_counter() - began
        self._finished.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=took_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Copies have ended when they were submitted."""

    def shutdown(self) -> None:
        self._device, self._host = [], []
        self._region.cleanup()
