"""Constraints that grammar libraries misread: each is served correctly, or refused on arrival with its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from contract.test_structured import PROMPT
from serving import httpx, running
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from beyond import LLM
from beyond.structured.answers import make_check, reason_against
from beyond.structured.gbnf import GbnfError, gbnf_to_lark
from beyond.structured.grammars import Grammars, compile_form
from beyond.structured.patterns import PatternError, check_pattern
from beyond.structured.schemas import Refused, prepare
from beyond.structured.tokens import byte_tokens, library_tokens
from stage_a_naive import SamplingParams
from stage_a_naive.checkpoints.loading import load_tokenizer, resolve
from stage_a_naive.contract.structured_outputs import GrammarError, StructuredOutputs, as_structured_outputs

llguidance = pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

NOT_NFC = "e\u0301 \u212b"  # e and an accent, and the sign of Ångström: other bytes in Unicode's normal form C


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tutor", device="cpu")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(resolve("tutor"), 4096)


@pytest.fixture()
def tokenizer():
    return load_tokenizer(resolve("tutor"))


def refusal(grammars: Grammars, form: dict) -> str:
    with pytest.raises(GrammarError) as refused:
        grammars.start(as_structured_outputs(form))
    return str(refused.value)


def accepts(grammar: str, text: str) -> bool:
    """Whether a grammar of the library's has a text, spelled byte by byte."""
    state = llguidance.LLMatcher(byte_tokens(), grammar, log_level=0)
    assert not state.is_error(), state.get_error()
    spelled = list(text.encode())
    return state.try_consume_tokens(spelled) == len(spelled) and state.is_accepting()


def json_accepts(schema: dict, text: str) -> bool:
    prepared = prepare(schema)
    assert not isinstance(prepared, Refused), prepared
    return accepts(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(prepared)), text)


def gbnf_accepts(text: str, answer: str) -> bool:
    return accepts(llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text)), answer)


def only_answer(start, tokenizer) -> str:
    """The text of the first tokens that are allowed."""
    ids: list[int] = []
    while not start.is_accepting():
        mask = np.frombuffer(start.compute_bitmask(), np.uint8)
        ids.append(int(np.flatnonzero(np.unpackbits(mask, bitorder="little"))[0]))
        assert start.consume_token(ids[-1]), start.get_error()
    return tokenizer.decode(ids)


# ---- marks of the tokenizer, and other spellings -------------------------------------------------------------------

SPELLED = {
    "stop at <|im_end|> please": {"choice": ["stop at <|im_end|> please"]},
    '"<|im_end|>"': {"json": {"const": "<|im_end|>"}},
    "token: <|im_end|>!": {"regex": r"token: <\|im_end\|>!"},
    '"<|im_start|>"': {"json": {"enum": ["<|im_start|>"]}},
    "say <|im_end|>": {"grammar": 'root ::= "say <|im_end|>"'},
    NOT_NFC: {"choice": [NOT_NFC]},
    "a\x7fb": {"choice": ["a\x7fb"]},
    r'"\u007F\u0001"': {"json": {"const": "\x7f\x01"}},
    "choice 3999": {"choice": [f"choice {i}" for i in range(3999, 4000)] + ["choice 3999"] * 3000},
    "AB": {"grammar": r'root ::= "\u0041\x42"'},
    "cats": {"grammar": 'root ::= "cat" w\nw ::= s\ns ::= "s"'},
    "yes": {"grammar": '?start: "yes"'},
    "ab": {"grammar": 'start: "a" <|im_start|> "b"'},  # a mark by its name is no text
}


def test_text_of_marks_is_spelled_out_and_every_answer_is_its_form(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=form) for form in SPELLED.values()]
    outputs = llm.generate([PROMPT] * len(params), params, False)
    assert [output["text"] for output in outputs] == list(SPELLED)
    assert {output["finish_reason"] for output in outputs} == {"stop"}


def test_added_tokens_that_are_not_special_are_spelled_out_too(tokenizer) -> None:
    tokenizer.add_tokens(["<tool_call>"])
    tokens = library_tokens(tokenizer, 4100, [2])
    start, _ = compile_form(StructuredOutputs("choice", '["<tool_call> x"]'), tokens)
    assert only_answer(start.deep_copy(), tokenizer) == "<tool_call> x"
    named, _ = compile_form(StructuredOutputs("grammar", "start: <[4096]>"), tokens)
    assert named.try_consume_tokens([4096]) == 1, "a grammar may name it by number"


