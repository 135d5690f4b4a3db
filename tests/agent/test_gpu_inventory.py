"""The list of GPUs: who waits for the driver, for how long, and when the session with it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from jupyter_distrib.agent.gpus import choice as gpu_choice
from jupyter_distrib.agent.gpus import inventory as gpu_inventory
from jupyter_distrib.agent.gpus import nvml
from jupyter_distrib.agent.gpus.devices import Gpu, Inventory
from jupyter_distrib.agent.gpus.inventory import GpuInventory
from jupyter_distrib.agent.gpus.nvml import Driver, NoDriver, NvmlSession, Question
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop


class SilentSession(NvmlSession):
    """A session whose driver answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[Question] = []

    def ask(self, question: Question) -> None:
        self.questions.append(question)


class Stage:
    def __init__(self) -> None:
        self.loop = Loop()
        self.calls = CallSoon(self.loop)
        self.session = SilentSession()
        self.gpus = GpuInventory(self.loop, self.calls, self.session)
        self.told: list[Inventory] = []

    def answer(self) -> None:
        self.session.questions.pop()(NoDriver(text="broken"))
        self.calls._handle()

    def wait_until_asked_for(self, seconds: float) -> float:
        """Wait until the current question is older than this; return the time."""
        asked_s = self.gpus._asked_s
        assert asked_s is not None
        while time.monotonic() - asked_s <= seconds:
            continue
        return seconds

    def wait(self) -> None:
        """Let the loop's next timer be due."""
        self.loop._selector.select(self.loop._wait_s())
        self.loop._fire()


@pytest.fixture
def stage() -> Iterator[Stage]:
    here = Stage()
    yield here
    here.calls.close()
    here.loop._selector.close()


def test_one_question_answers_all_who_ask_meanwhile_and_the_answer_is_kept(stage: Stage) -> None:
    stage.gpus.ask(stage.told.append)
    stage.gpus.ask(stage.told.append)
    assert len(stage.session.questions) == 1
    assert stage.told == []
    stage.answer()
    assert [each.problem for each in stage.told] == ["the GPU driver does not work (broken)"] * 2
    stage.gpus.ask(stage.told.append)
    assert len(stage.told) == 3
    assert stage.session.questions == []
    stage.gpus.ask(stage.told.append, fresh_s=0.0)
    assert len(stage.session.questions) == 1


def test_who_wants_a_new_list_is_not_given_one_that_was_on_its_way(stage: Stage) -> None:
    """It may count ranks that have gone meanwhile."""
    stage.gpus.ask(lambda inventory: None)
    stage.gpus.ask(stage.told.append, fresh_s=0.0)
    stage.answer()
    assert stage.told == []
    stage.answer()
    assert len(stage.told) == 1


def test_a_driver_that_does_not_answer_is_given_up(stage: Stage) -> None:
    stage.gpus.ask(stage.told.append, limit_s=0.001)
    while not stage.told:
        stage.wait()
    assert [each.silent_s > 0 for each in stage.told] == [True]
    stage.answer()
    assert len(stage.told) == 1, "not again"
    stage.gpus.ask(stage.told.append)
    assert stage.told[1].problem == "the GPU driver does not work (broken)"


def test_nobody_waits_for_a_driver_for_which_others_have_waited(stage: Stage) -> None:
    stage.gpus.ask(lambda inventory: None)
    limit_s = stage.wait_until_asked_for(0.001)
    stage.gpus.ask(stage.told.append, limit_s=limit_s)
    stage.gpus.ask(stage.told.append, fresh_s=0.0, limit_s=limit_s)
    assert [each.silent_s > limit_s for each in stage.told] == [True, True]
    assert len(stage.session.questions) == 1, "the driver owes an answer already"


def test_what_the_driver_has_said_before_it_hangs_is_told_with_its_silence(stage: Stage) -> None:
    stage.gpus.ask(stage.told.append)
    stage.answer()
    stage.gpus.ask(stage.told.append, fresh_s=0.0, limit_s=0.001)
    while len(stage.told) < 2:
        stage.wait()
    assert stage.told[1].problem == stage.told[0].problem
    assert stage.told[1].silent_s > 0


