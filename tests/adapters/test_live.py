"""A real Prometheus scrapes a real vLLM's page with moving counters through the configuration that `kvscope scrape-config` prints; the
recorded signals are what the page's own numbers give, worked out another way."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from observability.cli import root
from tests.adapters.serving import Server
from tests.conftest import wait_for

#: A counter grows by its value on the page every this many seconds: 60 requests a minute.
PERIOD = 60.0


def moving(capture: str, started: float) -> str:
    """The captured page as it is at this moment: gauges of load set, counters and buckets grown evenly since `started`."""
    factor = 1 + (time.time() - started) / PERIOD

    def grow(match: re.Match[str]) -> str:
        name, labels, value = match.groups()
        if name.endswith(("_total", "_bucket", "_sum", "_count")):
            return f"{name}{labels} {float(value) * factor!r}"
        return {"vllm:num_requests_running": f"{name}{labels} 7", "vllm:kv_cache_usage_perc": f"{name}{labels} 0.25"}.get(name, match[0])  # fmt: skip

    return re.sub(r"^(vllm:\w+)(\{.*\}) (\S+)$", grow, capture, flags=re.M)


def page_value(capture: str, name: str, **labels: str) -> float:
    for line in capture.splitlines():
        if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} {labels} is not on the page")


def page_buckets(capture: str, family: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite bounds and their cumulative counts, the total last."""
    rows = re.findall(rf'^{family}_bucket\{{.*le="([^"]+)".*\}} (\S+)$', capture, re.M)
    return np.array([float(le) for le, _ in rows[:-1]]), np.array([float(count) for _, count in rows])


def scrape_config(folder: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(root, ["scrape-config", "--rules", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    return yaml.safe_load(done.output)  # type: ignore[no-any-return]


def test_recorded_signals_of_a_real_vllm_are_what_its_page_gives_worked_out_another_way(
    server: Server, capture: str, program: Callable[[str], str], spawn: Callable[..., Any], free_port: Callable[[], int], tmp_path: Path
) -> None:  # fmt: skip
    started = time.time()

    def answer(handler: Any) -> None:
        body = moving(capture, started).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain; version=0.0.4")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    server.pages["/metrics"] = answer
    assert CliRunner().invoke(root, ["generate", str(tmp_path)]).exit_code == 0
    for file in (tmp_path / "alerts/generated").rglob("*.yml"):  # quicker than in service
        file.write_text(re.sub(r"interval: (15s|1m)", "interval: 1s", file.read_text()))
    config = scrape_config(tmp_path / "alerts/generated", "--engine", "vllm", "--target", server.address)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        spawn(
            program("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
        )  # fmt: skip

    def ask(query: str, at: float | None = None) -> list[dict[str, Any]]:
        params = {"query": query} | ({} if at is None else {"time": str(at)})
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params=params, timeout=10, trust_env=False)
        return answer.json()["data"]["result"]  # type: ignore[no-any-return]

    def value(name: str, **labels: str) -> float:
        match = ",".join(f'{k}="{v}"' for k, v in labels.items())
        [found] = ask(f"{name}{{{match}}}", at)  # all of one evaluation
        assert found["metric"] == {"__name__": name, "model": "smol", "engine": "vllm"} | labels
        return float(found["value"][1])

    wait_for(lambda: len(ask("model:kvscope_request_duration_seconds:p99_5m")) and ask("count_over_time(model:kvscope_kv_hit:ratio_rate5m[1m]) > 6"), 60, "recorded signals")  # fmt: skip
    at = time.time() - 1

    assert value("model:kvscope_requests_running:sum") == 7
    assert value("model:kvscope_kv_usage:ratio") == 0.25
    assert value("model:kvscope_kv_hit:ratio_rate5m") == pytest.approx(3712 / 10352, rel=1e-6)
    for objective, family, threshold in (
        ("time_to_first_token", "time_to_first_token", 0.75),
        ("inter_token_latency", "inter_token_latency", 0.1),
        ("request_duration", "e2e_request_latency", 20.0),
    ):
        bounds, counts = page_buckets(capture, f"vllm:{family}_seconds")
        name, total = f"model:kvscope_{objective}_seconds", counts[-1]
        for q in (0.5, 0.9, 0.99):
            top = int(np.searchsorted(counts, q * total))
            low, below = (bounds[top - 1], counts[top - 1]) if top else (0.0, 0.0)
            expected = low + (bounds[top] - low) * (q * total - below) / (counts[top] - below)
            assert value(f"{name}:p{q * 100:g}_5m") == pytest.approx(expected, rel=1e-6)
        good = counts[list(bounds).index(threshold)]
        assert value(f"{name}:error_ratio_rate5m") == pytest.approx(1 - good / total, abs=1e-9)
        assert value(f"{name}:overflow_ratio_rate5m") == pytest.approx(0, abs=1e-9)

    # rates against the scraped samples themselves: slope between the first and the last, over the time Prometheus extrapolates to
    [raw] = ask("vllm:prompt_tokens_total[5m]")
    times, values = np.array([[float(t), float(v)] for t, v in raw["values"]]).T
    assert np.polyfit(times, values, 1)[0] == pytest.approx(
        page_value(capture, "vllm:prompt_tokens_total") / PERIOD, rel=0.01
    )
    prompt = value("model:kvscope_prompt_tokens:rate5m")
    assert value("model:kvscope_generation_tokens:rate5m") / prompt == pytest.approx(1440 / 10352, rel=1e-6)
    assert value("model_phase:kvscope_step_tokens:rate5m", phase="prefill") / prompt == pytest.approx(6640 / 10352, rel=1e-6)  # fmt: skip
    assert value("model_outcome:kvscope_requests:rate5m", outcome="length") / prompt == pytest.approx(60 / 10352, rel=1e-6)  # fmt: skip

    capabilities = {r["metric"]["signal"]: r for r in ask('engine_signal:kvscope_capability:info{engine="vllm"}')}
    regions = capabilities["model_region:kvscope_kv_region_usage:ratio"]
    assert regions["metric"]["status"] == "no"
    assert float(regions["value"][1]) == 0
    assert not ask("model_region:kvscope_kv_region_usage:ratio")
