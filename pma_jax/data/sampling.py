"""Samples of the held-out text, the mean loss on a sample, and its standard error over documents.

Documents are ordered by a hash of their names and dealt in turn to three parts. Marks, previews and sweeps are
evaluated on `select`, published results on `report`, and merging weights are learned on `fit`. Documents of one name,
and documents of equal text, count as one document, so that no text is in two parts.

The documents of a part, in that order, are a stream that is cut into windows of L targets, as training cuts its stream:
a window may hold several documents, and begins with the token before its first target. The windows have a fixed order
in which those of every prefix are spread evenly over the stream. A sample of N tokens is the first N targets in that
order. So every target of the part is equally likely to be in it, long documents contribute in proportion to their
length, and a larger sample contains the smaller ones.

Dimensions: R windows of a sample, L targets per window, M = L + 1 tokens, D documents.
"""

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from pma_jax.config.errors import UserError

if TYPE_CHECKING:  # its imports take longer than `pma inspect`
    from pma_jax.data.shards import TokenSet

SELECT, REPORT, FIT, ALL = "select", "report", "fit", "all"
PARTS = (SELECT, REPORT, FIT)  # in the order in which documents are dealt; `all` is their union
MINIMUM_DOCUMENTS = 10  # in a part; the standard error over fewer is rough
PADDING_ID = -1  # the id of a position that the loss does not count: `model.loss` masks negative ids
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio


class SampleDescription(TypedDict):
    """How held-out text was sampled, as results record it."""

    part: str
    part_documents: int  # number of documents of the part
    documents: int  # number of those that the sample reads
    tokens: int  # number of counted targets
    digest: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """Windows of a part of the held-out text."""

    part: str
    windows: np.ndarray  # int32 [R, M]; targets that are not counted are negative
    documents: np.ndarray  # int32 [R, L], the document of each target: 0 ≤ d < D; -1 if the target is not counted
    part_documents: int  # number of documents of the part

    @functools.cached_property
    def counts_D(self) -> np.ndarray:
        """Number of counted targets of each document, float64."""
        return self.sum_by_document(np.ones(self.documents.shape))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (first 16 hex digits) of the windows. Losses on samples with equal digests are comparable."""
        hasher = hashlib.sha256(str(self.windows.shape).encode())
        hasher.update(self.windows.astype("<i4").tobytes())
        return hasher.hexdigest()[:16]

    def describe(self) -> "SampleDescription":
        """Return how the text was sampled."""
        return {
            "part": self.part,
            "part_documents": self.part_documents,
            "documents": len(self.counts_D),
            "tokens": int(self.counts_D.sum()),
            "digest": self.digest,
        }

    def sum_by_document(self, values_RxL: np.ndarray) -> np.ndarray:
        """Sum values of counted targets for each document, in float64 [D]."""
        is_counted_RxL = self.documents >= 0
        return np.bincount(self.documents[is_counted_RxL], weights=values_RxL[is_counted_RxL])

    def of_document(self, document: int) -> "Sample":
        """Return the windows with targets of one document; the other targets in them are read, but not counted."""
        is_counted_RxL = self.documents == document
        rows_r = np.flatnonzero(is_counted_RxL.any(axis=1))
        windows_rxM, is_counted_rxL = self.windows[rows_r], is_counted_RxL[rows_r]
        targets_rxL = windows_rxM[:, 1:]
        masked_rxL = np.where((targets_rxL >= 0) & ~is_counted_rxL, ~targets_rxL, targets_rxL)
        windows_rxM = np.concatenate([windows_rxM[:, :1], masked_rxL], axis=1)
        return Sample(self.part, windows_rxM, np.where(is_counted_rxL, 0, -1).astype(np.int32), self.part_documents)

    def estimate(self, nats_RxL: np.ndarray) -> "HeldOutLoss":
        """Compute the mean loss from the loss of each target."""
        return estimate(self.sum_by_document(nats_RxL), self.counts_D)


@dataclasses.dataclass(frozen=True)
class HeldOutLoss:
    """The mean loss on a sample of held-out text, in nats per token."""

    loss: float
    # Over documents: how much the loss would vary with other documents of the same kind. None for a single document.
    standard_error: float | None


def estimate(nats_D: np.ndarray, counts_D: np.ndarray) -> HeldOutLoss:
    """Compute the ratio of two sums over documents, and its standard error by the jackknife.

    The standard error says how much the ratio varies if documents are left out. It treats the documents as a sample of
    many more, so it does not vanish if a part is read to its end, and it is not misled by a document that holds most of
    the text, as a variance of residuals would be.

    Args:
        nats_D: float64, the summed loss of each document.
        counts_D: float64, the number of targets of each document.
    """
    documents, total = len(counts_D), counts_D.sum()
    loss = nats_D.sum() / total
    if documents < 2:
        return HeldOutLoss(float(loss), None)
    without_D = (nats_D.sum() - nats_D) / (total - counts_D)  # the loss without each document
    variance = (documents - 1) / documents * np.square(without_D - without_D.mean()).sum()
    return HeldOutLoss(float(loss), float(np.sqrt(variance)))


def sample_text(tokens: "TokenSet", part: str, wanted: int, window_targets: int, salt: int = 0) -> Sample:
    """Read a sample of a part of the held-out text.

    Args:
        tokens: The tokenised corpus.
        part: One of `PARTS`, or `ALL`.
        wanted: Number of targets in the sample, including those of prompts, which are not counted.
        window_targets: L.
        salt: Changes the order of the documents, and so the parts and the sample. To test how losses vary with it.

    Raises:
        UserError: The part has too few tokens.
    """
    ends_D = tokens.held_out_documents["end"].astype(np.int64)
    starts_D = np.concatenate([[0], ends_D[:-1]])
    documents_D, chosen = _deal(tokens.held_out_documents["key"], part, salt)
    lengths_D = (ends_D - starts_D)[chosen]
    stream_ends_D = np.cumsum(lengths_D)
    available = int(lengths_D.sum())
    if not 0 < wanted <= available:
        raise UserError(
            f"evaluation.tokens is {wanted} but the part {part!r} of the held-out split has only {available} tokens in "
            f"{len(np.unique(documents_D))} documents: lower it, or raise data.held_out_percent"
        )
    windows_R = _choose_windows(available, wanted, window_targets, salt)
    # The first target of the stream, at position 0, follows an end of document; a position past the end is padding.
    positions_RxM = windows_R[:, None] * window_targets + np.arange(-1, window_targets)
    is_inside_RxM = (positions_RxM >= 0) & (positions_RxM < available)
    clipped_RxM = np.clip(positions_RxM, 0, available - 1)
    index_RxM = np.searchsorted(stream_ends_D, clipped_RxM, side="right")
    shift_D = starts_D[chosen] - (stream_ends_D - lengths_D)
    ids_RxM = tokens.validation.ids[clipped_RxM + shift_D[index_RxM]].astype(np.int32)
    outside_RxM = np.where(positions_RxM < 0, tokens.end_of_document, PADDING_ID)
    windows_RxM = np.where(is_inside_RxM, ids_RxM, outside_RxM).astype(np.int32)
    # The last window may hold more targets than are wanted.
    is_wanted_RxL = (np.cumsum(is_inside_RxM[:, 1:]) <= wanted).reshape(-1, window_targets)
    windows_RxM[:, 1:] = np.where(is_wanted_RxL, windows_RxM[:, 1:], PADDING_ID)
    is_counted_RxL = windows_RxM[:, 1:] >= 0
    read_RxL = np.full(is_counted_RxL.shape, -1, np.int32)
    read_RxL[is_counted_RxL] = np.unique(documents_D[index_RxM[:, 1:][is_counted_RxL]], return_inverse=True)[1]
    return Sample(part, windows_RxM, read_RxL, len(np.unique(documents_D)))


def count_tokens(tokens: "TokenSet", part: str) -> int:
    """Count the tokens of a part of the held-out text (`PARTS`, or `ALL`), including those of prompts."""
    chosen = _deal(tokens.held_out_documents["key"], part, salt=0)[1]
    return int(np.diff(tokens.held_out_documents["end"].astype(np.int64), prepend=0)[chosen].sum())


def order_documents(tokens: "TokenSet", part: str) -> np.ndarray:
    """Return the indices of a part's documents among the held-out documents, in the order of samples: int64 [D]."""
    return _deal(tokens.held_out_documents["key"], part, salt=0)[1]


