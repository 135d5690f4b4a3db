"""`--strategy tensorflow` and `MirroredStrategyRunner` with real TensorFlow on two CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import leftovers_after
from tests.frameworks.training import missing
from tests.notebook import Notebook
from tests.pools.command.test_restarts import POOL as TWO_NODES
from tests.repository.test_notebooks import executed, outputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(missing("tensorflow") is not None, reason=f"{missing('tensorflow')}; sh .ci/tensorflow"),
]

LINE = "%%distributed --ranks 2 --out got --strategy tensorflow "
FIT = """
import numpy as np
import tensorflow as tf
random = np.random.default_rng(0)
x = random.normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="tanh"), tf.keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
history = model.fit(x, y, batch_size=16, epochs=10, verbose=0)
losses = history.history["loss"]
"""
VALUE = "losses, model.get_weights(), strategy.num_replicas_in_sync"
SAME = """
import numpy as np, sys
equal = all(np.array_equal(a, b) for a, b in zip(got[0][1], got[1][1]))
print(equal, got[0][0][-1] < got[0][0][0], got[0][2], "tensorflow" in sys.modules)
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("tensorflow"), {"CUDA_VISIBLE_DEVICES": ""}) as book:
        book.ok("%load_ext jupyter_distrib")
        name = "from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)"
        session = book.ok(name).stdout.strip()
        yield book
    leftovers_after(session)


def test_keras_fits_in_the_scope_and_both_workers_end_with_the_same_weights(ours: Notebook) -> None:
    shown = ours.ok(
        LINE
        + FIT
        + dedent("""\
            import sys
            assert 'torch' not in sys.modules
            print('trained', rank)
        """)
        + VALUE
    )

    assert ours.ok(SAME).stdout == "True True 2 False\n"
    assert "[0-1] trained" in shown.view or "trained 0" in shown.view
    assert "2 ranks · tensorflow" in shown.view


def test_workers_of_two_nodes_have_both_addresses_and_go_on_when_one_is_lost(ours: Notebook) -> None:
    lost = "import os, signal\nif rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    "
    line = f"{LINE}{TWO_NODES} --max-restarts 1\n{lost}os.kill(os.getpid(), signal.SIGKILL)\n"
    value = f"{VALUE}, os.environ['HOST'], os.environ['TF_CONFIG']"
    shown = ours.cell(line + FIT + value, timeout_s=150)

    assert shown.status == "ok", shown.text
    assert ours.ok(SAME).stdout == "True True 2 False\n"
    assert "attempt 2 of 2, since rank 1" in shown.view
    ours.ok("import json\nfound = [json.loads(each[4]) for each in got]")
    assert (
        ours.ok("sorted({each[3] for each in got}), [each['task']['index'] for each in found]").result
        == "(['a', 'b'], [0, 1])"
    )
    assert (
        ours.ok("found[0]['cluster'] == found[1]['cluster'], len({*found[0]['cluster']['worker']})").result
        == "(True, 2)"
    )


def test_a_kept_model_goes_on_in_the_next_cell(ours: Notebook) -> None:
    ours.ok(f"{LINE}--keep model,x,y{FIT}")
    ours.ok(
        dedent(f"""\
            {LINE}
            history = model.fit(x, y, batch_size=16, epochs=1, verbose=0)
            history.history['loss'], model.get_weights(), strategy.num_replicas_in_sync""")
    )

    assert ours.ok("all(np.array_equal(a, b) for a, b in zip(got[0][1], got[1][1])), got[0][2]").result == "(True, 2)"


def test_tensors_and_variables_come_to_the_notebook_as_arrays(ours: Notebook) -> None:
    ours.ok(
        dedent(f"""\
            {LINE}
            import tensorflow as tf
            tf.constant([1, 2]) + rank, tf.Variable(3.0)""")
    )

    read = "type(got[1][0]).__name__, got[1][0].tolist(), float(got[1][1])"
    assert ours.ok(read).result == "('ndarray', [2, 3], 3.0)"
    assert ours.ok("import sys; 'tensorflow' in sys.modules").result == "False"


