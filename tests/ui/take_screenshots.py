"""Pictures of the page for the docs: `stepwell serve` with a small random model, a few users who talk to it, and a browser.

PYTHONPATH=tests python tests/ui/take_screenshots.py docs/images [minutes]
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from stepwell.jobs.children import start_child
from ui.conftest import chromium

ADMIN = "a token for pictures"
SYSTEMS = (
    "You keep the books of a water works. " * 18,
    "You answer questions about wells, in one line. " * 12,
    "You are a pilot. " * 20,
)
ASKED = "A well is a hole to the water below, and steps lead down to it. " * 5
NUM_USERS, NUM_CHATS = 3, 40
FLAGS = "--model random-hybrid --port 0 --device-memory 40MiB --host-memory 64MiB --store-budget 512MiB --checkpoint-delay 5"


def main(out: Path, minutes: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stepwell", "serve", *FLAGS.split(), "--store", f"log:{folder}/wells"]
        environment = os.environ | {"STEPWELL_ADMIN_TOKEN": ADMIN}
        with start_child(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                address = next(found[1] for line in server.stdout if (found := re.match(r"address +(\S+)", line)))
                _talk_and_look(address, out, minutes)
            finally:
                server.terminate()


def _talk_and_look(address: str, out: Path, minutes: float) -> None:
    over = threading.Event()
    chats = [[{"role": "system", "content": SYSTEMS[number % len(SYSTEMS)]}] for number in range(NUM_CHATS)]
    users = [threading.Thread(target=_talk, args=(address, random.Random(number), chats, over)) for number in range(NUM_USERS)]
    for user in users:
        user.start()
    time.sleep(60 * minutes)
    body = {"model": "random-hybrid", "prompt": ASKED, "max_tokens": 1}
    httpx.post(f"{address}/v1/completions", json=body, timeout=600).raise_for_status()
    _look(address, out)
    over.set()
    for user in users:
        user.join()


def _talk(address: str, chance: random.Random, chats: list[list[dict[str, str]]], over: threading.Event) -> None:
    while not over.is_set():
        at = int(len(chats) * chance.random() ** 1.6)  # some come back more often
        mine = [*chats[at], {"role": "user", "content": f"Question {chance.randrange(10**6)}: how deep is well {at}? " * 4}]
        body = {"model": "random-hybrid", "messages": mine, "max_tokens": 24, "temperature": 1}
        reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600).raise_for_status()
        answer = {"role": "assistant", "content": reply.json()["choices"][0]["message"]["content"] or "."}
        chats[at] = [*mine, answer] if len(mine) < 16 else chats[at][:1]


def _look(address: str, out: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**chromium())
        for name, width, height, dark in (
            ("ui-light", 1000, 1010, False),
            ("ui-dark", 1000, 990, True),
            ("ui-phone", 390, 1100, False),
        ):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
            page.goto(f"{address}/ui")
            page.wait_for_selector("#status[data-state=ok]")
            page.fill("#token", ADMIN)
            page.click("#token-form button")
            page.wait_for_selector("#token-form[data-state=admin]")
            if dark:
                page.fill("#prompt", ASKED + " How deep is the sea?")
                page.click("#prompt-form button")
                page.wait_for_selector("#explained .says")
                page.evaluate("scrollTo(0, document.querySelector('#checkpoints').closest('.card').offsetTop - 12)")
            page.screenshot(path=out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 6.0)