def _deal(keys_D: np.ndarray, part: str, salt: int) -> tuple[np.ndarray, np.ndarray]:
    """Order the stored documents of a part by the hash of their keys.

    Returns:
        The rank of each document's key among all keys, and its index in the token stream, in that order. Documents
        with equal keys have the same rank.
    """
    hashes_D = _mix(keys_D.astype(np.uint64), salt)
    ranks_D = np.unique(hashes_D, return_inverse=True)[1]
    order_D = np.argsort(ranks_D, kind="stable")
    if part != ALL:
        order_D = order_D[ranks_D[order_D] % len(PARTS) == PARTS.index(part)]
    return ranks_D[order_D], order_D


def _choose_windows(available: int, wanted: int, window_targets: int, salt: int) -> np.ndarray:
    """Return the windows with the first `wanted` targets of a stream, in the order of samples: int64 [R].

    Window w has the place frac(w / golden ratio + offset). A prefix of the order consists of the windows with places
    below some number, and these are spread evenly over the stream.
    """
    windows_W = np.arange(-(-available // window_targets))
    places_W = windows_W.astype(np.uint64) * np.uint64(_GOLDEN_RATIO) + _mix(np.zeros(1, np.uint64), salt)
    order_W = np.argsort(places_W)
    targets_W = np.minimum(available - order_W * window_targets, window_targets)  # the last window may be shorter
    return order_W[: np.searchsorted(np.cumsum(targets_W), wanted) + 1]


def _mix(values_N: np.ndarray, salt: int) -> np.ndarray:
    """Hash 64-bit integers with a salt (the finaliser of SplitMix64)."""
    hashes_N = values_N ^ np.uint64(int.from_bytes(hashlib.sha256(f"salt {salt}".encode()).digest()[:8], "big"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes_N = (hashes_N ^ (hashes_N >> np.uint64(shift))) * np.uint64(factor)
    return hashes_N ^ (hashes_N >> np.uint64(31))