def test_more_choices_than_a_grammar_has_rules(grammars: Grammars, tokenizer) -> None:
    state = grammars.start(as_structured_outputs({"choice": [f"choice {i}" for i in range(4000)]})).state
    assert state.try_consume_tokens(tokenizer.encode("choice 3998")) > 0 and state.is_accepting()


# ---- the vocabulary ------------------------------------------------------------------------------------------------


def test_a_tokenizer_longer_than_the_vocabulary_spells_with_what_is_left(tokenizer) -> None:
    tokens = library_tokens(tokenizer, 1000, [2])
    start, _ = compile_form(StructuredOutputs("choice", '["a block table of tokens"]'), tokens)
    assert only_answer(start, tokenizer) == "a block table of tokens"


@pytest.mark.parametrize("eos_ids", [[], [-1], [4096]])
def test_a_model_that_cannot_end_an_answer_says_so(tokenizer, eos_ids: list[int]) -> None:
    with pytest.raises(
        GrammarError, match="no token can end an answer: eos_token_id is .* has 4096 tokens; give one in"
    ):
        library_tokens(tokenizer, 4096, eos_ids)


@pytest.mark.parametrize("eos_ids", [[2, -1], [2, 9999]])
def test_an_end_outside_the_vocabulary_is_left_out(tokenizer, eos_ids: list[int]) -> None:
    assert library_tokens(tokenizer, 4096, eos_ids).eos_tokens == [2]


def test_added_tokens_that_merges_make_are_pieces_of_text() -> None:
    pieces = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "\n", "\n\n", "a\n"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, [("\n", "\n"), ("a", "\n")], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<eos>"])
    made.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n")])  # as Gemma's line breaks are
    tokens = library_tokens(PreTrainedTokenizerFast(tokenizer_object=made), len(vocab), [0])
    assert tokens.tokenize_str("\n\na") == [vocab["\n\n"], vocab["a"]]
    assert tokens.tokenize_str("<eos>") != [0]


# ---- numbers, patterns and references of schemas -------------------------------------------------------------------

LARGE = 1234567890123456789
MISREAD = {
    ("/properties/a", "beyond 2**53"): {"properties": {"a": {"const": LARGE}}},
    ("/items", "beyond 2**53"): {"type": "array", "items": {"enum": [1, {"x": [LARGE]}]}},
    ("/anyOf/0", "beyond 2**53"): {"anyOf": [{"type": "integer", "minimum": LARGE}, {"type": "null"}]},
    ("", "beyond 2**53"): {"type": "integer", "maximum": -LARGE},
    ("/prefixItems/1", "15 digits"): {"prefixItems": [{}, {"const": 123456789.12345679}]},
    ("/properties/x~1y", "would allow 0"): {
        "properties": {"x/y": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}}
    },
    ("/allOf/0", "operation on sets"): {"allOf": [{"type": "string", "pattern": "^[a&&b]$"}]},
    ("/additionalProperties", "operation on sets"): {"additionalProperties": {"patternProperties": {"[a--b]": {}}}},
    ("/properties/a", "without end"): {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ("/$defs/n/items", "without end"): {
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}},
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}],
    },
    ("/items", "no JSON schema"): {"items": 5},
    ("", 'Unimplemented keys: ["if", "then"]'): {"if": {"type": "string"}, "then": {"maxLength": 2}},
}


@pytest.mark.parametrize(("place", "reason"), MISREAD)
def test_what_the_library_reads_wrongly_is_refused_with_its_place(grammars: Grammars, place: str, reason: str) -> None:
    said = refusal(grammars, {"json": MISREAD[place, reason]})
    assert f"the json{' at ' * bool(place)}{place} cannot be compiled (" in said and reason in said


def test_numbers_that_are_kept_are_served(grammars: Grammars) -> None:
    for schema in ({"const": 2**53}, {"enum": [0.1, -1.5]}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}):
        grammars.start(as_structured_outputs({"json": schema}))


def test_a_reference_to_itself_that_may_end_is_served(grammars: Grammars) -> None:
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    grammars.start(as_structured_outputs({"json": tree}))
    assert json_accepts(tree, '{"next": {"next": null}}')


