"""`specserve serve`: the gRPC server over one engine, from its start-up lines to a graceful end."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specserve.cli import options
from specserve.cli.pull import progress_bar

if TYPE_CHECKING:
    from specserve.build import Built
    from specserve.config import EngineConfig
    from specserve.server.grpc import GrpcDoor
    from specserve.server.worker import EngineThread

READY = "ready: "


@options.flat
def serve(
    sources: options.DraftSources,
    placement: options.Placement,
    model: options.Model = "demo",
    host: Annotated[str, typer.Option(help="Address to listen on; there is no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one and prints it.")] = 50051,
    served_model_name: Annotated[str | None, typer.Option(help="Name to report. [default: the model's]")] = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    block_size: options.BlockSize = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of prompts that start alike.")] = True,
    kv_cache_gib: options.KvCacheGib = None,
    speculate: options.Speculate = None,
    num_draft_tokens: options.NumDraftTokens = None,
    threads: options.Threads = None,
    kernels: options.Kernels = None,
    grace: Annotated[float, typer.Option(help="Seconds that requests in flight get at shutdown.")] = 10.0,
) -> None:
    """Serve a model over gRPC until SIGINT or SIGTERM; a second signal does not wait for requests in flight."""
    config = options.engine_config(
        model=model,
        served_model_name=served_model_name,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_gib=kv_cache_gib,
        drafter=speculate,
        num_draft_tokens=num_draft_tokens,
        threads=threads,
        kernels=kernels,
        **(sources.given() | placement.given()),
    )
    asyncio.run(_serve(config, host, port, grace))


async def _serve(config: EngineConfig, host: str, port: int, grace: float) -> None:
    from specserve.server import done
    from specserve.server.grpc import GrpcDoor
    from specserve.server.worker import EngineThread

    thread = EngineThread(lambda: _load(config))
    door = GrpcDoor(thread, host, port)
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    bound = await door.start()
    print(f"listening on {host}:{bound}; loading {config.model}", flush=True)
    thread.start()
    told_to_stop = asyncio.create_task(signals.get())
    try:
        await _first(told_to_stop, asyncio.create_task(done(thread.ready)))
        if thread.ready.done():
            served = thread.ready.result()
            # what was loaded stays until the process ends: no collection need look at it again
            gc.collect()
            gc.freeze()
            print(*served.startup_lines, f"{READY}{served.model_name} on {host}:{bound}", sep="\n", flush=True)
            await told_to_stop
    finally:
        told_to_stop.cancel()
        await _shut_down(door, thread, signals, grace)


def _load(config: EngineConfig) -> Built:
    from specserve.build import build

    with progress_bar() as progress:
        return build(config, progress)


async def _shut_down(door: GrpcDoor, thread: EngineThread, signals: asyncio.Queue[None], grace: float) -> None:
    drained = asyncio.create_task(door.stop(grace))
    again = asyncio.create_task(signals.get())
    await _first(drained, again)
    again.cancel()
    if not drained.done():
        await door.stop(0)
    await drained
    await asyncio.to_thread(thread.stop)


async def _first(*either: asyncio.Future[Any]) -> None:
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
