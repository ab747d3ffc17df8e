"""One of several plain TensorFlow processes that train apart, pinned: an upper bound. With --meets they wait for each
other.

python unconnected.py --rank 0 --cores 0 --cores 1 --model CNN --size 2 --steps 300 ... --output DIR
"""

from __future__ import annotations

import peer_loop


def main() -> None:
    arguments = peer_loop.parse_arguments(__doc__)
    peer_loop.pin(arguments, arguments.rank)
    peer_loop.set_threads(arguments)
    model, train_step = peer_loop.create_step(arguments.model, fused=arguments.fused)
    batches = peer_loop.make_batches(arguments, arguments.rank)
    if arguments.meets:
        batches = peer_loop.meeting(batches, arguments)
    sec_per_step, loss = peer_loop.time_steps(train_step, batches, arguments, is_rank0=arguments.rank == 0)
    peer_loop.write_results(arguments, sec_per_step, float(loss), model, name=f"result-{arguments.rank}")


if __name__ == "__main__":
    main()
