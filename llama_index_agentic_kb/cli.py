"""The command line: ``agentic-kb ingest``, ``ask``, ``chat``, ``list``, ``info``, ``doctor``, ``serve`` and others.

Options can also be set in ``agentic-kb.toml`` in the working directory: at the top level for all commands (``store``,
``model``), or in a table for one command (``[ask]``). The command line takes precedence. Modules that import
LlamaIndex are imported only by commands that need them, so that the others start fast.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from llama_index_agentic_kb._terminal import Watch, show_response, show_turn
from llama_index_agentic_kb._text import error_message, one_line, printable
from llama_index_agentic_kb._types import JsonMapping, JsonObject
from llama_index_agentic_kb.errors import AgenticKBError, ConfigurationError
from llama_index_agentic_kb.schema import OutputMode, ReasoningEffort, RetrievalRequest, RetrievalResponse

if TYPE_CHECKING:
    from llama_index.core.llms import LLM
    from typer.core import TyperOption

    from llama_index_agentic_kb.knowledge_base import KnowledgeBase
    from llama_index_agentic_kb.store import IngestReport, KnowledgeStore
    from llama_index_agentic_kb.store.database import SourceInfo

__all__ = ["main"]

CORPUS: Final = Path(__file__).parent / "corpus"
DEMO_SOURCES: Final = {
    "missions": "Space missions: dates, crews, spacecraft, results, and the rocket that launched each.",
    "vehicles": "Launch vehicles: who built them, height, mass, thrust, stages, boosters.",
    "destinations": "Moons, planets, asteroids, comets, craters: discovery, size, surface.",
}
DEMO_QUESTION: Final = "Which rocket launched Cassini-Huygens, how tall was it, and how wide is Titan?"
DEFAULT_STORE: Final = ".agentic-kb"
CONFIG: Final = Path("agentic-kb.toml")
_SKIPPED: Final = 3  # exit status of an ingestion that read all files but those of kinds that are not read
_WIDE: Final = 200  # minimum columns of tables in a file or a pipe
_LISTED: Final = 20  # maximum number of skipped files that are named
MORE: Final = "No API key: searched as asked, extracts only. For plans and cited answers set OPENAI_API_KEY, or \
OPENAI_BASE_URL for any OpenAI-compatible server, and choose a model with --model."

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # local variables include the API key
    help="An agentic knowledge base over your own documents.",
)
console = Console()
errors = Console(stderr=True)

StoreOption = Annotated[
    str, typer.Option("--store", help="The store: a directory, or postgresql://user@host/database.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="A chat model of the server.")]
EmbedModelOption = Annotated[
    str | None, typer.Option("--embed-model", help="Of a new store: multilingual, a Hugging Face name, or a folder.")
]
EffortOption = Annotated[ReasoningEffort, typer.Option(help="How hard to think.")]
SecondsOption = Annotated[float, typer.Option(help="Deadline.", min=0.1)]
WaitOption = Annotated[float, typer.Option("--wait", help="Seconds to wait for another process that writes.", min=0)]
WindowOption = Annotated[
    int, typer.Option(help="Context window in tokens of a model whose name is not known.", min=512)
]


def main() -> None:
    """Run the command line; on ``AgenticKBError``, print it and its remedy to stderr, and exit with status 1."""
    try:
        app()
    except AgenticKBError as error:
        errors.print(Text(f"agentic-kb: {printable(error_message(error))}", "red"))
        errors.print(Text(f"{error.code}: {error.remedy} More: {error.docs}", "dim"), soft_wrap=True)
        raise SystemExit(1) from None


@app.callback(invoke_without_command=True)
def configure(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Read the options of agentic-kb.toml."""
    if show_version:
        typer.echo(version("llama-index-agentic-kb"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
    if not CONFIG.is_file():
        return
    try:
        options = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{CONFIG} can't be read as TOML: {error}") from error
    context.default_map = _defaults(options)


def _defaults(options: JsonObject) -> dict[str, JsonObject]:
    """Return each command's defaults by parameter, from the options of agentic-kb.toml; refuse unknown names."""
    tables = {key: value for key, value in options.items() if isinstance(value, dict)}
    shared = {key: value for key, value in options.items() if key not in tables}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    defaults: dict[str, JsonObject] = {}
    unknown = {*shared, *(tables.keys() - commands.keys())}
    for name, command in commands.items():
        own = tables.get(name, {})
        values = _values(command.params, shared | own)
        defaults[name] = dict(values.values())
        unknown -= values.keys()
        unknown |= {f"{name}.{key}" for key in own.keys() - values.keys()}
    if unknown:
        raise ConfigurationError(f"{CONFIG}: unknown: {', '.join(sorted(unknown))}; names are those of the options")
    return defaults


def _values(parameters: Sequence[TyperOption], options: JsonMapping) -> dict[str, tuple[str, object]]:
    """Return name and value of each parameter that options set, by the options' keys."""
    flags = {flag[2:]: one for one in parameters for flag in one.opts if flag.startswith("--")}
    values: dict[str, tuple[str, object]] = {}
    for key, value in options.items():
        if (option := flags.get(key.replace("_", "-"))) is not None:
            values[key] = str(option.name), [value] if option.multiple and isinstance(value, str) else value
    return values


@app.command("ingest")
def ingest_command(  # noqa: PLR0917 (typer makes options of them)
    paths: Annotated[list[str], typer.Argument(help="Folders and files; each folder becomes a source.")],
    store: StoreOption = DEFAULT_STORE,
    source: Annotated[str | None, typer.Option(help="Put everything into this source.")] = None,
    description: Annotated[str | None, typer.Option(help="What is in it, for the planner.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Tokens of a chunk.", min=80)] = None,
    embed_model: EmbedModelOption = None,
    wait: WaitOption = 0.0,
    max_megabytes: Annotated[float, typer.Option(help="Larger files are skipped, and listed.", min=0)] = 100.0,
    ocr: Annotated[
        bool, typer.Option("--ocr/--no-ocr", help="Read images and scanned pages. Needs the extra ocr.")
    ] = False,
    tenant: Annotated[str | None, typer.Option(help="Whose the documents are; see permissions=.")] = None,
    group: Annotated[list[str] | None, typer.Option(help="A group that may see them; several times for more.")] = None,
    public: Annotated[bool, typer.Option(help="Everybody of the tenant may see them.")] = False,
    trust_urls: Annotated[bool, typer.Option(help="A file's own `url:` is its link.")] = False,
    on: Annotated[str | None, typer.Option(help="ray: from fsspec URLs into a shared store, on a cluster.")] = None,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster. Default: one on this machine.")] = None,
    cpus: Annotated[float, typer.Option(help="Cores of each Ray actor; may be a fraction.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of each Ray actor; may be a fraction.")] = 0.0,
) -> None:
    """Read documents into a store; unchanged ones are not embedded again.

    Read are txt, md, rst, html, pdf, docx, pptx, xlsx, csv, tsv, json, jsonl, epub, eml and ipynb files, and with --ocr
    png and jpg. Exit status: 1 if a file could not be read, 3 if files of other kinds were skipped. A missing or
    damaged vector index is rebuilt first.
    """
    stamp = {name: value for name, value in (("tenant", tenant), ("groups", group), ("public", public)) if value}
    options: JsonObject = {
        "source": source,
        "description": description,
        "stamp": stamp or None,
        "trust_urls": trust_urls,
        "max_file_bytes": int(max_megabytes * 1_000_000),
        **({} if chunk_size is None else {"chunk_size": chunk_size}),
    }
    if on is not None:
        if wait or ocr:
            raise ConfigurationError("--wait and --ocr don't go with --on ray")
        if on != "ray":
            raise ConfigurationError(f"--on: expected ray, got {on!r}")
        from llama_index_agentic_kb.store.ray_ingestion import ingest_on_ray  # noqa: PLC0415 (rarely needed)

        options |= {"address": address, "embed_model": embed_model, "cpus": cpus, "gpus": gpus}
        with _extra("ray"), _progress() as progress:
            report = ingest_on_ray(paths, store, progress=progress, **options)
        _report(report)
        return
    if (address, cpus, gpus) != (None, 1.0, 0.0):
        raise ConfigurationError("--address, --cpus and --gpus need --on ray")
    if "://" not in store and not Path(store).exists():  # else deleted files are removed from the store
        _check_existing(paths)
    with _stored(store, embed_model=embed_model, create=True, repair="auto") as opened:
        report = _ingest(paths, opened, wait=wait, ocr=ocr, **options)
        _report(report, opened.sources())


def _check_existing(paths: Sequence[str]) -> None:
    from llama_index_agentic_kb.store.files import NO_SUCH_PATH  # noqa: PLC0415 (loads SQLite and more)

    if missing := [path for path in paths if not Path(path).exists()]:
        raise ConfigurationError(f"{', '.join(missing)}: {NO_SUCH_PATH}")


@app.command()
def repair(
    store: StoreOption = DEFAULT_STORE,
    rebuild: Annotated[bool, typer.Option(help="Build every index again, whatever is found.")] = False,
    wait: WaitOption = 0.0,
) -> None:
    """Check a store, and rebuild damaged or missing parts from its documents. Can be interrupted safely."""
    from llama_index_agentic_kb.store import repair_store  # noqa: PLC0415 (loads SQLite and more)

    with _progress("Chunks") as progress:
        report = repair_store(store, rebuild_all=rebuild, wait=wait, progress=progress)
    contents = f"{report.documents} documents, {report.chunks} chunks"
    if report.fault:
        console.print(Text(f"damaged: {printable(report.fault)}"))
    done = f"built again: the indexes of {contents}"
    if not report.rebuilt:
        done = f"The store is whole: {contents}. Nothing was built again"
    console.print(Text(f"{done} ({report.seconds:.1f} s)"))


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    store: StoreOption = DEFAULT_STORE,
    effort: EffortOption = ReasoningEffort.LOW,
    mode: Annotated[OutputMode | None, typer.Option(help="Default: an answer if there is a model.")] = None,
    source: Annotated[list[str], typer.Option(help="Search this source alone; may be given again.")] = [],  # noqa: B006
    filters: Annotated[str | None, typer.Option("--filter", help="OData: \"year ge 2000 and kind eq 'a'\".")] = None,
    model: ModelOption = None,
    embed_model: EmbedModelOption = None,
    context_window: WindowOption = 8_192,
    documents: Annotated[int | None, typer.Option(help="Documents in the result.", min=1)] = None,
    seconds: SecondsOption = 90.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the response as JSON, nothing else.")] = False,
) -> None:
    """Ask a question over a store. On a terminal, its searches and the answer are shown while they are made."""
    base = _open(
        store,
        _language_model(model, context_window),
        embed_model=embed_model,
        effort=effort,
        max_runtime_in_seconds=seconds,
        filters=filters,
    )
    if unknown := sorted({*source} - base.sources.keys()):
        raise ConfigurationError(f"--source: {', '.join(unknown)}: the store has {', '.join(base.sources)}")
    left_out = base.sources.keys() - set(source or base.sources)
    request = base.request(
        question,
        output_mode=mode or base.output_mode,
        max_output_documents=documents,
        knowledge_source_params=[{"knowledgeSourceName": name, "neverQuerySource": True} for name in left_out],
    )
    response = _watched(base, request) if console.is_terminal and not as_json else base.retrieve(request)
    if as_json:
        typer.echo(response.to_json(indent=2))
        return
    show_response(console, response)
    if base.llm is None:
        console.print(Text(MORE, "dim"))


@app.command()
def chat(
    store: StoreOption = DEFAULT_STORE,
    effort: EffortOption = ReasoningEffort.LOW,
    model: ModelOption = None,
    embed_model: EmbedModelOption = None,
    context_window: WindowOption = 8_192,
    seconds: SecondsOption = 90.0,
) -> None:
    """Ask a series of questions, each in the context of the earlier ones. An empty line ends the chat."""
    llm = _language_model(model, context_window)
    if llm is None:
        raise ConfigurationError("chat needs a language model: set OPENAI_API_KEY or OPENAI_BASE_URL")
    base = _open(store, llm, embed_model=embed_model, effort=effort, max_runtime_in_seconds=seconds)
    engine = base.as_chat_engine()
    while question := console.input("[bold]> [/]").strip():
        with Watch(console) if console.is_terminal else nullcontext() as watch:
            response = engine.stream_chat(question)
            for token in response.response_gen:
                if watch is not None:
                    watch.write(token)
        titles = [str(node.metadata.get("title") or node.node_id) for node in response.source_nodes]
        show_turn(console, str(response), titles)


@app.command("list")
def list_sources(store: StoreOption = DEFAULT_STORE) -> None:
    """List the sources of a store."""
    with _stored(store) as opened:
        _list(opened.sources())


@app.command()
def remove(
    source: Annotated[str, typer.Argument(help="The source to remove, with all its documents.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Remove a source and its documents from a store."""
    with _stored(store) as opened:
        opened.remove_source(source)
    console.print(Text(f"removed {printable(source)}"))


@app.command()
def info(store: StoreOption = DEFAULT_STORE) -> None:
    """Show the contents of a store, its embedding model, and its size on disk."""
    with _stored(store) as opened:
        console.print(Text(f"{printable(opened.location)}: {opened.size() / 1e6:.1f} MB"))
        console.print(Text(f"embedding model: {printable(str(opened.fingerprint))}"))
        _list(opened.sources())


@app.command()
def doctor(
    store: StoreOption = DEFAULT_STORE,
    model: ModelOption = None,
    embed_model: EmbedModelOption = None,
    context_window: WindowOption = 8_192,
) -> None:
    """Check versions, store, embedding model and language model; exit with status 1 if a check fails."""

    def language_model() -> str:
        llm = _language_model(model, context_window)
        return "none" if llm is None else one_line(str(llm.complete("Reply with the word: ready")), 60)

    def embedding() -> str:
        with _stored(store, embed_model=embed_model) as opened:
            return f"{len(opened.embed_model.get_query_embedding('ready'))} dimensions"

    def sources() -> str:
        with _stored(store) as opened:
            return f"{len(opened.sources())} sources"

    for package in ("llama-index-agentic-kb", "llama-index-core", "chromadb", "usearch"):
        console.print(Text(f"{package}: {version(package)}"))
    failed = False
    for name, check in {"store": sources, "embedding model": embedding, "language model": language_model}.items():
        try:
            console.print(Text(f"{name}: {printable(check())}", "green"))
        except Exception as error:  # noqa: BLE001 (the check reports any failure)
            failed = True
            console.print(Text(f"{name}: {printable(error_message(error))}", "red"))
    if failed:
        raise typer.Exit(1)


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="A question about space missions.")] = DEMO_QUESTION,
    store: Annotated[str | None, typer.Option("--store", help="Where the demo's store is kept.")] = None,
    model: ModelOption = None,
    context_window: WindowOption = 8_192,
) -> None:
    """Ask a corpus of 44 articles on space missions; it is ingested on the first run. Needs no API key."""
    where = store or str(_cache() / "demo-3")  # a store of this format
    with _stored(where, create=True, repair="auto") as opened:
        for name, description in DEMO_SOURCES.items():
            _ingest([str(CORPUS / name)], opened, source=name, description=description, trust_urls=True)
    base = _open(where, _language_model(model, context_window))
    _ask_aloud(base, question)
    if base.llm is not None:
        return
    from llama_index_agentic_kb.replay import RecordedLLM, Recording  # noqa: PLC0415 (only the demo replays)

    recording = Recording.load(CORPUS / "recorded" / "demo-hard.json")  # a hard question, with a model's replies
    written = f"RECORDED: the plan and the answer below were written by {recording.model} and are replayed; "
    console.print(Text(MORE + "\n", "dim"))
    console.print(Text(f"{written}the searches are real.", "bold yellow"))
    _ask_aloud(_open(where, RecordedLLM(recording=recording), effort=recording.effort), recording.question)


@app.command()
def calibrate(store: StoreOption = DEFAULT_STORE) -> None:
    """Make or update the scope index, by which conversations narrow a search, and suit it to the documents."""
    from llama_index_agentic_kb.evaluation.calibration import calibrate_store  # noqa: PLC0415 (loads LlamaIndex)

    with _stored(store) as opened:
        for name, made in calibrate_store(opened):
            console.print(Text(f"{printable(name)}: {made}"))


@app.command("bench")
def bench_command(
    folder: Annotated[Path, typer.Argument(help="A BEIR-form folder: corpus, queries, qrels.")],
    systems: Annotated[
        str, typer.Option(help="Comma-separated: dense, bm25, hybrid, query_fusion, minimal, low, medium, auto.")
    ] = "dense,bm25,hybrid,minimal,low,medium",
    plans: Annotated[
        str, typer.Option(help="Where plans come from: oracle (gold fields), recorded:FILE, llm, none.")
    ] = "oracle",
    k: Annotated[str, typer.Option(help="The k of each metric, comma-separated.")] = "5,10",
    limit: Annotated[int | None, typer.Option(help="So many questions, drawn at random.", min=1)] = None,
    source_field: Annotated[str | None, typer.Option(help="Metadata key that tells the source.")] = None,
    split: Annotated[str, typer.Option(help="Which of qrels/, where there is no qrels.tsv.")] = "test",
    cache: Annotated[Path | None, typer.Option(help="Where vectors are kept.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the run as JSON.")] = None,
    model: ModelOption = None,
    context_window: WindowOption = 8_192,
) -> None:
    """Compare the retrieval quality of several systems on an evaluation set."""
    cutoffs = [int(part) if part.strip().isdigit() else 0 for part in k.split(",")]
    if not all(cutoffs):
        raise ConfigurationError(f"--k: expected numbers above 0, comma-separated, got {k!r}")
    from llama_index_agentic_kb import evaluation  # noqa: PLC0415 (loads LlamaIndex)
    from llama_index_agentic_kb.evaluation.runner import planner_of  # noqa: PLC0415 (same)
    from llama_index_agentic_kb.evaluation.systems import check_systems  # noqa: PLC0415 (same)
    from llama_index_agentic_kb.store import default_embed_model  # noqa: PLC0415 (loads torch)

    names = [name.strip() for name in systems.split(",")]
    llm = _language_model(model, context_window) if plans == "llm" else None
    planner, plans, dataset = planner_of(plans, llm, evaluation.read_dataset(folder, split=split, limit=limit))
    check_systems(names, planner)  # before anything is embedded, as for --out
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.open("a").close()
        except OSError as error:
            raise ConfigurationError(f"--out: {out} can't be written: {error}") from error
    embed_model, documents, kept = default_embed_model(), max(cutoffs), cache or _cache() / "bench"
    with _progress() as advance:

        def progress(name: str, done: int, total: int) -> None:
            advance(done, total, name)

        embedding = partial(progress, "embedding")
        corpus = evaluation.CorpusIndex(dataset, embed_model, kept, source_field=source_field, progress=embedding)
        with closing(corpus):
            made = evaluation.make_systems(names, corpus, planner, documents=documents)
            run = evaluation.evaluate(dataset, made, plans=plans, cutoffs=cutoffs, progress=progress)
    settings = {"embed_model": embed_model.model_name, "source_field": source_field, "documents": documents}
    versions = {package: version(package) for package in ("llama-index-agentic-kb", "llama-index-core")}
    run.settings |= settings | versions
    summary = run.summary()
    if out is not None:
        out.write_text(json.dumps(run.to_dict() | {"summary": summary}, ensure_ascii=False) + "\n", encoding="utf-8")
    wide = console if console.is_terminal else Console(file=console.file, width=max(console.width, _WIDE))
    wide.print(evaluation.render_run(run, summary))


ConfigArgument = Annotated[Path, typer.Argument(help="The server's configuration, kb.yaml; see docs/server.md.")]


@app.command("plan-capacity")
def plan_capacity(
    chunks: Annotated[list[float], typer.Option(help="The size of the collection; repeat it for several.", min=1)],
    qps: Annotated[float, typer.Option(help="Questions a second.")],
    effort: EffortOption = ReasoningEffort.AUTO,
    cores: Annotated[int, typer.Option(help="Cores of a machine.", min=1)] = 16,
    memory: Annotated[float, typer.Option(help="Memory of a machine in GB.")] = 64,
    price_hour: Annotated[float, typer.Option(help="Price of a machine for an hour.")] = 0.7,
    price_in: Annotated[float, typer.Option(help="Price of a million tokens that the model reads.")] = 0.15,
    price_out: Annotated[float, typer.Option(help="Price of a million tokens that the model writes.")] = 0.6,
    model_seconds: Annotated[
        float, typer.Option(help="Duration of a call of the model; 0: extracts only.", min=0)
    ] = 1.5,
) -> None:
    """Show the machines, memory, disk, time and money that a collection and its load need. Needs the extra capacity."""
    from llama_index_agentic_kb.evaluation import capacity  # noqa: PLC0415 (rarely needed)

    terms = capacity.Terms(cores, memory, price_hour, price_in, price_out, model_seconds)
    with _extra("capacity"):
        plans = [capacity.plan(size, qps, effort, terms=terms) for size in chunks]
    console.print(Text(f"{qps:g} questions a second, effort {effort.value}; times of {capacity.RECORDED.machine}"))
    console.print(capacity.table_of(plans))


@app.command()
def serve(config: ConfigArgument) -> None:
    """Serve knowledge bases over HTTP: Azure's and Google's APIs, and MCP. Needs the extra server."""
    with _extra("server"):
        from llama_index_agentic_kb.server import app as server  # noqa: PLC0415 (the extra)
    server.serve(server.Configuration.load(config))


@app.command()
def keys(
    config: ConfigArgument,
    new: Annotated[str | None, typer.Option(help="Create a key: admin or query.")] = None,
    name: Annotated[str, typer.Option(help="The new key's name, for lists and logs.")] = "unnamed",
    revoke: Annotated[str | None, typer.Option(help="Revoke the key with this id.")] = None,
) -> None:
    """List, create or revoke a server's API keys. A running server applies the change within a second."""
    with _extra("server"):
        from llama_index_agentic_kb.server.catalog import manage_keys  # noqa: PLC0415 (the extra)
    for line in manage_keys(config, new=new, name=name, revoke=revoke):
        typer.echo(line)


@app.command()
def mcp(
    store: StoreOption = DEFAULT_STORE,
    effort: EffortOption = ReasoningEffort.LOW,
    model: ModelOption = None,
    context_window: WindowOption = 8_192,
) -> None:
    """Serve a store to an MCP client over stdin and stdout, as the tool knowledge_base_retrieve."""
    import asyncio  # noqa: PLC0415 (only this command runs a loop)

    with _extra("server"):
        from llama_index_agentic_kb.server.mcp_tool import serve_stdio  # noqa: PLC0415 (the extra)
    asyncio.run(serve_stdio(_open(store, _language_model(model, context_window), effort=effort)))


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed: pip install 'llama-index-agentic-kb[{name}]'"
        ) from error


