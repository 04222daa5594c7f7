"""The grader: what a completion finally answers, and what that earns. The only one in the project.

A completion is read as a careful human would read it:

1. `visible_text`: what follows the thinking, in one alphabet (ASCII digits, one minus sign, one kind of space);
2. `extract_answer`: the statement that commits, which is the last of `#### n`, a box, "the answer is n", ..., else the
   last sentence with a number. A later correction wins; a later check or explanation does not;
3. `numerals.readings`: the number in that statement. Alternatives, ranges, ratios, times and open sums are no number.

Time is linear in the length of the text: a whole text only meets patterns that cannot backtrack, all others see a
bounded window. Values are exact fractions, compared without a tolerance.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from scripts.grpo_scratch.numerals import DIGIT, NUMBER, number_value, plain, readings, spelled_out

Completion = str | Sequence[Mapping[str, Any]]  # text, or chat messages {"role": ..., "content": ...}

MAX_STATEMENT = 400  # characters read of one statement
MAX_CUES = 40  # cues looked at, from the end of the text


class Answer(NamedTuple):
    """What a completion commits to, and how that was found.

    With a value, `kind` is hash, boxed, tag (<answer>), phrase, correction, bold, first (the answer first, then an
    explanation) or last_number. Without a value it is unfinished (the thinking was never closed), cut_off (the text
    was, and its last number was not given as an answer), undecided (alternatives, a ratio, a refusal, something else
    than a number) or none (no number at all).
    """

    value: Fraction | None
    kind: str


# 1. The text that counts

_THINKING = re.compile(r"<(/?)(?:think|thinking|thought|reasoning|scratchpad)>", re.IGNORECASE)
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end)\|>|</s>|<end_of_turn>")


class _Alphabet(dict[int, str]):
    """Table for `str.translate` that fills itself with the characters it meets."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if (digit := unicodedata.decimal(char, None)) is not None:
            char = str(digit)  # full-width, Arabic-Indic, Devanagari, mathematical bold, ...
        elif 0xFF01 <= code <= 0xFF5E:
            char = chr(code - 0xFEE0)  # full-width letters and signs
        elif unicodedata.decomposition(char).startswith("<fraction>"):
            char = " " + unicodedata.normalize("NFKC", char).replace("⁄", "/")  # 1½ -> 1 1/2
        else:  # every space is a space, every currency a dollar; zero-width and direction marks vanish
            char = {"Zs": " ", "Sc": "$", "Cf": ""}.get(unicodedata.category(char), char)
        if len(self) < 50_000:
            self[code] = char
        return char


_ALPHABET = _Alphabet({code: chr(code) for code in range(128)})
_SAME = {
    "−–‐‑﹣⁻": "-",
    "’‘ʼ′´": "'",
    "×·⋅✕": "*",
    "⁄∕": "/",
    "、٬": ",",
    "٫": ".",
    "→⇒": "=",
    "∶": ":",
    "。": ". ",
    "\ufe0f\u20e3": "",
}
_ALPHABET.update({ord(char): one for chars, one in _SAME.items() for char in chars})


def spoken_text(completion: Completion) -> str | None:
    """The text after the thinking and up to the end of the turn; None when the thinking was never closed.

    Of chat messages, the last one of the assistant counts.
    """
    if not isinstance(completion, str):
        completion = _last_message(completion)
    if "<" in completion:
        if end := _END_OF_TURN.search(completion):
            completion = completion[: end.start()]
        if marks := deque(_THINKING.finditer(completion), maxlen=1):
            return completion[marks[0].end() :] if marks[0][1] else None
    return completion


def _last_message(chat: Any) -> str:
    """What the assistant said last, "" for nothing (None); TypeError for what is no chat."""
    if chat is None:
        return ""
    if isinstance(chat, Sequence) and all(isinstance(message, Mapping) for message in chat):
        said = [message.get("content") for message in chat if message.get("role") == "assistant"]
        content = said[-1] if said else None
        parts = content if isinstance(content, list | tuple) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if all(text is None or isinstance(text, str) for text in texts):
            return "".join(text or "" for text in texts)
    raise TypeError(f"a completion is text or a list of chat messages, but this is {type(chat).__name__}: {chat!r:.80}")


