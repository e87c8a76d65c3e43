"""What a store's database knows of its other files: which directory holds the vectors, and who is changing them."""

from __future__ import annotations

from llama_index_agentic_kb.store.database import Database

__all__ = ["FIRST_VECTORS", "StoreState"]

FIRST_VECTORS = "chroma"
"""The directory of the vectors until they are made again."""


class StoreState:
    """A few values beside the documents, each changed in a durable transaction.

    Args:
        database: The database, with its table ``state``.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def writing(self) -> str | None:
        """Who is changing the vectors, or began to and died; None while they are whole."""
        return self._get("writing")

    @property
    def vectors(self) -> tuple[str, int]:
        """The name of the vectors' directory, and how often they have been changed by now."""
        found = dict(self._database.rows("SELECT key, value FROM state WHERE key IN ('directory', 'changes')"))
        return found.get("directory", FIRST_VECTORS), int(found.get("changes", 0))

    @property
    def store_file(self) -> str | None:
        """The content of ``store.json``, for when that is lost."""
        return self._get("store file")

    @property
    def empty(self) -> bool:
        """Whether there is nothing that should have a vector."""
        return not self._database.rows("SELECT 1 FROM chunks LIMIT 1")

    def keep_store_file(self, content: str) -> None:
        """Keep the content of ``store.json``."""
        if self.store_file != content:
            self._put({"store file": content})

    def begin(self, who: str) -> None:
        """Note that the vectors are about to be changed."""
        self._put({"writing": who})

    def end(self, directory: str | None = None) -> None:
        """Note that the vectors are whole and differ from those before.

        Args:
            directory: The directory they are in now; None is the same.
        """
        name, changes = self.vectors
        self._put({"directory": directory or name, "changes": str(changes + 1)}, remove="writing")

    def _get(self, key: str) -> str | None:
        rows = self._database.rows("SELECT value FROM state WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def _put(self, values: dict[str, str], remove: str = "") -> None:
        with self._database.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", list(values.items()))
            connection.execute("DELETE FROM state WHERE key = ?", (remove,))
