# train_moons.py: horovodrun -np 2 python train_moons.py
import ringtrain
from my_workload import Moons

if __name__ == "__main__":
    result = ringtrain.train(Moons, {"epochs": 5, "out": "runs/script"})
    if result:  # None where the run was complete before
        print(f"{result.evaluation.metrics}\n", end="")  # the same on every rank