def visible_text(completion: Completion) -> str | None:
    """`spoken_text` in lower case and one alphabet: the patterns below know one way of writing."""
    text = spoken_text(completion)
    if text is None:
        return None
    return text.lower() if text.isascii() else text.translate(_ALPHABET).lower()


# 2. The statement that commits


def _words(*words: str, or_else: str = "") -> re.Pattern[str]:
    """A pattern for whole words. What meets a whole text starts with a literal, which lets the engine skip ahead."""
    patterns = [rf"{word[0]}(?<![a-z]{word[0]}){word[1:]}(?![a-z])" for word in words]
    return re.compile("|".join([*patterns, or_else] if or_else else patterns))


_CUE = re.compile(
    r"####\#*+|\\boxed|\\fbox|\\framebox|<answer>|answer|respuesta|réponse|antwort|risposta|resposta|ответ|答案|答え|정답"
    r"|final (?:result|total|value|amount|number|count|cost|price)\b|correct(?:ed)? (?:result|total|value|amount)\b"
)
_NEXT_TASK = re.compile(r"\n(?:question|problem|human|user|q)(?: \d+)?:")
_KIND = {"#": "hash", "\\": "boxed", "<": "tag"}  # by the first character of the cue; else phrase
# From a phrase to what it states: "answer [to the question] is", "answer:", "answer -", "answer" alone on its line.
_LINK = re.compile(
    r"[\s*_'\")]*+(?:\([^()\n]{0,40}\)[\s*]*)?(?:(?:to|for|in|of|you|we|i|that)\s[^.\n:=]{1,80}?\s(?=is\b))?"
    r"[,\s]*(?:(?:therefore|thus|then|now|so|finale?|correcta?)\b[,\s]*)?"
    r"(?:(?:is|are|was|(?:should|must|would|will|might|may|could) be|comes to|equals|es|est|ist|lautet|è|é)\b"
    r"|[是为為은는は]|[:=>—]+|-+>?\s|\n)[\s*_:>—]*+(?:(?<=\n)(?:[-•+]|\d\d?[.)](?=\s[*$]*\d))\s+)?"
)
# What may stand between a cue and its number: signs, currencies, a variable, a label such as "cost:".
_LEAD = re.compile(
    r"(?>(?:\W|_|\b(?:about|approx|approximately|around|roughly|exactly|only|just|simply|therefore|thus|then|now|also|"
    r"probably|that|is|be|the|total|of|equals?|equal|to|it|usd?|eur|gbp|rs|inr|cad|aud|final|answer|minus|negative|"
    r"[a-z]|\w+(?=\s?[=:]))\b)*)"
)
_HEADING = re.compile(r"[\s*]*(?:(?:step|part|case|question|problem|section|day|week|method)\b|\d\d?[.)]\s+[a-z])")
_NO_ANSWER = re.compile(r"\W*(?:nan|inf|infinity|unknown|undefined|none|null|n/a|no|not|cannot|can't)\b")
_STOP = re.compile(r"\n|[.!?](?=\s+[^\s\d]|\s*$)")
_ALGEBRA = re.compile(r"(?<![a-z0-9])[a-z]\s*[-+*]|[-+*]\s*[a-z](?![a-z])")  # x + 18 in a box is no number

