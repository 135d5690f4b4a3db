"""What the Trainer of transformers logs on two ranks and in one process. Real kernels, real ranks."""

from __future__ import annotations

import pytest

from tests.frameworks.training import missing
from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(missing("transformers") is not None, reason=str(missing("transformers"))),
]

CLASSIFIER = """
import torch
from transformers import Trainer, TrainingArguments

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels=None, **ignored):  # as BertForSequenceClassification
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

torch.manual_seed(0)
samples = [{"x": x, "labels": int(x.sum() > 0)} for x in torch.randn(64, 4)]

def loss(batch_size, **options):
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=batch_size, num_train_epochs=1, report_to="none", disable_tqdm=True,
        save_strategy="no", optim="sgd", learning_rate=1e-9, logging_steps=1, **options,
    )
    return Trainer(model=Classifier(), args=arguments, train_dataset=samples).train().training_loss
"""


def test_a_model_that_ignores_the_count_of_tokens_has_the_loss_of_one_process_with_the_option_of_the_docs(
    notebook: Notebook,
) -> None:
    assert notebook.cell(CLASSIFIER, 120).status == "ok"
    notebook.ok("alone = loss(16)")
    option = "average_tokens_across_devices=False"
    trained = notebook.cell(f"%%distributed --ranks 2 --out got\nloss(8), loss(8, {option})", 120)
    assert trained.status == "ok", trained.text

    assert notebook.ok("[round(each / alone, 4) for each in got[0]], got[0] == got[1]").result == "([2.0, 1.0], True)"
