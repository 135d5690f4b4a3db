"""`--strategy fsdp`: an unchanged single-device cell trains sharded, and what it leaves is whole where it is wanted. Real
kernels."""

from __future__ import annotations

import os
import re
import signal
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

DEFINITIONS = """
import torch, jupyter_distrib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data():
    random = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=random)
    return TensorDataset(x, (x.sum(1) > 0).long())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 33)
        self.norm = nn.BatchNorm1d(33)
        self.blocks = nn.ModuleList([nn.Linear(33, 33), nn.Linear(33, 33)])
        self.head = nn.Linear(33, 2)
    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)

def build():
    torch.manual_seed(0)
    return Net()

def train(model, optimizer, epochs=2, clip=None):
    losses = []
    for _ in range(epochs):
        for x, y in DataLoader(data(), batch_size=8, shuffle=True):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(clip, 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def held(tensors):
    return sum(local(tensor).numel() for tensor in tensors)
"""


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(DEFINITIONS)
    return shared_notebook


def run(book: Notebook, cell: str, line: str = "--strategy fsdp") -> str:
    """What can be read under a cell that 2 ranks run."""
    return book.ok(f"%%distributed --ranks 2 {line}\n{cell}").text


PLAIN = """model = build()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses = train(model, optimizer)
"""


@pytest.mark.versions
def test_losses_are_those_of_ddp_and_each_rank_holds_half(book: Notebook) -> None:
    run(book, PLAIN + "losses", "--strategy ddp --out replicated")
    text = run(
        book,
        PLAIN
        + dedent("""\
            model.eval()
            with torch.no_grad():
                model(data()[:4][0])
            state = [each['exp_avg'] for each in optimizer.state.values()]
            losses, held(model.parameters()), held(state), sum(p.numel() for p in model.parameters())"""),
        "--strategy fsdp --out sharded",
    )

    assert "Net sharded: 1/2 of 2,609 parameters on each rank (optimizer of line 3)" in text
    assert "global batch 16 = 2 x 8" in text
    shown = book.ok(
        dedent("""\
            whole = sharded[0][3]
            print(max(abs(a - b) for r in (0, 1) for a, b in zip(replicated[r], sharded[r][0])) < 1e-4,
                  len(replicated[0]), all(0.45 < part / whole < 0.55 for r in (0, 1) for part in sharded[r][1:3]))""")
    )
    assert shown.stdout == "True 6 True\n"


CODE_BOOK = """
class Book(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.code = nn.Embedding(3, 6{bound})
    def forward(self, x):
        if self.training:
            new = self.code.weight.detach() + x.mean(0)
            with torch.no_grad():
                {change}
        return self.net(x + self.code(torch.tensor([0])).detach())
torch.manual_seed(0)
model = Book()
train(model, torch.optim.SGD(model.parameters(), 0.1), 1);"""


@pytest.mark.parametrize(
    "change",
    [
        "self.code.weight = nn.Parameter(new)",
        "self.code.weight.data = new",
        "self.code.weight.data.copy_(new)",
        "self.code.weight.copy_(new)",
    ],
)
def test_a_parameter_that_the_forward_pass_changes_is_refused(book: Notebook, change: str) -> None:
    """FSDP would put the old parameter back, without a word."""
    told = book.fails(f"%%distributed --ranks 2 --strategy fsdp{CODE_BOOK.format(change=change, bound='')}").text

    what = "replaced" if "Parameter" in change else "changed"
    assert f"`code.weight` is a parameter of Book, which is sharded, and is {what} by the code itself" in told
    assert change.partition(" = ")[0] in told or "Parameter" not in change  # the traceback has the line


BETWEEN_STEPS = """
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train(model, optimizer, 1)
kept = {{p: p.data.clone() for p in model.parameters()}}
for p in model.parameters(): {change};
"""


@pytest.mark.parametrize("change", ["p.data = 0.5 * p.data", "p.data = kept[p]", "p.data = p.detach() - 0.1 * p.grad"])
def test_data_that_is_set_between_steps_is_refused(book: Notebook, change: str) -> None:
    """As optimizers such as SAM and averages of weights restore theirs: it would have no effect, without a word."""
    told = book.fails(f"%%distributed --ranks 2 --strategy fsdp{BETWEEN_STEPS.format(change=change)}").text

    assert "is a parameter of Net, which is sharded, and `.data = ...` would not change its shard: write " in told


@pytest.mark.parametrize("change", ["p.data.copy_(0.5 * p.data)", "p.data = p.data", "p.data.mul_(0.5)"])
def test_data_that_is_changed_in_place_between_steps_is_not_refused(book: Notebook, change: str) -> None:
    cell = BETWEEN_STEPS.format(change=change)
    cell += "[round((p.data.sum() / kept[p].sum()).full_tensor().item(), 4) for p in model.parameters()]"
    book.ok(f"%%distributed --ranks 2 --strategy fsdp --out parts{cell}")

    assert book.ok("{*parts[0]}").result == ("{1.0}" if "=" in change else "{0.5}")


