"""The methods of `replicas` as loops over explicit workers, in NumPy and float64.

A tree is a dict from the path of a leaf to an array: "blocks/w" has a leading dim of layers, all others have none.
"""

import jax
import jax.numpy as jnp
import numpy as np
from oracle_models import LAYERS, LINEAR, OPTIMIZER, RATE, to_flat, to_tree

from pma_jax import config as configuration
from pma_jax.replicas import method, noloco, quantize, sparta
from pma_jax.replicas.workers import Workers, broadcast
from pma_jax.runtime.mesh import MeshConfig, make_mesh
from pma_jax.training.optimizer import init_opt_state, update_params


def make_config(**changes):
    """Return a configuration with steps of 16 tokens, in which `diloco_rate=0.5` changes `replicas.diloco_rate`."""
    raw = {
        "model": {"layers": LAYERS},
        "training": {"batch_size_sequences": 8, "sequence_length_tokens": 2},
        "checkpoint": {"interval_tokens": 16},
        "replicas": {"count": 4, "interval_tokens": 64} | changes,
    }
    if raw["replicas"]["method"] == "sparta" and not changes.get("sparta_diloco"):
        del raw["replicas"]["interval_tokens"]
    return configuration.resolve(raw)


def run_package(config, theta, x, mesh=None, model=LINEAR, uses_adam=False):
    """Train with the functions of the package; return the workers at each step, and what they share in the end.

    Args:
        config: The configuration.
        theta: The parameters from which all workers start.
        x: Inputs of each step and worker.
        mesh: The mesh, by default of one device.
        model: The model, from `oracle_models`.
        uses_adam: Whether the inner optimizer is the package's AdamW; otherwise it is SGD.
    """
    count = config.replicas.count
    mesh = mesh or make_mesh(MeshConfig(data=1))
    history = []
    with jax.set_mesh(mesh):
        params = jax.tree.map(jnp.asarray, to_tree(theta))
        outer = method.init(config.replicas, params, count)
        moments = broadcast(init_opt_state(OPTIMIZER, params), count) if uses_adam else {}
        workers = Workers(broadcast(params, count), moments, outer)
        for step, x_K in enumerate(x, 1):
            slopes = model.slopes(jax.tree.map(np.asarray, workers.params), x_K)
            slopes = jax.tree.map(lambda p, g: jax.device_put(g, p.sharding), workers.params, slopes)
            if uses_adam:
                workers = Workers(*_adam_steps(slopes, workers.moments, workers.params), workers.outer)
            else:
                workers = Workers(_sgd_steps(slopes, workers.params), {}, workers.outer)
            if sync := method.sync_after(config, step * config.batch_tokens):
                workers = method.make_sync(config.replicas, sync, mesh)(workers, jnp.int32(step))
            history.append(to_flat(workers.params))
        shared = to_flat(method.shared_params(config.replicas, workers))
    return history, shared


@jax.jit
def _sgd_steps(slopes, params):
    return jax.tree.map(lambda p, g: p - RATE * g, params, slopes)


@jax.jit
@jax.vmap
def _adam_steps(slopes, moments, params):
    params, moments = update_params(OPTIMIZER, slopes, moments, params, RATE, 16)
    return params, moments


