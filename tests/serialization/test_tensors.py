"""Tensors, modules and process groups through a payload."""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import payload, tensors
from tests.serialization import payload_ranks
from tests.serialization.payload_ranks import Kernel, returned, round_trip

ranks, kernel = payload_ranks.ranks, payload_ranks.kernel


torch: Any = pytest.importorskip("torch")

TENSORS = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "large": lambda: torch.arange(100_000),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.5),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.randn(50, 60).t(),
    "expanded": lambda: torch.ones(1).expand(10_000),
    "grad": lambda: torch.ones(3, requires_grad=True),
    "nonleaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "inference": lambda: made_in_inference(),  # noqa: PLW0108 - defined below
}


def made_in_inference() -> Any:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_survives_both_ways(kernel: Kernel, name: str) -> None:
    made = TENSORS[name]()
    back = kernel.run("given", given=made)
    assert type(back) is type(made)
    assert (back.dtype, back.shape, back.layout, back.requires_grad) == (
        made.dtype,
        made.shape,
        made.layout,
        made.requires_grad,
    )
    if made.layout is torch.strided:
        assert back.stride() == made.stride()
        assert (back.is_conj(), back.is_neg()) == (made.is_conj(), made.is_neg())
    assert torch.equal(back.detach().to_dense().to(torch.complex64), made.detach().to_dense().to(torch.complex64))


def test_gradients_of_the_notebook_are_there_on_the_rank(kernel: Kernel) -> None:
    model = torch.nn.Linear(3, 2)
    (model.weight.sum() * 2).backward()
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 3).sum().backward()
    used = "(model.weight.grad.tolist(), model.bias.grad, leaf.grad.tolist(), grad is leaf.grad)"
    assert kernel.run(used, model=model, leaf=leaf, grad=leaf.grad) == (
        [[2.0] * 3] * 2,
        None,
        [3.0] * 3,
        True,
    )


def test_a_tensor_whose_graph_stays_in_the_notebook_lets_no_gradient_through_without_a_word(kernel: Kernel) -> None:
    weight = torch.ones(3, requires_grad=True)
    features = weight * 2
    used = """
        import torch
        def error(call):
            try: return call()
            except RuntimeError as problem: return str(problem)
        head = torch.ones(3, requires_grad=True)
        loss = (features * head).sum()
        (seen,) = torch.autograd.grad(loss, features, retain_graph=True)
        errors = error(loss.backward), error(features.sum().backward)
        features[0] = 5
        (loss.item(), seen.tolist(), part[0].item(), *errors)
    """
    loss, seen, part, *errors = kernel.run(used, features=features, part=features.detach())
    assert (loss, seen, part) == (6, [1, 1, 1], 5)
    assert ["is in the notebook" in error for error in errors] == [True, True]


class Around(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.5)

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_an_optimizer_keeps_what_its_class_has_added(kernel: Kernel) -> None:
    """torch pickles only what every optimizer has."""
    weight = torch.nn.Parameter(torch.ones(2))
    used = """
        weight.grad = weight.detach().clone()
        around.step()
        lbfgs.step(lambda: (weight**2).sum())
        (weight.tolist(), around.base.param_groups[0]["params"][0] is weight)
    """
    inputs = {"weight": weight, "around": Around([weight]), "lbfgs": torch.optim.LBFGS([weight], lr=0.0)}
    assert kernel.run(used, **inputs) == ([0.5, 0.5], True)


def test_a_loader_that_keeps_its_workers_is_sent_after_its_first_use(kernel: Kernel) -> None:
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=2, num_workers=1, persistent_workers=True)
    begun = iter(loader)
    assert next(begun).tolist() == [0, 1]
    assert kernel.run("[batch.tolist() for batch in loader]", loader=loader) == [[0, 1], [2, 3]]
    assert next(begun).tolist() == [2, 3]
    with pytest.raises(PayloadError, match=r"call iter\(loader\) in the cell"):
        kernel.run("next(begun)", begun=begun)