_UNABLE = ("cannot", "can't", "can not", "could not", "couldn't", "unable to", "not able to", "impossible to")
_REFUSAL = _words(
    *(f"{words} (?:be )?(?:determined?|know|answer|solve|tell|say|calculated?|computed?)" for words in _UNABLE),
    "do not know (?:the|how|what|which)", "don't know (?:the|how|what|which)", "not enough information",
    "insufficient information",
)  # fmt: skip
_WRONG = re.compile(  # said of the answer itself; "4 wrong answers" may well be the answer
    r" (?:is|was|seems|looks) (?:wrong|incorrect|a mistake|an error)\b|'s (?:wrong|incorrect|a mistake|an error)\b"
    r"|n't (?:right|correct)\b| not (?:right|correct)\b|made an? (?:mistake|error)\b|scratch that\b"
    r"|\. (?:wrong|incorrect|mistake)[.!:,]|! (?:wrong|incorrect|mistake)[.!:,]|wait,? no\b"
)
_CORRECTION = _words(
    r"wait[,.!:—-]", r"a(?<![a-z] a)ctually", r"is actually [$]?\d", "correction", "oops", r"sorry[,.!:—-]", "i meant?",
    "no,", "on second thought", r"hold on[,.!:—-]", r"hmm[,.]", r"should (?:be|have been) [$]?\d[\d,.]*",
    r"it must be [$]?\d",
    "i (?:need to correct|overlooked|misread|miscounted|miscalculated)",
    "let me (?:redo|recalculate|re-?read|correct|fix)",
    or_else=_WRONG.pattern + "|等等|不对|不對|更正|纠正|修正|抱歉|我错了|重新(?:计算|算)",
)  # fmt: skip
_TAKEN_BACK = re.compile(  # 15, no, 12 | 15 eggs - I mean 12
    r"(?: [a-z]+)?[\s,;.:—-]+(?:no\b(?! \d)|wait|sorry|oops|i meant?|actually|correction|scratch that)"
    r"[\s,;.:—-]*(?:(?:no|wait|sorry|so|it|it's|is|that's|i mean|should be|rather|the answer)\b[\s,;.:—-]*){0,4}[$]?\d"
)
_CONFIRMED = re.compile(
    r"(?<!not )(?:correct|right|yes|ok|okay|good|great|confirmed|verified)[.!,]"
    r"|(?: is|'s) (?:indeed |also )?(?:correct|right)\b|matches|consistent|confirms|indeed|checks out"
    r"|正确|没错|一致|无误"
)
_CONCLUSION = _words("so", "thus", "therefore", "hence", "total", "finally", or_else="=")
_OR = re.compile(  # 17. Or perhaps 18. | 17. Alternatively, 18.
    r"[\s.,;]*+(?:or\b[^.\n]{0,60}\d|alternatively,? (?:it is |it's )?[$]?\d[\d.,]*+(?!\s?[-+*/=]))"
)
_OR_CUE = re.compile(r"\d[^\n]{0,20}\b(?:or|alternatively)[\s,$*]*(?:the )?\Z")  # 17 or \boxed{18}
_MAYBE = re.compile("could be|might be|may be|maybe|perhaps|possibly")
_GUESS = re.compile(
    r"[\W_]*+(?:(?:or|and|maybe|perhaps|possibly|also|alternatively|otherwise|if not|else|the|final|correct|guess"
    r"|option|first|second|third|\d+)\b[\W_]*+){0,4}"
)
_CHECK = _words(
    *(
        rf"{words} (?:quickly )?(?:double[- ]?check|verify|check)(?:[,:.]| (?:that|this|our|my|the|if|it|whether|by)\b)"
        for words in ("to", "we can", "you can", "let's", "let me", "let us")
    ),
    r"check\s?:", r"verify\s?:", r"verification\s?:", r"proof\s?:", "let me explain", "here(?:'s| is) how",
    "we get this", "this (?:comes|follows) from", "th(?:is|at)(?:'s| is) because",
    or_else="验算|检验|验证|检查",
)  # fmt: skip
_EXPLAINED = re.compile(r"[\s.,;:*(—-]*+(?:reason|because|since|explanation|here's|this is|that's|why|as\b|check)")
_FIRST = re.compile(r"[\s*]*+([^\s.,;:=][^.,;:=\n]{0,40})[.,;:—\n-]")
_BECAUSE = re.compile(r"because\b|since\b(?<!and since)(?<!but since)|given that\b|(?:after|by|for|from) [a-z]+ing\b")
_QUESTION = re.compile(r"\s*(?:or |so )?(?:is|are|does|do|can|could|would|should|may|perhaps|maybe|what|how|why)\b")
_BULLET = re.compile(r"^\s*(?:(?:[-•+*]|\d\d?[.)])\s+(?=.*\d))?")
_NUMBERED = re.compile(r"\W*(?:guess|answer|option|possibility|candidate|case)\s?(?:\d\d?|[a-z])\b.*\d.*")
_BARE = re.compile(r"[\s*_$(-]*\d[\d.,]*[\s*_$%).,;?]*")  # a line that is only a number
_BOLD = re.compile(r"(?:\*\*|__)(?!\d\d?[.)]\*)([^*\n]{1,80})(?:\*\*|__)")
_ASIDE = re.compile(r"\((?!or (?:maybe |perhaps )?[$]?\d[\d.,]*\))[^()]*\)")
_MONEY = r"[$]\s?\d[\d.,]*+|\d[\d.,]*+ (?:dollars?|cents?|euros?|pounds?)"
_CIRCUMSTANCE = re.compile(  # $12 for 3 pens | 12 eggs in total for 3 cakes | so 12 is the number of 3-legged stools
    rf"(?:(?:{_MONEY})[^\d$.,;:=]{{0,40}}?|\d[^\d$.,;:=]{{0,40}}? (?:in total|in all|altogether))"
    r"(?= (?:for|on) (?:the |these |his |her |their |all )?\d[\d.,]*+ (?!dollar|cent|euro|pound))"
    r"|\A\W*(?:(?:so|thus|therefore|hence|then)\W+)?\d[\d.,]*+(?: [a-z]+)?(?= (?:is|are|was|were) the\b)"
)
_PURPOSE = re.compile(r"(?<=\d)[^\d.,;:=]{0,40}?(?= to [a-z]| for (?:the )?\d)")  # it takes 12 days to read 300 pages
_NEEDS = re.compile(r"\b(?:takes?|took|needs?|requires?)\b")
_TURN = re.compile(r",\s|;|\b(?:so|then|thus|therefore|which|but|leaving|or|rounds?)\b")
_CLAUSE = re.compile(r"\s*(?:if|since|because|as|when)\b")