class InnerSteps:
    """The steps of the workers, in NumPy: SGD, or AdamW, whose moments of each worker are kept here."""

    def __init__(self, model=LINEAR, uses_adam=False):
        self.model, self.uses_adam = model, uses_adam
        self.moments_k, self.step = None, 0

    def __call__(self, theta_k, x_K):
        slopes = to_flat(self.model.slopes(jax.tree.map(lambda *leaves: np.stack(leaves), *map(to_tree, theta_k)), x_K))
        slopes_k = [{name: g[k] for name, g in slopes.items()} for k in range(len(theta_k))]
        if not self.uses_adam:
            of_workers = zip(theta_k, slopes_k, strict=True)
            return [{name: theta[name] - RATE * g[name] for name in theta} for theta, g in of_workers]
        self.step += 1
        if self.moments_k is None:
            self.moments_k = [{name: np.zeros((2, *g.shape)) for name, g in slopes.items()} for slopes in slopes_k]
        return [self._adam(*of_worker) for of_worker in zip(theta_k, slopes_k, self.moments_k, strict=True)]

    def _adam(self, theta, slopes, moments):
        """Take an AdamW step (arXiv 1711.05101); weight decay excludes norm scales."""
        new, o, t = {}, OPTIMIZER, self.step
        for name, g in slopes.items():
            m, v = moments[name]
            moments[name] = m, v = np.stack([o.b1 * m + (1 - o.b1) * g, o.b2 * v + (1 - o.b2) * g**2])
            direction = m / (1 - o.b1**t) / (np.sqrt(v / (1 - o.b2**t)) + o.epsilon)
            decay = 0 if "norm" in name else o.weight_decay
            new[name] = theta[name] - RATE * (direction + decay * theta[name])
        return new

    def average_moments(self):
        self.moments_k = [mean(self.moments_k) for _ in self.moments_k]


def mean(theta_k):
    return {name: np.mean([theta[name] for theta in theta_k], axis=0) for name in theta_k[0]}


def run_periodic(c, theta, x, inner_steps):
    theta_k, history = [theta] * c.count, []
    for step, x_K in enumerate(x, 1):
        theta_k = inner_steps(theta_k, x_K)
        if step % 4 == 0:
            theta_k = [mean(theta_k)] * c.count
            if c.periodic_moments:
                inner_steps.average_moments()
        history.append(theta_k)
    return history, mean(theta_k)


def run_diloco(c, theta, x, inner_steps, share=0.0):
    theta_k, history = [theta] * c.count, []
    v = {name: np.zeros_like(leaf) for name, leaf in theta.items()}
    for step, x_K in enumerate(x, 1):
        theta_k = inner_steps(theta_k, x_K)
        if share:
            theta_k = average_share(theta_k, share, step)
        if step % 4 == 0:
            inner = mean(theta_k)
            for name in theta:
                change = theta[name] - inner[name]
                v[name] = change + c.diloco_momentum * v[name]
                move = change + c.diloco_momentum * v[name] if c.diloco_nesterov else v[name]
                theta = theta | {name: theta[name] - c.diloco_rate * move}
            theta_k = [theta] * c.count
        history.append(theta_k)
    return history, theta


def average_share(theta_k, share, step):
    """Average elements over the workers; which ones is the choice of the package, for the step and the leaf."""
    new = [{name: leaf.copy() for name, leaf in theta.items()} for theta in theta_k]
    for name, chosen in chosen_elements(theta_k[0], share, step).items():
        middle = np.mean([theta[name].reshape(-1)[chosen] for theta in theta_k], axis=0)
        for theta in new:
            theta[name].reshape(-1)[chosen] = middle
    return new


def chosen_elements(theta, share, step):
    """Return leaf -> the flat indices that the package averages after a step."""
    key = jax.random.fold_in(jax.random.key(sparta.SEED), step)
    names = sorted(theta)
    chosen = sparta.choose(key, [theta[name].size for name in names], share)
    return {name: np.asarray(index) for name, index in zip(names, chosen, strict=True)}


def run_sparta(c, theta, x, inner_steps):
    if c.sparta_diloco:
        return run_diloco(c, theta, x, inner_steps, c.sparta_share)
    theta_k, history = [theta] * c.count, []
    for step, x_K in enumerate(x, 1):
        theta_k = average_share(inner_steps(theta_k, x_K), c.sparta_share, step)
        history.append(theta_k)
    return history, mean(theta_k)


