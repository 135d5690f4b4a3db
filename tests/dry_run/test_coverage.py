"""What is special about some cells: what they save, track, guess, and what cannot be played."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.dry_run import cells
from tests.dry_run.play import play

pytestmark = pytest.mark.slow

CELLS = {each.name: each.source for each in cells.read()}


def test_what_a_rank_refuses_to_save_is_an_error_of_the_dry_run() -> None:
    found = play(CELLS["own: saved as it goes"], "fsdp")
    assert found.error is not None
    assert found.error.text.startswith("torch.save() would write this rank's shards only")


def test_what_needs_values_says_nothing_about_a_real_run() -> None:
    found = play(
        dedent("""\
            import torch
            x = torch.randn(8)
            torch.repeat_interleave(x, torch.randint(0, 3, (8,)))""")
    )
    assert found.verdict == "cannot be run dry"
    assert "on line 3 (torch.repeat_interleave(x" in found.refused


class OnAnotherMachine:
    """A value that cannot be rebuilt in another process."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("nothing",)


def test_a_value_that_cannot_be_rebuilt_is_not_a_failure_of_the_cell() -> None:
    found = play("print(value)", inputs={"value": OnAnotherMachine()})
    assert found.verdict == "cannot be run dry"
    assert "`value` cannot be rebuilt" in found.refused


def test_trackers_do_nothing_and_what_is_done_for_real_is_named(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise RuntimeError('the tracker was loaded')")
    source = dedent(f"""\
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import wandb
        run = wandb.init(project='x')
        run.log({{'loss': 1}})
        with wandb.init() as run: run.summary['a'] = 1
        open({str(tmp_path / "written.txt")!r}, 'w').close()
        import os, pathlib, shutil, subprocess
        pathlib.Path({str(tmp_path / "old.txt")!r}).unlink()
        shutil.rmtree({str(tmp_path / "old")!r})
        subprocess.run(['true', 'a b'])
        os.system('true 2')
        subprocess.check_output('true 3', shell=True)
    """)
    (tmp_path / "old.txt").write_text("")
    (tmp_path / "old").mkdir()
    found = play(source, path=(str(tmp_path),))
    assert found.error is None, repr(found)
    assert found.effects["written"] == [str(tmp_path / "written.txt")]
    assert found.effects["removed or renamed"] == [str(tmp_path / "old.txt"), str(tmp_path / "old")]
    assert found.effects["run"] == ["true 'a b'", "true 2", "true 3"]
    assert f"for real, the cell has written {tmp_path}/written.txt; removed" in repr(found)


def test_the_programs_that_are_named_are_shown_without_secrets() -> None:
    source = dedent("""\
        import os, subprocess
        token = 'hunter2hunter2'
        subprocess.run(['true', '--db-password', token, f'Authorization: Bearer {token}'])
        os.system(f'true http://u:{token}@host/a')
        subprocess.run(['sh', '-c', f'TOKEN={token} true'])
    """)
    found = play(source)
    assert found.effects["run"] == [
        "true --db-password ... 'Authorization: Bearer ...'", "true http://host/a", "TOKEN=... true",
    ]  # fmt: skip
    assert "hunter2" not in repr(found)


def test_attention_takes_the_memory_of_a_kernel_of_gpus() -> None:
    """The plain one would hold a matrix of 8 GB."""
    found = play(
        dedent("""\
            import torch
            q = torch.randn(2, 16, 8192, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True)
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            out.sum().backward()""")
    )
    assert found.error is None, repr(found)
    assert 1e8 < found.peak_bytes < 4e8


def test_the_lines_whose_values_are_guessed_are_listed() -> None:
    found = play(CELLS["own: values decide"], "ddp")
    assert {line for _, line in found.guessed_lines} == {10, 11, 12, 13}
    assert "values had to be guessed on line 10, line 11, line 12, line 13" in repr(found)