class _Commit(NamedTuple):
    value: Fraction | None
    kind: str
    end: int  # of its statement, in the text
    lead: str  # from the cue to the statement
    rest: str = ""  # of the statement, after its number


def extract_answer(text: Completion, truncated: bool = False) -> Answer:
    """The number that a completion finally commits to, as an exact value, and how it was found. Never raises.

    Args:
        text: text, or chat messages (the last message of the assistant counts).
        truncated: cut at the length limit. The number that the text happened to have come to is then no answer; if it
            were, a model could earn by never ending (seen: 512 tokens each, of which most repeated one word).
    """
    answer = _read(text)
    return Answer(None, "cut_off") if truncated and answer.kind == "last_number" else answer


def _read(text: Completion) -> Answer:
    seen = visible_text(text)
    if seen is None:
        return Answer(None, "unfinished")
    if next_task := _NEXT_TASK.search(seen):  # a base model may go on with a task of its own
        before = _read(seen[: next_task.start()])
        if before.kind in ("hash", "boxed", "tag", "phrase"):
            return before
    cues = deque(_CUE.finditer(seen), maxlen=MAX_CUES)
    last = None
    while cues and not last:
        last = _commit(seen, cue := cues.pop())
    if not last:
        return _last_statement(seen if DIGIT.search(seen) else spelled_out(seen))
    tail = seen[last.end :]
    taken_back = _TAKEN_BACK.match(last.rest)
    tail = last.rest + tail if taken_back else tail
    if (taken_back or _CORRECTION.search(tail)) and not _CONFIRMED.search(tail):
        if DIGIT.search(tail):
            later = _last_statement(tail)
            return Answer(later.value, "correction" if later.value is not None else later.kind)
        if _WRONG.search(tail):
            return Answer(None, "undecided")
    if last.value is None or _REFUSAL.search(tail) or _OR.match(tail) or _is_guess(seen, cues, cue, last):
        return Answer(None, "undecided")
    return Answer(last.value, last.kind)


