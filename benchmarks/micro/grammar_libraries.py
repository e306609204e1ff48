"""Grammar libraries: llguidance and xgrammar compile a schema and fill the masks of 32 answers, on CPU cores.

Each answer continues with a token that both libraries allow, so both are at the same point of the same text. The
schema has other names each time. xgrammar keeps parts of schemas, so its first one takes longer than the others.
xgrammar is not a dependency of the course: `pip install xgrammar==0.2.8`.
"""

from __future__ import annotations

import json
import os
import random
import time
from importlib.metadata import version

import numpy as np

from benchmarks.micro import timed
from benchmarks.micro._vocabulary import widened
from benchmarks.micro.constrained import OBJECT
from beyond.structured.grammars import Grammars, Masks, Matcher, compile_form
from beyond.structured.tokens import library_tokens
from stage_a_naive.checkpoints.loading import eos_token_ids, load_tokenizer, resolve
from stage_a_naive.contract.structured_outputs import StructuredOutputs

LIBRARIES = ("llguidance", "xgrammar")
TABLES = """
[grammar-libraries]
corner = "what takes time"
line = "{what}"
column = "{library} {libraries[library]}, ms"
cell = "{ms:n} ({1e3 * sorted(samples)[int(0.99 * len(samples))]:n})"
note = "{result['answers']} answers, {result['vocabulary']:,} tokens, {result['cores']} CPU cores; medians (99 %)"
"""


def measure(vocabulary: int = 151_936, answers: int = 32, steps: int = 200, repeats: int = 5) -> dict:
    """Measure the seconds to compile a schema, and to fill the masks of a step."""
    import xgrammar

    cores, source = len(os.sched_getaffinity(0)), resolve("tutor")
    tutor = load_tokenizer(source)
    tokenizer, eos_ids = widened(tutor, vocabulary), sorted(eos_token_ids(source, tutor))
    tokens = library_tokens(tokenizer, vocabulary, eos_ids)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=eos_ids)
    compilers = [xgrammar.GrammarCompiler(info, max_threads=cores, cache_enabled=kept) for kept in (False, True)]
    spaces = {"max_whitespace_cnt": 8}
    compile_schema = {
        ("first", "llguidance"): lambda text: compile_form(StructuredOutputs("json", text), tokens)[0],
        ("first", "xgrammar"): lambda text: compilers[0].compile_json_schema(text, **spaces),
        ("next", "llguidance"): lambda text: compile_form(StructuredOutputs("json", text), tokens)[0],
        ("next", "xgrammar"): lambda text: compilers[1].compile_json_schema(text, **spaces),
    }
    compiling: dict[tuple[str, str], list[float]] = {way: [] for way in compile_schema}
    compiled = {}
    for repeat in range(1 + repeats):  # the first is a warm-up
        schema = json.dumps({"type": "array", "items": OBJECT, "minItems": 500}).replace('"text"', f'"text{repeat}"')
        for way, own in compiling.items():
            start = time.perf_counter()
            compiled[way] = compile_schema[way](schema)
            own.append(time.perf_counter() - start)
    matchers = [Matcher(compiled["next", "llguidance"].deep_copy()) for _ in range(answers)]
    others = [xgrammar.GrammarMatcher(compiled["next", "xgrammar"]) for _ in range(answers)]
    masks, batch = Masks(cores), xgrammar.BatchGrammarMatcher(max_threads=cores)
    words = {library: np.zeros((answers, Grammars(source, vocabulary).num_words), np.int32) for library in LIBRARIES}
    rows = [(matcher, row, []) for row, matcher in enumerate(matchers)]
    fill = {
        "llguidance": lambda: masks.fill(rows, words["llguidance"]),
        "xgrammar": lambda: batch.batch_fill_next_token_bitmask(others, words["xgrammar"]),
    }
    filling: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    chance = random.Random(0)
    for _ in range(steps):
        for library, own in filling.items():
            start = time.perf_counter()
            fill[library]()
            own.append(time.perf_counter() - start)
        for row, (matcher, other) in enumerate(zip(matchers, others, strict=True)):
            both = words["llguidance"][row] & words["xgrammar"][row]
            token = int(chance.choice(np.flatnonzero(np.unpackbits(both.view(np.uint8), bitorder="little"))))
            assert matcher.accept([token]) == 1 and other.accept_token(token), "both allow it"
    found = [
        timed(own[1:], what=f"compile the {which} schema", library=name) for (which, name), own in compiling.items()
    ]
    found += [timed(filling[library], what="fill the masks of a step", library=library) for library in LIBRARIES]
    versions = {library: version(library) for library in LIBRARIES}
    what = {"vocabulary": vocabulary, "answers": answers, "cores": cores, "libraries": versions}
    return what | {"rows": found}
