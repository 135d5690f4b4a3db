"""What a dry run finds in cells: their memory as real runs have it, and their errors with the line."""

from __future__ import annotations

import importlib.util
import re
import resource
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.dry_run import device_guard
from jupyter_distrib.kernel.views.dry_run import CONTEXT_BYTES
from tests.dry_run.play import play, play_each

pytestmark = pytest.mark.slow

DATA = """\
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
"""
MODEL = """\
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
LOOP = """\
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
PARAMETERS_BYTES = (64 * 256 + 256 + 256 * 10 + 10) * 4


def test_a_cell_of_one_device_works_under_each_strategy_with_its_memory_by_kind() -> None:
    found = {strategy: play(DATA + MODEL + LOOP, strategy) for strategy in ("ddp", "fsdp")}
    assert {name: each.verdict for name, each in found.items()} == {"ddp": "fits", "fsdp": "fits"}
    ddp, fsdp = found["ddp"].by_kind, found["fsdp"].by_kind
    for kind in ("parameters", "gradients", "gradient buckets"):
        assert PARAMETERS_BYTES <= ddp[kind] <= PARAMETERS_BYTES * 1.05
    assert 2 * PARAMETERS_BYTES <= ddp["optimizer state"] <= 2 * PARAMETERS_BYTES * 1.05
    assert fsdp["parameters"] < PARAMETERS_BYTES / 3
    assert found["ddp"].steps == 2
    assert found["ddp"].needed_bytes == found["ddp"].peak_bytes + CONTEXT_BYTES
    assert any("AdamW" in note or "Sequential wrapped" in note for note in found["ddp"].notes)


def test_torch_is_the_notebooks() -> None:
    """Not one in the folder in which the process begins."""
    found = play("import torch\nraise ValueError(torch.__file__)")
    assert found.error is not None
    assert found.error.text == importlib.util.find_spec("torch").origin  # type: ignore[union-attr]


def test_a_torch_that_is_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    assert device_guard.problem() == ""
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "6.0")
        assert device_guard.problem().startswith("dry runs do not support torch for ROCm: check the cell with --ranks")
    for header in ("", "virtual bool isBuilt() const {", "virtual ~A() = default;\nvirtual bool isBuilt() const {"):
        (tmp_path / "header").write_text(header)
        monkeypatch.setattr(device_guard, "_HEADER", str(tmp_path / "header"))
        assert "dry runs for GPUs do not support the way in which torch" in device_guard.problem()


def test_a_large_model_takes_no_memory_here() -> None:
    source = """\
    import torch, torch.nn as nn
    model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(20)])
    opt = torch.optim.AdamW(model.parameters())
    for x in torch.utils.data.DataLoader(torch.randn(1024, 8192), batch_size=4):
        model(x).sum().backward()
        opt.step(); opt.zero_grad()
    """
    ddp = play(source, "ddp", gpu="H100")
    assert ddp.verdict == "fits"
    assert ddp.by_kind["parameters"] == pytest.approx(20 * 8192 * 8192 * 4, rel=0.001)
    # As torch's optimizers do on GPUs: all parameters in one call, not one after another.
    assert ddp.by_kind["temporary in optimizer steps"] == pytest.approx(20 * 8192 * 8192 * 4, rel=0.001)
    assert ddp.memory_here_bytes < 2e9
    assert play(source, "ddp", gpu="A10").verdict == "does not fit"
    # Weights, gradients and the states of Adam in shards of a quarter; torch also computes shapes with whole tensors.
    fsdp = play(source, "fsdp")
    assert fsdp.peak_bytes < 1.6 * 20 * 8192 * 8192 * 4