def test_limits_of_dtypes_and_exported_programs_are_sent(kernel: Kernel) -> None:
    model = torch.nn.Linear(2, 1)
    program = torch.export.export(model, (torch.ones(1, 2),))
    given = {"floats": torch.finfo(torch.bfloat16), "integers": torch.iinfo(torch.int16), "program": program}
    used = "import torch\n(floats.max, integers.min, program.module()(torch.ones(1, 2)).item())"
    assert kernel.run(used, **given) == (
        torch.finfo(torch.bfloat16).max,
        torch.iinfo(torch.int16).min,
        pytest.approx(model(torch.ones(1, 2)).item()),
    )


def test_a_custom_operator_is_refused_with_what_to_do(kernel: Kernel) -> None:
    kernel.cell("import torch\ndef operate(x: torch.Tensor) -> torch.Tensor: return x * 2")
    operator = torch.library.custom_op("tests_of_jupyter_distrib::operate", kernel["operate"], mutates_args=())
    with pytest.raises(PayloadError, match="define it in a cell with %%distributed_setup"):
        kernel.run("operator", operator=operator)


def test_hooks_of_tensors_and_optimizers_are_called_on_the_rank(kernel: Kernel) -> None:
    """torch pickles neither, without a word."""
    kernel.namespace["torch"] = torch
    kernel.cell("""
seen = []
layer, leaf = torch.nn.Linear(2, 1), torch.ones(2, requires_grad=True)
handle = layer.weight.register_hook(lambda grad: grad * 0 + 5)
leaf.register_hook(lambda grad: grad * 3)
layer.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.item()))
optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
optimizer.register_step_post_hook(lambda *_: seen.append("after"))
""")
    used = """
        layer(leaf).sum().backward()
        optimizer.step()
        first = layer.weight.grad.tolist(), seen, (leaf.grad / layer.weight.grad[0]).tolist() != leaf.tolist()
        handle.remove()
        layer.weight.grad = None
        layer(torch.ones(2)).sum().backward()
        (*first, layer.weight.grad.tolist())
    """
    given = {name: kernel[name] for name in ("layer", "leaf", "handle", "optimizer", "seen", "torch")}
    weight_grad, seen, is_hooked, without = kernel.run(used, **given)
    assert (weight_grad, seen[:3], without) == ([[5.0, 5.0]], [1.0, "before", "after"], [[1.0, 1.0]])
    assert is_hooked
    assert kernel["seen"] == []


def test_a_hook_of_the_cell_is_added_to_those_of_the_notebook(kernel: Kernel) -> None:
    """In a new process torch numbers hooks from 0 again."""
    kernel.cell("seen = []\nnotice = lambda *_: seen.append('notebook')")
    model = torch.nn.ReLU()
    model.register_forward_hook(kernel["notice"])
    (number,) = model._forward_hooks
    kernel.run(f"import torch.utils.hooks\ntorch.utils.hooks.RemovableHandle.next_id = {number}")
    used = """
        import torch
        model.register_forward_hook(lambda *_: seen.append("cell"))
        model(torch.ones(1))
        seen
    """
    assert kernel.run(used, model=model, seen=kernel["seen"]) == ["notebook", "cell"]


def test_ids_of_tensors_and_modules_are_those_of_the_copies(kernel: Kernel) -> None:
    """With the notebook's ids, `id(p) in head` is false for all parameters, without a word."""
    kernel.namespace["torch"] = torch
    kernel.cell("""
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
extra = torch.nn.Parameter(torch.ones(1))
head = {id(p) for p in model[1].parameters()}
listed = list(map(id, model[0].parameters()))
names = {id(module): name for name, module in model.named_modules()}
rates = {id(extra): 0.5, 2**40 + 1: 0.25}
numbers = [2**40 + 1, [3]]
in_function = {id(p) for p in model[0].parameters()}
def body():
    return [name for name, p in model.named_parameters() if id(p) in in_function]
""")
    used = """(
        [name for name, p in model.named_parameters() if id(p) in head],
        [name for name, p in model.named_parameters() if id(p) not in listed],
        names[id(model[1])], rates[id(extra)], rates[2**40 + 1], numbers, body(),
    )"""
    ours, theirs = ["1.weight", "1.bias"], ["0.weight", "0.bias"]
    assert kernel.run(used) == (ours, ours, "1", 0.5, 0.25, [2**40 + 1, [3]], theirs)


