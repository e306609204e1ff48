"""Translate GBNF, llama.cpp's grammars, into the library's language: rules over words, words as expressions.

    root  ::= "(" root ")" | name
    name  ::= [a-z]+

GBNF knows only characters. The library reads a text in two layers, as compilers do: a lexer cuts it into *words*, each
as long as possible, and a parser combines the words. So every part without recursion becomes one word, which is exact
and costs least. But a word may swallow the beginning of the next: in `name "s"` the name swallows the s. Where this can
happen, the longer word is split, if necessary into single characters, which swallow nothing.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

MOST_WRITTEN = 1 << 20  # characters of a word
MOST_POSITIONS = 400  # of a word in comparisons; a longer repetition counts as endless
HIGHEST = 0x10FFFF
ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[\w-]+(?=\s*::=))|(?P<name>[\w-]+)|(?P<mark>::=|[|()*+?.])
    |(?P<times>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<text>"(?:\\.|[^"\\])*")|(?P<chars>\[\^?(?:\\.|[^\]\\])*\])""",
    re.VERBOSE | re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)

Ranges = tuple[tuple[int, int], ...]  # first and last code points, in order


class GbnfError(ValueError):
    """An error in a grammar; the message has the position."""


class Node(NamedTuple):
    """A part of a rule: `chars` (one of a set), `name` (of a rule), `then`, `either`, or `times`."""

    kind: str
    at: int  # where it begins in the grammar's text
    parts: tuple[Any, ...]  # ranges; a name; nodes; a node, the least and the most (None is endless)


class Token(NamedTuple):
    """A piece of the grammar's text."""

    kind: str
    text: str
    at: int


def gbnf_to_lark(text: str) -> str:
    """Translate a GBNF grammar into the library's language.

    Raises:
        GbnfError: it is wrong, never ends, or cannot be cut into words; the message says where.
    """
    try:
        return _Writer(text, Reader(text).rules()).lark()
    except RecursionError:
        raise GbnfError("it is nested too deeply") from None


def place(text: str, at: int) -> str:
    """Return the line and column of a position."""
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - text.rfind(chr(10), 0, at)}"


