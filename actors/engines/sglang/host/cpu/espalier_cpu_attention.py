"""Attention of new tokens alone, for prompts whose beginning is in the prefix cache.

SGLang's `torch_native` backend computes the attention of every position of a sequence, the cached ones and those of
earlier chunks included, and drops all but the new ones. So a cached prompt takes a good part of the time of an uncached
one, and each further chunk of a prompt takes longer. Here the new positions alone are computed, against all keys,
unless few are cached beside them; the results are the same but for rounding. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

EXTEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
ROWS_MAX = 256  # positions at a time: each has a row of the mask, as long as the last of them sees
# As a share of the new tokens: computing so short a prefix again costs less than masks in large pieces.
PREFIX_SHARE_MAX = 1 / 16


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
    size). A sliding window of w lets a position see itself and w positions before it, and only the keys that a new
    position sees are read. The lengths of the prefixes are `seq_lens` less `extend_seq_lens`. Attention that is not
    causal, or has an encoder's part, is left to `sglang_extend`, the wrapped function.
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
    options = {"enable_gqa": enable_gqa, "scale": scaling}
    begin = 0
    for request, length, new in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        own, prefix = slice(begin, begin + new), length - new
        places = req_to_token[request, 0 if window is None else max(0, prefix - window) : length]
        keys, values = (_heads_first(cache[places].to(query.dtype)) for cache in (k_cache, v_cache))
        # Of values that are shorter than keys PyTorch would compute a triangle with a mask of its own, of all rows.
        triangle = window is None and keys.shape[-1] == values.shape[-1]
        if triangle and prefix <= new * PREFIX_SHARE_MAX:
            _attend_all(query[own], output[own], keys, values, options)
        else:
            _attend_masked(query[own], output[own], keys, values, window, options)
        begin += new
    return output


def _attend_all(query, output, keys, values, options):
    """Fill the `output` of the last positions by computing all of them, the others of queries that are zero."""
    cached = query.new_zeros((keys.shape[2] - len(query), *query.shape[1:]))
    queries = _heads_first(torch.cat((cached, query)))
    attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, **options)
    output[:] = attended.squeeze(0).movedim(1, 0)[len(cached) :]


def _attend_masked(query, output, keys, values, window, options):
    """Fill the `output` of the last positions, some at a time, with a mask over the keys that these see."""
    prefix = keys.shape[2] - len(query)
    for first in range(0, len(query), ROWS_MAX):
        rows = slice(first, min(first + ROWS_MAX, len(query)))
        seen = slice(0 if window is None else max(0, prefix + first - window), prefix + rows.stop)
        mask = _mask(rows.stop - first, seen.stop - seen.start, window)
        attended = scaled_dot_product_attention(
            _heads_first(query[rows]), keys[:, :, seen], values[:, :, seen], attn_mask=mask, **options
        )
        output[rows] = attended.squeeze(0).movedim(1, 0)


def _heads_first(vectors):
    """Return (tokens, heads, size) as (1, heads, tokens, size)."""
    return vectors.movedim(0, 1).unsqueeze(0)


def _mask(rows, seen, window):
    """Return which of `seen` positions each of their last `rows` sees."""
    mask = torch.ones((rows, seen), dtype=torch.bool).tril_(seen - rows)
    return mask if window is None else mask.triu_(seen - rows - window)
