"""The description of the API names what the API takes, and the page shows it without help from elsewhere."""

from __future__ import annotations

import json
import re

import pytest
from serving import CHAT, QUESTION, engine, get, httpx, served

from beyond.serving.openapi import ENDPOINTS, ChatRequest, CompletionRequest, TokenizeRequest, describe_api
from beyond.serving.protocol import CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS, WHO_ASKS

pydantic = pytest.importorskip("pydantic")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
REQUESTS = {COMPLETIONS: (CompletionRequest, {"prompt": QUESTION}), CHATS: (ChatRequest, {"messages": CHAT})}
MODELS = {path: model for _, path, model, _ in ENDPOINTS if model is not None}
EVERYTHING = {
    "model": "tutor",
    "n": 1,
    "stream": False,
    "max_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"7": 1.5},
    "stop": ["x"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "seed": -1,
    "user": "someone",
}

llm = engine(max_num_seqs=8, num_kvcache_blocks=256)
server = served(page=False)


def test_the_models_have_the_fields_that_are_supported() -> None:
    assert set(CompletionRequest.model_fields) == COMPLETION_FIELDS
    assert set(ChatRequest.model_fields) == CHAT_FIELDS
    assert set(TokenizeRequest.model_fields) == TOKENIZE_FIELDS
    for model in MODELS.values():
        assert all(field.description for field in model.model_fields.values())


def test_every_path_of_the_api_is_described(server) -> None:
    routes = server.server.config.app.routes
    paths = {route.path.replace("{model:path}", "{model}") for route in routes} - {"/openapi.json", "/docs"}
    assert {path for _, path, _, _ in ENDPOINTS} == paths


@pytest.mark.parametrize("path", REQUESTS)
def test_what_a_model_allows_the_server_answers(server, path) -> None:
    model, least = REQUESTS[path]
    for body in (least | {"max_tokens": 1}, least | EVERYTHING):
        model.model_validate(body, strict=True)
        response = httpx.post(server.url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", MODELS)
def test_a_value_of_no_right_type_is_refused_by_model_and_server(server, path) -> None:
    least = REQUESTS[path][1] if path in REQUESTS else {}
    for name in MODELS[path].model_fields.keys() - WHO_ASKS:
        body = least | {name: [[["wrong"]]]}
        with pytest.raises(pydantic.ValidationError, match=name):
            MODELS[path].model_validate(body)
        response = httpx.post(server.url + path, json=body, timeout=60)
        assert response.status_code in (400, 404), (name, response.text)


def test_every_reference_leads_somewhere(server) -> None:
    api = get(server, "/openapi.json").json()
    assert api == describe_api() and api["openapi"].startswith("3.1")
    for name in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(api)):
        assert name in api["components"]["schemas"]


def test_the_page_shows_every_field_and_loads_nothing(server) -> None:
    response = get(server, "/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    for field in CHAT_FIELDS | COMPLETION_FIELDS:
        assert f"<code>{field}</code>" in response.text
    assert not re.search(r"<script|<link|<img|src=|url\(|https?:", response.text)