class Reader:
    """Reads the rules of a grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.next = text, 0
        self.tokens = list(self._cut(text))

    def _cut(self, text: str) -> Iterator[Token]:
        at = 0
        while at < len(text):
            found = TOKEN.match(text, at)
            if found is None:
                raise self.error(f"{text[at]!r} is not expected", at)
            kind = str(found.lastgroup)
            if kind != "space":
                yield Token(found[0] if kind == "mark" else kind, found[0], at)
            at = found.end()
        yield Token("end", "", len(text))

    def error(self, reason: str, at: int) -> GbnfError:
        return GbnfError(f"{reason} at {place(self.text, at)}")

    def take(self, *kinds: str) -> Token | None:
        """Return the next token if it is of one of these kinds."""
        token = self.tokens[self.next]
        if token.kind not in kinds:
            return None
        self.next += 1
        return token

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while not self.take("end"):
            name = self.take("rule")
            if name is None:
                wrong = self.tokens[self.next]
                raise self.error(f"a rule such as `root ::= …` is expected, not {wrong.text!r},", wrong.at)
            if name.text in rules:
                raise self.error(f"the rule {name.text!r} is defined twice, again", name.at)
            self.take("::=")
            rules[name.text] = self.either(name.at)
        if "root" not in rules:
            raise self.error("no rule is named root, where an answer begins,", 0)
        for rule in rules.values():
            for node in walk(rule):
                if node.kind == "name" and node.parts[0] not in rules:
                    raise self.error(f"Rule {node.parts[0]!r} not found", node.at)
        return rules

    def either(self, at: int) -> Node:
        branches = [self.then(at)]
        while self.take("|"):
            branches.append(self.then(self.tokens[self.next].at))
        return Node("either", at, tuple(branches))

    def then(self, at: int) -> Node:
        items: list[Node] = []
        while token := self.take("name", "text", "chars", ".", "(", "*", "+", "?", "times"):
            if token.kind in "*+?" or token.kind == "times":
                if not items:
                    raise self.error(f"nothing is there for {token.text!r} to repeat", token.at)
                items.append(Node("times", token.at, (items.pop(), *self.counts(token))))
            elif token.kind == "(":
                items.append(self.either(token.at))
                if not self.take(")"):
                    raise self.error("a parenthesis is not closed", token.at)
            elif token.kind == "text":
                one = [Node("chars", at, (((ord(c), ord(c)),),)) for c, at, _ in self.characters(token)]
                items.append(Node("then", token.at, tuple(one)))
            elif token.kind == "name":
                items.append(Node("name", token.at, (token.text,)))
            else:
                items.append(Node("chars", token.at, (self.ranges(token),)))
        return Node("then", at, tuple(items))

    def counts(self, token: Token) -> tuple[int, int | None]:
        if token.kind != "times":
            return int(token.text == "+"), 1 if token.text == "?" else None
        numbers = token.text[1:-1].split(",")
        least = int(numbers[0])
        most = least if len(numbers) == 1 else int(numbers[1]) if numbers[1].strip() else None
        if most is not None and most < least:
            raise self.error(f"{token.text} asks for at least {least} and at most {most}", token.at)
        return least, most

    def characters(self, token: Token) -> list[tuple[str, int, bool]]:
        """Return the characters between quotes or brackets, with their positions, and whether they were escaped."""
        found = []
        for match in ESCAPE.finditer(token.text, 1, len(token.text) - 1):
            number, at = match[1] or match[2] or match[3], token.at + match.start()
            if number is None and match[4] and (match[4].isalnum() or ord(match[4]) > 127) and match[4] not in ESCAPED:
                raise self.error(f"{match[0]} is no escape", at)
            if number is not None and (int(number, 16) > HIGHEST or 0xD800 <= int(number, 16) < 0xE000):
                raise self.error(f"{match[0]} is no character", at)
            character = chr(int(number, 16)) if number else ESCAPED.get(match[4], match[4]) or match[5]
            found.append((character, at, match[5] is None))
        return found

    def ranges(self, token: Token) -> Ranges:
        if token.kind == ".":
            return ((0, HIGHEST),)
        characters, found = self.characters(token), []
        negated = bool(characters) and characters[0][0] == "^" and not characters[0][2]
        i = int(negated)
        while i < len(characters):
            (first, at, _), last = characters[i], characters[i][0]
            if i + 2 < len(characters) and characters[i + 1][0] == "-" and not characters[i + 1][2]:
                last, i = characters[i + 2][0], i + 2
            if last < first:
                raise self.error(f"the range {first!r} to {last!r} is empty", at)
            found.append((ord(first), ord(last)))
            i += 1
        merged = merge(found)
        if negated:
            ends = [-1, *(n for pair in merged for n in pair), HIGHEST + 1]
            merged = tuple((a + 1, b - 1) for a, b in zip(ends[::2], ends[1::2], strict=True) if a + 1 < b)
        if not merged:
            raise self.error(f"{token.text} has no character", token.at)
        return merged


def merge(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Sort ranges, and join those that touch."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


@lru_cache(1 << 16)
def meet(a: Ranges, b: Ranges) -> bool:
    """Tell whether two sets have a character in common."""
    return any(first <= last and other <= end for first, end in a for other, last in b)


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes inside it."""
    yield node
    for part in node.parts:
        if isinstance(part, Node):
            yield from walk(part)


@dataclass
class Word:
    """A word of the lexer: an expression, and the automaton of its positions (Glushkov, 1961)."""

    written: str
    node: Node
    chars: list[Ranges] = field(default_factory=list)  # at each position
    first: set[int] = field(default_factory=set)  # positions where it may begin, and where it may end
    last: set[int] = field(default_factory=set)
    follow: list[set[int]] = field(default_factory=list)  # positions after each


class Ends(NamedTuple):
    """How a part may begin and end: positions of a word, or words of a rule."""

    can_be_empty: bool
    first: set[int]
    last: set[int]


