"""Plain TensorFlow in one process that may use all cores, on the whole global batch.

python one_process.py --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

import peer_loop


def main() -> None:
    arguments = peer_loop.parse_arguments(__doc__)
    peer_loop.pin(arguments, 0)
    peer_loop.set_threads(arguments)
    model, train_step = peer_loop.create_step(arguments.model)
    peer_loop.write_weights(arguments, model, name="first")
    batches = peer_loop.make_batches(arguments, 0, num_parts=1)
    sec_per_step, loss = peer_loop.time_steps(train_step, batches, arguments, is_rank0=True)
    peer_loop.write_results(arguments, sec_per_step, float(loss), model)


if __name__ == "__main__":
    main()
