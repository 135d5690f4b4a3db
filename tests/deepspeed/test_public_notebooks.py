"""A public notebook that fine-tunes with `DeepspeedTorchDistributor`, which nobody here has written: its own lines, made
smaller, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.training import missing
from tests.notebook import Notebook

CELLS = (
    """\
import os
import torch
deepspeed_dict = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e6,
    },
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "train_micro_batch_size_per_gpu": 4,
    "wall_clock_breakdown": False
}
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
""",
    """\
def train(dataset, distributor=True):
    import deepspeed
    if distributor:
        os.environ['NCCL_IB_DISABLE'] = '1'
        os.environ['NCCL_P2P_DISABLE'] = '1'
    net = torch.nn.Linear(4, 1)
    model, optimizer, dataloader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=dataset, config=deepspeed_dict)
    for epoch in range(2):
        for x, y in dataloader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            model.backward(loss)
            model.step()
    return model.global_steps, model.world_size
""",
    """\
from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor

distributor = DeepspeedTorchDistributor(numGpus=2, nnodes=1, localMode=True,
                                        useGpu=False, deepspeedConfig = deepspeed_dict)
completed_trainer = distributor.run(train, dataset=dataset)
""",
    "completed_trainer",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(missing("deepspeed") is not None, reason=f"{missing('deepspeed')}; sh .ci/deepspeed")
def test_a_configuration_of_the_notebook_trains_on_both_processes(tmp_path: Path) -> None:
    with Notebook(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_compat spark")
        for code in CELLS:
            outcome = book.cell(code, 200)
            assert outcome.status == "ok", outcome.text
    assert outcome.result == "(8, 2)"