def test_ids_are_those_of_the_copies_wherever_ids_and_objects_are_held(kernel: Kernel) -> None:
    kernel.namespace["torch"] = torch
    kernel.cell("""
model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
ids = {id(p) for p in model.parameters()}
def body():
    return [id(p) in ids for p in model.parameters()]

class Average:
    def __init__(self, module):
        self.module = module
        self.copies = {id(p): p.detach().clone() for p in module.parameters()}
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1)
        self.frozen = [id(self.inner.bias)]
class Odd(torch.nn.Module):
    def modules(self, needed): raise RuntimeError
average, outer, odd = Average(other), Outer(), Odd()
config = {"groups": [{"ids": {id(model.weight)}, "rate": 0.5}], "odd": (id(odd),)}
def maker(ids):
    return lambda p: id(p) in ids
is_head = maker(frozenset({id(other.bias)}))
times = [1_700_000_000_000 + second for second in range(3)]
""")
    assert kernel.run("body()") == [True, True]
    assert kernel.run("[average.copies[id(p)].shape for p in average.module.parameters()]") == [(2, 2), (2,)]
    assert kernel.run("outer.frozen == [id(outer.inner.bias)]") is True
    assert kernel.run("config['groups'][0]['ids'] == {id(model.weight)}, config['odd'] == (id(odd),)") == (True, True)
    assert kernel.run("[is_head(p) for p in other.parameters()], times") == ([False, True], kernel["times"])


def test_a_scheduler_of_the_notebook_goes_on_without_a_warning(kernel: Kernel) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    used = """
        import warnings
        warnings.simplefilter("error")
        for _ in range(3): optimizer.step(); scheduler.step()
        (scheduler.get_last_lr(), optimizer.param_groups[0]["initial_lr"], scheduler.last_epoch, scheduler.optimizer is optimizer)
    """
    assert kernel.run(used, optimizer=optimizer, scheduler=scheduler) == ([0.05], 0.5, 3, True)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_value_that_a_rank_returns_leaves_its_gradients_there(kernel: Kernel) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.sum().backward()
    back = kernel.run("given", given=parameter)
    assert (back.tolist(), back.grad) == ([1.0] * 3, None)


def test_a_quantized_tensor_is_sent_without_a_warning_of_torchs_own_doing(kernel: Kernel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    seen = "import warnings\nwarnings.simplefilter('error')\n"
    assert kernel.run(seen + "warm.dequantize().tolist()", warm=quantized) == pytest.approx([1, 1, 1])
    assert kernel.run("given", given=quantized).dequantize().tolist() == pytest.approx([1, 1, 1])


@pytest.mark.filterwarnings("ignore")
def test_quantized_meta_and_subclass_tensors_survive(kernel: Kernel) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    meta = torch.empty(3, 4, device="meta")
    assert kernel.run("given.dequantize()", given=quantized).tolist() == pytest.approx([1, 1, 1])
    back = kernel.run("given", given=meta)
    assert (back.device.type, back.shape) == ("meta", (3, 4))
    kernel.namespace["torch"] = torch
    kernel.cell(
        dedent("""\
            class Tagged(torch.Tensor): pass
            t = torch.ones(3).as_subclass(Tagged)
            t.tag = 'x'""")
    )
    back = kernel.run("t")
    assert (type(back), back.tag) == (kernel["Tagged"], "x")


def test_dtypes_devices_and_generators_survive(kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5))
    back = kernel.run("given", given=(torch.float16, torch.device("cuda:1"), torch.Size([2])))
    assert back == (torch.float16, torch.device("cuda:1"), torch.Size([2]))
    state = kernel.run("given.get_state()", given=generator)
    assert torch.equal(torch.rand(2, generator=torch.Generator().set_state(state)), expected)


