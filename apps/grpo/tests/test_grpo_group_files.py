from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core import GroupId, Rollout, RolloutGroup, Segment, TestStatus, Verdict, VerdictStatus, VersionSpan
from dockyard_grpo.actors.recorder import Recorder
from dockyard_grpo.group_files import dump_group, parse_group, read_group
from dockyard_grpo.summary import summarize

COUNTS = st.integers(0, 2**40)
FLOATS = st.floats()  # NaN, infinities, subnormals and -0.0 among them
WORDS = st.text(max_size=12)
SEGMENTS = st.builds(
    Segment,
    token_ids=st.lists(COUNTS, max_size=4).map(tuple),
    loss_mask=st.lists(st.booleans(), max_size=4).map(tuple),
    logprobs=st.lists(FLOATS, max_size=4).map(tuple),
    version_spans=st.lists(st.builds(VersionSpan, COUNTS, COUNTS, COUNTS), max_size=2).map(tuple),
)
VERDICTS = st.builds(
    Verdict,
    status=st.sampled_from(VerdictStatus),
    pass_rate=FLOATS,
    fail_to_pass=st.tuples(COUNTS, COUNTS),
    pass_to_pass=st.tuples(COUNTS, COUNTS),
    tests=st.dictionaries(WORDS, st.sampled_from(TestStatus), max_size=3).map(MappingProxyType),
    flags=st.lists(WORDS, max_size=2).map(tuple),
    isolation=WORDS,
    duration_s=st.dictionaries(WORDS, FLOATS, max_size=2),
    log=WORDS,
    evidence=WORDS,
    cached=st.booleans(),
    detail=WORDS,
)
ROLLOUTS = st.builds(
    Rollout,
    rollout_id=WORDS,
    task_id=WORDS,
    segments=st.lists(SEGMENTS, max_size=3).map(tuple),
    prompt_text=WORDS,
    completion_text=WORDS,
    patch=WORDS,
    verdict=VERDICTS,
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    temperature=FLOATS,
    reward=FLOATS,
    unshaped_reward=FLOATS,
    invalid_cause=st.none() | WORDS,
    timings_s=st.dictionaries(WORDS, FLOATS, max_size=2),
)
GROUPS = st.builds(
    RolloutGroup,
    group_id=st.builds(GroupId, WORDS, COUNTS),
    rollouts=st.lists(ROLLOUTS, max_size=3).map(tuple),
)


def bits(value: Any) -> Any:
    """The value with every type, and every bit of its floats: NaN is itself here, and 0.0 is not -0.0."""
    if dataclasses.is_dataclass(value):
        return type(value), [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, tuple):
        return type(value), [bits(inner) for inner in value]
    if isinstance(value, dict | MappingProxyType):
        return "mapping", [(key, bits(inner)) for key, inner in value.items()]
    return type(value), value


@settings(deadline=None)
@given(GROUPS)
def test_a_group_comes_back_bit_for_bit_with_every_type(group: RolloutGroup) -> None:
    line = dump_group(group)
    assert "\n" not in line
    assert line.isascii()
    assert bits(parse_group(line)) == bits(group)


@settings(deadline=None, max_examples=20)
@given(groups=st.lists(GROUPS, min_size=1, max_size=4))
def test_the_recorder_gives_back_each_group_by_its_place(tmp_path_factory, groups: list[RolloutGroup]) -> None:
    path: Path = tmp_path_factory.mktemp("groups") / "groups.jsonl"
    recorder = Recorder(path.with_name("rollouts.jsonl"))
    assert recorder.write_groups(path, *groups) is None
    assert path.read_bytes().count(b"\n") == len(groups)
    for index, group in enumerate(groups):
        if any(r.num_sampled_tokens and not any(s.version_spans for s in r.segments) for r in group.rollouts):
            continue  # a rollout with sampled tokens of no version has no summary
        summary, again = recorder.load_group(path, index)
        assert bits(again) == bits(group)
        assert bits(summary) == bits(summarize(group))
    with pytest.raises(IndexError, match="has no group"):
        read_group(path, len(groups))


def test_a_group_file_that_cannot_be_written_is_named_by_its_errno(tmp_path: Path) -> None:
    reason = Recorder(tmp_path / "rollouts.jsonl").write_groups(tmp_path / "missing" / "groups.jsonl")
    assert reason is not None
    assert reason.startswith("ENOENT: ")


def test_a_line_that_is_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group_id"):
        parse_group('{"rollouts": []}')
