"""The table of findings: each is there under its condition and only then, is unknown without its values, and makes the score."""

from __future__ import annotations

import pytest

from exporters.gpu import health
from exporters.gpu.health import BY_REASON, FINDINGS, Look, penalties
from exporters.gpu.reading import VALUES
from exporters.gpu.sampler import Growth

#: A reading and growth in which every finding can be told and none is there.
GOOD = {
    **{key: 0.0 for key in VALUES},
    "pcie_lanes/current": 16, "pcie_lanes/max": 16, "pcie_generation/current": 5, "pcie_generation/max": 5,
    "nvlink/active": 18, "utilization/sm": 0.9, "power/limit": 700, "power/default_limit": 700,
    "temperature/gpu": 60, "temperature_limit/slowdown": 87,
}  # fmt: skip
STILL = {key: 0.0 for key, value in VALUES.items() if value.family.kind == "counter"}

#: What brings each finding about, and what comes close without doing so. "~" marks growth, "xid" codes.
CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "remap_failed": ({"repair_flag/remap_failed": 1}, {"repairs/remapped_uncorrected": 5}),
    "xid_fatal": ({"xid": ("79",)}, {}),
    "xid_other": ({"xid": ("56",)}, {}),
    "xid_program": ({"xid": ("31",)}, {}),
    "ecc_uncorrected": ({"ecc/uncorrected": 1}, {"ecc/corrected": 10_000}),
    "ecc_corrected": ({"~ecc/corrected": 1001}, {"~ecc/corrected": 1000}),
    "retirement_pending": ({"repair_flag/retirement_pending": 1}, {}),
    "remap_pending": ({"repair_flag/remap_pending": 1}, {}),
    "retired_pages": (
        {"repairs/retired_corrected": 40, "repairs/retired_uncorrected": 20},
        {"repairs/retired_corrected": 40, "repairs/retired_uncorrected": 19},
    ),
    "nvlink_inactive": ({"nvlink/inactive": 1}, {"nvlink/active": 0, "nvlink/inactive": 18}),
    "nvlink_errors": ({"~nvlink_errors/recovery": 1}, {"~nvlink_errors/crc_flit": 60, "~nvlink_errors/crc_data": 40}),
    "pcie_width": ({"pcie_lanes/current": 8}, {}),
    "pcie_generation": ({"pcie_generation/current": 3}, {"pcie_generation/current": 1, "utilization/sm": 0.0}),
    "pcie_replays": ({"~pcie_replays": 11}, {"~pcie_replays": 10}),
    "thermal_slowdown": ({"clock_reason/sw_thermal_slowdown": 1}, {"clock_reason/sw_power_cap": 1}),
    "power_brake": ({"clock_reason/hw_power_brake_slowdown": 1}, {"clock_reason/gpu_idle": 1}),
    "hot": ({"temperature/gpu": 83}, {"temperature/gpu": 82}),
    "power_limit": ({"power/limit": 600}, {"power/limit": 699}),
}  # fmt: skip


def look(changes: dict[str, object]) -> Look:
    now, grown = dict(GOOD), dict(STILL)
    xids = changes.pop("xid", ())
    for key, amount in changes.items():
        (grown if key[0] == "~" else now)[key.lstrip("~")] = float(str(amount))
    assert set(now) == set(GOOD)
    assert set(grown) == set(STILL)
    return Look(now, grown, xids)  # type: ignore[arg-type]


def test_every_finding_has_a_case() -> None:
    assert CASES.keys() == BY_REASON.keys()
    assert len(FINDINGS) == len(BY_REASON)


def test_a_good_gpu_has_no_penalty_and_full_health() -> None:
    found = penalties(look({}))
    assert found == dict.fromkeys(BY_REASON, 0.0)
    assert health.health(found) == 1.0


@pytest.mark.parametrize("reason", CASES)
def test_a_finding_is_there_under_its_condition_alone(reason: str) -> None:
    there, near = CASES[reason]
    found = penalties(look(dict(there)))
    assert {name for name, penalty in found.items() if penalty} == {reason}
    assert health.health(found) == pytest.approx(1.0 - BY_REASON[reason].penalty)
    assert penalties(look(dict(near)))[reason] == 0.0


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.reason)
def test_a_finding_without_its_values_is_unknown_and_not_absent(finding) -> None:
    for key in finding.needs:
        assert finding.reason not in penalties(Look({k: v for k, v in GOOD.items() if k != key}, STILL, ()))
    for key in finding.needs_growth:
        assert finding.reason not in penalties(Look(GOOD, {k: v for k, v in STILL.items() if k != key}, ()))
    if finding.needs_xids:
        assert finding.reason not in penalties(Look(GOOD, STILL, None))
    assert finding.needs or finding.needs_growth or finding.needs_xids
    assert set(finding.needs) <= set(VALUES)
    assert set(finding.needs_growth) <= set(STILL)
    assert 0.0 < finding.penalty <= 1.0


def test_many_findings_end_at_0_and_nothing_known_is_no_score() -> None:
    assert health.health(penalties(look({"repair_flag/remap_failed": 1, "ecc/uncorrected": 2}))) == 0.0
    assert health.health(penalties(Look({}))) is None


def test_growth_counts_ten_minutes_and_restarts_of_counters() -> None:
    growth = Growth()
    assert growth.add(0, {"pcie_replays": 100}) == {}, "what grew before the first reading is not known"
    assert growth.add(300, {"pcie_replays": 107}) == {"pcie_replays": 7}
    assert growth.add(400, {"pcie_replays": 2}) == {"pcie_replays": 9}, "the driver was loaded again"
    assert growth.add(890, {"pcie_replays": 3}) == {"pcie_replays": 10}
    assert growth.add(905, {"pcie_replays": 3}) == {"pcie_replays": 3}, "what is older than ten minutes has left"
    assert growth.add(910, {}) == {}, "a counter that cannot be read now has no growth"
