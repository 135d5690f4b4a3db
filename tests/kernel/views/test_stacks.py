"""The text of stacks: pure."""

from __future__ import annotations

from jupyter_distrib.kernel.views.stacks import as_text, lines
from jupyter_distrib.wire import messages as m

CELL = m.Frame(filename="Cell In[5]", line=14, function="<module>", text="loss.backward()")
TORCH = "/env/lib/python3.11/site-packages/torch/"


def library(file: str, line: int, function: str) -> m.Frame:
    return m.Frame(filename=TORCH + file, line=line, function=function)


def stack(rank: int, *frames: m.Frame, trouble: str = "") -> m.StackSeen:
    return m.StackSeen(run="r-1", rank=rank, frames=frames, trouble=trouble, at_s=1.0)


def test_equal_stacks_are_shown_once_and_others_apart() -> None:
    other = m.Frame(filename="Cell In[5]", line=3, function="load", text="time.sleep(1)")
    text = as_text({2: stack(2, CELL), 0: stack(0, CELL), 1: stack(1, other)})

    assert text.splitlines() == [
        "ranks 0, 2",
        "  Cell In[5], line 14",
        "    loss.backward()",
        "rank 1",
        "  Cell In[5], line 3, in load",
        "    time.sleep(1)",
    ]


def test_of_the_frames_of_a_library_both_ends_are_shown() -> None:
    inside = [library("a.py", number, f"f{number}") for number in range(1, 6)]

    assert list(lines([CELL, *inside])) == [
        "Cell In[5], line 14",
        "  loss.backward()",
        f"File {TORCH}a.py:1, in f1",
        "... 3 calls inside torch",
        f"File {TORCH}a.py:5, in f5",
    ]
    assert list(lines(inside[:3]))[1] == "... 1 call inside torch"


def test_a_rank_that_does_not_answer_is_reported_with_the_reason() -> None:
    text = as_text({0: stack(0, trouble="is stopped (SIGSTOP)"), 1: stack(1, CELL, trouble="does not answer: x")})

    assert text.splitlines()[:2] == ["rank 0 is stopped (SIGSTOP)", "rank 1 does not answer: x"]
