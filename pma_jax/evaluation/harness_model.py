"""lm-eval's model class (`TemplateLM`) over a model on the mesh.

The numbers are those that lm-eval's `hf` backend computes: the same windows of a long text, the same truncation from
the left, the same end of a generation. lm-eval is the extra `eval`.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pma_jax.config.errors import UserError
from pma_jax.evaluation.snapshot_tokenizer import TextTokenizer
from pma_jax.evaluation.token_scores import MeshModel, truncate

MAX_GENERATED = 256  # tokens, where a task gives no number; as in the `hf` backend


class HarnessModel(TemplateLM):
    """A model that lm-eval scores. `truncated` counts the sequences whose context was cut from the left."""

    def __init__(self, model: MeshModel, tokenizer: TextTokenizer):
        super().__init__()
        self._mesh_model, self._text = model, tokenizer
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._text.end

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without a context."""
        return self._text.prefix

    @property
    def max_length(self) -> int:
        """Number of tokens that the model reads at once."""
        return self._mesh_model.sequence_tokens

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text."""
        return self._text.encode(string, add_special_tokens)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each continuation given its context; an empty one has the probability 1."""
        empty = [not "".join(request.args) or not request.args[1] for request in requests]
        scored = [request for request, is_empty in zip(requests, empty, strict=True) if not is_empty]
        scores = iter(super().loglikelihood(scored, disable_tqdm=True))
        return [(0.0, True) if is_empty else next(scores) for is_empty in empty]

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        sequences = []
        for _texts, context, continuation in requests:
            context = context or [self.prefix_token_id]
            sequences.append((truncate(context, continuation, self.max_length), len(continuation)))
            self.truncated += len(context) + len(continuation) > self.max_length + 1
        return self._mesh_model.score(sequences)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score each text as a whole, in windows of `max_length` tokens with one token of context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            new = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += new
            counts.append(len(new))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context with the most likely tokens, up to one of the texts that end it.

        Raises:
            UserError: A task asks for samples instead, or for as many tokens as the model reads.
        """
        end = self._text.decode([self._text.end], skip_special_tokens=False)
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1], MAX_GENERATED)
            if options.get("do_sample"):
                raise UserError("a task asks for sampled text (do_sample, temperature): only greedy text is generated")
            stops = tuple(handle_stop_sequences(options["until"], eos=end))
            groups.setdefault((options["max_gen_toks"], stops), []).append(index)
        texts = [""] * len(requests)
        for (max_tokens, stops), indices in groups.items():
            if max_tokens >= self.max_length:
                raise UserError(
                    f"a task generates {max_tokens} tokens, and the model reads {self.max_length} at once "
                    "(training.sequence_length_tokens): leave out the task"
                )
            prompts = [self._prompt(requests[index].args[0], self.max_length - max_tokens) for index in indices]

            def is_finished(tokens: list[int], stops: tuple[str, ...] = stops) -> bool:
                text = self._text.decode(tokens)
                return self._text.end in tokens or any(stop and stop in text for stop in stops)

            for index, tokens in zip(indices, self._mesh_model.generate(prompts, max_tokens, is_finished), strict=True):
                tokens = tokens[: tokens.index(self._text.end)] if self._text.end in tokens else tokens
                texts[index] = postprocess_generated_text(self._text.decode(tokens), list(stops), None)
        return texts

    def _prompt(self, text: str, limit: int) -> list[int]:
        ids = self.tok_encode(text) or [self.prefix_token_id]
        self.truncated += len(ids) > limit
        return ids[-limit:]
