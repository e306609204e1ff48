"""A server that streams: an event loop waits for all clients, and one thread runs the steps for all their requests.

A function that an *event loop* runs hands the thread back at every `await`, so one thread can serve all clients. A step
never waits and would stop them all: the engine runs in another thread. Requests cross in one queue, which the engine
empties between two steps, and tokens in one queue per request. Try `curl -N 127.0.0.1:8000/What%20is%20decode`. With
`--once` the program asks itself eight questions, in turn and at once. The answers are those of stage E's loop.
"""

import asyncio
import sys
from collections import deque
from queue import SimpleQueue
from threading import Thread
from urllib.parse import quote, unquote

from transformers import AutoTokenizer

from stage_a_naive.checkpoints.tutor import TUTOR_PATH, read_faq
from stage_a_naive.loop import encode
from stage_d_paged.loop import BLOCK_SIZE, PagedAttention, Pool, Sequence, load
from stage_e_batching.loop import NUM_BLOCKS, generate, step

IN_TURN, AT_ONCE = 1, 8  # clients that ask at the same time
in_flight: list[int] = []  # requests, in every step
tokenizer = AutoTokenizer.from_pretrained(TUTOR_PATH)


def run_engine(model: object, inbox: SimpleQueue, loop: asyncio.AbstractEventLoop) -> None:
    pool, waiting, running = Pool(model.config, NUM_BLOCKS, BLOCK_SIZE), deque(), []
    while True:
        while not inbox.empty() or not (waiting or running):  # wait for a request only where none is in flight
            waiting.append(inbox.get())
        in_flight.append(len(waiting) + len(running))
        for sequence in step(model, pool, waiting, running, tokenizer.eos_token_id):
            loop.call_soon_threadsafe(sequence.tokens.put_nowait, sequence.ids[-1] if sequence in running else None)


async def answer(inbox: SimpleQueue, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sequence = Sequence(encode(tokenizer, unquote((await reader.readuntil(b"\r\n\r\n")).split()[1][1:].decode())))
    sequence.tokens, ids = asyncio.Queue(), []  # what has been read began with GET /What%20is%20decode HTTP/1.1
    inbox.put(sequence)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")
    while (token := await sequence.tokens.get()) is not None:
        ids.append(token)
        if "\N{REPLACEMENT CHARACTER}" not in (text := tokenizer.decode(ids)):  # not in the middle of a character
            writer.write(text.encode())
            ids.clear()
    writer.close()


async def ask(port: int, question: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{quote(question)} HTTP/1.1\r\n\r\n".encode())
    return (await reader.read()).decode().partition("\r\n\r\n")[2]


async def serve(once: bool) -> None:
    model, inbox, most = load(PagedAttention()), SimpleQueue(), []
    Thread(target=run_engine, args=(model, inbox, asyncio.get_running_loop()), daemon=True).start()
    server = await asyncio.start_server(lambda *streams: answer(inbox, *streams), "127.0.0.1", 0 if once else 8000)
    if not once:
        await server.serve_forever()
    port, questions = server.sockets[0].getsockname()[1], [entry["question"] for entry in read_faq()[:8]]
    for n in (IN_TURN, AT_ONCE):
        in_flight.clear()
        answers = sum([await asyncio.gather(*(ask(port, q) for q in questions[i : i + n])) for i in range(0, 8, n)], [])
        most.append(max(in_flight))
        print(f"eight questions, {n} at a time: {len(in_flight)} steps")
    pool, prompts = Pool(model.config, NUM_BLOCKS, BLOCK_SIZE), [encode(tokenizer, question) for question in questions]
    expected = generate(model, pool, prompts, tokenizer.eos_token_id)
    assert answers == tokenizer.batch_decode(expected, skip_special_tokens=True)
    print(f"requests in flight: {most[0]} → {most[1]} [H200, 64 over HTTP: 60 % of the tokens/s without]")


def main() -> None:
    asyncio.run(serve(once="--once" in sys.argv))


if __name__ == "__main__":
    main()
