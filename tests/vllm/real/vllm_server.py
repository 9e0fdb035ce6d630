"""Start and stop a real `vllm serve` on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.ports import free_port

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment of vLLM: small, quiet, offline."""

START_SECONDS = 300

FLAGS = [
    *("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"),
    # A seeded request whose prompt is split into chunks crashes vLLM on a CPU.
    *("--max-num-seqs", "32", "--no-enable-chunked-prefill", "--disable-uvicorn-access-log"),
    *("--enable-prefix-caching", "--block-size", "32"),
]
TRANSFER = ["--weight-transfer-config", json.dumps({"backend": "gloo"})]
ADAPTERS = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"]
PROCESSED = ["--logprobs-mode", "processed_logprobs"]
SCALE_OUT = ["--enable-scale-out"]


os.environ.setdefault("VLLM_API_KEY", "a key")  # the server asks for it, and the engine sends it


class Server:
    """A `vllm serve` in a session of its own, so that a signal reaches all of its processes."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.log = free_port(), folder.parent / "server.log"
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port", str(self.port)]
        self.command = [*command, *FLAGS, *flags]
        self.start()
        self.wait()

    def start(self) -> None:
        """Start at the same port as before. Nothing waits until the server is ready."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the server answers. Raises: RuntimeError with the end of its log."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError), opener.open(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.5)
        self.close()
        raise RuntimeError(f"vllm serve did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """As `kill -9` of all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def close(self) -> None:
        """End the server, first politely, so that it removes its shared memory."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(5)  # that is enough, if it ends at all
        self.kill()


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    """A server that is closed afterwards."""
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        server.close()