OTHER_TENSORS = {
    "computed": "functional_call(model, {k: 0.5 * p for k, p in model.named_parameters()}, (x,))",
    "detached": "functional_call(model, {k: p.detach() for k, p in model.named_parameters()}, (x,))",
    "per sample": (
        "torch.func.vmap(torch.func.grad(lambda p, row: functional_call(model, p, (row[None],)).sum()), (None, 0))("
        "{k: p.detach() for k, p in model.named_parameters()}, x)"
    ),
    "tied": "setattr(model.blocks[1], 'weight', model.blocks[0].weight); model(x)",
}


@pytest.mark.parametrize("how", OTHER_TENSORS)
def test_a_forward_pass_with_other_tensors_in_place_of_the_parameters_is_refused(book: Notebook, how: str) -> None:
    """FSDP would compute with its own, without a word."""
    cell = dedent(f"""\
        %%distributed --ranks 2 --strategy fsdp
        from torch.func import functional_call
        model, x = build().eval(), data()[:4][0]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        {OTHER_TENSORS[how]};""")
    told = book.fails(cell).text

    assert "is a parameter of Net, which is sharded, and the cell has put another tensor in its place" in told


def test_a_forward_pass_with_the_models_own_parameters_is_not_refused(book: Notebook) -> None:
    cell = PLAIN + dedent("""\
        from torch.func import functional_call
        x = data()[:4][0]
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        sums = []
        for _ in range(2):
            model.train()
            functional_call(model, dict(model.named_parameters()), (x,)).sum().backward()
            model.eval()
            with torch.no_grad():
                sums += [each(x).sum().item() for each in (model, lambda x: functional_call(model, dict(model.named_parameters()), x))]
        model.to('cpu')
        model(x)
        sums[::2] == sums[1::2]""")
    assert book.ok(f"%%distributed --ranks 2 --strategy fsdp\n{cell}").result == "ranks 0-1: True"


def test_an_optimizer_that_is_built_between_the_passes_is_refused_as_such(book: Notebook) -> None:
    cell = f"{PLAIN}model(data()[:4][0])\noptimizer = torch.optim.SGD(model.parameters(), 0.1)"
    told = book.fails(f"%%distributed --ranks 2 --strategy fsdp\n{cell}")

    assert told.evalue.startswith(
        "SGD (line 6) is built between a forward pass of Net and its backward pass, when FSDP"
    )


RIDDLES = {
    "model.first.weight[0] = 0": "torch has no rule for this operation on a sharded parameter",
    "model.first.weight.detach().numpy()": "read the whole one with .full_tensor() on every rank",
    "nn.utils.parameters_to_vector(model.parameters())": "read the whole one with .full_tensor() on every rank",
    "model(data()[:4][0]); model.double()(data()[:4][0].double())": "the type of a sharded model was changed: change it (.half(), .double())",
    "grads = torch.autograd.grad(model(data()[:4][0]).sum(), [*model.parameters()])\n"
    "    for p, g in zip(model.parameters(), grads): p.data.sub_(g)": "with backward() and not with torch.autograd.grad",
    "for p, q in zip(model.parameters(), build().parameters()): p.copy_(q)": "another model with load_state_dict()",
}


@pytest.mark.parametrize("code", RIDDLES)
def test_what_torch_cannot_do_with_shards_comes_with_what_to_do(book: Notebook, code: str) -> None:
    told = book.fails(
        "%%distributed --ranks 2 --strategy fsdp\nmodel = build()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        f"with torch.set_grad_enabled('autograd' in {code!r}):\n    {code};"
    ).text

    assert RIDDLES[code] in told


HOOKED = """
model = build()
{before}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
{behind}
train(model, optimizer, 1);"""
HALVE = "handle = model.head.weight.register_hook(lambda grad: grad * 0.5)"
COUNT = "model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))"


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_hook_for_the_gradient_of_a_parameter_is_refused(book: Notebook, where: str) -> None:
    """FSDP would not call it, without a word."""
    cell = HOOKED.format(**{"before": "", "behind": "", where: HALVE})
    told = book.fails(f"%%distributed --ranks 2 --strategy fsdp{cell}").evalue

    assert "`head.weight` is a parameter of Net with a hook for its gradient (register_hook), which is not " in told
    removed = HOOKED.format(**{"before": "", "behind": "", where: f"{HALVE}; handle.remove()"})
    book.ok(f"%%distributed --ranks 2 --strategy fsdp{removed}")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_hook_that_is_called_with_the_sum_of_gradients_stays(book: Notebook, where: str) -> None:
    cell = HOOKED.format(**{"before": "", "behind": "", where: f"seen = []; {COUNT}"})
    for strategy in ("fsdp", "none"):
        book.ok(f"%%distributed --ranks 2 --strategy {strategy} --out seen_{strategy}{cell}\nlen(seen)")

    assert book.ok("seen_fsdp[0], seen_none[0]").result == "(3, 6)"  # batches of each rank's share, and of all


