"""A stand-in for the Hugging Face hub: one HTTP server on the loopback address with a few repositories.

course/tutor    the tutor's files, its chat template in a separate file, and weights in a format that is not read
course/broken   the same, but the connection ends in the middle of the weights
course/gated    refused: the token has no access
any other       not found
"""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH

COMMIT = "0123456789abcdef0123456789abcdef01234567"
READ = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
FILES = (*READ, "pytorch_model.bin")


class Hub(BaseHTTPRequestHandler):
    """Answers the four kinds of requests that a download consists of."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            parts = parts[2:]
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository == "course/gated":
            self._send(403, b"Access to model course/gated is restricted.", {"X-Error-Code": "GatedRepo"})
        elif repository not in ("course/tutor", "course/broken"):
            self._send(404, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
        elif rest[0] == "revision":
            self._send_json({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif rest[0] == "tree":
            self._send_json([{"type": "file", "path": n, "size": len(read(n)), "oid": etag(n)} for n in FILES])
        else:
            name, headers = rest[-1], {"ETag": f'"{etag(rest[-1])}"', "X-Repo-Commit": COMMIT}
            self._send(200, read(name), headers, cut=repository == "course/broken" and name == "model.safetensors")

    do_HEAD = do_GET

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection |= cut

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""


def read(name: str) -> bytes:
    if name == "chat_template.jinja":
        return json.loads(read("tokenizer_config.json"))["chat_template"].encode()
    return b"pickled" if name == "pytorch_model.bin" else (TUTOR_PATH / name).read_bytes()


def etag(name: str) -> str:
    return hashlib.sha1(read(name)).hexdigest()


def start() -> ThreadingHTTPServer:
    """A server on a free port, not serving yet."""
    return ThreadingHTTPServer(("127.0.0.1", 0), Hub)
