"""Attention of new tokens alone, for prompts whose beginning is in the prefix cache.

SGLang's `torch_native` backend computes the attention of every position of a sequence, also of those that are cached or
that an earlier piece of the prompt has computed, and drops all but the new ones. So a prompt that is found in the cache
takes a good part of the time of one that is not, and each further piece of a prompt takes longer. Here only the new
positions are computed, against all keys, with the same results. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

EXTEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
ROWS_MAX = 256  # positions at a time: each has a row of the mask, as long as the sequence so far


def attend_new(
    sglang_extend,
    backend,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_prefix_lens,
    extend_seq_lens,
    encoder_lens=None,
    *,
    scaling=None,
    enable_gqa=False,
    causal=False,
    is_cross_attn=False,
    sliding_window_size=None,
):
    """Fill `output` with the attention of the new tokens of all requests, and return it.

    `query` and `output` have the shape (new tokens of all requests, heads, head size), the caches (places, heads, head
    size). A sliding window of w lets a position see itself and w positions before it. What is not causal, or has an
    encoder's part, is left to `sglang_extend`, the function that this one stands in front of.
    """
    if encoder_lens is not None or is_cross_attn or not causal:
        lengths = (req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens)
        return sglang_extend(
            backend,
            *(query, output, k_cache, v_cache, req_to_token, *lengths),
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    window = None if sliding_window_size is None or sliding_window_size < 0 else sliding_window_size
    begin = 0
    for request, prefix, new in zip(
        req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        places, those = req_to_token[request, : prefix + new], slice(begin, begin + new)
        keys, values = (_heads_first(cache[places].to(query.dtype)) for cache in (k_cache, v_cache))
        options = {"enable_gqa": enable_gqa, "scale": scaling}
        _attend_one(query[those], output[those], keys, values, prefix, window, options)
        begin += new
    return output


def _attend_one(query, output, keys, values, prefix, window, options):
    """Fill the `output` of one request, whose new tokens come after `prefix` others."""
    whole, new = not prefix and window is None, len(query)  # the plain triangle needs no mask, and so no pieces
    rows_max = max(new, 1) if whole else ROWS_MAX
    for first in range(0, new, rows_max):
        rows = min(new - first, rows_max)
        seen = prefix + first + rows
        attended = scaled_dot_product_attention(
            _heads_first(query[first : first + rows]),
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=None if whole else _mask(rows, seen, window),
            is_causal=whole,
            **options,
        )
        output[first : first + rows] = attended.squeeze(0).movedim(1, 0)


def _heads_first(vectors):
    """Return (tokens, heads, size) as (1, heads, tokens, size)."""
    return vectors.movedim(0, 1).unsqueeze(0)


def _mask(rows, seen, window):
    """Return which of the `seen` positions each of their last `rows` sees."""
    mask = torch.ones((rows, seen), dtype=torch.bool).tril_(seen - rows)
    return mask if window is None else mask.triu_(seen - rows - window)
