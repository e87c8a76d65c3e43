from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core import VectorStoreIndex
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.schema import TextNode
from llama_index.llms.openai import OpenAI
from typer.testing import CliRunner

from llama_index_agentic_kb import (
    ActivityCallbackHandler,
    AgenticVectorStoreIndex,
    KnowledgeBase,
    KnowledgeSource,
    OpenAICompatible,
    RetrievalResponse,
    RetrieverOptions,
    cli,
)
from llama_index_agentic_kb._text import error_message, redacted, redacted_excerpt
from llama_index_agentic_kb.account import GuardedCallbackManager
from llama_index_agentic_kb.account.logs import redacted_leaves
from llama_index_agentic_kb.account.pickling import NotPickled, PicklingRefusedError
from llama_index_agentic_kb.errors import AgenticKBError
from llama_index_agentic_kb.guard.resilience import NO_RETRIES
from llama_index_agentic_kb.testing import HashEmbedding, LoopbackOpenAI, MemoryRetriever
from tests.openai_embedding import OpenAIEmbedding
from tests.security.canaries import KEYS, Echo, Witness, assert_clean, told_of

SAID = "Rain falls in Paris [ref_id:0]."


SECRET = [
    "https://admin:SECRET@db:8000/x", "postgres://u:SEC/RET@h/db", "redis://:SECRET@h", "https://SECRET@github.com/a",
    "https://u:p@SECRET@host/x", "GET http://h/?api_key=SECRET&x=1", "http://h/v1?key=SECRET&x=1",
    "postgresql://h/db?pass=SECRET&sslpassword=SECRET&pwd=SECRET",
    "{'x-chroma-token': 'SECRET'}", '{"x-api-key": "SECRET", "a": 1}', '{\\"api_key\\": \\"SECRET\\"}',
    "Headers([('authorization', 'Bearer SECRET'), ('x-chroma-token', 'SECRET')])", "[(b'x-api-key', b'SECRET')]",
    "Authorization: Bearer SECRET", "Authorization: Basic SECRET=", "Proxy-Authorization: Basic SECRET=",
    "authorization: token SECRET", "{'Authorization': 'SECRET'}", "sent Bearer SECRET12aB",
    "sk-proj-SECRET0123456789", "sk-SECRE***********6789", "sk_live_SECRET12345",
    "Incorrect API key provided: SECRET. You can find it", "AKIASECRET1234567890", "AIzaSySECRETabcd0123456789abc",
    "ya29.SECRET0123456789", "eyJhbGciOi.SECRETpayload.SECRETsignature",
    "-----BEGIN RSA PRIVATE KEY-----\nSECRET\nSECRET\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY----- SECRET cut", "password=SECRET", "Password: SECRET1x", "passwd: 'SECRET'",
    "secret:SECRET", "PGPASSWORD=SECRET", "OPENAI_API_KEY=SECRET", "aws_secret_access_key = SECRET/x+y",
    "Server=x;Password=SECRET;Database=y", "api_key='SECRET and more'", "client_secret: SECRET",
    '"accessToken":"SECRET"', "ghp_SECRET0123456789", "hf_SECRET0123456789", "xoxb-SECRET-1234567",
    "SG.SECRETSECRET.abc", "Cookie: session=SECRET; b=SECRET", "sr=x&SharedAccessSignature=SECRET",
    "http://h/a?X-Amz-Signature=SECRET&x=1", "sent Api-Key SECRET12aB", "body: client_secret%3DSECRET",
    'Model(api_key=SecretStr("SECRET"), x=1)', "cut off: {'api_key': 'SECRET", 'cut off: token="SECRET',
]  # fmt: skip

PROSE = [
    "the token: of gratitude was 5", "the answer's token budget: 4096 tokens, max_tokens=500",
    "Basic understanding of physics, basic income, basic internationalization",
    "Bearer of bad news; Bearer tokens and basic authentication",
    "key-performance-indicators matter, as sk-learn does", "The secret = love", "password: required",
    "Password: must be at least eight characters", "A private key: never share it",
    "docKey: abc-123, sort_key=title, {'docKey': 'a1b2c3d4e5'}",
    "see https://medium.com/@name/post and http://localhost:8000/users/a@b.c", "mail bob@example.org or ask at 10:40",
    "the secret of success: work", "Cookie: a small biscuit", "Authorization: users must log in first",
    "Keyword: token-based retrieval", "index.html?page=3&sort=key", "no such host: db.example.org:8000",
    "collection 0f8b1c2d3e4f5a6b7c8d9e0f not found", "the source 'docs' did not answer within 2.5 s: ReadTimeout",
    "It rains in Paris [ref_id:0].",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRET)
