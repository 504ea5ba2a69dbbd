"""Attention of one batch in two layouts, in SGLang 0.5.17 (ConfluxServe §4; Ulysses: arXiv 2309.14509).

The rows of a forward are pieces of prompts' chunks, then the rank's own decodes. A piece goes from its rows with all
heads to all rows of the chunk with this rank's heads (all-to-all), attends there to what the rank has of the prompt,
and comes back. A decode attends where it lives, with all heads. Both are SGLang's own attention backend, once over the
KV pool as it is and once over the same memory seen as N times as many slots of an Nth of the heads.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ext.xp.exchange import Exchange

# Layers whose migrated rows may be under way at once; more would only take memory.
UNDER_WAY = 2


class ShardPool:
    """The KV pool as ``ranks`` times as many slots, each with so small a part of the heads."""

    def __init__(self, pool: Any, ranks: int) -> None:
        self._pool, self.ranks = pool, ranks
        self.dtype, self.start_layer = pool.dtype, pool.start_layer
        self.keys = [self._view(pool.get_key_buffer(layer)) for layer in self._layers(pool)]
        self.values = [self._view(pool.get_value_buffer(layer)) for layer in self._layers(pool)]

    @staticmethod
    def _layers(pool: Any) -> range:
        return range(pool.start_layer, pool.start_layer + pool.layer_num)

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        slots, heads, dim = buffer.shape
        return buffer.view(slots * self.ranks, heads // self.ranks, dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id - self.start_layer]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer: Any, where: Any, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> None:
        loc = where.loc if isinstance(where, KVWriteLoc) else where
        self.get_key_buffer(layer.layer_id)[loc] = key.to(self.dtype)
        self.get_value_buffer(layer.layer_id)[loc] = value.to(self.dtype)


class ShardTable:
    """Where each prompt's sharded tokens lie: row r of ``req_to_token`` [rows, tokens], as SGLang keeps its own."""

    def __init__(self, rows: int, tokens: int, device: Any) -> None:
        self.req_to_token = torch.zeros((rows, tokens), dtype=torch.int32, device=device)
        self.size, self.device, self.max_context_len = rows, device, tokens


def sharded_backend(runner: ModelRunner, table: ShardTable, ranks: int) -> AttentionBackend:
    """A second instance of the runner's attention backend, over the shards."""
    seen = copy.copy(runner)
    seen.token_to_kv_pool = ShardPool(runner.token_to_kv_pool, ranks)
    seen.req_to_token_pool = table
    return type(runner.attn_backend)(seen)


@dataclass(slots=True)
class Rows:
    """One forward's rows, and where they go. Index tensors are int64 on the rows' device.

    ``pieces``: this rank's rows of chunks, first in the batch; then its ``decodes``; the rest is padding.
    ``piece_of`` [ranks]: all ranks' pieces. ``order`` [T]: arrived rows, which come by rank, in the order of the
    chunks' tokens; ``back`` is its inverse. ``shard_batch`` describes the chunks to the sharded backend, None if
    there are none; ``decode_batch`` the decodes to the other, likewise. ``leaving`` [m]: rows of pieces by the rank
    that owns their prompt, ``leaving_to`` [ranks] how many for each; ``arriving_from`` [ranks]: rows that come here;
    ``arriving_at`` and ``own_at``: KV slots for those and for own rows ``own``, whose prompts decode here.
    """

    pieces: int
    decodes: int
    piece_of: list[int]
    order: torch.Tensor
    back: torch.Tensor
    shard_batch: ForwardBatch | None
    decode_batch: ForwardBatch | None
    leaving: torch.Tensor
    leaving_to: list[int]
    arriving_from: list[int]
    arriving_at: torch.Tensor
    own: torch.Tensor
    own_at: torch.Tensor


