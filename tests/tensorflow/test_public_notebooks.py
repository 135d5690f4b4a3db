"""The public example of spark-tensorflow-distributor with a strategy of its own, which nobody here has written: its own
lines, made smaller, from top to bottom."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.training import missing
from tests.notebook import Notebook

TRAIN = """\
import os
from spark_tensorflow_distributor import MirroredStrategyRunner

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
num_workers = 2

def train():
    import tensorflow as tf
    import json

    BUFFER_SIZE = 100
    BATCH_SIZE = 16

    def make_datasets():
        images, labels = tf.random.normal((64, 8, 8, 1)), tf.random.uniform((64,), maxval=10, dtype=tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices((images, labels))
        return dataset.repeat().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)

    def build_and_compile_cnn_model():
        model = tf.keras.Sequential([
            tf.keras.layers.Conv2D(4, 3, activation='relu', input_shape=(8, 8, 1)),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation='softmax'),
        ])
        model.compile(
            loss=tf.keras.losses.sparse_categorical_crossentropy,
            optimizer=tf.keras.optimizers.SGD(learning_rate=0.001),
            metrics=['accuracy'],
        )
        return model

    train_datasets = make_datasets()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    train_datasets = train_datasets.with_options(options)
    model = build_and_compile_cnn_model()
    model.fit(x=train_datasets, epochs=2, steps_per_epoch=3)
    print('Model training completed')

    tf_config = json.loads(os.environ['TF_CONFIG'])
    if tf_config['task']['index'] == 0:
        model.save_weights('weights.h5')
        with open('configs.json', 'w') as f_configs:
            f_configs.write(model.to_json())
"""
RUN = """\
def train_with_custom_strategy():
    import tensorflow as tf

    communication_options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication_options)
    with strategy.scope():
        return train()

MirroredStrategyRunner(num_slots=num_workers, use_gpu=False, use_custom_strategy=True).run(train_with_custom_strategy)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(missing("tensorflow") is not None, reason=f"{missing('tensorflow')}; sh .ci/tensorflow")
def test_a_strategy_of_the_notebook_trains_on_all_workers_and_the_first_saves(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib\n%distributed_compat spark")
        book.ok(TRAIN)
        outcome = book.cell(RUN, 200)
        assert outcome.status == "ok", outcome.text
        assert outcome.view.count("Model training completed") >= 1
    assert {"weights.h5", "configs.json"} <= {path.name for path in tmp_path.iterdir()}
