"""A worker that has no model: reads messages and answers them as one that has, and computes nothing. For `messages.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import replace

from stepwell.base.ids import Kind
from stepwell.engine.sampling import Chosen
from stepwell.engine.workers.messages import CHOSEN, LOADED, MEMORY, READY, SETUP, pack_chosen
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

    def _answer(self, message: Message) -> Message:
        if message.kind == SETUP:
            self._rank = message.number("rank")
            return Message(kind=LOADED, fields={"free_bytes": 0, "vocab_size": VOCABULARY, "digest": "idle", "kernels": {}})
        if message.kind == MEMORY:
            return Message(kind=READY)
        number = message.number("pass")
        given = self._reader.read(message)
        if self._rank:
            return Message(kind=CHOSEN, fields={"pass": number, "calls": 0})
        chosen = pack_chosen([Chosen(token=0)] * len(given.choosing), number)
        return replace(chosen, fields={**chosen.fields, "calls": 0})


def main() -> None:
    work, channel = (Channel(socket.socket(fileno=int(each))) for each in sys.argv[-2:])
    worker = IdleWorker(channel, work)
    with contextlib.suppress(ChannelClosed):
        worker.live()
    os._exit(0)
