"""How the ranks of an XP server talk: plans from rank 0, and rows between all, on NCCL or, on CPUs, on gloo.

Three process groups that nothing else uses: objects on the host, attention's all-to-all, and migration, which runs
beside it and so must not share its communicator.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
START_S = 600.0  # until the slowest rank has loaded its model
ANSWER_S = 300.0  # rank 0 says something at least every few seconds
# Nearly all that is said fits into one message of a known length, which spares a message with the length.
LETTER_BYTES, _LENGTH = 1 << 13, 8


class RankLostError(RuntimeError):
    """Another rank has died or does not answer any more; nothing can go on without it."""


class Exchange:
    """Rank ``rank`` of ``ranks``. All ranks have to make theirs at the same time.

    ``port`` is free on :data:`HOST`; ``device`` is where rows lie. Raises RankLostError if the others do not come.
    """

    def __init__(self, rank: int, ranks: int, port: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.all_to_all_bytes = self.migrated_bytes = 0
        """Sent to other ranks so far."""
        try:
            self._store = dist.TCPStore(HOST, port, ranks, rank == 0, timedelta(seconds=START_S), wait_for_workers=True)
            self._host = self._group("host")
            self._rows = self._group("rows") if device.type == "cpu" else self._nccl("rows")
            self._migration = self._group("migration") if device.type == "cpu" else self._nccl("migration")
        except (RuntimeError, dist.DistError) as error:
            raise RankLostError(f"XP rank {rank}: the {ranks} ranks did not find each other: {error}") from error

    def _group(self, name: str) -> Any:
        store = dist.PrefixStore(f"conflux/{name}", self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.ranks, timedelta(seconds=ANSWER_S))

    def _nccl(self, name: str) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=ANSWER_S)
        options.is_high_priority_stream = True
        store = dist.PrefixStore(f"conflux/{name}", self._store)
        return dist.ProcessGroupNCCL(store, self.rank, self.ranks, options)

    # ---- on the host

    def gather(self, mine: Any) -> list[Any]:
        """What each rank said, by rank, for rank 0; the others get nothing."""
        letter, rest = _letter(mine)
        letters = [torch.empty_like(letter) for _ in range(self.ranks)]
        self._wait(self._host.allgather([letters], [letter]))
        if self.rank:
            if len(rest):
                self._wait(self._host.send([rest], 0, 0))
            return []
        return [mine, *(_word(letters[rank], self._rest_from(rank, letters[rank])) for rank in range(1, self.ranks))]

    def _rest_from(self, rank: int, letter: torch.Tensor) -> torch.Tensor:
        rest = torch.empty(_missing(letter), dtype=torch.uint8)
        if len(rest):
            self._wait(self._host.recv([rest], rank, 0))
        return rest

    def broadcast(self, word: Any) -> Any:
        """What rank 0 says; the others' ``word`` is ignored."""
        letter, rest = _letter(word if self.rank == 0 else None)
        self._wait(self._host.broadcast(letter, 0))
        if missing := _missing(letter):
            if self.rank:
                rest = torch.empty(missing, dtype=torch.uint8)
            self._wait(self._host.broadcast(rest, 0))
        return word if self.rank == 0 else _word(letter, rest)

    # ---- rows

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, receives: list[int], sends: list[int]) -> None:
        """Send ``sends[r]`` of ``rows`` to each rank r and put ``receives[r]`` of each into ``out``, by rank."""
        self._wait(self._rows.alltoall_base(out, rows, receives, sends, dist.AllToAllOptions()))
        self.all_to_all_bytes += self._bytes_out(rows, sends)

    def migrate(self, out: torch.Tensor, rows: torch.Tensor, receives: list[int], sends: list[int]) -> Any:
        """The same beside whatever else runs; what is returned is to be waited for."""
        work = self._migration.alltoall_base(out, rows, receives, sends, dist.AllToAllOptions())
        self.migrated_bytes += self._bytes_out(rows, sends)
        return work

    def _bytes_out(self, rows: torch.Tensor, sends: list[int]) -> int:
        others = sum(sends) - sends[self.rank]
        return others * rows[:1].numel() * rows.element_size() if len(rows) else 0

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except (RuntimeError, dist.DistError) as error:
            raise RankLostError(f"XP rank {self.rank}: another rank is gone: {str(error).splitlines()[0]}") from error


def _letter(word: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A word as its length and its first bytes, as many as fit LETTER_BYTES, and the rest."""
    data = pickle.dumps(word)
    letter = torch.zeros(LETTER_BYTES, dtype=torch.uint8)
    whole = torch.frombuffer(bytearray(len(data).to_bytes(_LENGTH, "little") + data), dtype=torch.uint8)
    letter[: len(whole)] = whole[:LETTER_BYTES]
    return letter, whole[LETTER_BYTES:]


def _missing(letter: torch.Tensor) -> int:
    """How many bytes of a word its letter lacks."""
    length = int.from_bytes(letter[:_LENGTH].numpy().tobytes(), "little")
    return max(_LENGTH + length - LETTER_BYTES, 0)


def _word(letter: torch.Tensor, rest: torch.Tensor) -> Any:
    return pickle.loads(letter.numpy().tobytes()[_LENGTH:] + rest.numpy().tobytes())