def test_views_of_one_storage_stay_views_and_travel_once(kernel: Kernel) -> None:
    base = torch.zeros(300_000)
    packed = payload.pack_inputs({"base": base, "tail": base[100_000:], "again": [base.view(3, -1)]}, {})
    assert packed.size_bytes < 1.1 * base.nbytes
    value = kernel.run(
        "base[-1] = 7; (tail[-1].item(), again[0][2, -1].item())", base=base, tail=base[9:], again=[base.view(3, -1)]
    )
    assert value == (7, 7)
    assert base[-1] == 0
    one, two = kernel.run("import torch; b = torch.zeros(300_000); [b, b[5:]]")
    two[0] = 3
    assert one[5] == 3


def test_a_storage_given_as_itself_is_the_one_of_its_tensor() -> None:
    tensor = torch.zeros(10_000)
    back = round_trip(storage=tensor.untyped_storage(), tensor=tensor)
    back["tensor"][0] = 1
    assert bytes(back["storage"][:4]) == bytes(torch.ones(1).untyped_storage())


def test_a_small_view_of_a_large_storage_travels_alone() -> None:
    huge = torch.arange(1_000_000)
    packed = payload.pack_value({"part": huge[10:20]}, by_value=False, run="")
    assert packed.size_bytes < 4096
    assert payload.unpack_value(packed.data, packed.buffers)["part"].tolist() == list(range(10, 20))
    two = payload.pack_value([huge[10:20], huge[15:25]], by_value=False, run="")
    assert two.size_bytes > huge.nbytes
    weight = torch.nn.Parameter(huge[10:20].float())
    assert payload.pack_value(weight, by_value=False, run="").size_bytes < 4096


@pytest.mark.parametrize("as_result", [True, False])
def test_only_what_travels_is_copied_from_an_accelerator(monkeypatch: pytest.MonkeyPatch, as_result: bool) -> None:
    copied = []
    monkeypatch.setattr(tensors, "is_on_accelerator", lambda _: True)
    monkeypatch.setattr(tensors, "on_host", lambda storage: copied.append(storage.nbytes()) or storage.clone())
    huge, large, small = torch.arange(1_000_000), torch.arange(500_000), torch.arange(10)
    value = {"part": huge[:20], "large": large, "views": (large[:3], large[3:]), "small": small}

    packed = payload.pack_value(value, by_value=False, run="") if as_result else payload.pack_inputs(value, {})

    assert large.nbytes <= packed.size_bytes < large.nbytes + 10_000
    assert sorted(copied) == sorted([20 * 8, large.nbytes, 10 * 8, 10 * 8])  # what is small goes in both passes
    if as_result:
        back = payload.unpack_value(packed.data, packed.buffers)
        assert back["part"].tolist() == list(range(20))
        assert torch.equal(back["large"], large)


def test_tensors_are_not_copied_to_pickle_nor_to_unpickle() -> None:
    tensor = torch.zeros(100_000)
    packed = payload.pack_inputs({"t": tensor}, {})
    tensor[0] = 5
    assert bytes(packed.buffers[0][:4]) == struct.pack("f", 5)
    namespace: dict[str, Any] = {}
    data, buffers = payload.from_parcel(*payload.to_parcel(packed))
    payload.unpack_inputs(data, buffers, namespace, device="cpu")
    namespace["t"][0] = 6
    assert bytes(buffers[0][:4]) == struct.pack("f", 6)
    assert tensor[0] == 5


def test_a_packed_tensor_outlives_the_tensor() -> None:
    packed = payload.pack_inputs({"t": torch.full((100_000,), 3.0)}, {})
    gc.collect()
    torch.full((100_000,), 9.0)
    assert bytes(packed.buffers[0][:4]) == struct.pack("f", 3)


def test_a_small_tensor_can_grow_in_place() -> None:
    tensor = round_trip(t=torch.ones(4))["t"]
    assert tensor.resize_(1000).shape == (1000,)


