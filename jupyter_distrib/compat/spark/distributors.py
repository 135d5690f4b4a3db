"""`TorchDistributor` and `DeepspeedTorchDistributor` of the installed pyspark, with a live view: each rank's lines,
`report()` and exception. Everything else is done by pyspark: its checks, its tasks, torchrun in each task. Kernel
side."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

from jupyter_distrib.compat import launching
from jupyter_distrib.compat.spark.entry import execute, run_script
from jupyter_distrib.compat.spark.launched import Launched
from jupyter_distrib.compat.spark.log_server import LogServer
from jupyter_distrib.compat.spark.task_output import Token

try:
    from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor as SparkDeepspeed
    from pyspark.ml.torch import distributor as spark_distributor
    from pyspark.ml.torch.distributor import TorchDistributor as SparkDistributor
    from pyspark.ml.torch.log_communication import LogStreamingServer as SparkServer
except ImportError as error:
    raise ImportError(
        "Spark's distributors need pyspark, which is not installed here (or lacks numpy, pandas, pyarrow): pip install "
        '"jupyter_distrib[spark]". Without Spark, %distributed_compat spark serves classes of the same names.'
    ) from error

__all__ = ["DeepspeedTorchDistributor", "TorchDistributor"]

_here = threading.local()
"""Holds the run for which Spark starts a log server in this thread."""


class _Watched:
    """The common part of both classes."""

    name: ClassVar[str]
    """The class's name in pyspark."""
    local_mode: bool
    is_remote: bool
    num_processes: int
    use_gpu: bool
    spark: Any
    input_params: dict[str, Any]

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function, or a script with these arguments, on every rank; return rank 0's value.

        Raises:
            RuntimeError: It failed on a rank; the rank's own exception is the cause.
        """
        name = self.name
        if callable(train_object):
            function, given, keywords = train_object, args, kwargs
        else:
            path = launching.check_script(name, train_object, kwargs)
            function, given, keywords = run_script, (path, *map(str, args)), {}
        run = super().run  # type: ignore[misc]
        return self._launch(lambda one: run(execute, one.run.id, Token(one.token), function, given, keywords))

    def _train_on_dataframe(self, train_function: Callable[..., Any], dataframe: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function on every rank, each beside one partition of the frame."""
        train = super()._train_on_dataframe  # type: ignore[misc]
        return self._launch(
            lambda one: train(execute, dataframe, one.run.id, Token(one.token), train_function, args, kwargs)
        )

    def _launch(self, call: Callable[[Launched], Any]) -> Any:
        name, tag = self.name, f"jupyter_distrib-{os.urandom(4).hex()}"
        launched = Launched(
            name, self.num_processes, gpus=self.use_gpu, local=self.local_mode, cancel=lambda: self._cancel(tag)
        )

        def run() -> Any:
            self._name_jobs(tag)
            if self.local_mode:
                self.input_params["log_streaming_client"] = LocalLines(launched)
            try:
                with log_server(launched), unbuffered() if self.local_mode else nullcontext():
                    return call(launched)
            finally:
                self.input_params.pop("log_streaming_client", None)

        return launched.wait(run)

    def _name_jobs(self, tag: str) -> None:
        if self.is_remote:
            self.spark.addTag(tag)
        else:
            self.spark.sparkContext.setJobGroup(tag, f"{self.name}.run", True)

    def _cancel(self, tag: str) -> None:
        if self.is_remote:
            self.spark.interruptTag(tag)
        else:
            self.spark.sparkContext.cancelJobGroup(tag)


class WatchedTorchDistributor(_Watched, SparkDistributor):  # type: ignore[misc]
    """pyspark's `TorchDistributor`, with a live view."""

    name = "TorchDistributor"


class WatchedDeepspeedDistributor(_Watched, SparkDeepspeed):  # type: ignore[misc]
    """pyspark's `DeepspeedTorchDistributor`, with a live view."""

    name = "DeepspeedTorchDistributor"


TorchDistributor = WatchedTorchDistributor
DeepspeedTorchDistributor = WatchedDeepspeedDistributor


class LocalLines:
    """The client of Spark's log server, for ranks on this machine, whose lines Spark reads in this process."""

    failed = False

    def __init__(self, launched: Launched) -> None:
        self._launched = launched

    def send(self, line: str) -> None:
        self._launched.read(line)

    @property
    def sock(self) -> LocalLines:
        """Spark prints a line by itself unless both ends have one address."""
        return self

    def getsockname(self) -> tuple[str, int]:
        return "", 0

    getpeername = getsockname


@contextmanager
def log_server(launched: Launched) -> Iterator[None]:
    """Make Spark start our log server for calls of this thread inside the block."""
    if spark_distributor.LogStreamingServer is not make_server:
        spark_distributor.LogStreamingServer = make_server
    _here.launched = launched
    try:
        yield
    finally:
        del _here.launched


@contextmanager
def unbuffered() -> Iterator[None]:
    """Let programs that are started inside the block write each line at once. On this machine pyspark (4.3) passes the
    lines of ranks on through a program that would hold back 8 KB; in tasks Spark sets the variable itself."""
    before = os.environ.get("PYTHONUNBUFFERED")
    os.environ["PYTHONUNBUFFERED"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONUNBUFFERED", None)
        else:
            os.environ["PYTHONUNBUFFERED"] = before


def make_server() -> Any:
    """Return a log server for the run of this thread: ours, or Spark's for its own classes."""
    launched = getattr(_here, "launched", None)
    return SparkServer() if launched is None else LogServer(launched)