def test_a_name_has_one_spelling() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert json_accepts(schema, '{"a": 1}') and not json_accepts(schema, r'{"\u0061": "x"}')


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r'^[^"]{1,4}$', r'"ceé\\"', r'"cee\""'),
        (r"^[^\\]$", r'"\""', r'"\\"'),
        (r'^[^"\n]+$', r'"a\tb"', r'"a\nb"'),
        (r"^.$", r'"\\"', r'"ab"'),
    ],
)
def test_a_class_forbids_the_escapes_of_what_it_leaves_out(pattern: str, right: str, wrong: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert json_accepts(schema, right) and not json_accepts(schema, wrong)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("x[+--]", "'--' in a class at position 3"),
        ("[~~a]", "'~~' in a class at position 1"),
        ("[a&&b]", "'&&' in a class at position 2"),
        ("[[a]b]", r"'\[' in a class at position 1"),
        ("ab?+", r"'\?\+' at position 2 repeats twice"),
        ("a{2}+", r"'\{2\}\+' at position 1 repeats twice"),
        ("a(?i)b", "flags .* at position 1"),
        ("a{2}{3}", "multiple repeat"),
        ("[a", "not closed"),
    ],
)
def test_an_expression_that_two_readers_read_differently_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"[a\-\-b]", r"[\[a]", "[]a]", "[^]a]", r"\[[a-z]+\]", "[[:alpha:]]", r"\p{L}", "a*?"]
)
def test_an_expression_with_one_meaning_is_taken(pattern: str) -> None:
    check_pattern(pattern)


# ---- what Pydantic writes ------------------------------------------------------------------------------------------


def test_unknown_formats_are_remarks_and_unique_items_are_checked_at_the_end(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "password"}, "uniqueItems": True}
    grammars.start(as_structured_outputs({"json": schema}))
    check = make_check(as_structured_outputs({"json": schema}), "")
    assert not check('["a", "b"]') and "non-unique" in check('["a", "a"]')


def test_no_more_unique_items_are_asked_for_than_there_are() -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}
    assert json_accepts(schema, '["a", "b"]') and not json_accepts(schema, '["a", "b", "a"]')


def test_parts_of_one_of_may_overlap_and_one_alone_holds(grammars: Grammars) -> None:
    form = as_structured_outputs({"json": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}})
    grammars.start(form)
    check = make_check(form, "")
    assert [bool(check(text)) for text in ("1", "3.5", "4")] == [False, False, True]


# ---- the end of an answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"json": {"type": "string", "format": "date"}}, '"2024-02-29"', '"2023-02-29"'),
        ({"json": {"format": "date-time"}}, '"2016-12-31T23:59:60Z"', '"2023-02-29T00:00:00Z"'),
        ({"json": {"type": "number", "multipleOf": 0.1}}, "0.3", "0.35"),
        ({"json": {"const": LARGE}}, str(LARGE), str(LARGE - 21)),
        ({"json": {"properties": {"a": {"type": "integer"}}}}, '{"a": 1}', r'{"\u0061": "x"}'),
        ({"json_object": True}, "{}", "[]"),
        ({"json_object": True}, '{"a": 1}', '{"a": NaN}'),
        ({"regex": "[a-c]+"}, "abc", "abcd"),
        ({"regex": "(a|aa)*"}, "aa", "a" * 4000 + "b"),  # exponentially long, but for the limit
        ({"regex": "([^a]|[^b])*c"}, "a bc", "a b"),
        ({"choice": ["a", "b"]}, "b", "ab"),
    ],
)
def test_an_answer_is_read_again_by_another_program(form: dict, right: str, wrong: str) -> None:
    check = make_check(as_structured_outputs(form), "")
    assert not reason_against(check, right) and reason_against(check, wrong)


def test_a_reference_to_another_document_is_not_fetched() -> None:
    check = make_check(as_structured_outputs({"json": {"$ref": "http://127.0.0.1:9/x.json"}}), "")
    assert "Unresolvable" in reason_against(check, "1")


def test_an_answer_that_its_form_does_not_accept_is_its_requests_error_alone(llm: LLM) -> None:
    """The library accepts any 29th of February; the constraint leads this answer to one."""
    wrong = {"json": {"type": "string", "format": "date", "pattern": "^2023-02-(29|30)$"}}
    free = llm.add_request(PROMPT, SamplingParams(max_tokens=20, temperature=0))
    llm.add_request(PROMPT, SamplingParams(max_tokens=60, temperature=0, structured_outputs=wrong))
    ended = []
    with pytest.raises(GrammarError, match="the answer does not match the json .*2023-02-(29|30).*is not a 'date'"):
        while True:
            ended += [number for number, _ in llm.step()[0]]
    while not llm.is_finished():
        ended += [number for number, _ in llm.step()[0]]
    assert ended == [free]


def test_a_stop_string_inside_the_form_is_no_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, stop="lock", structured_outputs={"choice": ["a block table"]})
    with pytest.raises(GrammarError, match="none of the choices.*stop or stop_token_ids ended it"):
        llm.generate(PROMPT, params, False)


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}])
@pytest.mark.parametrize("penalty", [1e38, 1e-40])
def test_no_penalty_reaches_what_is_forbidden(llm: LLM, penalty: float, way: dict) -> None:
    form = {"regex": "(KV|cache| is| a){12}!"}
    params = SamplingParams(max_tokens=40, repetition_penalty=penalty, structured_outputs=form, **way)
    [output] = llm.generate(PROMPT, params, False)
    assert output["finish_reason"] == "stop" and not reason_against(
        make_check(as_structured_outputs(form), ""), output["text"]
    )


