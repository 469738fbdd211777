"""Who may see the app: anybody who reaches it (the default, on loopback), holders of a token, or users that a proxy names in a header.

Stands before everything that Streamlit serves, its WebSocket too. Health alone is open, for those who watch the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from html import escape
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "kvscope_access"
LOGIN = "/login"
HEALTH = "/_stcore/health"
MAX_FORM_BYTES = 4096
#: Seconds that a wrong token waits for its answer.
WRONG_SECONDS = 1.0
_LOCAL = re.compile(r"/(?![/\\])[^\x00-\x20\\]*")
_HEADER = re.compile(r"[A-Za-z0-9-]+")


def is_header_name(text: str) -> bool:
    """Whether `text` can be the name of an HTTP header."""
    return _HEADER.fullmatch(text) is not None


class Guard:
    """Lets a request pass that carries `token` (as bearer, or as the cookie of the log-in form) or a non-empty `header`.

    The header is only as trustworthy as the way to this server: a proxy must be the only one who reaches it, and must replace what a
    client sends under that name.
    """

    def __init__(self, app: ASGIApp, *, token: str = "", header: str = "") -> None:
        self._app = app
        self._token = token.encode()
        self._header = header.lower().encode()
        self._pass = hmac.new(self._token, b"kvscope app", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == HEALTH or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif self._token and scope["method"] == "POST" and scope["path"] == LOGIN:
            await self._login(scope, receive, send)
        else:
            query = scope["query_string"].decode("latin-1")
            await _answer(send, 401, self._form(scope["path"] + (f"?{query}" if query else "")))

    def _may(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        if self._header and headers.get(self._header, b"").strip():
            return True
        if not self._token:
            return False
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token):
            return True
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return COOKIE in cookies and hmac.compare_digest(cookies[COOKIE].value.encode(), self._pass.encode())

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more and len(body) <= MAX_FORM_BYTES:
            message: Message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        form = parse_qs(body[:MAX_FORM_BYTES].decode("utf-8", errors="replace"))
        given, goal = form.get("token", [""])[0], form.get("next", ["/"])[0]
        if not hmac.compare_digest(given.encode(), self._token):
            await asyncio.sleep(WRONG_SECONDS)
            await _answer(send, 401, self._form(goal, wrong=True))
            return
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        cookie = f"{COOKIE}={self._pass}; Path=/; HttpOnly; SameSite=Strict{secure}"
        place = goal if _LOCAL.fullmatch(goal) else "/"
        await _answer(send, 303, "", (b"set-cookie", cookie.encode()), (b"location", place.encode("latin-1", "ignore")))

    def _form(self, goal: str, *, wrong: bool = False) -> str:
        if not self._token:
            said = "This page is reached through a proxy that knows you."
            return f"<!doctype html><title>kvscope</title><p>{said}</p>"
        told = '<p role="alert">That is not the token.</p>' if wrong else ""
        return (
            '<!doctype html><html lang="en"><title>kvscope</title><meta name="color-scheme" content="light dark">'
            '<body style="font-family: system-ui, sans-serif; max-width: 26rem; margin: 18vh auto">'
            f"<h1>kvscope</h1>{told}"
            f'<form method="post" action="{LOGIN}"><input type="hidden" name="next" value="{escape(goal)}">'
            '<label>Token<br><input name="token" type="password" autofocus autocomplete="current-password"></label> '
            "<button>Open</button></form></body></html>"
        )


async def _answer(send: Send, status: int, html: str, *headers: tuple[bytes, bytes]) -> None:
    always = [
        (b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"),
        (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"),
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})
    await send({"type": "http.response.body", "body": html.encode()})
