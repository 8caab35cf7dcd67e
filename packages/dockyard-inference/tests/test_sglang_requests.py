"""What the SGLang engine sends, against the request schema of the wheel, and what it makes of answers."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_environment import committed_schema, package_folder, read_schema, sglang_python

from dockyard_core.errors import GeneratorError
from dockyard_core.generator import Completion, SamplingParams, VersionSpan
from dockyard_core.refit import TensorSpec
from dockyard_inference.sglang_engine import requests

SCHEMA = committed_schema()
FIELDS = SCHEMA["classes"]
TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
ALIASES = {
    "Int64List": "List[int]",
    "TokenIdsOrList": "List[int]",
    "StringOrList": "str",
    "BoolOrList": "bool",
    "Int64OrList": "int",
}
"""Of the wheel, as far as they are used here."""
SAMPLING = SamplingParams(temperature=0.7, max_new_tokens=9, stop_token_ids=(3, 4), seed=5)


def payloads() -> list[tuple[str, dict[str, Any]]]:
    """One of each, with the class of the wheel that reads it."""
    specs = [TensorSpec("a", "float32", (2, 3))]
    group: Any = SimpleNamespace(host="h", port=1, world_size=2, name="g", backend="gloo")
    return [
        ("GenerateRequest", requests.rollout_payload((5, 6), SAMPLING, 7, "0:3")),
        ("GenerateRequest", requests.rollout_payload((5, 6), SamplingParams(), 7, "0:3")),
        ("GenerateRequest", requests.score_payload((5, 6, 7), "0:3")),
        ("AbortRequest", requests.abort_payload("r.1#")),
        ("AbortRequest", requests.abort_payload(None)),
        ("PauseGenerationReqInput", requests.pause_payload()),
        ("ContinueGenerationReqInput", requests.resume_payload()),
        ("UpdateWeightVersionReqInput", requests.label_payload("0:3")),
        ("InitWeightsUpdateGroupReqInput", requests.group_payload(group)),
        ("UpdateWeightsFromDistributedReqInput", requests.bucket_payload("g", specs, "0:3")),
        ("UpdateWeightsFromDistributedReqInput", requests.bucket_payload("g", specs, None)),
        ("UpdateWeightFromDiskReqInput", requests.disk_payload("/dev/shm/x", "0:3")),
    ]


def fits(value: Any, annotation: str) -> bool:
    """Whether a JSON value is of a field's type, of those that are used here."""
    if annotation.startswith("Optional["):
        return value is None or fits(value, annotation[9:-1])
    if annotation.startswith("List["):
        return isinstance(value, list) and all(fits(part, annotation[5:-1]) for part in value)
    if annotation.startswith("Literal["):
        return value in json.loads(annotation.removeprefix("Literal").replace("'", '"'))
    if annotation in ALIASES:
        return fits(value, ALIASES[annotation])
    if annotation == "SamplingParamsOrList":
        known = FIELDS["SamplingParams"]
        return all(key in known and fits(part, known[key]) for key, part in value.items())
    return isinstance(value, TYPES[annotation]) and (annotation == "bool" or not isinstance(value, bool))


@pytest.mark.parametrize(("kind", "payload"), payloads())
def test_every_field_that_is_sent_is_one_of_the_wheels(kind: str, payload: dict[str, Any]) -> None:
    """The server ignores unknown keys in silence."""
    assert payload.keys() <= FIELDS[kind].keys() | ({"rid"} if kind == "AbortRequest" else set())
    assert [key for key, value in payload.items() if not fits(value, FIELDS[kind][key])] == []


def test_the_schema_is_that_of_the_pinned_wheel() -> None:
    from importlib.metadata import requires

    [pinned] = [line for line in requires("dockyard-inference") or [] if line.startswith("sglang==")]
    assert f"=={SCHEMA['version']} " in f"{pinned.partition(';')[0].strip()} "