def test_secrets_are_taken_out(text: str) -> None:
    """By the name before it or by its own shape; a second time changes nothing."""
    told = redacted(text)
    assert "***" in told
    assert "SEC" not in told
    assert redacted(told) == told


@pytest.mark.parametrize("text", PROSE)
def test_prose_stays_as_it_is(text: str) -> None:
    """Words such as token, key and password are no secrets."""
    assert redacted(text) == text


HARD = ["://", "://:", "'token':\"", "Bearer ", "sk-", "eyJaaaaaa.", "-----BEGIN PRIVATE KEY-----", "----------", " "]
HARD += ["('x-", "cookie:a=", "\\", "password:https://"]


@pytest.mark.parametrize("part", HARD)
def test_long_text_takes_time_in_proportion(part: str) -> None:
    """100,000 characters that nearly match take about 8 times what an eighth takes; a square would be 64 times."""

    def seconds(length: int) -> float:
        text, began = (part * length)[:length], time.thread_time()
        redacted(text)
        return time.thread_time() - began

    assert seconds(100_000) < 25 * max(seconds(12_500), 0.02)


PIECES = ["token", "://", "Bearer ", "sk-", "api_key", "eyJ", "cookie: ", *"abK=:'\"@/ -_.1*,;\\\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@settings(max_examples=60)
def test_redacting_twice_is_redacting_once(text: str) -> None:
    """What is told in a message of ours may be told again in another."""
    once = redacted(text)
    assert redacted(once) == once


def test_what_is_cut_holds_no_half_of_a_key() -> None:
    """Words are redacted first and cut then: a key's first half has no shape."""
    for length in range(120, 220):
        text = "x " * (length // 2) + f"http://me:{KEYS['password']}@host/ and much more " * 40
        assert_clean(redacted_excerpt(text, 200))
        assert len(redacted_excerpt(text, 200)) <= 200
    page = "x" * 20_000
    assert len(error_message(RuntimeError(page))) == 10_000
    assert error_message(RuntimeError()) == "RuntimeError"
    at_the_end = "y " * 600 + f"http://me:{KEYS['password']}{'p' * 200}@host"
    assert_clean(redacted_excerpt(at_the_end, 120))


def model(address: str, kind: type[OpenAI] = OpenAI) -> OpenAI:
    return kind(
        model="gpt-4o-mini", api_key=KEYS["key"], api_base=address, default_headers={"x-gate-token": KEYS["header"]}
    )


class KeyedEmbedding(OpenAIEmbedding):
    """One whose key is a field, as that of LlamaIndex's own is."""

    api_key: str = KEYS["embedding"]


def everything(witness: Witness, address: str) -> KnowledgeBase:
    index = VectorStoreIndex([TextNode(text="Rain in Paris.")], embed_model=HashEmbedding())
    index._embed_model = KeyedEmbedding(api_base=address)
    down = ConnectionError(
        f"http://me:{KEYS['password']}@db/?key={KEYS['query']} {{'x-chroma-token': '{KEYS['chroma']}'}}"
    )
    return KnowledgeBase(
        [
            KnowledgeSource("index", index=index, hybrid=False),
            KnowledgeSource("well", retriever=MemoryRetriever(["Rain in Paris.", "Rain in Oslo."])),
            KnowledgeSource("down", retriever=MemoryRetriever([], fault=down)),
        ],
        llm=model(address),
        options=RetrieverOptions(retries=NO_RETRIES),
        callback_manager=CallbackManager([witness.handler, ActivityCallbackHandler()]),
    )


def objects(kb: KnowledgeBase) -> list[Any]:
    engine = kb.as_query_engine()
    made: list[Any] = [kb, kb.retriever, engine, kb.as_chat_engine(), engine.synthesizer, *kb.sources.values()]
    return [*made, kb.as_tool(), kb.as_retriever_tool()]


async def astream(kb: KnowledgeBase) -> list[str]:
    response: Any = await kb.as_query_engine(streaming=True).aquery("rain")
    return [delta async for delta in response.async_response_gen()]


def ways(kb: KnowledgeBase) -> list[Callable[[], Any]]:
    streaming: Any = kb.as_query_engine(streaming=True)
    return [
        lambda: kb.retrieve("rain"),
        lambda: asyncio.run(kb.aretrieve("rain")),
        lambda: kb.retrieve("rain", output_mode="extractiveData"),
        lambda: kb.as_query_engine().query("rain"),
        lambda: kb.as_query_engine("refine").query("rain"),
        lambda: list(streaming.query("rain").response_gen),
        lambda: asyncio.run(astream(kb)),
        lambda: kb.as_chat_engine().chat("rain"),
        lambda: kb.as_tool().call("rain"),
        lambda: kb.as_retriever().retrieve("rain"),
    ]


def go_every_way(kb: KnowledgeBase, witness: Witness) -> None:
    for way in ways(kb):
        try:
            result = way()
        except AgenticKBError as error:
            witness.told.append(told_of(error))
        else:
            witness.told += [repr(result), str(result)]
    witness.shown(kb.retrieve("rain", output_mode="extractiveData"))
    witness.told += [f"{one!r} {one}" for one in objects(kb)] + [repr(one.health) for one in kb.sources.values()]


@pytest.mark.slow
def test_keys_are_found_nowhere_where_everything_fails() -> None:
    """Every way of asking, over a server that repeats all keys, and a source that quotes its address and headers."""
    witness = Witness()
    with Echo() as server, witness.watching():
        go_every_way(everything(witness, server.address), witness)
        repeated = "".join(server.told)
        assert KEYS["header"] in repeated
        assert KEYS["query"] in repeated
    assert "status 401" in witness.text
    assert '"knowledgeSourceName": "down"' in witness.text
    assert_clean(witness.text)


def test_keys_are_found_nowhere_where_all_goes_well() -> None:
    """The same with a server that answers: no event, callback, page or wire form holds the model's settings."""
    witness = Witness()
    with LoopbackOpenAI(SAID) as server, witness.watching():
        address = server.base_url.replace("://", f"://me:{KEYS['password']}@")
        kb = everything(witness, address)
        go_every_way(kb, witness)
        assert kb.retrieve("rain").text.startswith("Rain falls")
        assert any(KEYS["header"] in request.headers.values() for request in server.requests)
    assert "LLMChatStartEvent" in witness.text
    assert_clean(witness.text)


def test_the_clients_own_error_stays_the_cause() -> None:
    """For programs: what the client raised is ``__cause__``, as it is; what is printed of ours alone holds no key."""
    witness = Witness()
    with Echo() as server:
        kb = everything(witness, server.address)
        with pytest.raises(AgenticKBError) as raised:
            kb.retrieve("rain")
    assert_clean("".join(traceback.format_exception(raised.value, chain=False)))
    assert "AuthenticationError" in "".join(traceback.format_exception(raised.value))


def test_a_client_s_error_is_told_to_handlers_without_its_keys() -> None:
    """Only where it holds any: else handlers get the client's own."""
    witness = Witness()
    manager = GuardedCallbackManager([witness.handler])
    plain = RuntimeError("no route to host")
    manager.on_event_end(CBEventType.LLM, payload={EventPayload.EXCEPTION: plain}, event_id="1")
    assert repr(plain) in witness.text
    payload: dict[Any, Any] = {
        EventPayload.EXCEPTION: RuntimeError(f"api_key={KEYS['query']}"),
        EventPayload.PROMPT: "p",
    }
    manager.on_event_end(CBEventType.LLM, payload, "2")
    manager.on_event_start(CBEventType.EXCEPTION, payload, "3")
    assert "RuntimeError: api_key=***" in witness.text
    assert KEYS["query"] in str(payload[EventPayload.EXCEPTION])
    assert_clean(witness.text)


def quote_a_key() -> None:
    raise RuntimeError(f"api_key={KEYS['query']}\nERROR root forged\u2028ERROR root forged\x1b[2J")


def test_log_lines_are_redacted_before_any_handler() -> None:
    """Messages and tracebacks, also those of modules that log by the same name; what holds none stays as it was."""
    kept: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record)

    handler, logger = Keeping(), logging.getLogger("llama_index_agentic_kb")
    logger.addHandler(handler)
    try:
        logger.warning("%s failed", f"http://me:{KEYS['password']}@host")
        logger.warning("%s failed", "host")
        try:
            quote_a_key()
        except RuntimeError:
            logger.warning("failed", exc_info=True)
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in kept] == ["http://***@host failed", "host failed", "failed"]
    assert kept[1].args == ("host",)
    written = logging.Formatter().format(kept[2])
    assert "RuntimeError: api_key=***" in written
    assert [line for line in written.splitlines() if not line.startswith("  ")] == ["failed"]
    assert "\x1b" not in written
    assert_clean(written)


