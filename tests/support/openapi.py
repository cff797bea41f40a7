"""OpenAI's own description of its API, as a source of requests and as a judge of answers.

`tests/contract/openai_openapi_chat.json` is a part of OpenAI's OpenAPI description
(https://github.com/openai/openai-openapi, commit f85dbe2), MIT licence, © OpenAI: its text is
beside it in `openai_openapi_chat.LICENSE.txt`. Changed: other paths and all `x-*` extensions
removed, one link removed from a description, the server's address set.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.support.http_client import Reply, checked_error

FILE = Path(__file__).parent.parent / "contract" / "openai_openapi_chat.json"


KEPT_OF_TEN = 2  # optional fields left in a body that is to be accepted


def nearly_right(model: str, required: Mapping[str, Any], seed: int = 7) -> Callable[[Any], None]:
    """Makes a generated body one that is probably accepted: few fields, and the required ones."""
    chance = random.Random(seed)

    def mend(case: Any) -> None:
        if not isinstance(case.body, dict):
            return
        kept = {k: v for k, v in case.body.items() if chance.random() * 10 < KEPT_OF_TEN}
        case.body = {**kept, **required, "model": model}
        if "logprobs" in case.body:
            # The first token of an echo has no probability: null, which lm-eval and others read,
            # although the description does not foresee it.
            case.body.pop("echo", None)

    return mend


def ignore_case(case: Any) -> None:
    """Send it as it was generated."""


def _with_nulls(schema: Any) -> Any:
    """The same schema without `nullable`, which 3.1 does not know and the file still uses."""
    if isinstance(schema, list):
        return [_with_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _with_nulls(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [kept, {"type": "null"}]} if schema.get("nullable") is True else kept


DESCRIPTION: dict[str, Any] = _with_nulls(json.loads(FILE.read_text()))


def validator(name: str) -> Callable[[Any], None]:
    """Checks a value against one schema of the description."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DESCRIPTION["components"]}
    check: Callable[[Any], None] = jsonschema.Draft202012Validator(schema).validate
    return check


def fuzz(
    url: str,
    path: str,
    method: str,
    num_cases: int,
    mend: Callable[[Any], None] = ignore_case,
) -> Counter[int]:
    """Send `num_cases` generated requests to a server, the same ones at every run.

    `mend` may change each before it is sent. Every answer has to be no 5xx, and as described. How
    often which status came.
    """
    operation = schemathesis.openapi.from_dict(DESCRIPTION)[path][method]
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num_cases, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        mend(case)
        response = case.call(base_url=f"{url}/v1", timeout=60)
        statuses[response.status_code] += 1
        checks: list[Any] = [not_a_server_error]
        if response.headers["content-type"] == ["application/json"]:
            checks.append(response_schema_conformance)
        else:
            # schemathesis reads the first 20 events of a stream.
            check_stream(response.content, path, is_whole=not response.stream_cut_short)
        case.validate_response(response, checks=checks)
        if response.status_code >= 400:
            checked_error(response.json())

    send()
    return statuses


def check_stream(content: bytes, path: str, *, is_whole: bool = True) -> None:
    """Every event is a chunk as described; a whole stream ends with [DONE] or the one error."""
    events = Reply.events_of(content)
    is_chat = "chat" in path
    check = validator("CreateChatCompletionStreamResponse") if is_chat else _check_chunk
    for event in events[:-1]:
        check(json.loads(event))
    if is_whole and events[-1] != "[DONE]":
        checked_error(json.loads(events[-1]))


def _check_chunk(chunk: dict[str, Any]) -> None:
    """A completions chunk: the described body, whose finish reasons may still be null."""
    described = {**chunk, "choices": [
        {**choice, "finish_reason": choice["finish_reason"] or "stop"}
        for choice in chunk["choices"]
    ]}  # fmt: skip
    if described.get("usage", 0) is None:
        del described["usage"]
    validator("CreateCompletionResponse")(described)
