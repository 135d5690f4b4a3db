"""Dry runs of cells that train with transformers, TRL, Accelerate and Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dry_run.cells import Cell, check, read
from tests.dry_run.play import play

pytestmark = [pytest.mark.slow]

TEXTS = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=200, n_positions=64))
texts = [{"input_ids": [i % 200] * 16, "labels": [i % 200] * 16} for i in range(64)]
"""
TOKENIZER = """\
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = models.WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(99))])}, "<unk>")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
"""
TRAINED = {
    "what saves after each step, and before": TEXTS
    + """\
args = TrainingArguments("out", max_steps=4, save_steps=1, save_total_limit=1, eval_strategy="steps", eval_steps=1,
    load_best_model_at_end=True, eval_on_start=True)
trainer = Trainer(model=model, args=args, train_dataset=texts, eval_dataset=texts[:8])
trainer.save_model("saved"); model.save_pretrained("saved too")
trainer.train()
""",
    "what pushes to a hub": TEXTS
    + """\
args = TrainingArguments("out", max_steps=4, save_steps=1, push_to_hub=True, hub_model_id="me/mine", hub_token="no")
trainer = Trainer(model=model, args=args, train_dataset=texts)
trainer.push_to_hub()
trainer.train()
""",
    "a tracker": TEXTS
    + """\
args = TrainingArguments("out", max_steps=4, logging_steps=1, report_to=["wandb"])
Trainer(model=model, args=args, train_dataset=texts).train()
""",
    "SFTTrainer of TRL": TEXTS
    + TOKENIZER
    + """\
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
data = Dataset.from_dict({"text": [" ".join("12345") for _ in range(64)]})
args = SFTConfig("out", max_steps=4, per_device_train_batch_size=4, max_length=32, save_steps=1)
SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train()
""",
    "its own FSDP": TEXTS
    + """\
args = TrainingArguments("out", max_steps=4, fsdp="full_shard auto_wrap", fsdp_config={"version": 2}, bf16=True)
Trainer(model=model, args=args, train_dataset=texts).train()
""",
    "Accelerate, which saves": """\
import torch
from accelerate import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(3):
    accelerator.backward(model(torch.ones(2, 4, device="cuda")).sum())
    accelerator.save_state("state"); accelerator.save_model(model, "model")
    optimizer.step(); optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("cell", [each for each in read() if each.needs], ids=lambda each: each.name)
def test_a_training_cell_is_played(cell: Cell, tmp_path: Path) -> None:
    pytest.importorskip(cell.needs)
    check(cell, tmp_path)


@pytest.mark.parametrize("name", TRAINED)
def test_what_a_trainer_saves_uploads_and_tracks_is_switched_off(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs transformers, TRL and Accelerate: sh .ci/frameworks")
    folder, path = tmp_path / "here", tmp_path / "path"
    (kept := folder / "out" / "checkpoint-0").mkdir(parents=True)
    path.mkdir()
    (path / "wandb.py").write_text("raise RuntimeError('the tracker was loaded')")
    found = play(TRAINED[name], folder=folder, path=(str(path),))
    assert found.verdict == "fits", repr(found)
    assert found.steps == 2
    assert [str(each.relative_to(folder)) for each in folder.rglob("*")] == ["out", "out/checkpoint-0"]
    assert kept.is_dir()
    assert not [each for each in found.effects.get("written", []) if each.startswith(str(folder))]


def test_an_error_in_a_trainer_is_told_with_the_line_of_the_cell() -> None:
    pytest.importorskip("transformers", reason="needs transformers: sh .ci/frameworks")
    source = (
        TEXTS
        + """\
class Mine(Trainer):
    def compute_loss(self, model, inputs, **_):
        return model(**inputs).logits @ torch.randn(7, device="cuda")
Mine(model=model, args=TrainingArguments("out", max_steps=4), train_dataset=texts).train()
"""
    )
    found = play(source)
    assert found.error is not None
    assert [frame[1] for frame in found.error.frames] == [8, 7]
    assert "size mismatch" in found.error.text
