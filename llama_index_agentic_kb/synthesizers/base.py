"""What all modes share: how they are set up, and the frame around each one's own way to an answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.llms import LLM, MockLLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from pydantic import BaseModel

from llama_index_agentic_kb._aio import Call, emit
from llama_index_agentic_kb.errors import ConfigurationError, DeadlineExceededError
from llama_index_agentic_kb.guard.retries import RetryPolicy
from llama_index_agentic_kb.guard.spotlighting import PLAIN, Spotlight, as_spotlighting, draw
from llama_index_agentic_kb.llm import LanguageModel, count_tokens, tokens_of
from llama_index_agentic_kb.prompts import Passage
from llama_index_agentic_kb.sources.base import KnowledgeSource
from llama_index_agentic_kb.synthesizers.draft import Draft, Window
from llama_index_agentic_kb.synthesizers.passages import passages
from llama_index_agentic_kb.synthesizers.responses import FlowSynthesizer, Synthesis, logger
from llama_index_agentic_kb.synthesizers.structured import ObjectAsker

__all__ = ["AgenticSynthesizer", "Synthesis"]

RESERVED: Final = 1_024
"""Tokens of the window that are kept for an answer of a model that doesn't say how long its answers get."""


LONG: Final = 200_000
"""Characters of all nodes together up to which they are read on the event loop: about 5 ms."""


