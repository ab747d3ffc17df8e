"""Model that averages over mirror images."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="ringtrain")
class MirrorAverage(keras.Model):
    """Functional model; outside training it averages outputs over each image and its mirror image.

    ``MirrorAverage(inputs, outputs)``, with images [n, h, w, c].
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        outputs = super().call(inputs, training=training, mask=mask)
        if training:
            return outputs
        return (outputs + super().call(keras.ops.flip(inputs, axis=2), training=training, mask=mask)) / 2