class _Writer:
    """Writes the rules of a grammar in the library's language.

    Args:
        text: of the grammar, for places.
        rules: by name.
    """

    def __init__(self, text: str, rules: dict[str, Node]) -> None:
        self.text, self.rules = text, rules
        self.words: list[Word] = []
        self.numbers: dict[str, int] = {}  # of words, by what is written
        self.apart: set[Node] = set()  # nodes that are not one word, because they would swallow others
        self.used = self._reach("root")
        self._check_ends()
        self.recursive = {
            name for name in self.used if name in set().union(*map(self._reach, self._names(rules[name])))
        }
        grown = True
        while grown:  # and rules that lead to such a rule
            more = {n for n in self.used - self.recursive if self._names(rules[n]) & self.recursive}
            self.recursive |= more
            grown = bool(more)

    def lark(self) -> str:
        # Each rule gets a new, unique name.
        order = ["root", *sorted(self.recursive - {"root"})]
        names = self.names = {name: f"r{i}" for i, name in enumerate(order)} | {"root": "start"}
        while True:
            self.words, self.numbers = [], {}
            bodies = {name: self._in_words(self.rules[name]) for name in order}
            greedy = self._find_greedy(bodies)
            if greedy is None:
                break
            self.apart.add(greedy.node)
        lines = [f"{names[name]}: {self._rule(bodies[name])}" for name in order]
        lines += [f"W{i}: /{word.written}/" for i, word in enumerate(self.words)]
        return "\n".join(lines)

    @staticmethod
    def _names(node: Node) -> set[str]:
        return {inner.parts[0] for inner in walk(node) if inner.kind == "name"}

    def _reach(self, name: str) -> set[str]:
        found, new = {name}, [name]
        while new:
            more = self._names(self.rules[new.pop()]) - found
            found |= more
            new += more
        return found

    def _check_ends(self) -> None:
        """Refuse a rule that contains itself without end."""
        ending: set[str] = set()

        def ends(node: Node) -> bool:
            if node.kind == "name":
                return node.parts[0] in ending
            if node.kind == "times":
                return node.parts[1] == 0 or ends(node.parts[0])
            return node.kind == "chars" or (all if node.kind == "then" else any)(map(ends, node.parts))

        while more := {name for name in self.used - ending if ends(self.rules[name])}:
            ending |= more
        if endless := sorted(self.used - ending, key=lambda name: self.rules[name].at):
            where = place(self.text, self.rules[endless[0]].at)
            raise GbnfError(f"the rule {endless[0]!r} at {where} cannot be satisfied: it never ends")

    # ---- rules of words ------------------------------------------------------------------------------------------

    def _is_word(self, node: Node) -> bool:
        return node not in self.apart and not self._names(node) & self.recursive

    def _in_words(self, node: Node) -> Node:
        """Replace the parts without recursion by `word` nodes."""
        if self._is_word(node):
            return self._word(node)
        if node.kind == "name":
            is_rule = node.parts[0] in self.recursive or node.parts[0] == "root"
            return node if is_rule else self._in_words(self.rules[node.parts[0]])
        if node.kind == "times":
            return node._replace(parts=(self._in_words(node.parts[0]), *node.parts[1:]))
        parts = node.parts
        if node.kind == "then" and node not in self.apart:  # neighbours are one word
            runs = [(is_word, tuple(run)) for is_word, run in groupby(parts, self._is_word)]
            parts = [n for is_word, run in runs for n in ([Node("then", run[0].at, run)] if is_word else run)]
        return node._replace(parts=tuple(map(self._in_words, parts)))

    def _word(self, node: Node) -> Node:
        """Return the node of a word; a word that may be empty becomes optional."""
        written = self._expression(node)
        if written not in self.numbers:
            word = Word(written, node)
            word.first, word.last = self._positions(node, word)[1:]
            self.numbers[written] = len(self.words)
            self.words.append(word)
        found = Node("word", node.at, (self.numbers[written],))
        return Node("times", node.at, (found, 0, 1)) if self._can_be_empty(node) else found

    def _can_be_empty(self, node: Node) -> bool:
        if node.kind == "name":
            return self._can_be_empty(self.rules[node.parts[0]])
        if node.kind == "times":
            return node.parts[1] == 0 or self._can_be_empty(node.parts[0])
        return node.kind != "chars" and (all if node.kind == "then" else any)(map(self._can_be_empty, node.parts))

    def _expression(self, node: Node) -> str:
        if node.kind == "chars":
            [ranges] = node.parts
            written = "".join(rf"\u{{{a:x}}}" if a == b else rf"\u{{{a:x}}}-\u{{{b:x}}}" for a, b in ranges)
            return written if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else f"[{written}]"
        if node.kind == "name":
            return self._expression(self.rules[node.parts[0]])
        if node.kind == "times":
            inner, least, most = node.parts
            return f"(?:{self._expression(inner)}){{{least},{'' if most is None else most}}}"
        written = ("" if node.kind == "then" else "|").join(map(self._expression, node.parts))
        if len(written) > MOST_WRITTEN:
            raise GbnfError(f"the rule at {place(self.text, node.at)} is too large, written out")
        return written if node.kind == "then" or len(node.parts) == 1 else f"(?:{written})"

    def _positions(self, node: Node, word: Word) -> Ends:
        if node.kind == "chars":
            i = len(word.chars)
            word.chars.append(node.parts[0])
            word.follow.append(set())
            return Ends(False, {i}, {i})
        if node.kind == "name":
            return self._positions(self.rules[node.parts[0]], word)
        if node.kind == "either":
            return _either([self._positions(part, word) for part in node.parts])
        if node.kind == "then":
            return _then([self._positions(part, word) for part in node.parts], word.follow)
        inner, least, most = node.parts
        begin = len(word.chars)
        found = self._positions(inner, word)
        copies = max(least, most or 1, 1)
        if copies * (len(word.chars) - begin) > MOST_POSITIONS:
            least, most, copies = min(least, 1), None, 1
        chain = [found, *(self._positions(inner, word) for _ in range(copies - 1))]
        if most is None:
            for i in chain[-1].last:
                word.follow[i] |= chain[-1].first
        chain = [Ends(ends.can_be_empty or i >= least, *ends[1:]) for i, ends in enumerate(chain)]
        return _then(chain, word.follow)

    def _rule(self, node: Node) -> str:
        if node.kind == "word":
            return f"W{node.parts[0]}"
        if node.kind == "name":
            return self.names[node.parts[0]]
        if node.kind == "times":
            inner, least, most = node.parts
            return f"({self._rule(inner)}){{{least},{'' if most is None else most}}}"
        written = (" " if node.kind == "then" else " | ").join(map(self._rule, node.parts))
        return f"({written})" if written else '""'

    # ---- can a word swallow the next one? ------------------------------------------------------------------------

    def _find_greedy(self, bodies: dict[str, Node]) -> Word | None:
        """Return a word that the lexer would continue where the grammar may need a shorter one."""
        rules: dict[str, Ends] = {name: Ends(False, set(), set()) for name in bodies}
        behind: list[set[int]] = [set() for _ in self.words]

        def ends(node: Node) -> Ends:
            if node.kind == "word":
                return Ends(False, {node.parts[0]}, {node.parts[0]})
            if node.kind == "name":
                return rules[node.parts[0]]
            if node.kind == "either":
                return _either(list(map(ends, node.parts)))
            if node.kind == "then":
                return _then(list(map(ends, node.parts)), behind)
            found = ends(node.parts[0])
            if node.parts[2] != 1:
                _then([found, found], behind)
            return Ends(found.can_be_empty or node.parts[1] == 0, *found[1:])

        size = -1
        while size != (size := sum(map(len, behind)) + sum(len(e.first) + len(e.last) + e[0] for e in rules.values())):
            rules = {name: ends(body) for name, body in bodies.items()}
        together = {frozenset(words) for words in [rules["root"].first, *behind]}
        pairs = {(a, b) for words in together for a in words for b in words if len(self.words[b].chars) > 1 or a == b}
        return next(
            (self.words[b] for a, b in sorted(pairs) if self._goes_on(self.words[a], self.words[b], behind[a])), None
        )

    def _goes_on(self, a: Word, b: Word, behind: set[int]) -> bool:
        """Tell whether what `a` has read may go on as `b` with a character that may also begin what follows `a`."""
        beginnings = merge([r for i in behind for p in self.words[i].first for r in self.words[i].chars[p]])
        if not meet(beginnings, merge([r for p in set().union(*b.follow) for r in b.chars[p]])):
            return False  # whatever was read
        new = [(p, q) for p in a.first for q in b.first if meet(a.chars[p], b.chars[q])]
        seen = set(new)
        while new:
            p, q = new.pop()
            if p in a.last and any(meet(b.chars[r], beginnings) for r in b.follow[q]):
                return True
            more = {(s, r) for s in a.follow[p] for r in b.follow[q] if meet(a.chars[s], b.chars[r])} - seen
            seen |= more
            new += more
        return False


def _either(parts: Sequence[Ends]) -> Ends:
    return Ends(
        any(e.can_be_empty for e in parts),
        set().union(*(e.first for e in parts)),
        set().union(*(e.last for e in parts)),
    )


def _then(parts: Sequence[Ends], follow: list[set[int]]) -> Ends:
    """Concatenate parts, and record which positions may follow which."""
    whole = Ends(True, set(), set())
    for part in parts:
        for i in whole.last:
            follow[i] |= part.first
        first = whole.first | part.first if whole.can_be_empty else whole.first
        last = whole.last | part.last if part.can_be_empty else part.last
        whole = Ends(whole.can_be_empty and part.can_be_empty, first, last)
    return whole