class AgenticSynthesizer(FlowSynthesizer):
    """Makes a response of a question and its evidence: LlamaIndex's ``BaseSynthesizer``, with references kept.

    Node N is ``[ref_id:N]`` in prompts and answers, and ``source_nodes[N]`` of the response. The given LLM is never
    changed. A language model's failure is raised as ``SynthesisError``.

    Args:
        llm: None is ``Settings.llm``, in modes that need one. A ``StructuredLLM`` sets ``output_cls``.
        callback_manager: None is ``Settings.callback_manager``. Handlers that raise are logged, no more.
        prompt_helper: Its window, output size and chunk size limit are kept to; None asks the LLM's metadata.
        chat_prompt_helper: As LlamaIndex takes it; only multimodal synthesis would use it.
        streaming: Whether responses stream. An object, with ``output_cls``, then comes as JSON in one piece.
        output_cls: The pydantic class of the object that is wanted in place of text.
        empty_response: The text where there is nothing to answer from. Default "Empty Response".
        multimodal: Not supported: True is refused.
        verbose: Whether each synthesis is logged (level INFO).
        max_output_tokens: The answer's budget; None leaves it to the model.
        retries: How failed calls of the language model are tried again; None is ``RetryPolicy()``.
        spotlighting: How prompts mark what was retrieved as data: "delimit" (default), "datamark", "encode", or None
            for not at all; see ``guard.spotlighting``. A query engine's is its retriever's, unless given.
        links: "references" (default) takes links and images out of answers that don't lead to a reference's own
            address (see ``guard.links``); "all" leaves them, for readers that render none.
        templates: By their keys in ``get_prompts()``: ``text_qa_template``, ...; None is the mode's own.

    Raises:
        ConfigurationError: An argument doesn't fit the mode, or there is no LLM and the mode needs one.
    """

    needs_llm: ClassVar[bool] = True
    makes_objects: ClassVar[bool] = True
    """Whether ``output_cls`` is possible."""
    default_templates: ClassVar[Mapping[str, BasePromptTemplate]] = {}

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        callback_manager: CallbackManager | None = None,
        prompt_helper: PromptHelper | None = None,
        chat_prompt_helper: ChatPromptHelper | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
        multimodal: bool = False,
        verbose: bool = False,
        max_output_tokens: int | None = None,
        retries: RetryPolicy | None = None,
        spotlighting: str | None = "delimit",
        links: str = "references",
        **templates: BasePromptTemplate | None,
    ) -> None:
        # Not super().__init__: it asks for Settings.llm where none is needed, writes into the caller's LLM, and asks
        # it for a window that an OpenAI of unknown name refuses to tell.
        if multimodal:
            raise ConfigurationError("multimodal: not supported; images and audio in nodes are not sent to a model")
        if max_output_tokens is not None and max_output_tokens <= 0:
            raise ConfigurationError(f"max_output_tokens must be above 0, got {max_output_tokens}")
        if links not in ("references", "all"):
            raise ConfigurationError(f"links: {links!r} is unknown; known are references, all")
        self.spotlighting = as_spotlighting(spotlighting)
        self.links = links
        self._llm = self._resolve(llm)
        inner: LLM = self._llm
        if isinstance(inner, StructuredLLM):
            output_cls, inner = output_cls or inner.output_cls, inner.llm
        if output_cls is not None and not self.makes_objects:
            raise ConfigurationError(f"output_cls: mode {self.mode!r} makes text only")
        self._output_cls = output_cls
        self._streaming = streaming
        self._empty_response = empty_response or "Empty Response"
        self._multimodal = False
        self._verbose = verbose
        self.callback_manager = callback_manager
        self.model = LanguageModel(inner, lambda: self.callback_manager, retries=retries)
        self.max_output_tokens = max_output_tokens
        self.templates = self._with_defaults(templates)
        self._asker = ObjectAsker()
        sizes: dict[str, Any] = {"context_window": self.model.context_window, "num_output": _num_output(inner)}
        self._prompt_helper = prompt_helper or Settings._prompt_helper or PromptHelper(**sizes, tokenizer=_tokens)  # noqa: SLF001
        self._chat_prompt_helper = (
            chat_prompt_helper or Settings._chat_prompt_helper or ChatPromptHelper(**sizes, tokenizer=_tokens)  # noqa: SLF001
        )

    def _resolve(self, llm: LLM | None) -> LLM:
        """Give the LLM as LlamaIndex does; modes that need none never ask for ``Settings.llm``."""
        if not self.needs_llm:
            return MockLLM(is_chat_model=True)
        if llm is not None:
            return llm
        try:
            default: LLM = Settings.llm
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"mode {self.mode!r} needs a language model: pass llm=, set Settings.llm or OPENAI_API_KEY"
            ) from error
        return default

    def _with_defaults(self, templates: Mapping[str, BasePromptTemplate | None]) -> dict[str, BasePromptTemplate]:
        unknown = sorted(set(templates) - set(self.default_templates))
        if unknown:
            known = ", ".join(self.default_templates) or "none"
            raise ConfigurationError(f"mode {self.mode!r} has no {', '.join(unknown)}; its templates: {known}")
        return {**self.default_templates, **{key: given for key, given in templates.items() if given is not None}}

    @property
    def streaming(self) -> bool:
        """Whether responses stream. Chat engines of LlamaIndex set ``_streaming`` for a while."""
        return self._streaming

    def _get_prompts(self) -> PromptDictType:
        return dict(self.templates)

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self.templates = {key: prompts.get(key, template) for key, template in self.templates.items()}

    # -- the way to an answer --------------------------------------------------------------------------------------

    async def synthesis(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        *,
        deadline: float | None = None,
        max_output_tokens: int | None = None,
        sources: Mapping[str, KnowledgeSource] | None = None,
        streaming: bool | None = None,
        instructions: str = "",
        aside: Callable[[Spotlight], str] | None = None,
        **response_kwargs: Any,
    ) -> Synthesis:
        """Make the answer. When streaming, deltas of its text are emitted, which together are the text.

        Args:
            query: The question.
            nodes: The evidence, best first; their positions are the reference ids.
            deadline: ``time.monotonic()`` by which the answer must be there; None waits.
            max_output_tokens: In place of the synthesizer's own.
            sources: By name: they know the fields of the nodes that name them.
            streaming: In place of the synthesizer's own.
            instructions: The caller's own, on tone, form, language; they stand behind the template's, and rank below.
            aside: Gives what the model may read beside the evidence and never cites, marked as data.
            response_kwargs: Further variables of the templates.

        Raises:
            SynthesisError: The language model failed; what it had answered before is in ``partial``.
            DeadlineExceededError: The answer was not there in time; what there was of it is in ``partial``.
        """
        limit = max_output_tokens or self.max_output_tokens
        spotlight = draw(self.spotlighting) if self.needs_llm else PLAIN
        shown = await _as_passages(nodes, sources, spotlight, deadline)
        draft = Draft(
            model=self.model,
            asker=self._asker,
            window=self._window(limit),
            query=query.query_str if aside is None else f"{query.query_str}\n\n{aside(spotlight)}",
            instructions=instructions,
            passages=shown,
            spotlight=spotlight,
            addresses={one.url for one in shown if one.url} if self.links == "references" else None,
            deadline=deadline,
            max_output_tokens=limit,
            variables=response_kwargs,
            streaming=self._streaming if streaming is None else streaming,
            output_cls=self._output_cls,
            warnings=_hidden_in(shown),
        )
        if nodes or not self.needs_nodes:
            text = await self._composed(draft)
        else:
            text = self._nothing()
        if draft.streaming and (rest := text[len(draft.told) :]):
            await emit(rest)
        if self.needs_llm and limit is not None and (written := count_tokens(text)) > limit:
            draft.warnings.append(f"the answer has {written} tokens, over the budget of {limit}")
        if self._verbose:
            logger.info("%s: %d passages, %d calls", self.mode, len(draft.passages), draft.usage.calls)
        return Synthesis(text, draft.output, draft.usage, draft.dropped, draft.warnings, draft.cut, draft.links_removed)

    async def _composed(self, draft: Draft) -> str:
        try:
            return await self._compose(draft)
        except DeadlineExceededError as error:
            error.partial = draft.so_far or draft.told
            raise

    def _compose(self, draft: Draft) -> Coroutine[Any, Any, str]:
        """Give the answer's text; what was told of it by then is its start. For modes to define."""
        raise NotImplementedError

    def _nothing(self) -> str:
        """Give the text of a synthesis without nodes."""
        return self._empty_response

    def _window(self, max_output_tokens: int | None) -> Window:
        helper = self._prompt_helper
        reserved = min(max_output_tokens or helper.num_output, helper.context_window // 2)
        return Window(helper.context_window, reserved, helper.chunk_size_limit)


async def _as_passages(
    nodes: Sequence[NodeWithScore],
    sources: Mapping[str, KnowledgeSource] | None,
    spotlight: Spotlight,
    deadline: float | None,
) -> list[Passage]:
    """Give nodes as passages; where they are very long, off the event loop: each character is looked at."""
    work = partial(passages, nodes, sources, spotlight)
    if sum(len(getattr(one.node, "text", None) or "") for one in nodes) <= LONG:
        return work()
    made: list[Passage] = await Call(sync=work, deadline=deadline, what="reading passages")
    return made


def _hidden_in(shown: Sequence[Passage]) -> list[str]:
    hidden = [one.hidden for one in shown if one.hidden]
    return [f"{sum(hidden)} hidden characters were left out of {len(hidden)} passages"] if hidden else []


def _num_output(llm: LLM) -> int:
    try:
        known = llm.metadata.num_output
    except ValueError:  # llama_index's OpenAI raises for names that it doesn't know
        return RESERVED
    return known if known > 0 else RESERVED


def _tokens(text: str) -> list[Any]:
    """Tokenize when it is needed: core's helpers load the tokenizer when they are made."""
    return tokens_of(text)