def _is_guess(text: str, earlier: Iterable[re.Match[str]], cue: re.Match[str], last: _Commit) -> bool:
    """Is it one of several: after "17 or", or after the same cue with another number and nothing said in between?"""
    if _OR_CUE.search(text[max(0, cue.start() - 40) : cue.start()]):
        return True
    alike = [other for other in earlier if other[0] == cue[0]]
    before = _commit(text[: cue.start()], alike[-1]) if alike else None
    if not before or before.value == last.value or before.lead != last.lead:
        return False
    return _GUESS.fullmatch(text, before.end, cue.start()) is not None


def _commit(text: str, cue: re.Match[str]) -> _Commit | None:
    """What one cue commits to; None when it is only a word, a heading or the start of a solution."""
    kind = _KIND.get(cue[0][0], "phrase")
    start = cue.end()
    if kind == "boxed":
        content, end = _box(text, start)
        content = plain(content)
        values = [] if _ALGEBRA.search(content) else list(readings(content))
        return _Commit(values[0] if len(values) == 1 else None, kind, end, "") if content.strip() else None
    if kind == "phrase":
        link = _LINK.match(text, start, start + MAX_STATEMENT)
        if not link or text[cue.start() - 1 : cue.start()] == "/":  # points/answer = 2
            return None
        start = link.end()
    lead = text[cue.start() : start]
    line = text[start : start + MAX_STATEMENT].partition("</answer>" if kind == "tag" else "\n")[0]
    statement = _sentence(line) if kind == "phrase" else line
    end = start + len(statement) + (len("</answer>") if kind == "tag" else 0)
    if kind == "hash" and _HEADING.match(statement):
        return None
    if direct := _direct(statement):
        if not lead.rstrip(" *").endswith(" is") and _opens_solution(direct.rest, text, end):
            return None
        next_line = _item(text[end : end + MAX_STATEMENT].lstrip())
        listed = "\n" in lead and _BARE.fullmatch(line) and _BARE.fullmatch(next_line)
        return _Commit(None if listed else direct.value, kind, end, lead, direct.rest)
    is_last_line = kind == "hash" and not text[end:].strip()
    if kind == "tag" or (is_last_line and (DIGIT.search(statement) or _NO_ANSWER.match(statement))):  # a sentence
        return _Commit(_last(readings(plain(statement))), kind, end, lead) if statement.strip() else None
    return None


def _opens_solution(rest: str, text: str, end: int) -> bool:
    """Does a statement begin a solution that goes on?

    As in "Answer: 16 - 7 = 9 eggs. Then 9 * 2 = 18.", or a heading "#### 3 baskets for each of them". `rest` is what
    follows the first number of the statement, `end` is where the statement ends in `text`.
    """
    rest = rest.partition("(")[0]
    more = "=" in rest or rest.count(" ") > 4 or DIGIT.search(rest) is not None
    more = more or (rest.strip(" .*") != "" and _CONCLUSION.search(text, end) is not None)
    return more and bool(DIGIT.search(text, end) and not _EXPLAINED.match(text, end) and not _CHECK.search(text, end))


def _box(text: str, start: int) -> tuple[str, int]:
    """Content of the braces that open at `start` (the rest of the line if they never close), and where it ends."""
    window = text[start : start + MAX_STATEMENT]
    depth = 0
    for brace in re.finditer("[{}]", window):
        depth += 1 if brace[0] == "{" else -1
        if depth <= 0:
            return window[1 : brace.start()], start + brace.end()
    line = window.partition("\n")[0]
    return line, start + len(line)


class _Direct(NamedTuple):
    value: Fraction | None  # None when left open
    rest: str  # what follows the first number


def _direct(statement: str) -> _Direct | None:
    """The number that a statement opens with; None when it opens with words."""
    statement = plain(statement)
    first = NUMBER.search(statement)
    if not first or not _LEAD.fullmatch(statement, 0, first.start()):
        return None
    if number_value(first) is None:
        return _Direct(None, statement[first.end() :])
    for value in readings(statement):
        return _Direct(value, statement[first.end() :])
    return None  # not 18


