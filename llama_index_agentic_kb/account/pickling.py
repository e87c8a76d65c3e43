"""What holds clients, threads and keys is not pickled: a pickle would carry the keys of the models in it."""

from __future__ import annotations

from typing import ClassVar, Final, NoReturn, Self

from llama_index_agentic_kb.errors import AgenticKBError

ANEW: Final = (
    "Make it anew where it is needed, from the settings that made it here (a process pool has its initializer for "
    "that); KnowledgeBase.from_store opens a store in each process."
)


class PicklingRefusedError(AgenticKBError, TypeError):
    """An object was to be pickled, or copied in depth, that holds keys; the message names the remedy."""

    code = "picklingRefused"


class NotPickled:
    """Refuses ``pickle`` and ``copy.deepcopy`` with an error that says what to do; ``copy.copy`` works.

    LlamaIndex's models keep API keys and headers in plain attributes, which their pickles hold in readable form.
    """

    instead_of_pickling: ClassVar[str] = ANEW
    """What to do, for the error."""

    def __copy__(self) -> Self:
        """Return a shallow copy, as ``copy.copy`` makes of any object."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            PicklingRefusedError: Always.
        """
        raise PicklingRefusedError(
            f"{type(self).__name__} can't be pickled or deep-copied: it holds clients, threads and the keys of its "
            f"models. {self.instead_of_pickling}"
        )