def run_noloco(c, theta, x, inner_steps):
    theta_k, phi, history = [theta] * c.count, [theta] * c.count, []
    m = [{name: np.zeros_like(leaf) for name, leaf in theta.items()} for _ in range(c.count)]
    for step, x_K in enumerate(x, 1):
        theta_k = inner_steps(theta_k, x_K)
        if step % 4 == 0:
            rounds = noloco.round_robin(c.count)
            key = jax.random.fold_in(jax.random.key(noloco.SEED), step)
            partners = rounds[int(jax.random.randint(key, (), 0, len(rounds)))]
            old_phi, new_phi, new_m = phi, [], []
            for i, j in enumerate(partners):
                both = {}
                for name in theta:
                    changes = [theta_k[k][name] - old_phi[k][name] for k in (i, j)]
                    middle = (old_phi[i][name] + old_phi[j][name]) / 2
                    both[name] = (
                        c.noloco_momentum * m[i][name]
                        + c.noloco_rate * (changes[0] + changes[1]) / 2
                        + c.noloco_pull * (middle - old_phi[i][name])
                    )
                new_m.append(both)
                new_phi.append({name: old_phi[i][name] + both[name] for name in theta})
            m, phi, theta_k = new_m, new_phi, list(new_phi)
        history.append(theta_k)
    return history, mean(phi)


def round_to(kind, x):
    """Return what a float64 array is after it was sent in few bits, from the grids of the docstring of `quantize`."""
    if not x.any():
        return x
    if kind in ("int8", "int4"):
        highest = {"int8": 127, "int4": 7}[kind]
        scale = np.abs(x).max() / highest
        return np.round(x / scale) * scale
    size = np.abs(x)
    # Leaves here have fewer values than a sample. bfloat16 is the upper half of a float32.
    bits = np.sort(size[size > 0]).astype(np.float32).view(np.uint32) >> 16 << 16
    scale = bits[(bits.size - 1) // 2].view(np.float32).astype(float)
    levels = np.array([0.25, 0.5, 1, 2, 4, 8])
    nearest = levels[np.abs(np.log2(np.maximum(size / scale, 1e-9))[..., None] - np.log2(levels)).argmin(-1)]
    return np.sign(x) * np.where(size / scale < 1 / 8, 0, nearest) * scale


def fragment(name, f, fragments):
    """Return the index of a fragment's part of a leaf, or None."""
    if name.startswith("blocks/"):
        return slice(f * LAYERS // fragments, (f + 1) * LAYERS // fragments)
    return slice(None) if f == (0 if name == "embedding_VxD" else fragments - 1) else None


def run_streaming(c, theta, x, inner_steps):
    count, P = c.count, c.streaming_fragments
    every, delay = 4 // P, c.streaming_delay_tokens // 16  # steps
    theta_k, history = [dict(theta) for _ in range(count)], []
    theta = dict(theta)
    v = {name: np.zeros_like(leaf) for name, leaf in theta.items()}
    residual = [{name: np.zeros_like(leaf) for name, leaf in theta.items()} for _ in range(count)]
    for step, x_K in enumerate(x, 1):
        theta_k = inner_steps(theta_k, x_K)
        if step % every == 0:
            send(c, theta, theta_k, v, residual, (step // every) % P)
        sent = step - delay
        if sent > 0 and sent % every == 0:
            for name in theta:
                index = fragment(name, (sent // every) % P, P)
                for worker in theta_k if index is not None else ():
                    alpha, mixed = c.streaming_mixing, worker[name].copy()
                    mixed[index] = alpha * mixed[index] + (1 - alpha) * theta[name][index]
                    worker[name] = mixed
        history.append([dict(worker) for worker in theta_k])
    return history, theta


def send(c, theta, theta_k, v, residual, f):
    for name in theta:
        index = fragment(name, f, c.streaming_fragments)
        if index is None:
            continue
        changes = []
        for worker, left in zip(theta_k, residual, strict=True):
            change = theta[name][index] - worker[name][index]
            if c.streaming_error_feedback:
                change = change + left[name][index]
            rounded = change if c.streaming_dtype == "float32" else round_to(c.streaming_dtype, change)
            left[name][index] = change - rounded
            changes.append(rounded)
        change = np.mean(changes, axis=0)
        v[name][index] = change + c.streaming_momentum * v[name][index]
        new = theta[name].copy()
        new[index] -= c.streaming_rate * (change + c.streaming_momentum * v[name][index])
        theta[name] = new


ORACLES = {
    "periodic": run_periodic,
    "diloco": run_diloco,
    "streaming": run_streaming,
    "sparta": run_sparta,
    "noloco": run_noloco,
}
KINDS = quantize.Kind.__args__