def _last_statement(text: str) -> Answer:
    """The number that a text without cues leaves its reader with."""
    if not DIGIT.search(text):
        return Answer(None, "undecided" if _REFUSAL.search(text) else "none")
    if first := _answer_first(text):
        return Answer(first.value, "first")
    text = _without_check(text)
    begin, end = _last_sentence(text)
    sentence = text[begin:end]
    guessed = _OR.match(sentence) or len(_MAYBE.findall(text, max(0, begin - 80), end)) > 1
    asked = text[end : end + 1] == "?" and _QUESTION.match(sentence)
    if guessed or asked or _REFUSAL.search(text, begin) or _WRONG.search(text, end):
        return Answer(None, "undecided")
    item = _item(sentence)
    above = text[max(0, begin - MAX_STATEMENT) : begin].rstrip().rpartition("\n")[2]
    listed = any(line.fullmatch(item) and line.fullmatch(_item(above)) for line in (_BARE, _NUMBERED))
    if listed and above.strip() != sentence.strip():
        return Answer(None, "undecided")  # a list of guesses, one a line
    for bold in reversed(list(_BOLD.finditer(sentence))):
        if "=" not in sentence[bold.end() :] and (direct := _direct(bold[1])):
            return Answer(direct.value, "bold" if direct.value is not None else "undecided")
    value = _conclusion(item, text[:begin])
    return Answer(value, "last_number" if value is not None else "undecided")


def _answer_first(text: str) -> _Direct | None:
    """The number of '18 tiles. Reason: 3 rows of 6.', or of a first line '18' above an explanation."""
    first = _FIRST.match(text)
    if not first:
        return None
    explained = _EXPLAINED.match(text, first.end() - 1)
    if not explained and not text.lstrip().startswith(_item(text[:MAX_STATEMENT])):  # the first of a list
        return None
    below = first[0][-1] == "\n" and text[first.end() :].lstrip()[:1].isalpha()
    below = below and not _CONCLUSION.search(text, first.end())
    direct = _direct(first[1]) if explained or below else None
    return direct if direct and direct.value is not None else None


def _without_check(text: str) -> str:
    """The text up to a check or an explanation of what it has said so far, unless that leads to a correction."""
    for check in _CHECK.finditer(text):
        if DIGIT.search(text, 0, check.start()):
            return text if _CORRECTION.search(text, check.end()) else text[: check.start()]
    aside = text.rfind("(")  # 18 chairs. (3 * 6 = 18)
    if text.endswith((")", ").")) and text[:aside].rstrip().endswith((".", "!")) and DIGIT.search(text, 0, aside):
        return text[:aside]
    return text


def _last_sentence(text: str) -> tuple[int, int]:
    """Where the last sentence with a digit begins and ends."""
    last = max(map(text.rfind, "0123456789"))
    begin = max(0, last - MAX_STATEMENT)
    for stop in _STOP.finditer(text, begin, last + 1):
        begin = stop.end()
    return begin, last + len(_sentence(text[last : last + MAX_STATEMENT]))


def _conclusion(sentence: str, before: str) -> Fraction | None:
    """The number that a sentence ends up with, given the text before it."""
    sentence = plain(sentence)
    because = _BECAUSE.search(sentence)
    if because and DIGIT.search(sentence, 0, because.start()) and not _CONCLUSION.search(sentence, because.end()):
        sentence = sentence[: because.start()]
    elif "=" not in sentence:
        for stated in (_PURPOSE if _NEEDS.search(sentence) else _CIRCUMSTANCE).finditer(sentence):
            if not _TURN.search(sentence, stated.end()):
                sentence = sentence[: stated.end()]
                break
    outside = _ASIDE.sub(" ", sentence)
    sentence = outside if DIGIT.search(outside) else sentence
    _, equals, result = sentence.rpartition("=")
    if equals and not _TURN.search(result) and (direct := _direct(result)) and direct.value is not None:
        return direct.value  # 60 * 8 = 480 cans in 8 hours
    values = list(readings(sentence))
    if len(values) > 1 and not equals and "=" in before and not _CLAUSE.match(sentence):
        shown = _direct(before[before.rindex("=") + 1 :][:60])  # 60 * 8 = 480. So she fills 480 cans in 8 hours.
        if shown and shown.value is not None and shown.value in values:
            return shown.value
    return values[-1] if values else None