def test_activity_lines_stay_json() -> None:
    """Texts are redacted one by one, so that no replacement reaches over a quote."""
    data = {"a": [f"token='{KEYS['query']}", {"b": f'"api_key": "{KEYS["query"]}"'}], "n": 1, "docKey": "x-1"}
    told = json.dumps(redacted_leaves(data))
    assert_clean(told)
    assert json.loads(told)["n"] == 1
    assert json.loads(told)["docKey"] == "x-1"


def test_what_holds_models_is_not_pickled() -> None:
    """A pickle would hold their keys: refused with the remedy; shallow copies still work."""
    kb = everything(Witness(), "http://127.0.0.1:9/v1")
    index = AgenticVectorStoreIndex([TextNode(text="Rain")], embed_model=HashEmbedding())
    language_model: Any = getattr(kb.as_query_engine("refine").synthesizer, "model")  # noqa: B009 (of ours alone)
    for one in [*objects(kb), index, index.as_retriever(), language_model]:
        for refused in (pickle.dumps, copy.deepcopy):
            with pytest.raises(PicklingRefusedError, match=r"Make it anew|storage_context\.persist"):
                refused(one)
        twin = copy.copy(one)
        assert type(twin) is type(one)
        assert not isinstance(one, NotPickled) or vars(twin) == vars(one)
    assert issubclass(PicklingRefusedError, TypeError)


