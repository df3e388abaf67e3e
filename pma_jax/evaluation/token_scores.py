"""Log-likelihoods and greedy continuations of token sequences, on the mesh.

Sequences are grouped by length and padded to one of a few lengths, which are chosen so that little is padding, because
each shape is compiled once. Only one number per sequence, or the generated ids, leave the devices.

With several processes, the first one calls `run_on_mesh` with the work, and the others compute the batches that it
broadcasts.

Dimensions: B sequences per batch, M = L + 1 tokens per sequence, P tokens of the longest prompt.
"""

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pma_jax.config import Config
from pma_jax.config.errors import UserError
from pma_jax.data.sampling import PADDING_ID
from pma_jax.model.decoder import Params, graph_definition
from pma_jax.model.generation import continue_generation, start_generation
from pma_jax.model.loss import MAX_BATCHES_IN_FLIGHT, score_step
from pma_jax.runtime import hosts
from pma_jax.runtime.mesh import RULES, axes_of, local_rows, put_batch

LENGTHS = 6  # lengths that the sequences of one call are padded to, at most
LENGTH_MULTIPLE = 16  # tokens
GENERATED_PER_CALL = 16  # tokens that are generated before the stop strings are looked for


@dataclasses.dataclass(frozen=True)
class MeshModel:
    """A model on the mesh that scores and continues sequences.

    Attributes:
        graph: The graph definition of the decoder.
        params: Its parameters.
        mesh: Their mesh.
        sequence_tokens: The longest sequence that the model reads.
        batch_tokens: Number of tokens of a batch.
    """

    graph: nnx.GraphDef
    params: Params
    mesh: jax.sharding.Mesh
    sequence_tokens: int
    batch_tokens: int

    def score(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """Score the last tokens of sequences.

        Args:
            sequences: Pairs of the token ids of a sequence, at most `sequence_tokens` + 1, and the number of its last
                tokens to score, less than all of them.

        Returns:
            For each sequence the log-probability of the scored tokens in nats, and whether each of them is the most
            likely one.
        """
        results: list[tuple[float, bool]] = [(0.0, True)] * len(sequences)
        pending: list[tuple[Sequence[int], Any]] = []
        for length, B, rows in self._group([len(ids) - 1 for ids, _ in sequences]):
            tokens_BxM = np.full((B, length + 1), PADDING_ID, np.int32)
            for row, index in enumerate(rows):
                ids, scored = sequences[index]
                tokens_BxM[row, : len(ids)] = ids
                tokens_BxM[row, : len(ids) - scored] = ~tokens_BxM[row, : len(ids) - scored]
            pending.append((rows, self._call("score", tokens_BxM)))
            if len(pending) > MAX_BATCHES_IN_FLIGHT:
                jax.block_until_ready(pending[-1 - MAX_BATCHES_IN_FLIGHT][1])
        for rows, scores in pending:
            nats_B, is_greedy_B = jax.device_get(scores)
            for row, index in enumerate(rows):
                results[index] = -float(nats_B[row]), bool(is_greedy_B[row])
        return results

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, is_finished: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """Continue prompts with the most likely tokens.

        Args:
            prompts: Token ids of each prompt, at least one.
            max_tokens: Tokens of a continuation; a prompt and its continuation have at most `sequence_tokens`.
            is_finished: Says of the first tokens of a continuation that the rest is not needed.

        Returns:
            The tokens of each continuation; after it is finished, it may hold more.
        """
        results: list[list[int]] = [[] for _ in prompts]
        for length, B, rows in self._group([len(prompt) for prompt in prompts], room=max_tokens):
            tokens_BxP, first_B = np.zeros((B, length), np.int32), np.full(B, length - 1, np.int32)
            for row, index in enumerate(rows):
                first_B[row] = length - len(prompts[index])
                tokens_BxP[row, first_B[row] :] = prompts[index]
            calls = math.ceil(max_tokens / GENERATED_PER_CALL)
            generation = self._call("start", tokens_BxP, first_B, calls * GENERATED_PER_CALL)
            for _ in range(calls):
                generation, chosen = self._call("continue", generation)
                chosen_BxC = np.asarray(chosen)
                for row, index in enumerate(rows):
                    results[index] += chosen_BxC[row].tolist()
                if all(is_finished(results[index]) for index in rows):
                    break
        return [tokens[:max_tokens] for tokens in results]

    def _group(self, lengths: Sequence[int], room: int = 0) -> list[tuple[int, int, list[int]]]:
        """Divide sequences into batches, the longest first.

        Args:
            lengths: Number of tokens of each sequence.
            room: Number of tokens that are added to each; with them it has at most `sequence_tokens`.

        Returns:
            For each batch the length to pad to, its number of rows, and the indices of its sequences, at most as many.
        """
        padded = choose_lengths(lengths, self.sequence_tokens - room)
        by_length: dict[int, list[int]] = {}
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            by_length.setdefault(min(p for p in padded if p >= lengths[index]), []).append(index)
        batches: list[tuple[int, int, list[int]]] = []
        for length, indices in by_length.items():
            most = max(self.batch_tokens // (length + room) // self._shares, 1) * self._shares
            count = math.ceil(len(indices) / most)
            rows = math.ceil(len(indices) / count / self._shares) * self._shares
            batches += [(length, rows, indices[i : i + rows]) for i in range(0, len(indices), rows)]
        return batches

    @property
    def _shares(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes_of(RULES.batch))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Compute a batch in all processes."""
        if hosts.process_index_and_count()[1] > 1:
            sent = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments if not _is_generation(a)]
            hosts.broadcast_from_first(lambda: json.dumps([name, sent]))
        return self._compute(name, *arguments)

    def _compute(self, name: str, *arguments: Any) -> Any:
        with jax.set_mesh(self.mesh):
            match name:
                case "score":
                    return score_step(self.graph, self.params, self._put(arguments[0]))
                case "start":
                    tokens_BxP, first_B, room = arguments
                    first = self._put(first_B[:, None])[:, 0]
                    return start_generation(self.graph, self.params, self._put(tokens_BxP), first, room)
                case "continue":
                    return continue_generation(self.graph, self.params, arguments[0], GENERATED_PER_CALL)
                case _:
                    raise AssertionError(name)

    def _put(self, rows_BxN: np.ndarray) -> jax.Array:
        return put_batch(self.mesh, rows_BxN[local_rows(self.mesh, len(rows_BxN))])

    def follow(self) -> Any:
        """Compute the batches that the first process broadcasts, and return what its work returns."""
        generation: Any = None
        while True:
            name, values = json.loads(hosts.broadcast_from_first(lambda: ""))
            if name == "end":
                return values
            if name == "continue":
                generation, _ = self._compute(name, generation)
                continue
            arrays = [np.array(v, np.int32) if isinstance(v, list) else v for v in values]
            result = self._compute(name, *arrays)
            generation = result if name == "start" else generation


def make_model(config: Config, params: Params, mesh: jax.sharding.Mesh) -> MeshModel:
    """Return the model that scores sequences of at most a training sequence, in batches as evaluations have."""
    length = config.training.sequence_length_tokens
    with jax.set_mesh(mesh):
        graph = graph_definition(config.model)
    return MeshModel(graph, params, mesh, length, config.evaluation.batch_size_sequences * length)


def run_on_mesh(model: MeshModel, work: Callable[[], Any]) -> Any:
    """Call `work`, which calls `model`, in the first process, and return its result, JSON values, in all.

    Raises:
        Exception: The error of `work` in the first process; in the others, as `hosts.broadcast_from_first`.
    """
    if hosts.process_index_and_count()[1] == 1:
        return work()
    if not hosts.is_first_process():
        return model.follow()
    try:
        result = work()
    except Exception as raised:
        error = raised

        def fail() -> str:
            raise error

        hosts.broadcast_from_first(fail)
        raise
    hosts.broadcast_from_first(lambda: json.dumps(["end", result]))
    return result


def choose_lengths(lengths: Sequence[int], longest: int) -> list[int]:
    """Choose the lengths to pad sequences to, with the fewest tokens of padding.

    Args:
        lengths: Number of tokens of each sequence.
        longest: The largest length that a sequence has.

    Returns:
        At most `LENGTHS` lengths, ascending: multiples of `LENGTH_MULTIPLE`, or `longest`.
    """
    counts = collections.Counter(min(-(-n // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest) for n in lengths)
    sizes = sorted(counts)
    up_to = [0, *itertools.accumulate(counts[size] for size in sizes)]  # sequences of the first j sizes
    # For each size as the largest: the tokens with padding, and the chosen lengths.
    best = [(up_to[j + 1] * size, [size]) for j, size in enumerate(sizes)]
    for _ in range(LENGTHS - 1):
        best = [
            min(
                [best[j], *((best[i][0] + (up_to[j + 1] - up_to[i + 1]) * size, [*best[i][1], size]) for i in range(j))]
            )
            for j, size in enumerate(sizes)
        ]
    return best[-1][1] if best else []


def truncate(context: Sequence[int], continuation: Sequence[int], sequence_tokens: int) -> list[int]:
    """Return the last tokens of a context and its continuation that the model can read.

    The last token of the continuation is predicted but not read, so they are at most `sequence_tokens` + 1.

    Raises:
        UserError: The continuation alone is too long, so that its first token could not be scored.
    """
    if len(continuation) > sequence_tokens:
        raise UserError(
            f"an answer has {len(continuation)} tokens, and the model reads {sequence_tokens} at once "
            "(training.sequence_length_tokens): leave out the task"
        )
    return [*context, *continuation][-(sequence_tokens + 1) :]


def _is_generation(argument: Any) -> bool:
    return dataclasses.is_dataclass(argument)
