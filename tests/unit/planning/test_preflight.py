"""The preflight: every rule fires where it should and is silent next to that; the shipped files pass."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import Fault, run_from_dict
from megastable.config.reading.faults import NO_VALUE
from megastable.core.errors import UserError
from megastable.planning.preflight.preflight import RULES, preflight
from megastable.planning.preflight.review import LEVELS, Finding, Gpu, LocalText, Review
from megastable.planning.run_plan import RunPlan
from megastable.training.host import look_at_text
from tests.unit.planning.preflight_cases import A100, CASES, P100, SOUND, WORLD_SIZE, Case, M, bytes_of_text, ramp

quick = settings(max_examples=25, deadline=None)  # no deadline: the machine may be busy
RUN_FILES = Path(__file__).parents[3] / "ds_configs"
SHIPPED = sorted(path for path in RUN_FILES.glob("*.json") if "schema" not in path.name)


def review_of(*overrides: str, gpus: tuple[Gpu, ...] = (), text: LocalText | None = None) -> Review:
    """Gather the review of the sound run with overrides, on 16 processes."""
    plan = RunPlan.of(run_from_dict(SOUND, overrides, world_size=WORLD_SIZE), WORLD_SIZE)
    return replace(Review.of(plan, world_size_was_assumed=False, gpus=gpus, text=None), text=text)


def findings_of(rule: str, review: Review) -> list[Finding]:
    """Ask one rule of the registry."""
    (function,) = (each for each in RULES if each.__name__ == rule)
    return list(function(review))


def test_no_rule_fires_on_the_sound_run() -> None:
    assert [finding for rule in RULES for finding in rule(review_of(gpus=(A100,), text=bytes_of_text(10**9)))] == []


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_fires_and_is_silent_next_to_it(case: Case) -> None:
    (finding,) = findings_of(case.rule, review_of(*case.fires, gpus=case.gpus, text=case.text))
    assert (finding.level, finding.key) == (case.level, case.key)
    assert case.says in finding.message
    assert finding.suggestion
    assert findings_of(case.rule, review_of(*case.silent, gpus=case.silent_gpus, text=case.silent_text)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_finding_gives_a_number_or_the_evidence(case: Case) -> None:
    (finding,) = findings_of(case.rule, review_of(*case.fires, gpus=case.gpus, text=case.text))
    assert any(letter.isdigit() for letter in finding.message) or case.text is not None
    assert len(finding.message) < 260
    assert not finding.message.endswith(".")


def test_accumulation_is_not_judged_on_an_assumed_layout() -> None:
    review = review_of("train_micro_batch_size_per_gpu=2")
    assert findings_of("accumulation_is_customary", review)
    assert not findings_of("accumulation_is_customary", replace(review, world_size_was_assumed=True))


def test_the_suggested_warmup_is_taken() -> None:
    """Whatever the ramp, the rule is silent on both ends that it suggests."""
    overrides = (ramp(128, 512, 100_000), f"{M}.lr_schedule.warmup=0")
    (finding,) = findings_of("warmup_has_customary_length", review_of(*overrides))
    ends = [int(digits) for digits in re.findall(r"\d+", finding.suggestion)]
    assert len(ends) == 2
    for end in ends:
        again = review_of(overrides[0], f"{M}.lr_schedule.warmup={end}")
        assert findings_of("warmup_has_customary_length", again) == []


def test_the_suggested_heads_are_legal() -> None:
    (finding,) = findings_of("head_dim_suits_the_kernels", review_of(f"{M}.model.num_attention_heads=48"))
    heads = int(finding.suggestion.split()[1])
    again = review_of(f"{M}.model.num_attention_heads={heads}")
    assert findings_of("head_dim_suits_the_kernels", again) == []


# Whole files


def run_file(folder: Path, **sections: Any) -> Path:
    """Write the sound run with top-level sections replaced."""
    path = folder / "run.json"
    path.write_text(json.dumps({**SOUND, **sections}))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_has_no_errors_and_few_findings(path: Path) -> None:
    findings = review_file(path)
    assert len(findings) <= 5
    assert sum(finding.level == "warning" for finding in findings) <= 1
    assert all(finding.level != "error" for finding in findings)


def review_file(path: Path, world_size: int | None = None, *, gpus: tuple[Gpu, ...] = ()) -> list[Finding]:
    """Review a run file, with the text of this machine."""
    return preflight(path, world_size, gpus, look_at_text)


def test_findings_come_gravest_first(tmp_path: Path) -> None:
    loose = {"bf16": {}, "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 5}, "data_types": {}}
    findings = preflight(
        run_file(tmp_path, gradient_clipping=0, **loose), WORLD_SIZE, gpus=(P100,), look_at_text=look_at_text
    )
    levels = [LEVELS.index(finding.level) for finding in findings]
    assert levels == sorted(levels)
    assert set(levels) == {0, 1, 2}


@pytest.mark.parametrize(
    ("sections", "key", "why", "instead"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage", "embeddings are tied", "write 1"),
        ({"bf16": {"enabled": True, "loss_scale": 128}}, "bf16.loss_scale", "is 128: unknown key", "fp16.loss_scale"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16.enabled",
            "fp16.enabled is true as well",
            "enable one of them",
        ),
        ({"gradient_clipping": "1"}, "gradient_clipping", 'is "1"', "must be a number"),
        ({"train_micro_batch_size_per_gpu": 3}, "megastable.batch_rampup", "not a multiple", "nearest legal sizes"),
    ],
    ids=["ZeRO 0", "bf16 loss scale", "two formats", "a value", "layout"],
)
def test_what_the_launch_would_refuse_is_an_error(
    tmp_path: Path, sections: dict[str, Any], key: str, why: str, instead: str
) -> None:
    findings = review_file(run_file(tmp_path, **sections), WORLD_SIZE)
    (finding,) = (finding for finding in findings if finding.key == key)
    assert finding.level == "error"
    assert why in finding.message
    assert instead in finding.suggestion


def test_every_fault_of_a_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = run_file(tmp_path, optimizer={"type": "SGD", "params": {}}, train_batch_size=3)
    findings = review_file(path)
    assert {finding.key for finding in findings} == {"optimizer.type", "optimizer.params.lr", "train_batch_size"}
    assert {finding.level for finding in findings} == {"error"}


texts = st.text(alphabet="ab ;:", min_size=1)
values = st.one_of(st.just(NO_VALUE), st.none(), st.integers(), texts)


@quick
@given(message=texts, value=values, path=st.sampled_from(["", "a.b"]))
def test_no_word_of_a_fault_is_lost(message: str, value: object, path: str) -> None:
    finding = Finding.of_fault(Fault(path, value, message))
    assert finding.key
    said = f"{finding.message}; {finding.suggestion}"
    assert all(part in said for part in message.split("; "))


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", b"\xff"], ids=["missing", "empty", "no JSON", "no object", "no text"]
)
def test_what_is_no_run_file_stays_a_users_mistake(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"run\.json"):
        review_file(path)


# The number of processes


def world_size_findings(path: Path, world_size: int | None) -> list[Finding]:
    """Review a run file, and return what is found on the number of processes alone."""
    return [finding for finding in review_file(path, world_size) if finding.key == "world_size"]


def test_the_assumed_world_size_is_said_and_only_then(tmp_path: Path) -> None:
    own = {**SOUND[M], "pipeline": {"num_stages": 3}, "tensor_parallel": {"size": 2}}
    path = run_file(tmp_path, megastable=own)
    (assumed,) = world_size_findings(path, None)
    assert assumed.level == "note"
    assert assumed.message.startswith("assumed 6,")
    assert world_size_findings(path, 12) == []
    asking = run_file(tmp_path, megastable={**own, "training": {**own["training"], "world_size": 12}})
    assert world_size_findings(asking, None) == []


def test_a_world_size_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    path = run_file(tmp_path, megastable={**SOUND[M], "pipeline": {"num_stages": 3}})
    (finding,) = world_size_findings(path, 4)
    assert finding.level == "error"
    assert "num_stages (3)" in finding.message
