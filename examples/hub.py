# hub.py: horovodrun -np 2 python -m ringtrain --workload hub.py
import keras
import keras_hub
import numpy as np
from ringtrain import Sources, Workload, from_arrays

VOCABULARY, LENGTH = 100, 16


class Bert(Workload):  # built from its class, with random weights; from_preset("bert_tiny_en_uncased") has trained ones
    defaults = {"epochs": 5, "batch_size": 32, "optimizer": {"name": "adamw", "lr": 0.002}}

    def create_model(self):
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=VOCABULARY,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            intermediate_dim=64,
            max_sequence_length=LENGTH,
        )
        return keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)

    def create_sources(self, data_dir, *, synthetic):  # is there a 7 in a sentence of tokens?
        tokens = np.random.default_rng(0).integers(10, VOCABULARY, (2000, LENGTH))
        tokens[::2, 3] = 7
        inputs = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": np.ones_like(tokens)}
        return Sources(train=from_arrays(inputs, (tokens == 7).any(axis=1).astype(np.int64)))

    def loss(self, y, outputs):
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
