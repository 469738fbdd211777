"""What the server and the router share: request bodies of bounded size and time, and errors as OpenAI error objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from observability.engine import openai_types as wire
from observability.engine.openai_types import ApiError
from observability.errors import KvscopeError

_CLIENT_GONE = 499  # nginx's status for a client that closed the connection; nobody reads it


async def read_body(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """The whole body. Raises ApiError when it is too large (413) or too slow (408)."""
    parts, size = [], 0
    too_large = ApiError(
        413, f"The body is larger than {max_bytes} bytes.", code="body_too_large", next_step="Send less."
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} s.", headers={"Connection": "close"}) from None
    return b"".join(parts)


async def _on_error(request: Request, error: KvscopeError) -> Response:
    answer = wire.api_error(error)
    return JSONResponse(answer.body(), answer.status, answer.headers)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    reason = {404: "There is no", 405: "This method is not allowed:"}.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    answer = ApiError(error.status_code, f"{reason} {request.method} {request.url.path[:200]}.", code=code)
    return JSONResponse(answer.body(), answer.status, error.headers)


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises `error` again after this answer, and uvicorn logs it with its traceback."""
    answer = ApiError(500, "The server failed on this request; its log says why.", type="server_error")
    return JSONResponse(answer.body(), answer.status)


#: For Starlette(exception_handlers=...).
EXCEPTION_HANDLERS: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
    KvscopeError: _on_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_disconnect,
    Exception: _on_bug,
}
