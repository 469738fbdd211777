"""The OpenAI wire format: request bodies to checked values, results to response objects, errors to the OpenAI error object.

Nothing here knows about HTTP connections or the engine's threads; server.py does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from observability import catalog
from observability.engine.types import SamplingParams
from observability.errors import KvscopeError, QueueFullError, RequestError

MAX_STOP_CHARS = 256
MAX_SESSION_ID_CHARS = 256
MAX_TENANT_CHARS = 128
_SEED_RANGE = range(-(2**63), 2**63)


class ApiError(KvscopeError):
    """An answer other than 200, with the fields of the OpenAI error object. `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        reason: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        next_step: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(reason, next_step=next_step)
        self.status, self.type, self.param, self.code = status, type, param, code
        self.headers = dict(headers or {})
        self.outcome = "rejected" if status == 429 or status >= 500 else "invalid"

    def body(self) -> dict[str, Any]:
        message = f"{self.reason} {self.next_step}".rstrip()
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}


def unavailable(reason: str) -> ApiError:
    """503: the engine cannot take requests now."""
    return ApiError(503, reason, type="server_error", code="engine_unavailable", next_step="See /health.")


def deadline_exceeded(reason: str) -> ApiError:
    """504: nothing was generated in time. Trying again would be later still, which `x-should-retry` tells OpenAI's clients."""
    return ApiError(
        504,
        reason,
        type="timeout_error",
        code="deadline_exceeded",
        next_step="Allow more time.",
        headers={"x-should-retry": "false"},
    )


def api_error(error: KvscopeError) -> ApiError:
    """The HTTP answer to an error of the engine or of the request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            error.reason,
            type="rate_limit_error",
            code="queue_full",
            next_step=error.next_step,
            headers={"Retry-After": str(error.retry_after_seconds)},
        )
    if isinstance(error, RequestError):
        return ApiError(400, error.reason, param=error.param, code="invalid_value", next_step=error.next_step)
    return ApiError(503, error.reason, type="server_error", code="engine_unavailable", next_step=error.next_step)


def error_code(error: KvscopeError) -> str:
    """What names the kind of an error for whoever counts them: the `code` of its answer, else its `type`."""
    answer = api_error(error)
    return answer.code or answer.type


# -- request bodies -------------------------------------------------------------------------------------------------

# Fail fast: a long list of the wrong kind is one error, not one an element.
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """What both endpoints share. `ignore_eos` (as in vLLM) makes a replayed load generate its recorded lengths.

    `session_id` names the conversation that a request continues. `deadline_seconds` after its arrival a request ends: with what it
    has generated and finish_reason "deadline", or with an error (504) when that is nothing.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    service_tier: str | None = None
    priority: int | None = None
    session_id: str | None = None
    deadline_seconds: float | None = None

    #: Fields that would change the result and are not supported, with the values that ask for nothing.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def check_supported(self) -> None:
        """Raises ApiError (400) for a field that this server would have to ignore silently."""
        for name, neutral in self.neutral.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and not any(
                value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral
            ):
                raise ApiError(
                    400,
                    f"{name} is not supported by this server.",
                    param=name,
                    code="unsupported_parameter",
                    next_step=f"Leave {name} out.",
                )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field that gives it, the most tokens to generate or None for the default)."""
        return "max_tokens", self.max_tokens

    def deadline(self, arrival: float) -> float | None:
        """When the request ends at the latest, on the clock of `arrival`. Raises RequestError."""
        seconds = self.deadline_seconds
        if seconds is None:
            return None
        if not (math.isfinite(seconds) and seconds > 0):
            raise RequestError(
                f"deadline_seconds = {seconds:g} is not valid; it must be above 0 and finite.", param="deadline_seconds"
            )
        return arrival + seconds

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The engine's sampling settings. Unset temperature and top_p are 1, as OpenAI's. Raises RequestError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(len(text) > MAX_STOP_CHARS for text in stop):
            raise RequestError(f"A stop string is longer than {MAX_STOP_CHARS} characters.", param="stop")
        if self.seed is not None and self.seed not in _SEED_RANGE:
            raise RequestError("seed does not fit in 64 bits.", param="seed")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
            seed=self.seed,
        )


_NEUTRAL = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Strings | TokenIds | TokenIdLists
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (0, False),
        "suffix": ("",),
    }

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list.", param="prompt", next_step="Give at least one token.")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ContentPart(_Body):
    type: str
    text: str | None = None


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, str]:
        """{role, content} with text parts joined; `developer` is what older models call `system`."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise ApiError(
                        400,
                        f"Content of type {part.type!r} is not supported.",
                        param="messages",
                        code="unsupported_parameter",
                        next_step="Send text parts only.",
                    )
            content = "".join(part.text or "" for part in self.content)
        else:
            content = self.content or ""
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = None
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
    }

    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit()


B = TypeVar("B", bound=GenerationBody)


def parse_body(body: type[B], raw: bytes) -> B:
    """`raw` JSON as a checked `body`. Raises ApiError (400) that names the first field at fault."""
    try:
        parsed = body.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid(error) from None
    parsed.check_supported()
    return parsed


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}.")
    if not first["loc"]:
        return ApiError(400, "The body is not a JSON object.", next_step='Send an object such as {"model": ...}.')
    param = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return ApiError(400, f"{param} is missing.", param=param, code="missing_required_parameter")
    if param in ("prompt", "stop"):
        kinds = {
            "prompt": ", a list of strings, token ids, or a list of token id lists",
            "stop": " or a list of strings",
        }
        return ApiError(400, f"{param} must be a string{kinds[param]}.", param=param, code="invalid_type")
    where = ".".join(str(part) for part in first["loc"])
    return ApiError(400, f"{where}: {first['msg']}.", param=param, code="invalid_type")


#: Values of OpenAI's `service_tier`; a class name is accepted too.
_TIERS = {
    "auto": "standard",
    "default": "standard",
    "scale": "standard",
    "priority": "interactive",
    "flex": "long_context",
}


def request_class(header: str | None, body: GenerationBody | None) -> str:
    """The priority class (catalog.CLASSES) that a client asks for: header `x-kvscope-class`, else `service_tier`, else `priority`.

    The header and `service_tier` take a class (interactive, standard, long_context); `service_tier` also takes OpenAI's
    values: priority is interactive, flex is long_context, auto, default and scale are standard. `priority` is vLLM's number:
    below 0 is interactive, 0 standard, above 0 long_context. What is not known is standard.
    """
    named = header or (body.service_tier if body is not None else None)
    if named:
        named = _TIERS.get(named, named)
        return named if named in catalog.CLASSES else "standard"
    priority = (body.priority if body is not None else None) or 0
    return "interactive" if priority < 0 else "long_context" if priority > 0 else "standard"


def session_id(header: str | None, body: GenerationBody) -> str:
    """The session that a request belongs to, "" for none: header `X-Session-ID`, so that a router need not read bodies, else
    `session_id`. Any characters; raises RequestError when there are too many."""
    named = header or body.session_id or ""
    if len(named) > MAX_SESSION_ID_CHARS:
        raise RequestError(
            f"The session id has {len(named)} characters; at most {MAX_SESSION_ID_CHARS} are allowed.",
            param="session_id",
            next_step="Send a shorter one, such as a UUID.",
        )
    return named


def tenant_name(header: str | None) -> str:
    """On whose behalf a request runs, "" when not said: header `X-Tenant` in UTF-8; what is not UTF-8 shows as U+FFFD."""
    return (header or "").encode("latin-1", "replace").decode("utf-8", "replace")  # header values arrive as Latin-1


def tenant(header: str | None) -> str:
    """`tenant_name`. Raises RequestError when it is too long."""
    named = tenant_name(header)
    if len(named) > MAX_TENANT_CHARS:
        raise RequestError(
            f"The header X-Tenant has {len(named)} characters; at most {MAX_TENANT_CHARS} are allowed.",
            param="X-Tenant",
        )
    return named


# -- response objects -----------------------------------------------------------------------------------------------


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def chat_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


def chat_delta(index: int, delta: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
