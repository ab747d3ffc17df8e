"""A model of images that is evaluated on each image and on its mirror image."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="ringtrain")
class MirrorAverage(keras.Model):
    """A functional model whose outputs, outside training, are the mean of those for an image and for its mirror image.

    Made as any functional model: ``MirrorAverage(inputs, outputs)``; the inputs are images [n, h, w, c]. Training sees
    each image as it comes.
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        outputs = super().call(inputs, training=training, mask=mask)
        if training:
            return outputs
        return (outputs + super().call(keras.ops.flip(inputs, axis=2), training=training, mask=mask)) / 2