def test_a_default_device_does_not_disturb_what_arrives() -> None:
    packed = payload.pack_inputs({"s": torch.ones(4), "l": torch.ones(100_000)}, {})
    namespace: dict[str, Any] = {}
    with torch.device("meta"):
        payload.unpack_inputs(packed.data, packed.buffers, namespace, device="cpu")
    assert (namespace["s"].sum(), namespace["l"].sum()) == (4, 100_000)


def test_captured_tensors_of_an_accelerator_go_to_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no accelerator here: the rank's side alone, with `meta` as its device."""
    token = tensors.DEVICE.set("meta")
    try:
        assert tensors.rebuild_storage(bytearray(8), True).device.type == "meta"
        assert tensors.rebuild_storage(bytearray(8), False).device.type == "cpu"
    finally:
        tensors.DEVICE.reset(token)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.usefixtures("torch_keeps_descriptors")
def test_cuda_tensors_are_rebuilt_on_the_ranks_device_and_return_to_the_cpu() -> None:
    given = torch.arange(10, device="cuda")
    packed = payload.pack_inputs({"a": given, "b": given[2:]}, {})
    namespace: dict[str, Any] = {}
    payload.unpack_inputs(packed.data, packed.buffers, namespace, device="cuda:0")
    assert namespace["a"].device == torch.device("cuda:0")
    namespace["a"][2] = 50
    assert namespace["b"][0] == 50
    back = returned(namespace["a"])
    assert back.device.type == "cpu"


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore")  # some of these kinds are in beta
def test_sparse_tensors_leave_nothing_behind_in_torch(kernel: Kernel) -> None:
    back = returned([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()])
    alive = [weakref.ref(each) for each in back]
    del back
    assert [each() for each in alive] == [None, None]


@pytest.mark.slow
def test_a_model_and_its_optimizer_stay_connected(kernel: Kernel) -> None:
    kernel.namespace["torch"] = torch
    kernel.cell("""
        model = torch.nn.Sequential(torch.nn.Linear(2, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        def step():
            optimizer.zero_grad()
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        step()
    """)
    before = [p.clone() for p in model_parameters(kernel)]
    model, optimizer = kernel.run("step(); [model, optimizer]")
    assert all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    assert next(iter(optimizer.state.values()))["step"] == 2
    assert not torch.equal(list(model.parameters())[-1], before[-1])
    assert all(torch.equal(a, b) for a, b in zip(model_parameters(kernel), before, strict=True))


def model_parameters(kernel: Kernel) -> list[Any]:
    return list(kernel["model"].parameters())


def test_tied_parameters_stay_tied(kernel: Kernel) -> None:
    a, b = torch.nn.Linear(50, 50, bias=False), torch.nn.Linear(50, 50, bias=False)
    b.weight = a.weight
    back = kernel.run("pair", pair=torch.nn.ModuleList([a, b]))
    assert back[0].weight is back[1].weight


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel_comes_back_as_its_module(group: None, torch_keeps_descriptors: None) -> None:
    model = torch.nn.Linear(2, 2)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    value = returned({"model": parallel, "deep": [(parallel, optimizer)]})
    assert type(value["model"]) is torch.nn.Linear
    assert value["deep"][0][0] is value["model"]
    assert value["deep"][0][1].param_groups[0]["params"][0] is value["model"].weight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.versions
