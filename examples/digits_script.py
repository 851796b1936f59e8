"""The digits example as a script with arguments, as you would write it for torchrun.

Run it with three ranks, on this machine or on the executors of the active Spark session::

    TorchDistributor(num_processes=3, use_gpu=False).run("examples/digits_script.py", "--epochs", "20")
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description="Learn handwritten digits.")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--save", help="file to which rank 0 writes the weights")
args = parser.parse_args()

dist.init_process_group("gloo")
pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(labels)
held_out = torch.arange(len(x)) % 4 == 0
data = TensorDataset(x[~held_out], y[~held_out])
sampler = DistributedSampler(data, seed=0)

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for pixels, labels in DataLoader(data, batch_size=args.batch_size, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

if dist.get_rank() == 0:
    with torch.no_grad():
        accuracy = (network(x[held_out]).argmax(dim=1) == y[held_out]).float().mean().item()
    print(f"accuracy {accuracy:.4f} on {dist.get_world_size()} ranks")
    if args.save:
        torch.save(network.state_dict(), args.save)
dist.destroy_process_group()
