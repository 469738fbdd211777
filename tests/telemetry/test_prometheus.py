"""A real Prometheus scrapes the exporter: no error, every sample and exemplar stored."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from exporters.prometheus import start_exporter
from observability import catalog as c
from tests.conftest import wait_for
from tests.telemetry.bench import Bench, kv_state


def test_prometheus_stores_every_sample_and_exemplar(
    program: Callable[[str], str],
    free_port: Callable[[], int],
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    b = Bench(kv_dtype="int8")
    b.t._wall_clock = time.time  # exemplars older than the stored ones are refused: real time
    for i in range(20):
        b.serve(b.submit(request_class=c.CLASSES[i % 3]), prefill=0.05 * i)
    b.t.quant_error(0, "0-9", "int8", 0.01, 100.0, 0.05, 10)
    b.t.publish(kv_state(free=60, active=4, stored=50), [0, 1, 0], [0, 0, 0])
    with start_exporter(b.t, token="s3cret") as exporter:
        base = f"http://127.0.0.1:{free_port()}"
        target = exporter.url.removeprefix("http://").removesuffix("/metrics")
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {
                    "job_name": "kvscope",
                    "authorization": {"credentials": "s3cret"},
                    "static_configs": [{"targets": [target]}],
                },
                {"job_name": "self", "static_configs": [{"targets": [base.removeprefix("http://")]}]},
            ],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        with (tmp_path / "log").open("wb") as log:
            spawn(
                program("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address={base.removeprefix('http://')}", "--enable-feature=exemplar-storage",
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

        def query(expr: str) -> dict[tuple[str, ...], float]:
            answer = httpx.get(f"{base}/api/v1/query", params={"query": expr}).raise_for_status().json()
            return {tuple(sorted(r["metric"].items())): float(r["value"][1]) for r in answer["data"]["result"]}

        wait_for(lambda: sum(query('count_over_time(up{job="kvscope"}[1m])').values()) >= 4, 30, "four scrapes")
        wait_for(lambda: sum(query('count_over_time(up{job="self"}[1m])').values()) >= 3, 30, "three scrapes of itself")
        (health,) = [
            t
            for t in httpx.get(f"{base}/api/v1/targets").json()["data"]["activeTargets"]
            if t["labels"]["job"] == "kvscope"
        ]
        assert (health["health"], health["lastError"]) == ("up", "")
        assert set(query('min_over_time(up{job="kvscope"}[1m])').values()) == {1.0}

        rows = sum(len(rows) for _, rows in b.t.snapshot())
        assert set(query('scrape_samples_scraped{job="kvscope"}').values()) == {
            rows + 2.0
        }  # and two of the scrape itself
        assert sum(query('count({job="kvscope", __name__=~"kvscope_.*"})').values()) == rows + 2.0
        for family, samples in b.t.snapshot():
            stored = query(family.series)
            expected = sorted(s.value for s in samples if family.name + s.suffix == family.series)
            assert sorted(stored.values()) == expected, family.name
        refused = query(
            '{job="self", __name__=~"prometheus_target_scrapes_(exemplar_out_of_order|sample_.*|exceeded_.*)_total"}'
        )
        assert refused
        assert set(refused.values()) == {0.0}

        now = time.time()
        answer = httpx.get(
            f"{base}/api/v1/query_exemplars",
            params={"query": '{__name__=~"kvscope_.*_bucket"}', "start": now - 300, "end": now + 60},
        ).raise_for_status().json()  # fmt: skip
        found = {
            (s["seriesLabels"]["__name__"], e["labels"]["request_id"]) for s in answer["data"] for e in s["exemplars"]
        }
        expected_exemplars = {
            (family.name + row.suffix, dict(row.exemplar.labels)["request_id"])
            for family, samples in b.t.snapshot()
            for row in samples
            if row.exemplar is not None
        }
        assert found == expected_exemplars
        assert {name for name, _ in found} == {
            "kvscope_request_duration_seconds_bucket",
            "kvscope_time_to_first_token_seconds_bucket",
        }
