"""Requests drawn from the OpenAPI document that is served, and the document itself."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from jsonschema_rs import validator_for
from octavo_serving import served_on_socket
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.config.engine import EngineConfig
from octavo.config.server import ServerConfig
from octavo.server.app import create_app
from octavo.server.startup import load_engine

CANARY = {"prompt": "canary", "max_tokens": 4, "temperature": 0}
EXAMPLES_PER_ROUTE = 8


@dataclasses.dataclass
class RealModel:
    """Settings of a server over a checkpoint with a short context, so that answers are short."""

    checkpoint: Path

    def app(self) -> FastAPI:
        engine_config = EngineConfig.model_validate(
            {
                "load": {"model": str(self.checkpoint), "max_model_len": 48},
                "scheduler": {"max_num_seqs": 128, "max_num_batched_tokens": 256},
                "device": {"device": "cpu"},
            }
        )
        return create_app(ServerConfig(disable_log_stats=True), engine_config, load_engine)


@pytest.fixture(scope="module")
def base_url(random_llama_dir: Path) -> Iterator[str]:
    with served_on_socket(RealModel(random_llama_dir)) as url:
        yield url


@pytest.fixture(scope="module")
def document(base_url: str) -> dict[str, Any]:
    loaded: dict[str, Any] = httpx.get(f"{base_url}/openapi.json").json()
    return loaded


def test_bodies_are_described_by_valid_schemas_with_examples(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    described = 0
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation.get("summary") or operation.get("description")
            body = operation.get("requestBody")
            if body is None:
                continue
            schema = body["content"]["application/json"]["schema"]
            validator_for(schema)
            described += 1
            for choice in schema.get("anyOf", [schema]):
                for name, field in choice["properties"].items():
                    assert field.get("description") or field.get("examples"), name
    assert described >= 6


def test_the_document_names_ranges_and_defaults(document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/completions"]["post"]
    fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert (fields["n"]["minimum"], fields["n"]["maximum"], fields["n"]["default"]) == (1, 128, 1)
    assert fields["max_tokens"]["default"] == 16
    number = next(kind for kind in fields["temperature"]["anyOf"] if kind["type"] == "number")
    assert (number["minimum"], number["maximum"]) == (0, 2)
    answers = operation["responses"]
    assert {"200", "400", "401", "404", "413", "415", "429", "500", "503"} <= answers.keys()
    assert answers["200"]["content"].keys() == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("mode", GenerationMode)
def test_drawn_requests_get_what_the_document_promises(
    base_url: str, document: dict[str, Any], mode: GenerationMode
) -> None:
    load_all_checks()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base_url)
    checks = [
        schemathesis.checks.not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        response_headers_conformance,
    ]
    canary = httpx.post(f"{base_url}/v1/completions", json=CANARY).json()["choices"]
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @seed(20)
        @settings(
            max_examples=EXAMPLES_PER_ROUTE if operation.body else 2,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=checks, timeout=20)

        check()
        again = httpx.post(f"{base_url}/v1/completions", json=CANARY).json()["choices"]
        assert again == canary
