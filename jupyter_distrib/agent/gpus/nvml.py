"""The session with the NVIDIA driver's library (NVML), in a thread of its own. Never creates a CUDA context.

A driver takes milliseconds for an answer, and seconds for the first one where no process keeps its GPUs awake; the
agent's loop does not wait. The session is closed when nobody has asked for a while, because an open one keeps an
administrator from resetting a GPU or dividing it.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

CLOSE_AFTER_S = 60.0
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDriver:
    """The reason why the driver cannot be asked."""

    text: str = ""
    """Message of the driver's library; empty on a machine without an NVIDIA driver."""


Driver: TypeAlias = Any
"""The module `pynvml`, initialised, or `NoDriver`."""
Question: TypeAlias = Callable[[Driver], None]


class NvmlSession:
    """Asks the driver one question after another, in a thread that begins with the first one."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, question: Question) -> None:
        """Call the question soon in the session's thread. Can be called from any thread."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="jupyter_distrib-gpus", daemon=True)
                self._thread.start()
        self._questions.put(question)

    def close(self) -> None:
        """Close the session once its pending questions are answered; the next question opens a new one."""
        with self._starting:
            if self._thread is not None:
                self._thread = None
                self._questions.put(None)

    def _serve(self) -> None:
        driver: Driver = NoDriver()
        while True:
            try:
                question = self._questions.get(timeout=None if isinstance(driver, NoDriver) else CLOSE_AFTER_S)
            except queue.Empty:
                driver = _shut(driver)
                continue
            if question is None:
                _shut(driver)
                return
            if isinstance(driver, NoDriver):
                driver = _opened()
            try:
                question(driver)
            except Exception:  # noqa: BLE001 - whatever a driver's library does, the next question is asked anew
                traceback.print_exc()  # into the agent's log
                driver = _shut(driver)


def _opened() -> Driver:
    try:
        import pynvml  # only the agent asks, and a machine without a GPU need not have it
    except ImportError:
        return NoDriver()
    try:
        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - also other errors than NVMLError, from a broken library
        value = getattr(error, "value", None)
        if value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return NoDriver(text=_without_library())
        return NoDriver() if value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED else NoDriver(text=str(error))
    return pynvml


def _without_library() -> str:
    """Return why an installed driver cannot be queried, as in a container; empty if there is no driver."""
    device = min(DEVICES.glob("nvidia[0-9]*"), default=None)
    if device is None:
        return ""
    return (
        f"{device} is there, but not its library libnvidia-ml.so.1; containers have it with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )


def _shut(driver: Driver) -> NoDriver:
    if not isinstance(driver, NoDriver):
        try:
            driver.nvmlShutdown()
        except Exception:  # noqa: BLE001 - the session is given up either way
            traceback.print_exc()
    return NoDriver()


session = NvmlSession()
"""The session of this process. There is only one because the library keeps global state."""