class XpAttention(AttentionBackend):
    """What a forward in two layouts calls; ``rows`` is to be set before each."""

    def __init__(self, runner: ModelRunner, exchange: Exchange, table: ShardTable) -> None:
        super().__init__()
        self._full, self._exchange = runner.attn_backend, exchange
        self._sharded = sharded_backend(runner, table, exchange.ranks)
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self._layers: dict[int, RadixAttention] = {}
        self._under_way: deque[tuple[Any, torch.Tensor, RadixAttention, torch.Tensor]] = deque()
        self._rows: Rows | None = None
        on_gpu = torch.device(runner.device).type == "cuda"
        self._stream = torch.cuda.Stream(priority=-1) if on_gpu else None

    def begin(self, rows: Rows) -> None:
        """Prepare both backends for a forward."""
        self._rows = rows
        if rows.shard_batch is not None:
            self._sharded.init_forward_metadata(rows.shard_batch)
        if rows.decode_batch is not None:
            self._full.init_forward_metadata(rows.decode_batch)

    def end(self) -> None:
        """Wait until all that migrates has arrived."""
        while self._under_way:
            self._settle()
        self._rows = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing: see :meth:`begin`."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = self._rows
        assert rows is not None
        q = q.reshape(q.shape[0], -1)
        k, v = k.reshape(k.shape[0], -1), v.reshape(v.shape[0], -1)
        out = torch.zeros_like(q)
        end = rows.pieces + rows.decodes
        if rows.decode_batch is not None:
            own = slice(rows.pieces, end)
            with self._beside(rows):
                out[own] = self._decode(q[own], k[own], v[own], layer, rows)
        if rows.shard_batch is not None:
            self._migrate(k[: rows.pieces], v[: rows.pieces], layer, rows)
            out[: rows.pieces] = self._prefill(q[: rows.pieces], k[: rows.pieces], v[: rows.pieces], layer, rows)
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
        return out

    @contextmanager
    def _beside(self, rows: Rows) -> Iterator[None]:
        """On a GPU decode attention, which reads memory, runs beside exchanges and the attention of prefill, which
        computes. What it reads was made before, and :meth:`forward` waits for it before any of that can be freed."""
        if self._stream is None or rows.shard_batch is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, rows: Rows
    ) -> torch.Tensor:
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        return self._full.forward_decode(q, k, v, layer, rows.decode_batch).reshape(rows.decodes, -1)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, rows: Rows
    ) -> torch.Tensor:
        ranks, pieces = self._exchange.ranks, rows.pieces
        parts = [x.view(pieces, ranks, x.shape[1] // ranks) for x in (q, k, v)]
        widths = [part.shape[2] for part in parts]
        leaving = torch.cat(parts, dim=2).transpose(0, 1).reshape(ranks * pieces, sum(widths))
        arrived = leaving.new_empty((sum(rows.piece_of), leaving.shape[1]))
        self._exchange.all_to_all(arrived, leaving, rows.piece_of, [pieces] * ranks)
        q, k, v = arrived[rows.order].split(widths, dim=1)
        one = self._sharded_layer(layer)
        attended = self._sharded.forward_extend(
            q.contiguous(),
            k.reshape(-1, one.tp_k_head_num, one.qk_head_dim),
            v.reshape(-1, one.tp_v_head_num, one.v_head_dim),
            one,
            rows.shard_batch,
        )
        attended = attended.reshape(len(arrived), widths[0])[rows.back]
        out = attended.new_empty((ranks * pieces, widths[0]))
        self._exchange.all_to_all(out, attended, [pieces] * ranks, rows.piece_of)
        return out.view(ranks, pieces, widths[0]).transpose(0, 1).reshape(pieces, ranks * widths[0])

    def _migrate(self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, rows: Rows) -> None:
        """Rows go to where their prompt will decode, with all heads, beside what follows."""
        if len(rows.own):
            self._write(layer, rows.own_at, torch.cat((k[rows.own], v[rows.own]), dim=1))
        both = torch.cat((k, v), dim=1)[rows.leaving]
        arriving = both.new_empty((sum(rows.arriving_from), both.shape[1]))
        work = self._exchange.migrate(arriving, both, rows.arriving_from, rows.leaving_to)
        # What leaves is kept until it has left.
        self._under_way.append((work, arriving, layer, both))
        while len(self._under_way) > UNDER_WAY:
            self._settle()

    def _settle(self) -> None:
        work, arriving, layer, _ = self._under_way.popleft()
        work.wait()
        assert self._rows is not None
        if len(arriving):
            self._write(layer, self._rows.arriving_at, arriving)

    def _write(self, layer: RadixAttention, at: torch.Tensor, both: torch.Tensor) -> None:
        k, v = both.split((layer.tp_k_head_num * layer.qk_head_dim, layer.tp_v_head_num * layer.v_head_dim), dim=1)
        self.token_to_kv_pool.set_kv_buffer(
            layer,
            KVWriteLoc(at),
            k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim),
        )

    def _sharded_layer(self, layer: RadixAttention) -> RadixAttention:
        """The layer with this rank's part of the heads."""
        one = self._layers.get(layer.layer_id)
        if one is None:
            ranks = self._exchange.ranks
            one = self._layers[layer.layer_id] = copy.copy(layer)
            one.tp_q_head_num //= ranks
            one.tp_k_head_num //= ranks
            one.tp_v_head_num //= ranks
        return one
