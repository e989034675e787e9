"""Waiting requests: first in, first out for each client, and clients in turns."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

from powerinfer_py.errors import QueueFullError

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Not safe for threads: its owner holds a lock.

    Args:
        limit: items that may wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._n_items = 0
        # Clients that have something waiting; the first one's turn is next.
        self._clients: collections.OrderedDict[str, collections.deque[Item]] = collections.OrderedDict()

    def __len__(self) -> int:
        return self._n_items

    def put(self, client: str, item: Item) -> None:
        """Append an item.

        Raises:
            QueueFullError: as many as the limit wait.
        """
        if self._n_items >= self._limit:
            raise QueueFullError(
                f"queue: {self._n_items} requests are waiting; expected fewer than {self._limit}; try again later."
            )
        self._clients.setdefault(client, collections.deque()).append(item)
        self._n_items += 1

    def get(self) -> Item:
        """Take the next item; its client goes to the end.

        Raises:
            IndexError: there is none.
        """
        if not self._clients:
            raise IndexError("the queue is empty")
        client, items = self._clients.popitem(last=False)
        item = items.popleft()
        if items:
            self._clients[client] = items
        self._n_items -= 1
        return item

    def take_where(self, is_wanted: collections.abc.Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which `is_wanted` says yes."""
        taken = []
        for client in list(self._clients):
            items = self._clients[client]
            kept = collections.deque(item for item in items if not is_wanted(item))
            taken += [item for item in items if is_wanted(item)]
            if kept:
                self._clients[client] = kept
            else:
                del self._clients[client]
        self._n_items -= len(taken)
        return taken
