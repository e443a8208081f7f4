"""Which rank gets which part of which document.

Three ways to give a batch's documents to the ranks are weighed for every batch, and the one that a cost
model finds fastest is taken. All ranks weigh the same numbers, so they agree without a word.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchtune_cp.attention import AttentionMask
from torchtune_cp.distributed.context_parallel.documents import attention_pairs

# The cost model counts in query-key pairs of one layer, forward and backward. What a token costs in the
# other parts of a layer is about 6 x embed_dim pairs (24 embed_dim^2 operations against 4 embed_dim a
# pair), so 4,096 is a small model; the larger the model, the more a padded token costs.
TOKEN_COST = 4096
#: One call of an attention kernel, however little it does.
CALL_COST = 1024
#: Keys and values of one token, sent to one rank and their gradients back.
SENT_TOKEN_COST = 16


class Piece(NamedTuple):
    """Consecutive tokens of one document.

    Attributes:
        document: Its number in the batch.
        start: Position of the first token in the document.
        stop: One behind the last.
    """

    document: int
    start: int
    stop: int


class Placed(NamedTuple):
    """A piece of a document and where it lies in a buffer."""

    piece: Piece
    at: int


def placed(pieces: Iterable[Piece], at: int = 0) -> list[Placed]:
    """Lay pieces side by side from place `at`."""
    result = []
    for piece in pieces:
        result.append(Placed(piece, at))
        at += piece.stop - piece.start
    return result


#: What attention work is evened out to, largest over mean, where it costs at most this much of the time:
#: costs that close are within the error of the model, and what balances does not depend on it.
FAIR_IMBALANCE, FAIRNESS_COST = 1.05, 1.05
#: What need not be evened out, as a share of the time: documents so short that attention hardly counts are
#: not cut for it.
NEGLIGIBLE_EXCESS = 0.003

#: The pieces of each rank.
Assignment = list[list[Piece]]


def _cut_evenly(
    number: int, length: int, is_causal: bool, tokens: list[int], pieces: Assignment
) -> None:
    """Give every rank an equal part of the work of one document.

    Causal: chunks r and 2n - 1 - r of 2n, as in Llama 3 (arXiv 2407.21783, section 3.3.2), here for
    each document alone. Bidirectional: chunk r of n. What does not divide goes to the ranks that have
    the fewest tokens so far, so that no document needs padding.
    """
    ranks = len(tokens)
    count = 2 * ranks if is_causal else ranks
    each, left = divmod(length, count)
    sizes = [each] * count
    fewest_first = sorted(range(ranks), key=lambda r: (tokens[r], r))
    # Tail chunks first: a causal token there has more work, but so has every rank's tail.
    for place in range(left):
        rank = fewest_first[place % ranks]
        sizes[count - 1 - rank if is_causal and place < ranks else rank] += 1
    start = 0
    for chunk, size in enumerate(sizes):
        rank = min(chunk, count - 1 - chunk) if is_causal else chunk
        if size:
            pieces[rank].append(Piece(number, start, start + size))
            tokens[rank] += size
        start += size


def _cut_long_ones(
    lengths: Sequence[int], ranks: int, mask: AttentionMask, shortest_cut: int
) -> Assignment:
    """Cut every document of at least `shortest_cut` tokens evenly, give the others out whole.

    The whole ones go, the longest first, to the rank with the least to do (LPT scheduling, Graham 1969).
    """
    pieces: Assignment = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    whole = []
    for number, length in enumerate(lengths):
        if length >= shortest_cut:
            _cut_evenly(number, length, mask.is_causal, tokens, pieces)
        else:
            whole.append((-length, number))
    loads = [(TOKEN_COST * count, rank) for rank, count in enumerate(tokens)]
    heapq.heapify(loads)
    for negative, number in sorted(whole):
        length = -negative
        load, rank = loads[0]
        pieces[rank].append(Piece(number, 0, length))
        pairs = attention_pairs(0, length, length, mask.within(length))
        heapq.heapreplace(loads, (load + TOKEN_COST * length + pairs, rank))
    return pieces


def _cut_the_whole(lengths: Sequence[int], ranks: int, head_tail: bool) -> Assignment:
    """Cut all documents, laid end to end, wherever a chunk ends: chunk r, or r and 2n - 1 - r."""
    count = 2 * ranks if head_tail else ranks
    total = sum(lengths)
    borders = [total * i // count for i in range(count + 1)]
    pieces: Assignment = [[] for _ in range(ranks)]
    chunk, place = 0, 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            while borders[chunk + 1] <= place:
                chunk += 1
            size = min(length - start, borders[chunk + 1] - place)
            rank = min(chunk, count - 1 - chunk) if head_tail else chunk
            last = pieces[rank][-1] if pieces[rank] else None
            if last is not None and last.document == number and last.stop == start:
                pieces[rank][-1] = Piece(number, last.start, start + size)
            else:
                pieces[rank].append(Piece(number, start, start + size))
            start += size
            place += size
    return pieces


def split_documents(pieces: Assignment) -> set[int]:
    """The documents of which several ranks hold a piece: their keys and values have to travel."""
    holder: dict[int, int] = {}
    split = set()
    for rank, own in enumerate(pieces):
        for piece in own:
            if holder.setdefault(piece.document, rank) != rank:
                split.add(piece.document)
    return split


def pairs_by_rank(
    pieces: Sequence[Sequence[Piece]], lengths: Sequence[int], mask: AttentionMask
) -> list[int]:
    """Count every rank's query-key pairs."""
    return [
        sum(
            attention_pairs(p.start, p.stop, lengths[p.document], mask.within(lengths[p.document]))
            for p in own
        )
        for own in pieces
    ]


