"""One small training per framework, as cells of a notebook, and the same training by hand in one process.

Every training ends with one value per rank: `world` (what the framework takes for the number of ranks), `seen` (the
numbers of the samples that this rank was given) and `weights`. It calls `each_step()` after each step.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from jupyter_distrib.libraries import known

PROBLEM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(64, 4)
targets = inputs @ torch.randn(4, 1)
samples = TensorDataset(torch.arange(64), inputs, targets)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
"""
"""Trained with 8 samples a step and rank, which by hand is one step with the samples of both ranks."""

BY_HAND = """
import copy

def by_hand(seen):
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(0, len(seen[0]), 8):
        rows = [row for rank in seen for row in rank[step : step + 8]]
        optimizer.zero_grad()
        nn.functional.mse_loss(alone(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return weights_of(alone)
"""

SENTENCES = """
import random
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

words = "the a big small red blue cat dog bird sat ran sang on in under mat park tree".split()
vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", *words])}
plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
random.seed(0)
texts = [" ".join(random.choices(words, k=7)) for _ in range(16)]
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(vocabulary), n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
    pad_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
)
model = GPT2LMHeadModel(config)
sentences = [tokenizer(text + " <end>")["input_ids"] for text in texts]

def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def noted(batch):
    seen.extend(sentences.index(ids) for ids in batch["input_ids"].tolist())
    batch["labels"][:, 0] = -100  # no token predicts the first, but transformers (5.23) divides by it as well
    return batch

seen = []
"""

SENTENCES_BY_HAND = """
import copy

def by_hand(seen):
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(0, len(seen[0]), 8):
        batch = torch.tensor([sentences[row] for rank in seen for row in rank[step : step + 8]])
        optimizer.zero_grad()
        alone(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return weights_of(alone)
"""

HF_ARGUMENTS = """\
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=3, optim="sgd", learning_rate=0.5,
    lr_scheduler_type="constant", max_grad_norm=0, report_to="none", save_strategy="no", logging_steps=1,
    disable_tqdm=True,
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A framework's training: cells that run in the kernel, and the body of the distributed cell."""

    needs: str
    """The module that has to be installed."""
    setup: str
    body: str
    by_hand: str = BY_HAND
    epochs: int = 1
    """How often each sample is seen."""


ACCELERATE = Training(
    needs="accelerate",
    setup=f"{PROBLEM}\nfrom accelerate import Accelerator\n",
    body="""
accelerator = Accelerator()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=8))
seen = []
for numbers, x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(wrapped(x), y))
    optimizer.step()
    seen += numbers.tolist()
    each_step()
{"world": accelerator.num_processes, "seen": seen, "weights": weights_of(model)}
""",
)

LIGHTNING = Training(
    needs="lightning",
    setup=f"""{PROBLEM}
import lightning

class Fit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.seen = model, []

    def training_step(self, batch, index):
        numbers, x, y = batch
        self.seen += numbers.tolist()
        return nn.functional.mse_loss(self.model(x), y)

    def on_train_batch_end(self, *_):
        each_step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

fit = Fit()
""",
    body="""
trainer = lightning.Trainer(
    strategy="ddp", accelerator="cpu", devices=world_size, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(fit, DataLoader(samples, batch_size=8))
{"world": trainer.world_size, "seen": fit.seen, "weights": weights_of(fit.model)}
""",
)

FABRIC = Training(
    needs="lightning",
    setup=f"{PROBLEM}\nfrom lightning.fabric import Fabric\n",
    body="""
fabric = Fabric(strategy="ddp", accelerator="cpu", devices=world_size)
fabric.launch()
wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
seen = []
for numbers, x, y in fabric.setup_dataloaders(DataLoader(samples, batch_size=8)):
    optimizer.zero_grad()
    fabric.backward(nn.functional.mse_loss(wrapped(x), y))
    optimizer.step()
    seen += numbers.tolist()
    each_step()
{"world": fabric.world_size, "seen": seen, "weights": weights_of(model)}
""",
)

HF_TRAINER = Training(
    needs="transformers",
    setup=f"""{SENTENCES}
from transformers import Trainer, TrainerCallback, TrainingArguments

class EachStep(TrainerCallback):
    def on_step_end(self, *_, **__):
        each_step()

def collate(items):
    return noted({{name: torch.tensor([item[name] for item in items]) for name in items[0]}})

items = [{{"input_ids": ids, "labels": ids}} for ids in sentences]
""",
    body=f"""
arguments = TrainingArguments(
{HF_ARGUMENTS})
trainer = Trainer(model=model, args=arguments, train_dataset=items, data_collator=collate, callbacks=[EachStep()])
trainer.train()
{{"world": arguments.world_size, "seen": seen, "weights": weights_of(model)}}
""",
    by_hand=SENTENCES_BY_HAND,
    epochs=3,
)

TRL_SFT = Training(
    needs="trl",
    setup=f"""{SENTENCES}
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

class EachStep(TrainerCallback):
    def on_step_end(self, *_, **__):
        each_step()

""",
    body=f"""
arguments = SFTConfig(
{HF_ARGUMENTS}    max_length=16, bf16=False,
)
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict({{"text": texts}}), processing_class=tokenizer,
    callbacks=[EachStep()],
)
collate = trainer.data_collator
trainer.data_collator = lambda items: noted(collate(items))
trainer.train()
{{"world": arguments.world_size, "seen": seen, "weights": weights_of(model)}}
""",
    by_hand=SENTENCES_BY_HAND,
    epochs=3,
)

TRAININGS = {
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "lightning": LIGHTNING,
    "trainer": HF_TRAINER,
    "sft": TRL_SFT,
}

GOES_ON = "def each_step():\n    pass\n"
FAILS = """
steps = 0
def each_step():
    global steps
    steps += 1
    if rank == 1 and steps == 2:
        raise LookupError("no such sample")
"""
HANGS = """
import time
steps = 0
def each_step():
    global steps
    steps += 1
    if steps == 2:
        print("ready", rank, flush=True)
        if rank == 1:
            time.sleep(100)
"""
"""Rank 0 goes on to the next step and waits in a collective."""


def cell(training: Training, each_step: str = GOES_ON, *, line: str = "--strategy ddp") -> str:
    """The distributed cell."""
    return f"%%distributed --ranks 2 --out got {line}\nimport os\nprint('pid', os.getpid())\n{each_step}{training.body}"


def missing(module: str) -> str | None:
    """What to install for the tests of a framework, if it is not there."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{module} is missing: pip install 'jupyter_distrib[{known.extras()[module]}]'"