def _sentence(text: str) -> str:
    stop = _STOP.search(text)
    return text[: stop.start()] if stop else text


def _item(text: str) -> str:
    """The first line without its bullet, when a number follows the bullet."""
    return _BULLET.sub("", text, count=1).partition("\n")[0]


def _last(values: Iterator[Fraction | None]) -> Fraction | None:
    last = deque(values, maxlen=1)
    return last[0] if last else None


# Rewards

_HASH_LINE = re.compile(r"#### (-?(?:\d{1,40}|[1-9]\d{0,2}(?:,\d{3}){1,12})(?:\.\d{1,20})?)[ \t\r]*", re.ASCII)
_NAMED_SCALE = {Fraction(1000): "thousand", Fraction(10**6): "million", Fraction(10**9): "billion"}
_GOLD = re.compile(r"([\s$+]*-?[\s$+]*)([\d.].*?)[\s$%.]*", re.DOTALL)


@lru_cache(maxsize=65_536)  # a reference answer is met once per completion of its group
def parse_gold(text: str) -> Fraction:
    """A reference answer ('18', '-3', '1,200', '$5', '2.5') as an exact value; ValueError if it is no number."""
    text = str(text)  # JSON may hold 18 as well as "18"
    parts = _GOLD.fullmatch(plain(visible_text(text) or ""))
    number = NUMBER.fullmatch(parts[2]) if parts else None
    value = number_value(number, "-" in parts[1]) if parts and number else None
    if value is None:
        raise ValueError(f"the reference answer {text[:80]!r} is no number; expected one like 18, -3, 1,200 or 2.5")
    return value


def agrees(answer: Answer, gold: str, completion: Completion) -> bool:
    """Whether the answer extracted from a completion is exactly the reference answer.

    '26 billion miles' is 26000000000 and also answers a question that asks for billions, whose reference is 26.
    """
    value, reference = answer.value, parse_gold(gold)
    if value is None or value == reference:
        return value is not None
    if not reference or value.numerator % 1000:
        return False
    scale = _NAMED_SCALE.get(value / reference)
    return scale is not None and scale in (visible_text(completion) or "")


def correctness_reward(completion: Completion, gold: str, truncated: bool = False) -> float:
    """1.0 when the completion commits to the reference answer (see `extract_answer`, `agrees`), else 0.0."""
    return float(agrees(extract_answer(completion, truncated), gold, completion))


def format_reward(completion: Completion) -> float:
    """1.0 when the completion ends in its only `####`, a line `#### number` as GSM8K writes it, else 0.0."""
    text = (spoken_text(completion) or "").rstrip()
    return float(text.count("####") == 1 and _hash_line(text[text.rfind("\n") + 1 :]) is not None)


def strict_answer(completion: Completion) -> Fraction | None:
    """The number on the last line that starts with `####`; None unless it is `#### number` as GSM8K writes it."""
    text = "\n" + (spoken_text(completion) or "")
    return _hash_line(text[text.rfind("\n####") + 1 :].partition("\n")[0])


def strict_match(completion: Completion, gold: str) -> bool:
    """Whether `strict_answer` is the reference answer."""
    return strict_answer(completion) == parse_gold(gold)


def _hash_line(line: str) -> Fraction | None:
    number = _HASH_LINE.fullmatch(line)
    return Fraction(number[1].replace(",", "")) if number else None


def total_reward(
    text: Completion, gold: str, truncated: bool = False, weights: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What one completion earns.

    Returns `total` (weighted sum), `correct` and `format` (0.0 or 1.0, not weighted), `truncated` (as given) and `kind`
    (see `Answer`). `weights` has the keys `correct` and `format`; left out: 1.0 and 0.1. A truncated completion may
    have answered before it was cut (see `extract_answer`); whether it enters the loss is up to the trainer.
    """
    weights = {"correct": 1.0, "format": 0.1} if weights is None else weights
    answer = extract_answer(text, truncated)
    correct, form = float(agrees(answer, gold, text)), format_reward(text)
    total = weights["correct"] * correct + weights["format"] * form
    return {"total": total, "correct": correct, "format": form, "truncated": truncated, "kind": answer.kind}