# ---- GBNF and Lark -------------------------------------------------------------------------------------------------

JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value
    ("," ws value)* )? "]" ws   # on several lines
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
GBNF = [
    (JSON, ['{"a": [1, -2.5, {"b": null}], "c\\u0041": "é"}', "{}"], ['{"a": 01}', "{"]),
    (ARITHMETIC, ["a=1\n", "(a+b)*3 = 7\n\n"], ["a = b", "=1\n"]),
    (r'root ::= "\u0041"', ["A"], ["\u4180"]),
    ('root ::= w "s"\nw ::= [a-z]+', ["ss", "cats"], ["s", "cat"]),
    ('root ::= "(" root ")" | w "s"\nw ::= [a-z]+', ["(cats)"], ["(cat)"]),
    ('root ::= p "s"\np ::= "(" p ")" | [a-z]+', ["cats", "(x)s"], ["cat", "(s)"]),
    ('root ::= "(" root ")" | "if" | [a-z]+ "f"', ["(if)", "iff"], ["i"]),
    ("root ::= [+--]", ["+", ",", "-"], ["a"]),
    ("root ::= [~~a]", ["~", "a"], ["b"]),
    ("root ::= [a&&b]", ["a", "&"], ["c"]),
    (r"root ::= [^\-<]+", ["ab\n"], ["-", "<"]),
    ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', ["xy"], ["xx"]),
    ('root ::= start\nstart ::= "x" start | "y"', ["xxy"], ["x"]),
    ('root ::= "a" root | ""', ["", "aa"], ["b"]),
    ('root ::= ("a" | "b" root){2,3}', ["aa", "baaa"], ["a"]),
    ("root ::= .", ["\n", "é"], [""]),
    ('root ::= "a"\r\nunused ::= "b"\r\n', ["a"], ["b"]),
]


@pytest.mark.fast
@pytest.mark.parametrize(("grammar", "right", "wrong"), GBNF)
def test_gbnf_means_its_characters(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert all(gbnf_accepts(grammar, text) for text in right)
    assert not any(gbnf_accepts(grammar, text) for text in wrong)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a"\nb ::= missing', "Rule 'missing' not found at line 2, column 7"),
        ("root ::= [[a]b]", "']' is not expected at line 1, column 15"),
        ('a ::= "x"', "no rule is named root"),
        ('root ::= "a" x\nx ::= "b" x', "'root' at line 1, column 1 cannot be satisfied"),
        ('root ::= "a"\nroot ::= "b"', "'root' is defined twice, again at line 2, column 1"),
        (r'root ::= "\q"', r"\q is no escape at line 1, column 11"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty at line 1, column 11"),
        ('root ::= ("a"', "a parenthesis is not closed at line 1, column 10"),
        ("root ::= *", "nothing is there for '*' to repeat at line 1, column 10"),
        ('root ::= "a"{3,1}', "at least 3 and at most 1 at line 1, column 13"),
        ("root ::= " + "(" * 20_000, "nested too deeply"),
    ],
)
def test_gbnf_that_is_wrong_names_the_place(grammar: str, reason: str) -> None:
    with pytest.raises(GbnfError) as refused:
        gbnf_to_lark(grammar)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: missing", '1(8): unknown name: "missing"'),
        ('start: "x"\n  | /[a&&b]/', "/[a&&b]/ at line 2, column 5: '&&' in a class at position 2"),
        ("start: <missing>", "unknown special token"),
        ("neither", "1 | neither"),
        ("root ::= missing", "Rule 'missing' not found at line 1, column 10"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_over_http_with_its_place(llm: LLM, grammar: str, reason: str) -> None:
    body = {"prompt": PROMPT, "structured_outputs": {"grammar": grammar}}
    with running(llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs" and reason in error["message"]


# ---- random constraints ----------------------------------------------------------------------------------------------


def test_random_answers_of_random_forms_are_valid() -> None:
    from benchmarks.micro.random_forms import ENGINE, measure

    found = measure(schemas=40, expressions=30, grammars=10, answers=2, parts=1, only=ENGINE)
    for row in found["rows"]:
        assert row["wrong"] == row["stuck"] == 0, row["reasons"]
        assert row["ended"] > row["forms"] > 2 * row["refused"], row