WRONG = {
    "shapes": (
        DATA + MODEL + LOOP.replace("model(x)", "model(x[:, :60])"),
        8,
        "RuntimeError",
        "mat1|reduction|size mismatch|inconsistent",
    ),
    "a tensor on the CPU": (
        dedent("""\
            import torch
            w = torch.randn(4, 4, device='cuda')
            x = torch.randn(2, 4)
            y = x @ w"""),
        4,
        "RuntimeError",
        "cuda:0.*cpu|cpu.*cuda:0",
    ),
    "numpy of a GPU's tensor": (
        dedent("""\
            import torch
            x = torch.randn(2, device='cuda')
            x.numpy()"""),
        3,
        "TypeError",
        "Use Tensor.cpu",
    ),
    "numpy with a gradient": (
        dedent("""\
            import torch
            x = torch.randn(2, requires_grad=True)
            x.numpy()"""),
        3,
        "RuntimeError",
        "detach",
    ),
    "two types": (
        dedent("""\
            import torch
            x = torch.randn(2, 4, dtype=torch.float64)
            layer = torch.nn.Linear(4, 4)
            layer(x)"""),
        4,
        "RuntimeError",
        "same dtype",
    ),
    "labels of a float type": (
        DATA + MODEL + LOOP.replace(", y)", ", y.float())"),
        8,
        "",
        "",
    ),
    "one sample for a batch norm": (
        dedent("""\
            import torch
            norm = torch.nn.BatchNorm1d(4)
            norm(torch.randn(1, 4))"""),
        3,
        "ValueError",
        "more than 1 value per channel",
    ),
    "backward twice": (
        dedent("""\
            import torch
            x = torch.randn(2, requires_grad=True)
            loss = x.exp().sum()
            loss.backward()
            loss.backward()"""),
        5,
        "RuntimeError",
        "second time",
    ),
    "a change in place": (
        dedent("""\
            import torch
            x = torch.randn(2, requires_grad=True)
            y = x.exp()
            y.add_(1)
            y.sum().backward()"""),
        5,
        "RuntimeError",
        "inplace operation",
    ),
    "a leaf changed in place": (
        dedent("""\
            import torch
            x = torch.randn(2, requires_grad=True)
            x.add_(1)"""),
        3,
        "RuntimeError",
        "leaf Variable",
    ),
    "no gradient at all": (
        dedent("""\
            import torch
            x = torch.randn(2)
            x.sum().backward()"""),
        3,
        "RuntimeError",
        "does not require grad",
    ),
    "a loss that is no number": (
        dedent("""\
            import torch
            x = torch.randn(2, requires_grad=True)
            x.exp().backward()"""),
        3,
        "RuntimeError",
        "scalar outputs",
    ),
    "a name in the second step": (
        DATA + MODEL + LOOP + "    x_mean = mena(x)\n",
        12,
        "NameError",
        "mena",
    ),
    "a convolution's channels": (
        dedent("""\
            import torch
            conv = torch.nn.Conv2d(3, 8, 3)
            conv(torch.randn(2, 1, 8, 8))"""),
        3,
        "RuntimeError",
        "channels",
    ),
    "an embedding of floats": (
        dedent("""\
            import torch
            emb = torch.nn.Embedding(10, 4)
            emb(torch.randn(2, 3))"""),
        3,
        "RuntimeError",
        "",
    ),
    "a view that cannot be": (
        dedent("""\
            import torch
            x = torch.randn(4, 6)
            x.view(5, 5)"""),
        3,
        "RuntimeError",
        "shape|view|reshape",
    ),
    "broadcast": (
        dedent("""\
            import torch
            x = torch.randn(4, 6)
            x + torch.randn(4, 5)"""),
        3,
        "RuntimeError",
        "size|broadcast|shape",
    ),
    "concatenation": (
        dedent("""\
            import torch
            x = torch.randn(4, 6)
            torch.cat([x, torch.randn(4, 5)], 0)"""),
        3,
        "RuntimeError",
        "[Ss]ize",
    ),
    "an unequal state_dict": (
        dedent("""\
            import torch
            model = torch.nn.Linear(4, 4)
            model.load_state_dict(torch.nn.Linear(4, 5).state_dict())"""),
        3,
        "RuntimeError",
        "size mismatch",
    ),
    "no such GPU": (
        dedent("""\
            import torch
            x = torch.randn(4)
            x.to('cuda:1')"""),
        3,
        "RuntimeError",
        "invalid device ordinal",
    ),
    "nothing to optimize": (
        dedent("""\
            import torch
            model = torch.nn.ReLU()
            torch.optim.SGD(model.parameters(), lr=1)"""),
        3,
        "ValueError",
        "empty parameter list",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_reported_with_its_line(name: str) -> None:
    source, line, kind, text = WRONG[name]
    found = play(source)
    assert found.error is not None, f"{found!r}"
    assert found.verdict == "fails"
    assert [frame[1] for frame in found.error.frames][:1] == [line]
    assert kind in found.error.type_name
    assert re.search(text, found.error.text), found.error.text
    assert f"line {line}: {dedent(source).splitlines()[line - 1].strip()}" in repr(found)


NOT_SEEN = {
    "labels out of range": LOOP.replace(", y)", ", y + 100)"),
    "what other ranks do differently": "import os\nif os.environ['RANK'] == '3': raise ValueError\n" + LOOP,
    "what comes after the second step of the optimizer": LOOP + "raise ValueError\n",
    "NaN": LOOP.replace("    loss.backward()\n", "    loss = loss / 0\n    loss.backward()\n"),
}


@pytest.mark.parametrize("name", NOT_SEEN)
def test_what_a_dry_run_cannot_see_is_said(name: str) -> None:
    found = play(DATA + MODEL + NOT_SEEN[name], "ddp")
    assert found.verdict == "fits"
    assert name in repr(found)


def test_a_foreign_kernel_says_nothing_about_a_real_run() -> None:
    found = play(
        dedent("""\
            import torch
            @torch.library.custom_op('mine::kernel', mutates_args=())
            def kernel(x: torch.Tensor) -> torch.Tensor: return x.clone()
            kernel(torch.ones(3, device='cuda'))""")
    )
    assert found.verdict == "cannot be run dry", repr(found)
    assert found.refused.startswith("A kernel that is not torch's own needs values on line 4 (")
    assert "says nothing about a real run" in found.refused


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_an_ordinary_cell_takes_a_few_seconds() -> None:
    """Eight on two quiet cores; the time of processors is about the same on busy ones."""
    before_s = cpu_s()
    assert play(DATA + MODEL + LOOP, "fsdp").verdict == "fits"
    assert cpu_s() - before_s < 8.0


def test_a_model_of_seven_billion_parameters_takes_less_than_two_gigabytes_here() -> None:
    source = """\
    import torch, torch.nn as nn
    class Block(nn.Module):
        def __init__(self, d=4096):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        def forward(self, x):
            q, k, v = (y.unflatten(2, (32, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, 2))
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(a.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(x)))
    model = nn.Sequential(nn.Embedding(32000, 4096), *[Block() for _ in range(32)], nn.Linear(4096, 32000))
    opt = torch.optim.AdamW(model.parameters())
    for x in torch.utils.data.DataLoader(torch.randint(0, 32000, (64, 1024)), batch_size=1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward(); opt.step(); opt.zero_grad()
    """
    ddp, fsdp = play_each(source, ["ddp", "fsdp"], ranks=8)
    assert (ddp.verdict, fsdp.verdict) == ("does not fit", "fits"), repr(fsdp)
    assert ddp.by_kind["parameters"] > 6.5e9 * 4
    assert max(ddp.memory_here_bytes, fsdp.memory_here_bytes) < 2e9


def test_fsdp_leaves_batches_where_they_are_if_the_cell_places_its_model() -> None:
    source = (
        DATA
        + MODEL.replace("\nopt", ".cuda()\nopt")
        + "for x, y in loader: y.numpy(); model(x.cuda()).mean().backward(); opt.step()"
    )
    assert play(source, "fsdp").verdict == "fits"
    assert "can't convert cuda" in repr(play(source.replace(".cuda()\nopt", "\nopt").replace("x.cuda()", "x"), "fsdp"))


@pytest.mark.parametrize("draw", ["nn.init.normal_(model[0].weight)", "model[0].weight.data.uniform_(-1, 1)"])
def test_weights_that_are_drawn_again_when_they_are_sharded_fit(draw: str) -> None:
    source = DATA + MODEL + f"{draw}\nfor x, y in loader: model(x).mean().backward(); opt.step()"
    assert play(source, "fsdp").verdict == "fits"


def test_flex_attention_is_run_dry_and_a_condition_in_the_graph_is_not() -> None:
    head = dedent("""\
        import torch
        linear = torch.nn.Linear(64, 64).cuda()
        opt = torch.optim.SGD(linear.parameters())
    """)
    flex = (
        "from torch.nn.attention.flex_attention import flex_attention\nq = linear(torch.randn(2, 4, 16, 64).cuda())\n"
    )
    assert play(f"{head}{flex}flex_attention(q, q, q).sum().backward()\nopt.step()").verdict == "fits"
    found = play(f"{head}torch.cond(torch.tensor(True).cuda(), linear, torch.sin, (torch.randn(4, 64).cuda(),))")
    assert found.verdict == "cannot be run dry", repr(found)
    assert "torch cannot compute cond on line 4" in found.refused


def test_what_was_saved_cannot_be_read() -> None:
    saved = dedent("""\
        import io, torch
        file = io.BytesIO()
        torch.save(torch.ones(1), file)
        file.seek(0)
        torch.load(file)""")
    found = play(saved)
    assert found.verdict == "cannot be run dry"
    assert "torch.load() reads a file that torch.save() has not written" in found.refused


def test_nested_tensors_cannot_be_run_dry() -> None:
    """torch (2.13) cannot make them without values, and fails an assertion of its own."""
    found = play("import torch\ntorch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)")
    assert found.verdict == "cannot be run dry"
    assert "on line 2" in found.refused


def test_counts_with_a_minimum_have_that_many_places() -> None:
    source = (
        DATA
        + MODEL
        + LOOP.replace(
            "    opt.zero_grad()",
            "    loss = loss + torch.bincount(y, minlength=10).float().mean()\n    opt.zero_grad()",
        )
    )
    found = play(source, "ddp")
    assert found.verdict == "fits"
    assert [line for _, line in found.guessed_lines] == [9]


def test_a_gradient_for_what_the_notebook_has_computed_is_the_error_of_a_real_run() -> None:
    import torch

    features = torch.nn.Linear(3, 2)(torch.ones(3))
    found = play("features.sum().backward()", inputs={"features": features})
    assert found.error is not None
    assert "its graph is in the notebook: compute the tensor in this cell" in found.error.text


def test_a_gradient_counts_once() -> None:
    """Autograd keeps the gradient that a kernel has made, unless something else holds it: then it copies it."""
    source = """\
    import torch
    layer = torch.nn.Linear(1152, 256, device="cuda")
    opt = torch.optim.SGD(layer.parameters())
    for _ in range(2):
        layer(torch.randn(8, 1152, device="cuda")).sum().backward(); opt.step(); opt.zero_grad()
    """
    weight_bytes = 1152 * 256 * 4
    for strategy, copies in {"none": 2, "ddp": 3, "fsdp": 2.5}.items():
        peak_bytes = play(source, strategy, ranks=2).peak_bytes
        assert peak_bytes == pytest.approx(copies * weight_bytes, rel=0.05), strategy


RECURRENT = """\
import torch
layer = torch.nn.{layer}.cuda()
x = torch.randn(12, 8, 16, device="cuda")
before = torch.cuda.memory_allocated()
with torch.set_grad_enabled({trains}):
    layer.train({trains})
    out = layer(x)[0]
raise ValueError(torch.cuda.memory_allocated() - before - out.nbytes)
"""


@pytest.mark.parametrize(
    ("layer", "states"),
    {"LSTM(16, 32)": 6, "GRU(16, 32)": 5, "RNN(16, 32)": 2, "LSTM(16, 32, 2, bidirectional=True)": 24}.items(),
)
def test_what_a_recurrent_layer_keeps_for_the_backward_pass_counts(layer: str, states: int) -> None:
    """The gates and states of each step, for cuDNN's kernel."""
    evaluating, training = (play(RECURRENT.format(layer=layer, trains=trains)) for trains in (False, True))
    assert evaluating.error is not None
    assert training.error is not None
    states_bytes = states * 12 * 8 * 32 * 4
    assert int(training.error.text) - int(evaluating.error.text) == pytest.approx(states_bytes, rel=0.25)
    assert int(evaluating.error.text) < states_bytes / 2


def test_packed_sequences_have_the_longest_lengths_which_are_guessed() -> None:
    """Also where the number of samples is read from the batch sizes."""
    found = play(
        dedent("""\
            import torch
            from torch.nn.utils import rnn
            x, lengths = torch.randn(8, 12, 16).cuda(), torch.full((8,), 3)
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, (hidden, _) = torch.nn.LSTM(16, 32, batch_first=True).cuda()(packed)
            padded, _ = rnn.pad_packed_sequence(out, batch_first=True, total_length=20)
            raise ValueError((packed.data.shape, padded.shape, hidden.shape))""")
    )
    assert found.error is not None
    shapes = [[int(each) for each in re.findall(r"\d+", text)] for text in found.error.text.split("torch.Size")[1:]]
    assert shapes == [[96, 16], [8, 20, 32], [1, 8, 32]], found.error.text
    assert [line for _, line in found.guessed_lines] == [4]


def test_parts_of_guessed_sizes_are_equal() -> None:
    """As in a mixture of experts that sends to each what it has chosen."""
    source = """\
    import torch
    layer, opt = (made := torch.nn.Linear(4, 4).cuda()), torch.optim.SGD(made.parameters())
    for _ in range(2):
        x = torch.randn(10, 4, device="cuda")
        counts = torch.bincount(layer(x).argmax(1), minlength=4).tolist()
        sum(layer(each).sum() for each in x.split(counts)).backward()
        opt.step(); opt.zero_grad()
    """
    assert play(source).verdict == "fits"


SPARSE = """\
import torch
a = torch.sparse_coo_tensor(torch.zeros(2, 5, dtype=torch.long), torch.ones(5), (64, 64))
w = torch.nn.Parameter(torch.randn(64, 64))
opt = torch.optim.SGD([w])
for _ in range(2):
    torch.sparse.mm(a, w).sum().backward(); opt.step(); opt.zero_grad()
"""


def test_sparse_tensors_count_by_their_parts() -> None:
    found = play(SPARSE, gpu="")
    assert found.verdict == "fits", repr(found)
    assert found.peak_bytes > 3 * 64 * 64 * 4


def test_a_missing_kernel_for_tensors_without_values_says_nothing_about_a_real_run() -> None:
    found = play("import torch\ntorch.ones(9, 9, device='cuda').to_sparse()")
    assert found.verdict == "cannot be run dry", repr(found)
    assert "on line 2" in found.refused
    assert "registered at" not in repr(found)


def test_a_lazy_layer_cannot_be_run_dry() -> None:
    found = play("import torch\ntorch.nn.LazyLinear(4)")
    assert found.verdict == "cannot be run dry", repr(found)
    assert "on line 2" in found.refused


def test_drawn_integers_count() -> None:
    """On CPU ranks, where they are drawn for real, since they may choose samples."""
    found = play(
        dedent("""\
            import torch
            x = torch.randint(0, 9, (100, 100))
            raise ValueError"""),
        gpu="",
    )
    assert found.peak_bytes == pytest.approx(100 * 100 * 8, rel=0.01)
