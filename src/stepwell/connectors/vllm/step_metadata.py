"""What vLLM carries between the scheduler's process and the workers' for us, as its own kinds of values. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from stepwell.connectors.vllm.orders import Answers, Order, WeightsAnswer, merged


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """To the workers, with a step."""

    step: int = 0
    loads: list[Order] = field(default_factory=list)
    saves: list[Order] = field(default_factory=list)
    weights_question: int = 0  # its number, where workers are asked which weights they hold


@dataclass
class WorkerAnswers(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers, with a step's output."""

    answers: Answers
    step: int  # the last one that was computed
    weights: dict[int, WeightsAnswer] = field(default_factory=dict)  # by rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerAnswers), f"answers of {type(other).__name__}"
        step = min(self.step, other.step)
        return WorkerAnswers(merged(self.answers, other.answers), step, self.weights | other.weights)
