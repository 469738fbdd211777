"""The finding names the state and the component that dominate, with numbers that follow from the make-up."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest

from observability import catalog
from observability.app import findings
from observability.app.findings import RULES, explain
from observability.app.p99 import Makeup
from observability.app.pages import PAGES

TIME = pd.Timestamp("2026-11-29T03:12:00Z")


def makeup(seconds: dict[tuple[str, str], float], q: float = 0.99) -> Makeup:
    matrix = pd.DataFrame(0.0, index=list(catalog.SHOWN_STATES), columns=list(catalog.SHOWN_COMPONENTS))
    for (state, component), value in seconds.items():
        matrix.loc[state, component] = value
    return Makeup(q, TIME, matrix)


def test_a_queue_with_a_full_pool_is_told_apart_from_a_queue_with_free_blocks() -> None:
    slow = makeup({("queued", "forward_prefill"): 3.0, ("decode", "forward_decode"): 1.0})
    full, free, unknown = (explain(slow, None, usage) for usage in (0.97, 0.4, None))
    assert full is not None
    assert free is not None
    assert unknown is not None
    assert "pool is full" in full.headline
    assert "prefill of other prompts" in free.headline
    assert "KV" not in unknown.headline


def test_evidence_states_share_seconds_and_growth() -> None:
    slow = makeup({("queued", "forward_prefill"): 3.0, ("queued", "idle"): 1.0, ("decode", "forward_decode"): 1.0})
    typical = makeup({("queued", "forward_prefill"): 0.5, ("decode", "forward_decode"): 0.9}, q=0.5)
    finding = explain(slow, typical, 0.4)
    assert finding is not None
    where, doing, growth, pool = finding.evidence
    assert where == "80.0 % of their 5.00 s is spent in the queue (4.00 s)."
    assert doing == "75.0 % of that, 3.00 s, while the model ran prefill."
    assert "500 ms → 4.00 s, 8.0 times as much" in growth
    assert "40.0 %" in pool


def test_requests_that_took_no_time_have_no_finding() -> None:
    assert explain(makeup({}), None, 0.5) is None


def test_the_host_s_own_work_is_named_when_it_dominates() -> None:
    finding = explain(makeup({("decode", "sample"): 2.0, ("decode", "forward_decode"): 1.0}), None, 0.3)
    assert finding is not None
    assert "own work" in finding.headline


@pytest.mark.parametrize(
    ("state", "component"), list(itertools.product(catalog.SHOWN_STATES, catalog.SHOWN_COMPONENTS))
)
@pytest.mark.parametrize("usage", [None, 0.2, 0.99])
def test_every_make_up_has_a_sentence_evidence_and_something_to_do(
    state: str, component: str, usage: float | None
) -> None:
    finding = explain(makeup({(state, component): 1.0}), makeup({(state, component): 0.5}, 0.5), usage)
    assert finding is not None
    assert finding.headline.endswith(".")
    assert len(finding.evidence) >= (2 if component == catalog.UNTOLD else 3)
    assert finding.actions


def test_rules_name_only_states_components_and_pages_that_exist() -> None:
    for rule in RULES:
        assert rule.state in catalog.SHOWN_STATES
        assert rule.component in (findings.ANY, *catalog.SHOWN_COMPONENTS)
        assert rule.page in {page.path for page in PAGES}
        assert findings.runbook(rule.runbook).startswith(f"# {rule.runbook}")
    reachable = {
        id(findings._rule(state, component, component, usage))
        for state, component, usage in itertools.product(
            catalog.SHOWN_STATES, catalog.SHOWN_COMPONENTS, (None, 0.2, 0.99)
        )
    }
    assert all(id(rule) in reachable for rule in RULES), "a rule can never hold"