def _stored(path: str, **options: Any) -> KnowledgeStore:
    from llama_index_agentic_kb.store import KnowledgeStore  # noqa: PLC0415 (loads SQLite and more)

    return KnowledgeStore.open(path, **options)


def _list(sources: Iterable[SourceInfo]) -> None:
    for source in sources:
        console.print(Text(f"{printable(source.name)}: {source.documents} documents, {source.chunks} chunks"))


def _ask_aloud(base: KnowledgeBase, question: str) -> None:
    console.rule(Text(one_line(printable(question), 120), "bold"))
    show_response(console, base.retrieve(question))


def _watched(base: KnowledgeBase, request: RetrievalRequest) -> RetrievalResponse:
    """Answer a request, and show its activity and its text on the terminal meanwhile."""
    with Watch(console) as watch:
        if request.output_mode is OutputMode.EXTRACTIVE_DATA:
            return base.retrieve(request, on_activity=watch.record)
        engine = base.as_query_engine(request.output_mode and request.output_mode.value, streaming=True)
        response = engine.stream(request, observer=watch.record)
        for token in response.response_gen:
            watch.write(token)
        return response.account


def _open(store: str, llm: LLM | None, **kwargs: Any) -> KnowledgeBase:
    from llama_index_agentic_kb.knowledge_base import KnowledgeBase  # noqa: PLC0415 (loads LlamaIndex)

    with console.status("Loading the store and its embedding model"):
        return KnowledgeBase.from_store(store, llm=llm, **kwargs).warm_up()


