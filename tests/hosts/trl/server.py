"""What TRL asks of vLLM, answered on a CPU by the model itself: its API of completions, over HTTP.

    python server.py PORT-FILE WEIGHTS

A completion is drawn from the model, token by token, of a length that is drawn as well; some take long. ``WEIGHTS`` are
read again whenever the trainer has sent new ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tests.hosts.trl.tiny import PROMPTS, WORDS, tiny_model

torch.set_num_threads(1)
model: LlamaForCausalLM = tiny_model()
read_at = 0
lock = threading.Lock()
weights = Path(sys.argv[2])


def complete(prompt: list[int], most: int) -> tuple[list[int], list[float]]:
    """Tokens, and the logarithms of their probabilities."""
    global read_at
    tokens, logs = list(prompt), []
    with lock, torch.no_grad():
        if weights.exists() and (now := weights.stat().st_mtime_ns) != read_at:
            model.load_state_dict(torch.load(weights))
            read_at = now
        for _ in range(random.randrange(1, most + 1)):
            chances = model(torch.tensor([tokens])).logits[0, -1].double()
            chances[: PROMPTS + 2] = -torch.inf  # words alone: a prompt is known by its token
            chances = chances.log_softmax(0)
            tokens.append(int(torch.multinomial(chances.exp(), 1)))
            logs.append(float(chances[tokens[-1]]))
    return tokens[len(prompt) :], logs


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """Health and models."""
        self._answer({"data": [{"id": "tiny", "max_model_len": 64}]})

    def do_POST(self) -> None:
        """Completions; whatever else is asked is done."""
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self.path.startswith("/v1/completions"):
            return self._answer({})
        tokens, logs = complete(asked["prompt"], asked["max_tokens"])
        number = asked["prompt"][-1] - 2
        time.sleep(random.random() * 0.02 + (1.0 if number % 11 == 3 else 0))
        return self._answer({"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": logs}}]})

    def _answer(self, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


if __name__ == "__main__":
    assert WORDS
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    new = Path(f"{sys.argv[1]}.new")
    new.write_text(str(server.server_port))
    os.replace(new, sys.argv[1])
    server.serve_forever()
