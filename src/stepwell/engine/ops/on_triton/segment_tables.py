"""The bounds of a pass's segments, as tensors for kernels that take several runs in one launch.

    rows      | a | b | c c c c c c c | d d d d |        singles first, then runs
    chunks                |- - - -|- - -|- - - -|        of each run, equally long; none reaches into the next run

Made once for a pass, in one copy that the host does not wait for. Captured steps have no runs, and never need it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stepwell.engine.ops.recurrent import CHUNK_TOKENS, Points
from stepwell.engine.passes.numbers import on_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentTables:
    """C chunks of R runs. Rows of runs are counted from the first run on."""

    start_S: torch.Tensor  # with one more after the last
    segment_N: torch.Tensor
    run_start_R: torch.Tensor  # with one more after the last
    run_start_on_host_R: torch.Tensor
    run_and_index_C2: torch.Tensor
    first_chunk_R: torch.Tensor  # with one more after the last


def tables_of(points: Points) -> SegmentTables:
    if "segments" not in points.plans:
        points.plans["segments"] = _made(points)
    tables: SegmentTables = points.plans["segments"]
    return tables


def _made(points: Points) -> SegmentTables:
    start_S = np.asarray(points.starts, np.int64)
    run_start_R = start_S[points.num_singles :] - start_S[points.num_singles]
    chunks_R = -(-np.diff(run_start_R) // CHUNK_TOKENS)
    first_chunk_R = np.concatenate([[0], np.cumsum(chunks_R)])
    run_C = np.repeat(np.arange(len(chunks_R)), chunks_R)
    index_C = np.arange(len(run_C)) - first_chunk_R[run_C]
    segment_N = np.repeat(np.arange(len(start_S) - 1), np.diff(start_S))
    parts = (start_S, segment_N, run_start_R, first_chunk_R, np.stack([run_C, index_C], axis=1).reshape(-1))
    joined = on_device(np.concatenate(parts).astype(np.int64), points.page_S.device, points.send)
    start, segment, run_start, first_chunk, run_and_index = joined.split([len(each) for each in parts])
    return SegmentTables(
        start_S=start,
        segment_N=segment,
        run_start_R=run_start,
        run_start_on_host_R=torch.from_numpy(run_start_R),
        first_chunk_R=first_chunk,
        run_and_index_C2=run_and_index.view(-1, 2),
    )