def _language_model(name: str | None, context_window: int) -> LLM | None:
    """Return the language model set by environment variables; None if neither an API key nor OPENAI_BASE_URL is set."""
    from llama_index_agentic_kb.llm import calls  # noqa: PLC0415 (loads LlamaIndex)

    if os.environ.get("OPENAI_API_KEY") or calls.openai_address() is not None:
        return calls.openai_from_environment(name, context_window=context_window)
    if name is not None:
        raise ConfigurationError("--model needs OPENAI_API_KEY, or OPENAI_BASE_URL for a server of your own")
    return None


def _cache() -> Path:
    from platformdirs import user_cache_path  # noqa: PLC0415 (only demo and bench ask)

    return Path(user_cache_path("agentic-kb"))


def _ingest(paths: list[str], store: KnowledgeStore, **kwargs: Any) -> IngestReport:
    from llama_index_agentic_kb.store import ingest  # noqa: PLC0415 (loads SQLite and more)

    with _progress() as progress:
        return ingest(paths, store, progress=progress, **kwargs)


@contextmanager
def _progress(what: str = "Reading") -> Iterator[Callable[[int, int, object], None]]:
    """Show a progress bar if the output is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, path: object) -> None:
            name = Text(one_line(printable(str(path)), 60)).markup
            bar.update(task, completed=done, total=total, description=name)

        yield advance


def _report(report: IngestReport, sources: Iterable[SourceInfo] = ()) -> None:
    """Print what was ingested and what a store holds now; exit with a status above 0 if files were left out."""
    counts = (
        f"{len(report.added)} added, {len(report.updated)} updated, {len(report.unchanged)} unchanged, "
        f"{len(report.deleted)} deleted, {len(report.failed)} failed, {report.skipped} skipped; "
        f"{report.chunks_embedded} chunks embedded in {report.seconds:.1f} s"
    )
    console.print(Text(counts))
    for what, files in (("failed", report.failed), ("skipped", report.skipped_files[:_LISTED])):
        for path, reason in files:
            errors.print(Text(f"{what}: {printable(str(path))}: {printable(reason)}", "yellow"))
    if report.skipped > _LISTED:
        errors.print(Text(f"skipped: and {report.skipped - _LISTED} more", "yellow"))
    _list(sources)
    if report.failed or report.skipped:
        raise typer.Exit(1 if report.failed else _SKIPPED)
