"""An imported model begins where transformers has it: the first loss of the real engine is theirs, on the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megastable.config import load_run_file
from megastable.core.labels import IGNORED_LABEL
from megastable.data import prepare_corpus
from megastable.data.micro_batches import training_micro_batches
from megastable.data.sample_order import SampleOrder
from megastable.interop.tokenizer import open_tokenizer_folder
from megastable.planning.run_plan import RunPlan
from tests.interop.moved_models import STEP_0, imported, save_theirs
from tests.support.launches import metrics, train_command
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script
from tests.support.tokens import global_batch

BATCH, TOLERANCE = 8, 1e-5
FAMILIES_AND_KEYS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}), ("bloom", {}), ("llama", {"num_key_value_heads": 2}), ("gpt_neox", {}),
]  # fmt: skip


def their_loss(theirs: Any, token_ids: Tensor, labels: Tensor) -> float:
    """The mean over the tokens that count."""
    with torch.no_grad():
        logits = theirs(token_ids).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL).item()


def first_loss(checkpoint: str, run_file: str, num_stages: int) -> float:
    """Load the checkpoint of step 0 into a real engine and take a step on made-up tokens."""
    from tests.support.steps import build_engine, load, train

    run = load_run_file(run_file, [f"megastable.pipeline.num_stages={num_stages}"])
    plan, engine = build_engine(run)
    state = load(engine, Path(checkpoint))
    _, rows = train(plan, engine, 1, state)
    return float(rows[0]["loss"])


@pytest.mark.parametrize(("family", "keys"), FAMILIES_AND_KEYS, ids=[family for family, _ in FAMILIES_AND_KEYS])
def test_the_first_loss_is_theirs_on_one_stage_and_on_two(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", family, **keys)
    model = imported(tmp_path, tmp_path / "theirs").megastable.model
    expected = their_loss(theirs, *global_batch(0, BATCH, model.seq_length, model.vocab_size))
    checkpoint, run_file = str(tmp_path / "run" / STEP_0), str(tmp_path / "run.json")
    for num_stages in (1, 2):
        losses = run_ranks(first_loss, num_stages, checkpoint=checkpoint, run_file=run_file, num_stages=num_stages)
        assert losses == pytest.approx([expected] * num_stages, abs=TOLERANCE)


def test_the_printed_line_trains_an_imported_model_on_two_stages(tmp_path: Path) -> None:
    theirs = save_theirs(tmp_path / "theirs", "gpt_neox")
    text = tmp_path / "text"
    text.mkdir()
    for number in range(6):
        (text / f"{number}.txt").write_text(f"file {number} has a few words. " * 12)
    source = f'megastable.data.source={{"type": "text", "path": "{text}"}}'
    imported(
        tmp_path, tmp_path / "theirs", source, f"megastable.data.cache_dir={tmp_path / 'cache'}",
        "megastable.training.total_steps=2", "megastable.pipeline.num_stages=2",
    )  # fmt: skip
    finished = run_script(train_command([], tmp_path / "run.json", tmp_path / "run", "--resume=auto"), world_size=2)
    assert finished.exit_codes == [0, 0], finished.output
    # Neither is it taken for a run that starts anew, nor its loss for that of fresh weights.
    assert "starts again from step 0" not in finished.output
    assert "ln(vocabulary) is" not in finished.output
    found = metrics(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    plan = RunPlan.of(load_run_file(tmp_path / "run.json"), world_size=2)
    settings = plan.run.megastable
    corpus = prepare_corpus(settings.data, settings.model, show_progress=False)
    order = SampleOrder(len(corpus.train), settings.training.seed)
    batches = list(training_micro_batches(corpus.train, order, plan.ramp.at(0), 0, replica=0, num_replicas=1))
    token_ids, labels = torch.cat([ids for ids, _ in batches]), torch.cat([labels for _, (labels, _) in batches])
    assert found[0]["loss"] == pytest.approx(their_loss(theirs, token_ids, labels), abs=TOLERANCE)
    assert found[1]["loss"] < found[0]["loss"] + 1
    # The tokenizer has travelled from the folder of the model through the run.
    newest = open_tokenizer_folder(tmp_path / "run" / "checkpoints" / "step_00000002")
    assert newest.get_vocab() == open_tokenizer_folder(tmp_path / "theirs").get_vocab()
    assert newest.encode("größer\n") == list("größer\n".encode())
