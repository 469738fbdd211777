"""What kvscope brings with it may be used with it."""

from __future__ import annotations

from tests.security.licences import ALLOWED, licences, runtime


def test_every_package_that_is_installed_with_kvscope_has_a_licence_that_is_allowed() -> None:
    found = {of.metadata["Name"]: licences(of) for of in runtime()}
    assert len(found) > 30
    assert {"httpx", "numpy", "torch", "streamlit"} <= {name.lower() for name in found}
    assert {name: sorted(of - ALLOWED) for name, of in found.items() if of - ALLOWED} == {}
