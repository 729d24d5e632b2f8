"""A worker that has no model: reads messages and answers them as one that has, and computes nothing. For `messages.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import replace

from stepwell.base.ids import Kind
from stepwell.engine.sampling import Chosen
from stepwell.engine.workers.messages import CHOSEN, LOADED, MEMORY, READY, SETUP, pack_chosen, read_pass
from stepwell.engine.workers.worker import MOST_SLOTS, Worker
from stepwell.jobs.channel import Channel, ChannelClosed, Message

VOCABULARY = 128_256
PAGES = {Kind.PREFIX: 1 << 20}


class IdleWorker(Worker):
    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._rank = 0

    def _answer(self, message: Message) -> Message:
        if message.kind == SETUP:
            self._rank = message.number("rank")
            return Message(kind=LOADED, fields={"free_bytes": 0, "vocab_size": VOCABULARY, "digest": "idle", "kernels": {}})
        if message.kind == MEMORY:
            return Message(kind=READY)
        number = message.number("pass")
        given = read_pass(message, pages=PAGES, vocab_size=VOCABULARY, most_slots=MOST_SLOTS)
        if self._rank:
            return Message(kind=CHOSEN, fields={"pass": number, "calls": 0})
        chosen = pack_chosen([Chosen(token=0)] * len(given.choosing), number)
        return replace(chosen, fields={**chosen.fields, "calls": 0})


def main() -> None:
    worker = IdleWorker(Channel(socket.socket(fileno=int(sys.argv[-1]))))
    with contextlib.suppress(ChannelClosed):
        worker.live()
    os._exit(0)