def test_a_replicated_module_comes_back_plain_and_the_ranks_own_stays_as_it_is(group: None) -> None:
    from torch.distributed._composable import replicate

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    hook = model.register_forward_hook(_user_hook)
    replicate(model)
    model(torch.ones(1, 2)).sum().backward()
    state_before, class_before = dict(vars(model)), type(model)
    value = returned([model, model])
    assert value[0] is value[1]
    assert type(value[0]) is torch.nn.Sequential
    assert not [name for name in vars(value[0]) if "composable" in name]
    assert list(value[0]._forward_hooks) == [hook.id]
    assert not value[0]._forward_pre_hooks
    assert torch.equal(value[0](torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert dict(vars(model)) == state_before
    assert type(model) is class_before
    assert len(model._forward_hooks) == 2


def _user_hook(module: Any, args: Any, output: Any) -> None:
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.versions
def test_what_is_sharded_is_refused_with_advice_and_what_is_replicated_is_sent(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    whole = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    value = returned({"sharded": sharded, "whole": whole})
    assert "full_tensor" in value["sharded"].reason
    assert type(value["whole"]) is torch.Tensor


@pytest.mark.filterwarnings("ignore")
def test_a_process_group_is_not_returned(group: None) -> None:
    import torch.distributed as dist

    value = returned([dist.group.WORLD, 1])
    assert "between the ranks" in value[0].reason
    assert value[1] == 1


def test_torch_is_not_imported_by_packing() -> None:
    code = "import sys; from jupyter_distrib.serialization import payload as p; n = {};"
    code += "k = p.pack_inputs({'a': [1, 2], 'f': lambda: 3}, n); m = {};"
    code += "p.unpack_inputs(k.data, k.buffers, m, device='cpu');"
    code += "v = p.pack_value(m, by_value=True, run='r'); p.unpack_value(v.data, v.buffers);"
    code += "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, cwd=Path(payload.__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.versions
def test_a_fully_sharded_module_is_refused_with_advice(group: None, torch_keeps_descriptors: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(4, 4), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    assert "get_model_state_dict" in returned(model).reason
    assert "full_tensor" in returned(model.state_dict())["weight"].reason


class FreshTensor:
    """Its state is a small view of new memory every time it is asked for."""

    def __getstate__(self) -> Any:
        return {"part": torch.arange(1_000_000)[5:7]}


@pytest.mark.slow
def test_a_state_made_of_new_memory_each_time_is_packed_too() -> None:
    assert returned(FreshTensor()).part.tolist() == [5, 6]


def test_parametrized_modules_are_sent_and_returned(kernel: Kernel) -> None:
    kernel.cell("""
        import torch
        from torch.nn.utils import parametrizations, parametrize
        class Doubled(torch.nn.Module):
            def forward(self, x): return 2 * x
        model = torch.nn.Sequential(parametrizations.weight_norm(torch.nn.Linear(3, 2)), torch.nn.Linear(2, 2))
        parametrize.register_parametrization(model[1], "bias", Doubled())
        spectral = parametrizations.spectral_norm(torch.nn.Linear(3, 2)).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """)
    cell = """
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        (model, [type(each).__name__ for each in model], model(torch.ones(3)), spectral(torch.ones(3)))
    """
    model, kinds, output, of_spectral = kernel.run(cell)
    assert kinds == ["ParametrizedLinear", "ParametrizedLinear"]
    assert torch.equal(of_spectral, kernel["spectral"](torch.ones(3)))
    own = kernel["model"]
    own(torch.ones(3)).sum().backward()
    kernel["optimizer"].step()
    assert torch.equal(output, own(torch.ones(3)))
    assert torch.equal(model(torch.ones(3)), output)


@pytest.mark.filterwarnings("ignore")
def test_modules_and_functions_of_torchscript_are_sent_and_returned(kernel: Kernel) -> None:
    model = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
    batch = torch.randn(4, 3)
    kernel.namespace.update(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        trace=torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3)),
        squares=torch.jit.trace(torch.square, torch.ones(1)),
        batch=batch,
    )
    back, output, traced, of_function = kernel.run("""
        model(batch).pow(2).sum().backward()
        optimizer.step()
        (model.eval(), model(batch), trace(batch), squares(batch))
    """)
    model(batch).pow(2).sum().backward()
    kernel["optimizer"].step()
    assert torch.allclose(output, model.eval()(batch), atol=1e-5)
    assert torch.allclose(back(batch), output, atol=1e-5)
    assert torch.allclose(traced, kernel["trace"](batch), atol=1e-5)
    assert torch.equal(of_function, batch.square())
    with pytest.raises(PayloadError, match="default arguments of a function of TorchScript"):
        payload.pack_inputs({"sigmoid": torch.jit.script(torch.nn.functional.hardsigmoid)}, {})
