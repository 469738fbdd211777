"""Trace readers: what is in the file comes out, scaled as asked; what cannot be right is refused with its line number."""

from __future__ import annotations

import contextlib
import json
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observability.errors import ConfigError, TraceError
from observability.workload.traces import MAX_LINE_BYTES, TraceRequest, read_trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def refused(path: Path, **options: object) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(read_trace(path, **options))  # type: ignore[arg-type]
    assert str(path) in caught.value.reason
    assert caught.value.next_step
    return caught.value


def test_mooncake_file_comes_out_whole(data_dir: Path) -> None:
    path = data_dir / "traces" / "mooncake_conversation.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    requests = list(read_trace(path))
    assert len(requests) == 12_031
    assert [r.arrival_seconds for r in requests] == [row["timestamp"] / 1000 for row in rows]
    assert [r.prompt.length for r in requests] == [row["input_length"] for row in rows]
    assert [r.output_tokens for r in requests] == [row["output_length"] for row in rows]
    assert [list(r.prompt.hash_ids) for r in requests] == [row["hash_ids"] for row in rows]
    assert {r.prompt.part_tokens for r in requests} == {512}


def test_azure_file_comes_out_whole_and_every_prompt_is_distinct(data_dir: Path) -> None:
    path = data_dir / "traces" / "azure_2023_code.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    requests = list(read_trace(path))
    assert [r.prompt.length for r in requests] == [int(row[1]) for row in rows]
    assert [r.output_tokens for r in requests] == [int(row[2]) for row in rows]
    ids = [i for r in requests for i in r.prompt.hash_ids]
    assert len(ids) == len(set(ids)) == sum(-(-int(row[1]) // 512) for row in rows)
    # 18:17:03.97996 to 19:14:19.928016
    assert requests[-1].arrival_seconds == pytest.approx(57 * 60 + 15.948056, abs=1e-5)


def test_azure_2024_times_with_a_zone_and_other_column_orders_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "ContextTokens,TIMESTAMP,GeneratedTokens,model\n",
        "5,2024-05-10 00:00:00.009930+00:00,2,x\n",
        '7,"2024-05-10 02:00:01.009930+02:00",3,y\n',
    )
    assert [(r.arrival_seconds, r.prompt.length, r.output_tokens) for r in read_trace(path)] == [
        (0.0, 5, 2),
        (1.0, 7, 3),
    ]


def test_time_and_length_scales_keep_order_and_shared_parts(data_dir: Path) -> None:
    path = data_dir / "traces" / "mooncake_conversation.jsonl"
    plain = list(read_trace(path, limit=300))
    scaled = list(read_trace(path, limit=300, time_scale=10, length_scale=0.1))
    for one, other in zip(plain, scaled, strict=True):
        assert other.arrival_seconds == pytest.approx(one.arrival_seconds / 10)
        assert other.prompt.part_tokens == 51  # round(512 x 0.1)
        assert other.prompt.hash_ids == one.prompt.hash_ids
        assert other.prompt.length == pytest.approx(one.prompt.length * 51 / 512, abs=1)
        assert -(-other.prompt.length // 51) == len(other.prompt.hash_ids)
        assert other.output_tokens == pytest.approx(one.output_tokens * 51 / 512, abs=1)
        assert other.output_tokens >= 1


def test_limit_and_time_span(data_dir: Path) -> None:
    path = data_dir / "traces" / "mooncake_conversation.jsonl"
    seconds = [json.loads(line)["timestamp"] / 1000 for line in path.read_text().splitlines()]
    inside = [s for s in seconds if 600 <= s < 660]
    span = list(read_trace(path, start_seconds=600, span_seconds=60))
    assert [r.arrival_seconds for r in span] == pytest.approx([s - 600 for s in inside])
    assert len(list(read_trace(path, start_seconds=600, span_seconds=60, limit=5))) == 5


def test_arrivals_count_from_the_first_request(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD | {"timestamp": 5_000_000}, GOOD | {"timestamp": 5_001_500})
    assert [r.arrival_seconds for r in read_trace(path)] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("\n", "is empty"),
        ("   \n", "is empty"),
        ('{"timestamp": 0\n', "invalid JSON"),
        ("[1, 2]\n", "object"),
        ({"timestamp": 0, "input_length": 5, "hash_ids": [1]}, "output_length: field required"),
        (GOOD | {"input_length": -5}, "input_length: input should be greater than or equal to 1"),
        (GOOD | {"input_length": 0}, "input_length"),
        (GOOD | {"output_length": 0}, "output_length"),
        (GOOD | {"input_length": 10_000_001}, "input_length: input should be less than or equal to 10000000"),
        (GOOD | {"output_length": 10**12}, "output_length"),
        (GOOD | {"input_length": "700"}, "input_length"),
        (GOOD | {"input_length": 700.5}, "input_length"),
        (GOOD | {"timestamp": -1}, "timestamp"),
        ('{"timestamp": NaN, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n', "timestamp"),
        ('{"timestamp": 1e999, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n', "timestamp"),
        (GOOD | {"hash_ids": [1]}, "has 1 hash_ids; 700 tokens in parts of 512 need 2"),
        (GOOD | {"hash_ids": [1, 2, 3]}, "has 3 hash_ids; 700 tokens in parts of 512 need 2"),
        (GOOD | {"hash_ids": []}, "has 0 hash_ids"),
        (GOOD | {"hash_ids": [1, -2]}, "hash id outside"),
        (GOOD | {"hash_ids": [1, 1 << 63]}, "hash id outside"),
        (GOOD | {"hash_ids": [1, "2"]}, "hash_ids.1"),
        (GOOD | {"hash_ids": [True, 2]}, "hash_ids.0"),
    ],
)
def test_mooncake_line_that_cannot_be_right_is_refused_with_its_number(
    tmp_path: Path, line: object, reason: str
) -> None:
    path = write(tmp_path, GOOD, GOOD, line, GOOD)
    error = refused(path)
    assert ", line 3: " in error.reason
    assert reason in error.reason
    assert error.next_step == "Correct or remove line 3 and replay again."


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("\n", "is empty"),
        ("2023-11-16 18:17:05,10\n", "has 2 fields; the header has 3"),
        ("2023-11-16 18:17:05,10,5,1\n", "has 4 fields; the header has 3"),
        ("yesterday,10,5\n", "TIMESTAMP 'yesterday' is not an ISO 8601 date and time"),
        ("2023-11-16 18:17:05,-10,5\n", "ContextTokens"),
        ("2023-11-16 18:17:05,10,0\n", "GeneratedTokens"),
        ("2023-11-16 18:17:05,nan,5\n", "ContextTokens"),
        ("2023-11-16 18:17:05,99999999999,5\n", "ContextTokens"),
        ("2023-11-16 18:17:05+00:00,10,5\n", "mixes times with and without a time zone"),
        ("2023-11-16 18:17:02,10,5\n", "arrives 2.000 s before the line above it"),
        ('"2023-11-16 18:17:05,10,5\n', "is not CSV"),
    ],
)
def test_azure_line_that_cannot_be_right_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    error = refused(write(tmp_path, AZURE_HEADER, "2023-11-16 18:17:04,10,5\n", line, "2023-11-16 18:17:09,10,5\n"))
    assert ", line 3: " in error.reason
    assert reason in error.reason


