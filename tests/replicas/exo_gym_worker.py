"""One worker of exo gym's strategies, with the linear model of `oracle_models` in torch: a process of test_exo_gym.py.

Command:   python exo_gym_worker.py FOLDER RANK COUNT

FOLDER/setting.json has the keys of the strategy, FOLDER/inputs.npz the start, the inputs and SPARTA's masks. The
parameters after each step are written to FOLDER/RANK.npz.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from exogym.strategy import CommunicateOptimizeStrategy, DiLoCoCommunicator, OptimSpec
from exogym.strategy.sparta import SparseCommunicator


class Masks:
    """Choose the elements that are averaged from a table, where exo gym draws them."""

    def __init__(self, masks, names):
        self.masks, self.names = masks, names

    def get_indices(self, param, iteration):
        return torch.from_numpy(self.masks[self.names[id(param)]][iteration])


def loss(params, x):
    """Return what `oracle_models.linear_loss` returns."""
    y = torch.einsum("bli,lij->bj", x, params["blocks/w"]) + params["blocks/b"].sum(0)
    y = y + params["embedding_VxD"][:2].sum(0) + params["final_norm_D"]
    return ((y - x[:, 0].flip(1)) ** 2).mean()


def main(folder, rank, count):
    """Train a worker; the first step has no gradient, after which exo gym counts steps as pma_jax does."""
    setting, inputs = json.loads((folder / "setting.json").read_text()), np.load(folder / "inputs.npz")
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=count)
    model = torch.nn.Module()
    for name in setting["leaves"]:
        model.register_parameter(name, torch.nn.Parameter(torch.from_numpy(inputs[f"theta {name}"])))
    params = dict(model.named_parameters())
    modules = []
    if setting["sparta"]:
        masks = {name: inputs[f"mask {name}"] for name in params}
        modules.append(SparseCommunicator(Masks(masks, {id(param): name for name, param in params.items()})))
    if outer := setting["outer"]:
        modules.append(DiLoCoCommunicator(setting["steps"], OptimSpec(torch.optim.SGD, **outer)))
    strategy = CommunicateOptimizeStrategy(modules, OptimSpec(torch.optim.SGD, lr=setting["rate"]))
    strategy._init_node(model, rank, count)
    history = {name: [] for name in params}
    for step in range(len(inputs["x"]) + 1):
        strategy.zero_grad()
        x = torch.from_numpy(inputs["x"][step - 1, rank])
        (loss(params, x) * (0 if step == 0 else 1)).backward()
        strategy.step()
        for name, param in model.named_parameters():
            history[name].append(param.detach().numpy().copy())
            # On CPU, exo gym's first worker shares memory with the outer parameters, which its next steps would change.
            param.data = param.data.clone()
    np.savez(folder / f"{rank}.npz", **{name: np.stack(of_steps[1:]) for name, of_steps in history.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
