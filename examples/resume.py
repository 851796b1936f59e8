"""Train on although a rank is killed, and resume after the whole program is killed.

    python examples/resume.py /tmp/runs

One of the ranks is killed after 100 of 300 steps, and training goes on from there. You can also kill the whole program
with ``kill -9``. When you start it again, it resumes from its last checkpoint. On a cluster, pass a folder that all
nodes and the driver see, or a URL.
"""

from __future__ import annotations

import os
import signal
import sys

from distributor import Checkpoints, Distributor, runtime


def train(steps: int = 300, killed_at: int = 100) -> tuple[int, float]:
    """Train on handwritten digits. Return the step at which the last attempt began, and the last loss."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits

    dist.init_process_group("gloo")
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    state = {"model": model, "optimizer": optimizer}
    begun = runtime.load_checkpoint(state) or 0
    loss = torch.zeros(())
    for step in range(begun + 1, steps + 1):
        chosen = torch.randint(len(images), (32,))
        loss = torch.nn.functional.cross_entropy(model(images[chosen].float() / 16), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        runtime.report(step=step, total_steps=steps, loss=loss)
        if step % 10 == 0:
            runtime.save_checkpoint(state, step)
        if step == killed_at and runtime.attempt() == 0 and runtime.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    dist.destroy_process_group()
    return begun, loss.item()


if __name__ == "__main__":
    kept = Checkpoints(sys.argv[1], memory=True)
    run = Distributor(2, use_gpu=False, name="digits", checkpoints=kept, max_restarts=3).submit(train)
    begun, loss = run.result()
    print(f"went on from step {begun}; loss {loss:.3f}")
    for attempt in run.attempts:
        print(attempt)