@pytest.mark.nightly
def test_the_installed_wheel_has_this_schema_and_reads_what_is_sent() -> None:
    python = sglang_python()
    package = package_folder(python)
    assert read_schema(package) == SCHEMA
    program = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('api_types', sys.argv[1])\n"
        "types = importlib.util.module_from_spec(spec); sys.modules['api_types'] = types\n"
        "spec.loader.exec_module(types)\n"
        "for kind, payload in json.loads(sys.argv[2]):\n"
        "    print(json.dumps(getattr(types, kind).from_json_value(payload).to_json_value()))\n"
    )
    sent = [pair for pair in payloads() if pair[0] in ("GenerateRequest", "AbortRequest")]
    command = [str(python), "-c", program, str(package / "api/v1/api_types.py"), json.dumps(sent)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    for (_, payload), line in zip(sent, answer.stdout.splitlines(), strict=True):
        read = json.loads(line)
        assert {key: read[key] for key in payload if key != "sampling_params"} == {
            key: value for key, value in payload.items() if key != "sampling_params"
        }
        params = payload.get("sampling_params", {})
        assert {key: read["sampling_params"][key] for key in params} == params


def reply(**changes: Any) -> dict[str, Any]:
    """An answer of the real server (0.5.23), shortened."""
    meta = {
        "id": "r.1#",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-1.0, 9, None]],
        "input_token_logprobs": [],
        "weight_version": "0:4",
        "weight_versions": [{"version": "0:3", "start": 0, "end": 2}, {"version": "0:4", "start": 2, "end": 3}],
    }
    return {"output_ids": [7, 8, 9], "meta_info": meta | changes}


def test_an_answer_becomes_a_completion() -> None:
    assert requests.to_completion(reply()) == Completion(
        token_ids=(7, 8, 9),
        logprobs=(-0.5, -0.25, -1.0),
        version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        finish_reason="length",
    )


def test_a_request_that_sampled_nothing_has_no_spans() -> None:
    empty = reply(
        finish_reason={"type": "abort", "message": "Abort in waiting queue"},
        output_token_logprobs=[],
        weight_versions=[{"version": "0:3", "start": 0, "end": 0}],
    ) | {"output_ids": []}
    completion = requests.to_completion(empty)
    assert (completion.token_ids, completion.version_spans, completion.finish_reason) == ((), (), "abort")


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"output_ids": [7]},
        reply() | {"output_ids": [7, 8]},
        reply() | {"output_ids": [7, 8, 10]},
        reply(output_token_logprobs=None),
        reply(output_token_logprobs=[[None, 7, None], [-0.25, 8, None], [-1.0, 9, None]]),
        reply(weight_versions=[]),
        reply(weight_versions=[{"version": "0:3", "start": 0, "end": 2}]),
        reply(weight_versions=[{"version": "0:3", "start": 1, "end": 3}]),
        reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]),
        reply(finish_reason=None),
        reply(finish_reason={"type": "content_filter"}),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_an_error(broken: dict[str, Any]) -> None:
    with pytest.raises(GeneratorError):
        requests.to_completion(broken)


def test_scores_are_whole_or_an_error() -> None:
    whole = reply(input_token_logprobs=[[None, 5, None], [-2.0, 6, None], [-3.0, 7, None]])
    assert requests.to_scores(whole, 3) == (-2.0, -3.0)
    with pytest.raises(GeneratorError, match="scored 2 tokens of 3"):
        requests.to_scores(whole, 4)
    with pytest.raises(GeneratorError, match="aborted"):
        requests.to_scores(reply(finish_reason={"type": "abort"}), 3)


def test_two_parts_are_one_completion() -> None:
    head = requests.to_completion(reply(finish_reason={"type": "stop", "matched": 9}))
    tail = requests.to_completion(
        reply(weight_versions=[{"version": "0:4", "start": 0, "end": 1}, {"version": "0:5", "start": 1, "end": 3}])
    )
    whole = requests.extended(head, tail)
    assert whole.token_ids == (7, 8, 9, 7, 8, 9)
    assert whole.version_spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 4), VersionSpan(5, 4, 6))
    assert whole.finish_reason == "length"
    assert requests.extended(None, head) is head