def test_requests_before_a_bad_line_are_given_out_first(tmp_path: Path) -> None:
    stream = read_trace(write(tmp_path, GOOD, GOOD, "oops\n"))
    assert [next(stream).prompt.length, next(stream).prompt.length] == [700, 700]
    with pytest.raises(TraceError, match="line 3"):
        next(stream)


def test_arrivals_out_of_order_are_refused(tmp_path: Path) -> None:
    error = refused(write(tmp_path, GOOD | {"timestamp": 2000}, GOOD | {"timestamp": 500}))
    assert ", line 2: arrives 1.500 s before the line above it" in error.reason


def test_a_file_of_neither_format_is_refused(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "a,b,c\n1,2,3\n"))
    assert ", line 1: is neither a Mooncake JSON object nor an Azure CSV header" in error.reason


@pytest.mark.parametrize("end", ["\n", "\n\n", "  \r\n\t"])
def test_a_file_may_end_in_empty_lines(tmp_path: Path, end: str) -> None:
    azure = (AZURE_HEADER, "2023-11-16 18:17:04,10,5\n")
    assert [r.prompt.length for r in read_trace(write(tmp_path, GOOD, GOOD, end))] == [700, 700]
    assert [r.prompt.length for r in read_trace(write(tmp_path, *azure, end))] == [10]


