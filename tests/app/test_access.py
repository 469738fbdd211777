"""Who gets past the door: nobody without the token or the proxy's header, to no page, file or WebSocket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from observability.app.access import COOKIE, HEALTH, Guard

TOKEN = "correct horse"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """What is behind the door."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def ask(guard: Guard, method: str, path: str, **options: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://app") as client:
            return await client.request(method, path, **options)

    return asyncio.run(once())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.app.access.WRONG_SECONDS", 0.0)


@pytest.mark.parametrize(
    "path", ["/", "/p99?range=6h", "/_stcore/stream", "/media/abc.csv", "/static/js/main.js", "/kvscope/plotly.js"]
)
def test_without_the_token_nothing_is_served(path: str) -> None:
    answer = ask(Guard(app, token=TOKEN), "GET", path)
    assert answer.status_code == 401
    assert "inside" not in answer.text
    assert 'type="password"' in answer.text


def test_health_is_open() -> None:
    assert ask(Guard(app, token=TOKEN), "GET", HEALTH).text == "inside"


def test_the_right_bearer_token_passes_and_a_wrong_one_does_not() -> None:
    guard = Guard(app, token=TOKEN)
    assert ask(guard, "GET", "/", headers={"Authorization": f"Bearer {TOKEN}"}).text == "inside"
    for wrong in ("Bearer", "Bearer correct", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
        assert ask(guard, "GET", "/", headers={"Authorization": wrong}).status_code == 401


def test_the_log_in_leads_back_to_the_page_and_its_cookie_is_not_the_token() -> None:
    guard = Guard(app, token=TOKEN)
    answer = ask(guard, "POST", "/login", data={"token": TOKEN, "next": "/p99?range=6h&q=P90"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/p99?range=6h&q=P90")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    assert TOKEN not in cookie
    assert ask(guard, "GET", "/", headers={"Cookie": cookie.split(";")[0]}).text == "inside"
    other = Guard(app, token="another")
    assert ask(other, "GET", "/", headers={"Cookie": cookie.split(";")[0]}).status_code == 401
    assert ask(guard, "GET", "/", headers={"Cookie": f"{COOKIE}="}).status_code == 401


@pytest.mark.parametrize(
    "goal", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/a\r\nX: y", ""]
)
def test_the_log_in_leads_nowhere_else(goal: str) -> None:
    answer = ask(Guard(app, token=TOKEN), "POST", "/login", data={"token": TOKEN, "next": goal})
    assert answer.headers["location"] == "/"


def test_a_wrong_token_gets_the_form_again_with_its_text_escaped() -> None:
    answer = ask(Guard(app, token=TOKEN), "POST", "/login", data={"token": "no", "next": '"><script>x</script>'})
    assert answer.status_code == 401
    assert "That is not the token." in answer.text
    assert "<script>" not in answer.text
    assert "set-cookie" not in answer.headers


def test_a_proxy_names_the_user_in_a_header() -> None:
    guard = Guard(app, header="X-Forwarded-User")
    assert ask(guard, "GET", "/", headers={"x-forwarded-user": "ada"}).text == "inside"
    for headers in ({}, {"X-Forwarded-User": " "}, {"Authorization": "Bearer "}):
        assert ask(guard, "GET", "/", headers=headers).status_code == 401
    assert ask(guard, "POST", "/login", data={"token": ""}).status_code == 401


@pytest.mark.parametrize(
    ("headers", "first"), [([], "websocket.close"), ([(b"authorization", b"Bearer correct horse")], "websocket.accept")]
)
def test_the_websocket_stands_behind_the_same_door(headers: list[tuple[bytes, bytes]], first: str) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/_stcore/stream", "headers": headers, "query_string": b""}
    asyncio.run(Guard(app, token=TOKEN)(scope, receive, send))
    assert [message["type"] for message in sent] == [first]