def cost(pieces: Assignment, lengths: Sequence[int], mask: AttentionMask) -> float:
    """Estimate the time of one layer, in query-key pairs; the slowest rank sets it."""
    ranks = len(pieces)
    split = split_documents(pieces)
    pairs = pairs_by_rank(pieces, lengths, mask)
    slowest, travelling = 0, 0
    for rank, own in enumerate(pieces):
        documents = {p.document for p in own}
        calls = len(documents - split) + ranks * len(documents & split)
        slowest = max(slowest, pairs[rank] + CALL_COST * calls)
        travelling = max(travelling, sum(p.stop - p.start for p in own if p.document in split))
    most_tokens = max(sum(p.stop - p.start for p in own) for own in pieces)
    sent = SENT_TOKEN_COST * travelling * (ranks - 1)
    return slowest + TOKEN_COST * most_tokens + sent


def _candidates(lengths: Sequence[int], ranks: int, mask: AttentionMask) -> Iterator[Assignment]:
    longest = max(lengths)
    yield _cut_long_ones(lengths, ranks, mask, 1)
    shortest_cut = 2
    while shortest_cut <= 2 * longest:
        yield _cut_long_ones(lengths, ranks, mask, shortest_cut)
        shortest_cut *= 2
    yield _cut_the_whole(lengths, ranks, head_tail=mask.is_causal)
    yield _cut_the_whole(lengths, ranks, head_tail=False)


def assign(lengths: Sequence[int], ranks: int, mask: AttentionMask) -> Assignment:
    """Give a batch's documents to the ranks, in the way that the cost model finds fastest.

    Weighed are: every document of at least so many tokens cut evenly over all ranks and the shorter ones
    given out whole (for powers of two), and the documents laid end to end and cut into equal chunks,
    consecutive or head-tail. Of ways that cost nearly the same, one that balances attention is taken.

    Args:
        lengths: Tokens of each document.
        ranks: How many ranks share them.
        mask: What is attended to within a document.

    Returns:
        The pieces of each rank: first those of documents that several ranks hold, then those of its own
        documents; pieces of one document in order and side by side.
    """
    if not lengths:
        return [[] for _ in range(ranks)]
    weighed = [(cost(way, lengths, mask), way) for way in _candidates(lengths, ranks, mask)]
    cheapest, best = min(weighed, key=lambda w: w[0])
    for costs, way in sorted(weighed, key=lambda w: w[0]):
        pairs = pairs_by_rank(way, lengths, mask)
        if costs > FAIRNESS_COST * cheapest:
            break
        mean = sum(pairs) / ranks
        if max(pairs) <= max(FAIR_IMBALANCE * mean, mean + NEGLIGIBLE_EXCESS * costs):
            best = way
            break
    return _in_order(best)


def _in_order(pieces: Assignment) -> Assignment:
    split = split_documents(pieces)
    return [sorted(own, key=lambda p: (p.document not in split, p)) for own in pieces]


def whole_sequence_head_tail(lengths: Sequence[int], ranks: int) -> Assignment:
    """What torch's balancing gives the ranks when it is told nothing of documents."""
    return _in_order(_cut_the_whole(lengths, ranks, head_tail=True))
