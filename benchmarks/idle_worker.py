"""A rank without a model: reads and answers messages as a real one does, and computes nothing. For `bench_ranks.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from stepwell.base.ids import Kind
from stepwell.engine.workers.messages import CHOSEN, LOADED, MEMORY, READY, SETUP, ChosenTokens, pack_chosen
from stepwell.engine.workers.pass_arrays import PassReader
from stepwell.engine.workers.worker import MOST_SLOTS, Worker
from stepwell.jobs.channel import Channel, ChannelClosed, Message

VOCABULARY = 128_256
PAGES = {Kind.PREFIX: 1 << 20}


class IdleWorker(Worker):
    def __init__(self, channel: Channel, work: Channel) -> None:
        super().__init__(channel, work)
        self._rank = 0
        self._reader = PassReader(pages=PAGES, vocab_size=VOCABULARY, most_slots=MOST_SLOTS)

    def _look_ahead(self) -> None:
        self._reader.look_ahead()

    def _answer(self, message: Message) -> Message:
        if message.kind == SETUP:
            self._rank = message.number("rank")
            return Message(kind=LOADED, fields={"free_bytes": 0, "vocab_size": VOCABULARY, "digest": "idle", "kernels": {}})
        if message.kind == MEMORY:
            return Message(kind=READY)
        given = self._reader.read(message)
        tokens = [] if self._rank else pack_chosen(ChosenTokens([0] * len(given.choosing())))
        return Message(kind=CHOSEN, numbers=(message.numbers[0], 0), arrays=tokens)


def main() -> None:
    work, channel = (Channel(socket.socket(fileno=int(each))) for each in sys.argv[-2:])
    worker = IdleWorker(channel, work)
    with contextlib.suppress(ChannelClosed):
        worker.live()
    os._exit(0)
