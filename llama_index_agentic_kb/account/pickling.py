"""Prevents pickling of objects with clients, threads or API keys: a pickle would contain the models' keys."""

from __future__ import annotations

from typing import ClassVar, NoReturn, Self

from llama_index_agentic_kb.errors import AgenticKBError


class PicklingRefusedError(AgenticKBError, TypeError):
    """Raised when an object with API keys is pickled or deep-copied; the message names the alternative."""

    code = "picklingRefused"
    remedy = "Make the object anew in the other process, from the settings that made it here."


class NotPickled:
    """Base class whose objects can't be pickled or deep-copied, with a helpful error; ``copy.copy`` works."""

    instead_of_pickling: ClassVar[str] = (
        "Make it anew where it is needed, from the settings that made it here (a process pool has its initializer for "
        "that); KnowledgeBase.from_store opens a store in each process."
    )

    def __copy__(self) -> Self:
        """Return a shallow copy."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise ``PicklingRefusedError``."""
        raise PicklingRefusedError(
            f"{type(self).__name__} can't be pickled or deep-copied: it holds clients, threads and the keys of its "
            f"models. {self.instead_of_pickling}"
        )
