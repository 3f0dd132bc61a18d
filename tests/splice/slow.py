# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Splicing by plain loops and lists."""

from fractions import Fraction


def pairs(
    L, S, K=None, k_t=1, k_s=1, mode="slide_within", least=2, adaptive=True, slide=False, cut=False
):
    """Return every (t, s), by t and then s."""
    if slide:
        return [(t, 0) for t in range(0, L - S + 1, k_t)]
    content = S if K is None else min(K, S)
    found = []
    for t in range(0, L, k_t):
        copied = {
            "anchor_start": min(content, L),
            "cyclic_roll": min(content, L),
            "slide_within": min(content, L - t),
            "coverage_balanced": min(content, L) if adaptive or K is None else content,
        }[mode]
        if copied < least or (mode == "anchor_start" and t > 0):
            continue
        if mode == "coverage_balanced":
            found += [(t, S - copied)] if t + copied <= L else []
        else:
            needed = least if cut else copied
            found += [(t, s) for s in range(S) if s % k_s == 0 and s + needed <= S]
    return found


def start_at(fraction, L, K, alpha=0, stride=1):
    """Return the start whose cumulative weight passes a fraction; exact for integer alpha."""
    candidates = range(0, L - K + 1, stride)
    distances = [min(t + 1, candidates[-1] - t + 1, K) for t in candidates]
    weights = [Fraction(K, d) ** alpha for d in distances]
    below = Fraction(0)
    reached = []
    for weight in weights:
        below += weight
        reached.append(below)
    return min(t for t, b in zip(candidates, reached) if b > fraction * reached[-1])


def quotas(shares, epoch_length):
    """Return quotas by exact largest remainders, with ties to the lower index."""
    total = sum(map(Fraction, shares))
    ideal = [Fraction(share) * epoch_length / total for share in shares]
    given = [int(x) for x in ideal]
    for _ in range(epoch_length - sum(given)):
        remainders = [x - g for x, g in zip(ideal, given)]
        given[remainders.index(max(remainders))] += 1
    return given


def frame(doc, t, s, S, K=None, pad=0, cyclic=False):
    """Return the tokens and weights of one frame, position by position."""
    source = doc[t:] + (doc[:t] if cyclic else [])
    source = source[: S if K is None else K]
    tokens = [source[i - s] if s <= i < s + len(source) else pad for i in range(S)]
    last = min(s + len(source), S) - 1
    return tokens, [1.0 if s <= i < last else 0.0 for i in range(S)]