@pytest.mark.parametrize("content", ["", "\n\n", AZURE_HEADER])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    assert "holds no request" in refused(write(tmp_path, content)).reason


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "absent.jsonl").reason
    assert "cannot be read: Is a directory" in refused(tmp_path).reason


def test_binary_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    assert ", line 1: " in refused(path).reason


def test_a_line_without_end_is_refused_before_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(4 << 30)  # sparse: 4 GiB of zero bytes without a line break
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert f"is longer than {MAX_LINE_BYTES:,} bytes" in refused(path).reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.parametrize(
    "options",
    [
        {"time_scale": 0}, {"time_scale": float("nan")}, {"time_scale": float("inf")}, {"length_scale": -1},
        {"length_scale": 0.0001}, {"length_scale": 1e9}, {"limit": 0}, {"start_seconds": -1}, {"span_seconds": 0},
        {"span_seconds": float("nan")},
    ],
)  # fmt: skip
def test_scales_and_limits_out_of_range_are_refused_at_once(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read_trace(write(tmp_path, GOOD), **options)  # type: ignore[arg-type]


requests_strategy = st.lists(
    st.tuples(st.integers(0, 10**7), st.integers(1, 40_000), st.integers(1, 4000), st.randoms(use_true_random=False)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=requests_strategy, part=st.integers(1, 2048))
def test_any_valid_file_is_read_back(tmp_path: Path, rows: list[tuple], part: int) -> None:  # type: ignore[type-arg]
    rows.sort(key=lambda row: row[0])
    lines = [
        {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [rng.randrange(2**63) for _ in range(-(-n // 512))]}
        for ms, n, m, rng in rows
    ]  # fmt: skip
    requests = list(read_trace(write(tmp_path, *lines), length_scale=part / 512))
    for line, request in zip(lines, requests, strict=True):
        assert request.arrival_seconds == pytest.approx((line["timestamp"] - lines[0]["timestamp"]) / 1000)
        assert list(request.prompt.hash_ids) == line["hash_ids"]
        assert -(-request.prompt.length // part) == len(line["hash_ids"])
        assert 0 <= request.prompt.length - line["input_length"] * part / 512 < 1


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=200), at=st.integers(0, 400), azure=st.booleans(), drop=st.integers(0, 30))
def test_any_damage_ends_in_requests_or_a_trace_error_never_in_a_crash(
    tmp_path: Path, noise: bytes, at: int, azure: bool, drop: int
) -> None:
    if azure:
        good = (AZURE_HEADER + "2023-11-16 18:17:04.0319600,3180,8\r\n" * 4).encode()
    else:
        good = (json.dumps(GOOD) + "\n").encode() * 4
    at = min(at, len(good))
    path = tmp_path / "damaged"
    path.write_bytes(good[:at] + noise + good[at + drop :])
    requests: list[TraceRequest] = []
    with contextlib.suppress(TraceError):  # and no other error
        requests.extend(read_trace(path))
    assert all(1 <= r.prompt.length <= 10_000_000 and r.output_tokens >= 1 for r in requests)
    assert all(len(r.prompt.hash_ids) == -(-r.prompt.length // 512) for r in requests)


def test_timestamps_in_another_unit_are_refused_with_the_line(tmp_path: Path) -> None:
    """Microseconds in place of milliseconds: the second request would arrive after years."""
    file = tmp_path / "micro.jsonl"
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}}\n'
    file.write_text(line.format(0) + line.format(86_400_000_000_000))
    with pytest.raises(TraceError, match=r"(?s)2.*days after the first.*milliseconds"):
        list(read_trace(file))


def test_absolute_timestamps_count_from_the_first(tmp_path: Path) -> None:
    file = tmp_path / "epoch.jsonl"
    line = '{{"timestamp": {}, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}}\n'
    file.write_text(line.format(1_795_980_000_000) + line.format(1_795_980_001_500))
    assert [r.arrival_seconds for r in read_trace(file)] == [0.0, 1.5]