def test_a_request_gets_its_whole_time_when_its_own_question_is_asked(stage: Stage) -> None:
    """The one before may have woken the GPUs."""
    stage.gpus.ask(lambda inventory: None)
    limit_s = stage.wait_until_asked_for(0.001)
    stage.gpus.ask(stage.told.append, fresh_s=0.0, limit_s=limit_s + 60)
    stage.answer()
    (request,) = stage.gpus._waiting
    stage.gpus._give_up_in_time(request)
    assert stage.told == []
    stage.answer()
    assert [each.silent_s for each in stage.told] == [0.0]


class PlayedDriver:
    """As much of `pynvml` as a session needs."""

    def __init__(self) -> None:
        self.shut = threading.Event()

    def nvmlShutdown(self) -> None:
        self.shut.set()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PlayedDriver:
    here = PlayedDriver()
    monkeypatch.setattr(nvml, "_opened", lambda: here)
    return here


def asked(session: NvmlSession) -> Driver:
    """Ask a session for its driver."""
    there, box = threading.Event(), []
    session.ask(lambda driver: (box.append(driver), there.set()))
    assert there.wait(10)
    return box[0]


def test_a_session_is_closed_when_nobody_has_asked_for_a_while(
    driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open one keeps an administrator from resetting or dividing a GPU."""
    monkeypatch.setattr(nvml, "CLOSE_AFTER_S", 0.01)
    session = NvmlSession()
    assert asked(session) is driver
    assert driver.shut.wait(10)
    assert asked(session) is driver, "and opened again"
    session.close()


@pytest.mark.filterwarnings("ignore")
def test_a_question_that_fails_ends_nothing(driver: PlayedDriver, capsys: pytest.CaptureFixture[str]) -> None:
    session = NvmlSession()
    session.ask(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert asked(session) is driver
    session.close()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_machine_whose_driver_lists_nothing_has_no_gpus() -> None:
    class Broken:
        def nvmlDeviceGetCount(self) -> int:
            raise RuntimeError("no luck")

    assert gpu_inventory.read(Broken()).problem == "the GPU driver does not list its GPUs (no luck)"
    found = gpu_inventory.read_now()
    assert found.problem or all(isinstance(gpu, Gpu) for gpu in found.gpus)


def test_a_driver_whose_library_is_missing_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with NVIDIA_DRIVER_CAPABILITIES=compute."""

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setattr(nvml, "DEVICES", tmp_path)
    assert gpu_inventory.read_now().problem == ""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia0").touch()
    assert gpu_inventory.read_now().problem == (
        f"the GPU driver does not work ({tmp_path}/nvidia0 is there, but not its library libnvidia-ml.so.1; containers "
        "have it with NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    )


@pytest.mark.parametrize(
    ("left", "left_out", "reason"),
    [
        ([0, 1], (), ""),
        ([0], (("1", "GPU is lost"),), "GPU 1 cannot be used (GPU is lost)"),
        ([], (("0", "ECC error"), ("1", "GPU is lost")), "GPU 1 cannot be used (GPU is lost)"),
        ([0], (), "GPU 1 cannot be used (the driver does not list it any more)"),
        ([], (), ""),  # the driver does not answer
    ],
)
def test_why_a_gpu_that_was_there_cannot_be_used(
    left: list[int], left_out: tuple[tuple[str, str], ...], reason: str
) -> None:
    gpus = [Gpu(index=index, uuid=f"GPU-{index}", name="H100", memory_bytes=1, used_bytes=0) for index in range(2)]
    inventory = Inventory(gpus=tuple(gpus[index] for index in left), left_out=left_out)
    assert gpu_choice.loss(gpus[1], inventory) == reason


def test_a_process_without_a_loop_waits_once_for_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SilentSession()
    monkeypatch.setattr(gpu_inventory, "session", session)
    monkeypatch.setattr(gpu_inventory, "_owed", None)
    assert gpu_inventory.read_now(0.01).silent_s >= 0.01
    began_s = time.monotonic()
    assert gpu_inventory.read_now(0.01).silent_s >= time.monotonic() - began_s
    assert len(session.questions) == 1
    session.questions.pop()(NoDriver(text="broken"))
    assert gpu_inventory.read_now(0.0).silent_s >= 0, "an answer that came late may be old"
    assert len(session.questions) == 1
    session.ask = lambda question: question(NoDriver(text="broken"))  # type: ignore[method-assign]
    monkeypatch.setattr(gpu_inventory, "_owed", None)
    assert gpu_inventory.read_now().problem.endswith("(broken)")