def test_a_compatible_model_tells_no_key() -> None:
    """Printed, as a dictionary, as JSON, pickled: no key, no headers, no password of the address; it works on."""
    with LoopbackOpenAI(SAID) as server:
        address = server.base_url.replace("://", f"://me:{KEYS['password']}@")
        llm = model(address, OpenAICompatible)
        assert llm.complete("Who?").text == SAID
        forms = [repr(llm), str(llm), str(llm.to_dict()), llm.to_json(), llm.model_dump_json(), str(llm.model_dump())]
        assert_clean("\n".join(forms))
        assert_clean(pickle.dumps(llm).decode("latin-1"))
        assert llm.api_key == copy.copy(llm).api_key == KEYS["key"]
        assert pickle.loads(pickle.dumps(llm)).api_key != KEYS["key"]
        assert llm.to_dict()["model"] == "gpt-4o-mini"


def test_the_command_line_shows_no_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its errors are redacted, and where a program error shows, local variables (the key is one) are not."""
    assert cli.app.pretty_exceptions_show_locals is False
    with Echo() as server:
        environment = {"OPENAI_API_KEY": KEYS["key"], "OPENAI_BASE_URL": server.address}
        done = CliRunner().invoke(cli.app, ["ask", "rain", "--store", "no-such-store"], env=environment)
    assert done.exit_code == 1
    assert_clean(done.output + str(done.exception))

    def fail() -> None:
        raise AgenticKBError(f"http://me:{KEYS['password']}@host answers nobody")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit):
        cli.main()
    told = capsys.readouterr().err
    assert "http://***@host answers nobody" in told
    assert_clean(told)


WORDS: Final = (
    "the credential {key} is not one of ours", "{key}", "no account for <{key}>; gate {header} is closed",
    "user me with {password} and {header!r} may not use this", '{{"detail": "unknown {key}", "gate": ["{header}"]}}',
    "encoded: {encoded} {quoted}", "{environment} was seen", "no {short}",
    "{half}... is cut", "in JSON: {escaped} {partly}",
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("status", [400, 401, 500])
def test_what_a_client_holds_is_known_in_any_words(words: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key, its headers, the password in its address and the environment's: no shape and no name is needed."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", "CaNaRy6/environment")
    odd = "CaNaRy7odd+key"
    held = {**KEYS, "key": odd, "environment": "CaNaRy6/environment", "quoted": quote("CaNaRy6/environment", safe="")}
    held["short"], long = "CaNaRy8", "CaNaRy9-a-very-long-key"
    held["half"] = long[:15]
    held["escaped"] = "".join(f"\\u{ord(character):04X}" for character in KEYS["header"])
    held["partly"] = r"CaNaRy6\/environment, 'CaNaRy7odd\\u002Bkey'"
    held["encoded"] = base64.b64encode(KEYS["header"].encode()).decode()
    witness = Witness()
    with Echo(status, lambda _: words.format(**held)) as server, witness.watching():
        headers = {"x-gate": KEYS["header"], "x-short": held["short"], "x-long": long}
        llm = OpenAI("gpt-4o-mini", api_key=odd, api_base=server.address, default_headers=headers, max_retries=0)
        source = KnowledgeSource("well", retriever=MemoryRetriever(["Rain in Paris."]))
        options = RetrieverOptions(retries=NO_RETRIES)
        kb = KnowledgeBase([source], llm=llm, options=options, callback_manager=CallbackManager([witness.handler]))
        asks: list[Callable[[], RetrievalResponse]] = [
            lambda: kb.retrieve("rain"),
            lambda: asyncio.run(kb.aretrieve("rain")),
        ]
        for ask in asks:
            with suppress(AgenticKBError):
                witness.shown(ask())
    assert f"status {status}" in witness.text
    assert_clean(witness.text)
    assert held["encoded"] not in witness.text
    assert held["escaped"].replace("\\", "") not in witness.text.replace("\\", "")