@pytest.mark.parametrize("bound", ["", ", max_norm=0.1"])
def test_a_forward_pass_that_changes_no_parameter_for_good_is_not_refused(book: Notebook, bound: str) -> None:
    run(book, CODE_BOOK.format(change="pass", bound=bound) + "\nmodel.load_state_dict(Book().state_dict());")


OWN_SETATTR = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 6, batch_first=True), Net()
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])
torch.manual_seed(0)
model = Words()
train(model, torch.optim.SGD(model.parameters(), 0.1), 1);"""


def test_modules_that_set_attributes_themselves_are_not_refused(book: Notebook) -> None:
    run(book, OWN_SETATTR)


CASES = {
    "a list of parameters from before": dedent("""\
        model = build()
        parameters = [p for p in model.parameters()]
        named = list(model.named_parameters())
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        train(model, optimizer, clip=parameters)
        assert all(p is q for (_, p), q in zip(named, model.parameters()))"""),
    "parameter groups and a frozen part": dedent("""\
        model = build()
        model.first.requires_grad_(False)
        optimizer = torch.optim.AdamW([{'params': model.blocks.parameters(), 'lr': 0.02}, {'params': [*model.norm.parameters(), *model.head.parameters()]}], 0.01)
        train(model, optimizer)"""),
    "tied weights": dedent("""\
        model = build()
        model.blocks[1].weight = model.blocks[0].weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer)
        assert model.blocks[1].weight is model.blocks[0].weight"""),
    "another seed on each rank": dedent("""\
        torch.manual_seed(rank)
        model = Net()
        if rank == 0:
            model.load_state_dict(build().state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer)"""),
    "a scheduler and accumulated gradients": dedent("""\
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for index, (x, y) in enumerate(DataLoader(data(), batch_size=4)):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
            if index % 2:
                optimizer.step(); optimizer.zero_grad(); scheduler.step()"""),
    "evaluations between backward and step": dedent("""\
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in DataLoader(data(), batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                model(x)
            optimizer.step()"""),
    "gradients that the model zeroes after the forward pass": dedent("""\
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for part in (model, model.blocks, model):
            for x, y in DataLoader(data(), batch_size=8):
                loss = nn.functional.cross_entropy(model(x), y)
                part.zero_grad()
                loss.backward()
                optimizer.step()"""),
    "a model and an optimizer of the notebook": "model, optimizer = theirs, its\ntrain(model, optimizer)",
    "inside a function": dedent("""\
        def fit():
            model = build()
            for p in model.parameters():
                p.requires_grad = True
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            assert p is list(model.parameters())[-1] or rank < 0
            train(model, optimizer)
            return model
        model = fit()"""),
    "prepare, the optimizer before": dedent("""\
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = jupyter_distrib.prepare(model, optimizer)
        train(model, optimizer)"""),
    "prepare, the optimizer after": dedent("""\
        model = jupyter_distrib.prepare(build())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer)"""),
    "a container that nobody calls": dedent("""\
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = build(), build()
        pair = Pair()
        optimizer = torch.optim.SGD(pair.parameters(), 0.1)
        for x, y in DataLoader(data(), batch_size=8):
            optimizer.zero_grad()
            (nn.functional.cross_entropy(pair.one(x), y) + pair.two(x).pow(2).mean()).backward()
            optimizer.step()
        model = pair.one"""),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_ddp(book: Notebook, case: str) -> None:
    for strategy in ("ddp", "fsdp"):
        book.ok(
            dedent("""\
                theirs = build()
                its = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
                _ = train(theirs, its, 1)""")
        )
        run(book, CASES[case] + "\nmodel", f"--strategy {strategy} --out {strategy}")

    compared = book.ok(
        "a, b = ddp[0].state_dict(), fsdp[0].state_dict()\n"
        "print(type(fsdp[0]) is Net, a.keys() == b.keys(), max((a[k].double() - b[k]).abs().max().item() for k in a) < 1e-4)"
    )
    assert compared.stdout == "True True True\n"


CHANGES = {
    "values": "for p in model.parameters(): p.data.mul_(0.5)",
    "in place": "with torch.no_grad():\n    for p in model.parameters(): p.mul_(0.5)",
    "frozen": "for p in model.parameters(): p.requires_grad = False\nmodel.head.requires_grad_(True)",
    "a backward pass": "shown.sum().backward()",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_after_an_evaluation_with_gradients_is_done_to_the_shards(book: Notebook, change: str) -> None:
    """Without torch.no_grad(), the model had its whole parameters then, and what was done to these was lost."""
    cell = f"{PLAIN}model.eval()\nshown = model(data()[:4][0])\n{CHANGES[change]}\nmodel.train()\n"
    for strategy, name in (("ddp", "replicated"), ("fsdp", "sharded")):
        run(book, f"{cell}train(model, optimizer, 1)\nmodel", f"--strategy {strategy} --out {name}")

    apart = "(a - b).abs().max().item() for a, b in zip(replicated[0].parameters(), sharded[0].parameters())"
    assert float(book.ok(f"max({apart})").result) < 1e-4


def test_what_a_cell_returns_is_whole_on_rank_0_and_said_to_be_there_on_the_others(book: Notebook) -> None:
    text = run(
        book, PLAIN + "{'model': model, 'state': model.state_dict(), 'losses': losses[:1]}", "--strategy fsdp --out out"
    )

    shown = book.ok(
        "model, state = out[0]['model'], out[0]['state']\n"
        "print(type(model) is Net, model.head.weight.shape, type(model.head.weight).__name__, "
        "torch.equal(model.head.weight, state['head.weight']), len(out[1]['losses']), model(torch.ones(2, 6)).shape, "
        "not model._forward_hooks and not model._state_dict_pre_hooks)"
    )

    assert shown.stdout == "True torch.Size([2, 33]) Parameter True 1 torch.Size([2, 2]) True\n"
    assert "it is sharded over the ranks; the value of rank 0 has all of it" in text
    assert "FSDPNet" not in book.ok("repr(model)").result


def test_numbers_of_shards_are_those_of_the_whole(book: Notebook) -> None:
    numbers = dedent("""\
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        nn.functional.cross_entropy(model(data().tensors[0]), data().tensors[1]).backward()
        clipped = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        weight, gradient = model.first.weight.detach(), model.first.weight.grad
        numbers = [clipped.item(), float(gradient.norm()), weight.sum().item(), weight.mean().item(), weight.min().item(),
          weight[20, 3].item(), int((weight > 0).sum()), bool((weight > weight.max() * 0.99).any()), f'{weight.abs().max():.3f}']
    """)
    plain = book.ok(f"model = build()\n{numbers}numbers").result
    assert book.ok(f"%%distributed --ranks 2 --strategy fsdp --out there\nmodel = build()\n{numbers}numbers").view
    same = "all(a == b if isinstance(a, str) else abs(a - b) < 1e-4 for a, b in zip(numbers, there[rank], strict=True))"
    assert book.ok(f"[{same} for rank in range(2)]").result == "[True, True]", (plain, book.ok("list(there)").result)


def test_a_rank_that_returns_something_else_or_leaves_early_keeps_nobody_waiting(book: Notebook) -> None:
    text = run(book, PLAIN + "model if rank == 0 else 5")
    assert "rank 1: 5" in text
    assert "it is sharded over the ranks; in the cell" in text
    text = run(
        book,
        PLAIN
        + dedent("""\
            if rank == 1:
                raise SystemExit
            model"""),
    )
    assert "left the cell early" in text


def test_a_kept_model_stays_sharded_and_its_handle_brings_the_whole(book: Notebook) -> None:
    run(book, PLAIN, "--strategy fsdp --keep model,optimizer")

    assert "FSDPNet on ranks 0-1 (sharded, local pool, kept since" in book.ok("model").result
    text = run(book, dedent("""\
        before = held(model.parameters())
        losses = train(model, optimizer)
        print('held', before, 'of', sum(p.numel() for p in model.parameters()))
        losses[-1] < losses[0], len(losses)"""))  # fmt: skip
    assert "(True, 6)" in text  # divided among the ranks again
    assert "held 1305 of 2609" in text or "[0] held" in text
    assert book.ok("type(model[1]) is Net, model[0].head.weight.shape, type(optimizer[0]).__name__").result == (
        "(True, torch.Size([2, 33]), 'AdamW')"
    )
    assert book.ok("next(iter(optimizer[0].state.values()))['exp_avg'].shape").result == "torch.Size([33, 6])"


@pytest.mark.versions
def test_an_interrupt_inside_a_collective_leaves_a_kept_model_that_goes_on(book: Notebook) -> None:
    run(book, PLAIN, "--strategy fsdp --keep model,optimizer")
    before = book.ok("reference = model[0]; reference.head.weight.sum().item()").result
    for stop_in in ("forward", "backward"):
        hook = "register_forward_pre_hook" if stop_in == "forward" else "register_full_backward_pre_hook"
        book.start(
            dedent(f"""\
                %%distributed --ranks 2 --strategy fsdp
                import time
                x = torch.ones(4, 6)
                def stuck(*_):
                    print('stuck')
                    time.sleep(60)
                handle = model.blocks[1].{hook}(stuck) if rank == 1 else None
                try:
                    model(x).sum().backward()
                    print('here')
                    torch.distributed.barrier()
                finally:
                    handle and handle.remove()""")
        )
        book.until("stuck")
        book.interrupt()
        assert book.finish().ename == "KeyboardInterrupt"
        assert book.ok("model[0].head.weight.sum().item()").result == before

    assert "(True, 6)" in run(book, "losses = train(model, optimizer)\nlosses[-1] < 1, len(losses)")


@pytest.mark.parametrize("hook", ["register_forward_pre_hook", "register_full_backward_pre_hook"])
def test_a_kept_model_goes_on_with_the_groups_that_a_stop_has_left(book: Notebook, hook: str) -> None:
    """Ranks on GPUs keep their groups if all were stopped at the same point."""
    run(book, PLAIN, "--strategy fsdp --keep model,optimizer")
    run(
        book,
        dedent(f"""\
            from jupyter_distrib.worker.pytorch import process_group
            def stop(*_): raise KeyError
            handle = model.blocks[1].{hook}(stop)
            try:
                model(torch.ones(4, 6)).sum().backward()
            except KeyError:
                handle.remove()
                process_group.current.keep()"""),
    )

    assert "(True, 6)" in run(book, "losses = train(model, optimizer)\nlosses[-1] < 1, len(losses)")


@pytest.mark.versions
def test_a_kept_model_that_has_not_computed_yet_outlives_a_failed_cell(book: Notebook) -> None:
    run(
        book, "model = build()\noptimizer = torch.optim.AdamW(model.parameters(), 0.01)", "--strategy fsdp --keep model"
    )
    book.fails("%%distributed --ranks 2 --strategy fsdp\n1 / 0")

    cell = dedent("""\
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses = train(model, optimizer)
        losses[-1] < losses[0], len(losses)""")
    assert "(True, 6)" in run(
        book,
        cell,
    )


def test_a_sharded_model_can_be_moved_after_it_has_trained(book: Notebook) -> None:
    """torch swaps the tensors of such a model, and refuses that while anybody holds weak references to them."""
    keep = "%%distributed --ranks 2 --strategy fsdp --keep model,optimizer"
    make = "model = build()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    again = "model.to(device)\ntrain(model, optimizer)"
    book.ok(f"{keep} --out first\n{make}\nlosses = train(model, optimizer)\n{again}\nlosses")
    book.ok(f"{keep} --out last\n{again}")

    assert book.ok("sum(last[0]) < sum(first[0])").result == "True"


def test_a_cell_that_failed_in_a_step_is_not_held_against_the_next_one(book: Notebook) -> None:
    book.fails(
        f"%%distributed --ranks 2 --strategy fsdp\n{PLAIN}\n"
        "torch.left_behind = model\noptimizer.register_step_pre_hook(lambda *_: 1 / 0)\ntrain(model, optimizer)"
    )

    assert "stopped in the middle" not in run(book, PLAIN + "del torch.left_behind")


def test_two_kept_models_of_one_class_are_not_taken_for_one_that_was_stopped(book: Notebook) -> None:
    keep = "--strategy fsdp --keep model,optimizer"
    run(book, PLAIN, keep)
    run(book, PLAIN.replace("model", "other"), "--strategy fsdp --keep other")
    run(book, "train(model, optimizer)", keep)
    book.fails("%%distributed --ranks 2 --strategy fsdp\n1 / 0")

    assert "stopped in the middle" not in run(book, "1")


def test_a_cell_that_is_stopped_keeps_the_shards_that_it_has_trained(book: Notebook) -> None:
    book.start(
        f"%%distributed --ranks 2 --strategy fsdp --keep model,optimizer,losses\n{PLAIN}\n"
        "losses = train(model, optimizer)\nprint('trained')\nimport time\nwhile True: time.sleep(0.01)"
    )
    book.until("trained")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"

    assert "sharded" in book.ok("model").result
    assert book.ok("sum(p.numel() for p in model[0].parameters()) > 0").result == "True"
    run(book, "more = train(model, optimizer)\nsum(losses) > sum(more) > 0", "--strategy fsdp --out lower")
    assert book.ok("lower[0]").result == "True"


def test_an_interrupt_between_the_steps_of_two_ranks_is_said(book: Notebook) -> None:
    run(book, PLAIN, "--strategy fsdp --keep model,optimizer")
    book.start(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp
            import time
            model(torch.ones(4, 6)).sum().backward()
            if rank == 1:
                print('waits')
                time.sleep(60)
            optimizer.step()
            torch.distributed.barrier()""")
    )
    book.until("waits")
    book.interrupt()
    book.finish()

    text = run(book, "len(train(model, optimizer))")

    assert "Net was stopped in the middle of an optimizer step: its shards may be one step apart" in text
    assert "ranks 0-1: 6" in text


