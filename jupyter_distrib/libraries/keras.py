"""The facts about Keras 3, which cannot `fit` under TensorFlow's `MultiWorkerMirroredStrategy` (3.15)."""

from __future__ import annotations

import functools
from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries.library import Library

_STRATEGIES = ("CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy")


def _refuse_several_workers(module: Any) -> None:
    for name in ("fit", "evaluate", "predict"):
        original = getattr(module.TensorFlowTrainer, name)
        setattr(module.TensorFlowTrainer, name, _refusing(name, original))


def _refusing(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def method(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        import tensorflow as tf

        if type(tf.distribute.get_strategy()).__name__ in _STRATEGIES:
            raise DistributedError(
                f"Keras 3 cannot {name} on several workers of TensorFlow: use tf_keras, which `tf.keras` is in this "
                "cell, or `import tf_keras as keras` (pip install tf_keras)."
            )
        return original(trainer, *arguments, **keywords)

    return method


KERAS = Library(modules=("keras",), mend={"keras.src.backend.tensorflow.trainer": _refuse_several_workers})