def test_a_cell_may_make_the_strategy_itself_and_run_again(ours: Notebook) -> None:
    cell = dedent("""\
        import os, tensorflow as tf
        own = tf.distribute.MultiWorkerMirroredStrategy()
        with own.scope():
            start = tf.Variable(1.0)
        total = own.run(lambda: tf.distribute.get_replica_context().all_reduce('sum', start))
        float(total), os.getpid()""")
    ours.ok(f"{LINE}--own-scope --fresh\n{cell}")
    ours.ok("before = got[0], got[1]")
    resolver = "Strategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())"
    ours.ok(f"{LINE}--own-scope\n{cell.replace('Strategy()', resolver)}")
    assert ours.ok("before[0][0], (got[0], got[1]) == before").result == "(2.0, True)"

    ring = "implementation=tf.distribute.experimental.CommunicationImplementation.RING"
    options = f"Strategy(communication_options=tf.distribute.experimental.CommunicationOptions({ring}))"
    refused = ours.fails(f"{LINE}--own-scope\n{cell.replace('Strategy()', options)}")
    assert (refused.ename, "--fresh" in refused.evalue) == ("DistributedError", True)
    ours.ok(LINE + FIT + VALUE)
    assert ours.ok(SAME).stdout.startswith("True True 2")


def test_a_strategy_that_is_made_after_operations_is_refused(ours: Notebook) -> None:
    ours.ok(f"{LINE}--own-scope --fresh\nimport tensorflow as tf\ntf.constant(1) + rank")
    refused = ours.fails(LINE + FIT)

    assert (refused.ename, "--fresh" in refused.evalue) == ("DistributedError", True)


def test_keras_3_is_refused_in_a_sentence_before_it_fails(ours: Notebook) -> None:
    keras_3 = FIT.replace("import tensorflow as tf", "import tensorflow as tf, keras").replace("tf.keras.", "keras.")
    refused = ours.fails(LINE + keras_3)

    assert refused.ename == "DistributedError"
    assert "Keras 3 cannot fit on several workers of TensorFlow: use tf_keras" in refused.evalue
    ours.ok(LINE + FIT + VALUE)
    assert ours.ok(SAME).stdout.startswith("True True 2")


def test_a_worker_that_raises_or_dies_is_reported_and_the_next_cell_trains(ours: Notebook) -> None:
    raised = ours.fails(LINE + FIT.replace("model.compile", "assert rank == 0, 'no more'\nmodel.compile"))
    assert raised.ename == "AssertionError"
    died = ours.fails(LINE + "\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + FIT)
    assert died.ename == "RankLost"

    ours.ok(LINE + FIT + VALUE)
    assert ours.ok(SAME).stdout.startswith("True True 2")


def test_a_stop_frees_workers_that_wait_in_a_collective(ours: Notebook) -> None:
    waits = FIT.replace("history = ", "if rank: print('ready', flush=True); import time; time.sleep(100)\nhistory = ")
    ours.start(LINE + waits)
    ours.until("ready")
    ours.manager.interrupt_kernel()
    assert ours.finish().ename == "KeyboardInterrupt"

    ours.ok(LINE + FIT + VALUE)
    assert ours.ok(SAME).stdout.startswith("True True 2")


def test_on_some_of_the_ranks_it_is_refused(ours: Notebook) -> None:
    assert "--on runs the cell on some of them: leave --on out" in ours.fails(f"{LINE}--on 0\n1").evalue


RUNNER = "from jupyter_distrib.compat.mirrored_strategy_runner import MirroredStrategyRunner\n"


def test_the_runner_returns_the_first_worker_s_value(ours: Notebook) -> None:
    body = "".join(f"    {line}\n" for line in FIT.strip().splitlines())
    ours.ok(f"{RUNNER}def train():\n{body}    return losses, tf.distribute.get_strategy().num_replicas_in_sync")
    ours.ok("value = MirroredStrategyRunner(num_slots=2, use_gpu=False).run(train)")
    assert ours.ok("value[0][-1] < value[0][0], value[1]").result == "(True, 2)"


def test_the_notebook_trains_as_its_text_says(ours: Notebook, tmp_path: Path) -> None:
    cells = executed("tensorflow.ipynb", tmp_path)

    assert float(outputs(cells[-1])) > 0.8