def test_a_killed_rank_takes_the_kept_shards_with_it_and_the_next_cell_trains(book: Notebook) -> None:
    run(book, PLAIN + "print('pid', __import__('os').getpid())", "--strategy fsdp --keep model")
    pid = int(
        book.ok("%distributed_status").text
        and run(book, "if rank == 1:\n    print('pid', __import__('os').getpid())").partition("pid ")[2].split()[0]
    )
    book.start(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp
            print('ready')
            for _ in range(10**6):
                model(torch.ones(4, 6)).sum().backward()""")
    )
    book.until("ready")
    os.kill(pid, signal.SIGKILL)
    assert book.finish().ename == "RankLost"

    assert "is gone with" in book.fails("model[0]").evalue
    assert "ranks 0-1: 6" in run(book, PLAIN + "len(losses)")


def test_options(book: Notebook) -> None:
    text = run(book, PLAIN + "losses[-1] < 1", "--strategy fsdp --fsdp-unit Linear --precision bf16 --cpu-offload")
    assert "Net sharded in 4 units (Linear)" in text
    assert "ranks 0-1: True" in text
    failed = book.fails(f"%%distributed --ranks 2 --strategy fsdp --fsdp-unit Linaer\n{PLAIN}")
    assert failed.evalue == "--fsdp-unit Linaer: no part of Net has this class; did you mean Linear?"
    assert "line 3" in failed.traceback
    assert "bf16" in book.fails("%%distributed --strategy fsdp --precision bf15\n1").evalue
    assert "--strategy fsdp" in book.fails("%%distributed --strategy ddp --fsdp-unit Block\n1").evalue


def test_a_cell_that_resumes_from_whole_state_dicts_trains_on(book: Notebook) -> None:
    book.ok(
        dedent("""\
            model = build()
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            train(model, optimizer);
            torch.save([model.state_dict(), optimizer.state_dict()], 'plain.pt')""")
    )
    resumed = dedent("""\
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 0.5)
        of_model, of_optimizer = torch.load('plain.pt')
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        losses = train(model, optimizer)
        losses, optimizer.param_groups[0]['lr'], max(int(s['step']) for s in optimizer.state.values())""")
    run(book, resumed, "--strategy ddp --out replicated")
    run(book, resumed, "--strategy fsdp --out sharded")
    run(book, resumed, "--strategy fsdp --fsdp-unit Linear --out in_units")
    for name in ("sharded", "in_units"):
        shown = book.ok(
            f"max(abs(a - b) for a, b in zip(replicated[0][0], {name}[0][0])) < 1e-4, {name}[0][1:] == replicated[0][1:]"
        )
        assert shown.result == "(True, True)"


@pytest.mark.parametrize(("weights", "precision"), [("float32", "bf16"), ("bfloat16", "fp32")])
def test_precision_is_what_the_layers_compute_in(book: Notebook, weights: str, precision: str) -> None:
    seen = run(
        book,
        dedent(f"""\
            model = build().to(torch.{weights})
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            seen = set()
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda module, given, out: seen.add((str(given[0].dtype), str(out.dtype))))
            out = model(data()[:4][0])
            out.sum().backward()
            print('computed in', seen, 'gives', out.dtype, 'holds', {{str(p.dtype) for p in model.parameters()}});"""),
        f"--strategy fsdp --precision {precision}",
    )
    compute = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[precision]
    assert f"computed in {{('{compute}', '{compute}')}} gives torch.float32 holds {{'torch.{weights}'}}" in seen


def test_a_unit_may_be_a_class_of_one_of_two_models(book: Notebook) -> None:
    text = run(
        book,
        dedent("""\
            first, second = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1)), build()
            torch.optim.SGD(first.parameters(), 0.1)
            torch.optim.SGD(second.parameters(), 0.1)
            second(data()[:4][0]).sum().backward();"""),
        "--strategy fsdp --fsdp-unit Linear",
    )
    assert "Net sharded in 4" in text
    assert "Sequential sharded: 1/2" in text


def test_what_cannot_be_sharded_is_one_sentence(book: Notebook) -> None:
    scalar = book.fails(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp
            model = build()
            model.scale = nn.Parameter(torch.tensor(1.0))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)""")
    )
    assert scalar.evalue == (
        "Net.scale is a single number without a dimension, which cannot be sharded: give it the shape (1,), "
        "or use --strategy ddp."
    )
    loose = book.fails(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp
            w = torch.zeros(3, requires_grad=True)
            torch.optim.SGD([w], 0.1)""")
    )
    assert "SGD (line 3) trains a tensor of shape (3,) that belongs to no module" in loose.evalue
    sparse = book.fails(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp
            model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 1))
            torch.optim.SGD(model.parameters(), 0.1)""")
    )
    assert "Sequential.0 has sparse gradients, which FSDP cannot divide: make it with sparse=False" in sparse.evalue
    frozen = run(
        book,
        dedent("""\
            model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 1))
            model[0].requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.zeros(2, 3, dtype=torch.long)
            model(x).sum().backward()
            optimizer.step()
            'stepped'"""),
    )
    assert "stepped" in frozen
    scripted = book.fails(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp
            model = nn.Sequential(torch.jit.script(nn.Linear(4, 1)))
            torch.optim.SGD(model.parameters(), 0.1)""")
    )
    assert "Linear is compiled by torch.jit, and FSDP shards modules of Python only" in scripted.evalue


META = """
from torch.func import functional_call
model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.ones(8, 1, requires_grad=True)
"""


@pytest.mark.parametrize(
    "second",
    [
        (
            "p = dict(model.named_parameters())\nloss = functional_call(model, p, (x,)).sum()\n"
            "torch.autograd.grad(loss, p.values(), create_graph=True)"
        ),
        "torch.autograd.grad(model(x).sum(), x, None, None, True)",
        "model(x).sum().backward(create_graph=True)",
    ],
    ids=["meta-learning", "grad", "backward"],
)
def test_second_derivatives_are_refused_before_freed_parameters_end_the_ranks(book: Notebook, second: str) -> None:
    before = book.ok("%%distributed --ranks 2\nimport os; os.getpid()").result
    failed = book.fails(f"%%distributed --ranks 2 --strategy fsdp{META}{second}")
    assert failed.ename == "DistributedError"
    assert (
        f"create_graph=True (line {len((META + second).splitlines())}) is to be differentiated again" in failed.evalue
    )
    assert book.ok("%%distributed --ranks 2\nimport os; os.getpid()").result == before


def test_second_derivatives_of_what_is_not_sharded_stay_possible(book: Notebook) -> None:
    text = run(
        book,
        META
        + dedent("""\
            w = torch.ones(3, requires_grad=True)
            g, = torch.autograd.grad((w ** 3).sum(), w, create_graph=True)
            model(x).sum().backward(); optimizer.step()
            torch.autograd.grad(g.sum(), w)[0].tolist()"""),
    )
    assert "[6.0, 6.0, 6.0]" in text


def test_parameters_that_a_transformation_of_torch_func_reads_too_late_are_explained(book: Notebook) -> None:
    failed = book.fails(
        f"%%distributed --ranks 2 --strategy fsdp{META}from torch.func import jacrev, vmap\nmodel(x)\n"
        "vmap(jacrev(lambda each: model(each).sum()))(x).sum().backward()"
    )
    assert "parameters of a sharded model were read after FSDP had freed them" in failed.text


def test_explain_shows_what_would_be_sharded_and_where(book: Notebook) -> None:
    book.ok("theirs = build()\nits = torch.optim.SGD(theirs.parameters(), 0.1)")
    shown = book.ok(
        "%%distributed --ranks 2 --strategy fsdp --fsdp-unit Linear --explain\n"
        f"{PLAIN}train(theirs, its)\nfrom torch.distributed.fsdp import fully_shard\nfully_shard(build(), mesh=mesh)"
    ).result
    table = [re.split(r" {2,}", line) for line in shown.partition("\n\n")[2].splitlines()]

    model = "its model is sharded over the ranks, in units of Linear"
    assert table == [
        ["where", "what", "with --strategy fsdp"],
        ["line 3", "torch.optim.AdamW(model.parameters(), 0.01)", model],
        ["line 7", "fully_shard(build(), mesh=mesh)", "sharded by hand, so this model is left alone"],
        [
            "train, its line 4",
            "DataLoader(data(), batch_size=8, shuffle=True)",
            "divided among the ranks where it is trained with, whole in an evaluation",
        ],
        ["captured", "its", model],
    ]


def test_a_strategy_that_cannot_begin_leaves_torch_as_it_was(book: Notebook) -> None:
    book.ok("theirs = build()\nits = torch.optim.SGD(theirs.parameters(), 0.1)")
    failed = book.fails("%%distributed --ranks 2 --strategy fsdp --fsdp-unit Linaer\ntrain(theirs, its)")

    assert failed.evalue.endswith("did you mean Linear?")
    assert "line" not in failed.traceback  # it had not come to the cell
    clean = book.ok("%%distributed --ranks 2\ntorch.optim.Optimizer.__init__.__code__.co_filename.split('/')[-2]")
    assert clean.result == "ranks 0-1: 'optim'"


@pytest.mark.versions
def test_torch_save_of_shards_is_refused_and_that_of_whole_tensors_is_not(book: Notebook) -> None:
    saved = "torch.save(model.state_dict(), f'{rank}.pt')"

    refused = book.fails(f"%%distributed --ranks 2 --strategy fsdp --keep model\n{PLAIN}{saved}").evalue
    assert refused.startswith("torch.save() would write this rank's shards only, since this model is sharded over")
    run(book, PLAIN, "--strategy fsdp --keep model")
    assert book.fails(f"%%distributed --ranks 2\n{saved}").evalue == refused
    run(book, f"model = build()\n{saved}")
    assert book.ok("torch.load('1.pt').keys() == build().state_dict().keys()").result == "True"


def test_sharding_by_hand_is_left_alone(book: Notebook) -> None:
    text = run(
        book,
        dedent("""\
            from torch.distributed.fsdp import fully_shard
            model = build()
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            len(train(model, optimizer)), held(model.parameters())"""),
    )

    assert "sharded:" not in text
    assert "(12, 13" in text  # every loader is whole: the cell knows what it does


NEW_PART = "model.more = nn.Linear(16, 3)\ntorch.optim.SGD(model.parameters(), lr=0.1)"


def test_a_new_part_of_a_model_that_is_sharded_already_is_refused(book: Notebook) -> None:
    here = book.fails(f"%%distributed --ranks 2 --strategy fsdp\n{PLAIN}{NEW_PART}")
    assert "SGD (line 6) trains more.weight, which was added to " in here.traceback

    run(book, f"{PLAIN}None", "--strategy fsdp --keep model")
    later = book.fails(f"%%distributed --ranks 2 --strategy fsdp\n{NEW_PART}")
    assert "SGD (line 3) trains more.weight, which was added to " in later.traceback


BY_HAND = """
from torch.distributed.fsdp import fully_shard
model = build()
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{use}
"""


PART = (
    "{} has a part that is sharded already ({}): shard all of it yourself, or nothing, and build a model around one that "
    "--strategy fsdp has sharded before its first optimizer."
)


@pytest.mark.parametrize(
    ("wrap", "use", "said"),
    [
        (
            "fully_shard(model.first, mesh=mesh)",
            "",
            PART.format("Net", "Linear"),
        ),
        (
            "torch.optim.SGD(model.parameters(), lr=0.1)\nmodel = nn.Sequential(model, nn.Linear(2, 2))",
            "",
            PART.format("Sequential", "Net"),
        ),
        (
            "model.first = nn.parallel.DistributedDataParallel(model.first)",
            "",
            "SGD (line 5) trains Net, of which a part is wrapped already: wrap all of it yourself, or nothing.",
        ),
        (
            "fully_shard(model, mesh=mesh)",
            "jupyter_distrib.save('mixed', some={'weight': model.first.weight, 'epoch': 1})",
            (
                "`some` has sharded tensors among other things: give jupyter_distrib.save() the model or optimizer "
                "itself, or a dict with tensors only."
            ),
        ),
    ],
    ids=["in part", "around one", "in part by another wrapper", "among others"],
)
def test_what_is_sharded_by_hand_and_cannot_be_taken_is_refused(book: Notebook, wrap: str, use: str, said: str) -> None:
    refused = book.fails(f"%%distributed --ranks 2 --strategy fsdp{BY_HAND.format(wrap=wrap, use=use)}")

    assert refused.evalue == said


AVERAGE = """
import copy
model, (x, y) = Net(), data().tensors
average = copy.deepcopy(model)
average = {prepared}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
with torch.no_grad():
    {update}
all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(average.parameters(), model.parameters()))"""
UPDATES = {
    "parameters": "for a, b in zip(average.parameters(), model.parameters()): a.lerp_(b, 1.0)",
    "weights": "average.load_state_dict(model.state_dict())",
    "arithmetic": "average.load_state_dict({k: 0 * v + model.state_dict()[k] for k, v in average.state_dict().items()})",
}


@pytest.mark.parametrize("how", UPDATES)
def test_a_copy_of_a_sharded_model_is_averaged_once_it_is_prepared(book: Notebook, how: str) -> None:
    line, update = "%%distributed --ranks 2 --strategy fsdp", UPDATES[how]
    advice = "a moving average or a target network, to jupyter_distrib.prepare(), which shards it, too"

    assert advice in book.fails(line + AVERAGE.format(prepared="average", update=update)).text
    outcome = book.ok(line + AVERAGE.format(prepared="jupyter_distrib.prepare(average)", update=update))
    assert outcome.result == "ranks 0-1: True"


BEST = """
import copy
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(DataLoader(data(), batch_size=4)):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if {when}: best = copy.deepcopy({what})
model.load_state_dict(best)
sum(p.sum() for p in model.parameters()).item()"""


@pytest.mark.parametrize(
    ("when", "what", "said"),
    [
        ("step in (0, 1 + rank)", "model.state_dict()", "after 2 steps on rank 0 and after 3 on rank 1, so that each"),
        ("step in (0, 1 + rank)", "dict(weights=model.state_dict())['weights']", "after 2 steps on rank 0 and after 3"),
        ("step in (rank, 2)", "model.state_dict()", ""),
        ("step % 2", "model.state_dict()", ""),
    ],
)
def test_weights_that_each_rank_has_read_after_another_step_are_named(
    book: Notebook, when: str, what: str, said: str
) -> None:
    """The best weights by each rank's own loss would be parts of several steps, without a word."""
    view = book.ok(f"%%distributed --ranks 2 --strategy fsdp\n{BEST.format(when=when, what=what)}").view

    assert said in view
    assert said or "was last read" not in view
    assert not said or "Take the mean over ranks of the number that decides" in view
