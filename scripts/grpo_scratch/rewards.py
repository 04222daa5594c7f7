"""The grader: what a completion finally answers, and what that earns. The only one in the project.

A completion is read as a careful human would read it:

1. `visible_text`: what follows the thinking, in one alphabet (ASCII digits, one minus sign, one kind of space, one currency);
2. `extract_answer`: the statement that commits - the last of `#### n`, a box, "the answer is n", ..., else the last sentence
   with a number in it. A later correction wins; a later check or explanation does not;
3. `readings`: the number in that statement. Alternatives, ranges, ratios, times, dates and open sums are no number.

Time is linear in the length of the text: whole texts meet only patterns that cannot backtrack, the rest sees a bounded window.
Nothing is evaluated: no powers, no float, no eval. Values are exact fractions, compared without a tolerance.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

Completion = str | Sequence[Mapping[str, Any]]  # text, or chat messages {"role": ..., "content": ...}

MAX_STATEMENT = 400  # characters read of one statement
MAX_CUES = 40  # cues looked at, from the end of the text
MAX_NUMBER = 60  # characters of one number
MAX_EXPONENT = 30  # of scientific notation, so that 1e999999999 costs nothing


class Answer(NamedTuple):
    """What a completion commits to, and how that was found.

    With a value, `kind` is hash, boxed, tag, phrase, correction, bold, first (answer first, explanation after) or
    last_number, from strong to weak. Without: unfinished (the thinking was never closed), undecided (alternatives, a ratio,
    a refusal, something else than a number), none (no number at all).
    """

    value: Fraction | None
    kind: str


# 1. The text that counts ------------------------------------------------------------------------------------------------

_THINKING = re.compile(r"<(/?)(?:think|thinking|thought|reasoning|scratchpad)>", re.IGNORECASE)
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end)\|>|</s>")


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
for _chars, _as in {
    "−–‐‑﹣⁻": "-",
    "’‘ʼ′": "'",
    "×·⋅✕": "*",
    "⁄∕": "/",
    "、٬": ",",
    "٫": ".",
    "→⇒": "=",
    "∶": ":",
    "。": ". ",
}.items():
    _ALPHABET.update(dict.fromkeys(map(ord, _chars), _as))


def spoken_text(completion: Completion) -> str | None:
    """The text after the thinking and up to the end of the turn; None when the thinking was never closed.

    Of chat messages, the last one of the assistant counts.
    """
    if not isinstance(completion, str):
        said = [message.get("content") or "" for message in completion if message.get("role") == "assistant"]
        parts = said[-1] if said else ""
        completion = parts if isinstance(parts, str) else "".join(str(part.get("text", "")) for part in parts)
    if "<" in completion:
        if end := _END_OF_TURN.search(completion):
            completion = completion[: end.start()]
        if marks := deque(_THINKING.finditer(completion), maxlen=1):
            return completion[marks[0].end() :] if marks[0][1] else None
    return completion


def visible_text(completion: Completion) -> str | None:
    """`spoken_text` in lower case and one alphabet: the patterns below know one way of writing."""
    text = spoken_text(completion)
    if text is not None and not text.isascii():
        text = text.translate(_ALPHABET)
    return text.lower() if text else text


# 2. The statement that commits ------------------------------------------------------------------------------------------

# Alternatives start with a literal: that lets the engine skip through a long text.
_CUE = re.compile(
    r"####\#*+|\\boxed|\\fbox|\\framebox|<answer>|answer|respuesta|réponse|antwort|risposta|resposta|ответ|答案|答え|정답"
    r"|final (?:result|total|value|amount|number|count|cost|price)\b|correct(?:ed)? (?:result|total|value|amount|number)\b"
)
_KIND = {"#": "hash", "\\": "boxed", "<": "tag"}
# From a phrase to what it states: "answer [to the question] is", "answer:", "answer -", "answer" alone on its line.
_LINK = re.compile(
    r"[\s*_'\")]*+(?:(?:to|for)\s[^.\n:=]{1,80}?\s(?=is\b))?[,\s]*(?:(?:therefore|thus|then|now|so|finale?|correcta?)\b[,\s]*)?"
    r"(?:(?:is|are|was|should be|must be|would be|will be|might be|may be|could be|comes to|equals|es|est|ist|lautet|è|é)\b"
    r"|[是为為は은는]|[:=>—]+|-+>?\s|\n)[\s*_:>—]*+(?:(?<=\n)[-•+]\s+)?"
)
# What may stand between a cue and the number it states.
_LEAD = re.compile(
    r"(?:[^\w]|_|\b(?:about|approx|approximately|around|roughly|exactly|only|just|simply|therefore|thus|then|now|also|"
    r"probably|that|is|be|the|total|of|equal|equals|to|it|us|usd|eur|gbp|rs|inr|cad|aud|final|answer|minus|negative|[a-z]|"
    r"\w+(?=\s?[=:]))\b)*+"
)
_HEADING = re.compile(
    r"[\s*]*(?:(?:step|part|case|question|problem|section|day|week|example|method|option)\b|\d\d?[.)]\s+[a-z])"
)
_STOP = re.compile(r"\n|[.!?](?=\s+[^\s\d]|\s*$)")
_DIGIT = re.compile(r"\d")

_REFUSAL = re.compile(
    r"(?:cannot|can't|can not|could not|couldn't|unable to|not able to|impossible to|do not|don't) "
    r"(?:be )?(?:determine|know|answer|solve|tell|say|calculate|compute)|(?:not enough|insufficient) information"
)
_WRONG = (  # said of the answer; "4 wrong answers" may be the answer
    r"(?:\bis|\bwas|'s|n't|\bnot|\bseems|\blooks) (?:wrong|incorrect|right|correct|a mistake|an error)\b(?<!is right)(?<!is correct)"
    r"|\bmade an? (?:mistake|error)\b|\bscratch that\b|(?:^|[.!?]\s+)(?:wrong|incorrect|mistake)\b[.!:,]"
)
_CORRECTION = re.compile(
    r"\b(?:wait|actually|correction|oops|sorry|should (?:be|have been)|i mean|i meant|on second thought|no,"
    rf"|let me (?:redo|recalculate|correct|fix))|{_WRONG}"
)
_WITHDRAWN = re.compile(_WRONG)
_CONFIRMED = re.compile(
    r"(?<!not )\b(?:correct|right|confirm|confirms|matches|consistent|yes|indeed|stands|verified|checks out)\b"
)
_CHECK = re.compile(
    r"(?:to |we can |you can |let's |let me |let us )(?:quickly )?(?:double[- ]?check|verify|check)"
    r"(?:[,:.]| (?:that|this|our|my|the|if|it|whether|by)\b)"
    r"|(?:check|verification|proof)\s?:"
)
_EXPLANATION = r"(?:reason|because|since|explanation|here's|this is because|that's because|why|proof|as\b|check)"
_FIRST = re.compile(rf"[\s*]*([^\s.,;:=][^.,;:=\n]{{0,40}})(?:(?:[.,;:—-]|\n)[\s*]*\(?{_EXPLANATION}|\n\s*[a-z])")
_EXPLAINED = re.compile(rf"[\s.,;*(]*{_EXPLANATION}")
_BECAUSE = re.compile(r"because\b|since\b|given that\b")
_CONCLUSION = re.compile(r"\b(?:so|thus|therefore|hence|total|finally)\b|=")
_BOLD = re.compile(r"(?:\*\*|__)(?!\d\d?[.)]\*)([^*\n]{1,80})(?:\*\*|__)")
_GUESS = re.compile(r"[\W_]*(?:(?:or|and|maybe|perhaps|possibly|also|alternatively|the|final|correct)\b[\W_]*){0,4}")
_QUESTION = re.compile(
    r"\s*(?:or |so )?(?:is|are|does|do|can|could|would|should|might|may|perhaps|maybe|what|how|why)\b"
)
_OR = re.compile(r"[\s.,;]*or\b[^.\n]{0,60}\d")
_BULLET = re.compile(r"^\s*(?:[-•+*]|\d\d?[.)])\s+(?=.*\d)")
_BARE = re.compile(r"[\s*_$(-]*\d[\d.,]*[\s*_$%).,;?]*")
_ALGEBRA = re.compile(r"(?<![a-z])[a-z]\s*[-+*]|[-+*]\s*[a-z](?![a-z])")  # x + 18 in a box is no number
_TURN = re.compile(r",\s|;|\b(?:so|then|thus|therefore|which|but|leaving|or|rounds?)\b")
_ASIDE = re.compile(r"\([^()]*\)")


class _Commit(NamedTuple):
    value: Fraction | None
    kind: str
    start: int
    end: int
    lead: str  # text from the cue to the statement


def extract_answer(text: Completion) -> Answer:
    """The number that a completion finally commits to, as an exact value, and how it was found. Never raises.

    Takes text or chat messages (the last message of the assistant counts).
    """
    seen = visible_text(text)
    if seen is None:
        return Answer(None, "unfinished")
    commits = _commits(seen)
    if not (last := next(commits, None)):
        return _last_statement(seen if _DIGIT.search(seen) else _spelled(seen))
    tail = seen[last.end :]
    if _REFUSAL.search(tail) or _OR.match(tail):
        return Answer(None, "undecided")
    if _CORRECTION.search(tail) and not _CONFIRMED.search(tail):
        if _DIGIT.search(tail):
            later = _last_statement(tail)
            return Answer(later.value, "correction" if later.value is not None else later.kind)
        if _WITHDRAWN.search(tail):
            return Answer(None, "undecided")
    before = next(commits, None)
    if before and before.value != last.value and before.lead == last.lead:  # one guess after the other, no word between
        if last.start - before.end < 80 and _GUESS.fullmatch(seen, before.end, last.start):
            return Answer(None, "undecided")
    return Answer(last.value, last.kind if last.value is not None else "undecided")


def _commits(text: str) -> Iterator[_Commit]:
    """The commitments that cues announce, last one first."""
    for cue in reversed(deque(_CUE.finditer(text), maxlen=MAX_CUES)):
        if commit := _commit(text, cue):
            yield commit


def _commit(text: str, cue: re.Match[str]) -> _Commit | None:
    """What one cue commits to; None when it is only a word, a heading or the start of a solution."""
    kind = _KIND.get(cue[0][0], "phrase")
    start = cue.end()
    if kind == "boxed":
        content, end = _box(text, start)
        if not content.strip(" {}"):
            return None
        content = plain(content)
        values = list(readings(content)) if not _ALGEBRA.search(content) else []
        return _Commit(values[0] if len(values) == 1 else None, kind, cue.start(), end, "")
    if kind == "phrase":
        if text[cue.start() - 1 : cue.start()] == "/" or not (link := _LINK.match(text, start, start + MAX_STATEMENT)):
            return None
        start = link.end()
    window = text[start : start + MAX_STATEMENT]
    line = window.partition("</answer>" if kind == "tag" else "\n")[0]
    statement = _sentence(line) if kind == "phrase" else line
    lead = text[cue.start() : start]
    end = start + len(statement)
    if kind == "hash" and _HEADING.match(statement):
        return None
    direct, value, rest = _direct(statement)
    if direct:
        # "Answer: 16 - 7 = 9 eggs. So 9 * 2 = 18." and "#### 3 baskets of apples in all" open a solution, they do not end it.
        rest = rest.partition("(")[0]
        works = ("=" in rest or rest.count(" ") > 4 or _DIGIT.search(rest)) and not lead.rstrip().endswith((" is", "be"))
        if works and _DIGIT.search(text, end) and not _EXPLAINED.match(text, end) and not _CHECK.search(text, end):
            return None
        if "\n" in lead and _BARE.fullmatch(line) and _BARE.fullmatch(_BULLET.sub("", _next_line(text, end))):
            value = None  # a list of guesses
        return _Commit(value, kind, cue.start(), end, lead)
    if kind != "phrase" and statement.strip(" *") and not text[end:].strip():  # a sentence on the last line
        return _Commit(_last(readings(plain(statement))), kind, cue.start(), end, lead)
    return None


def _box(text: str, start: int) -> tuple[str, int]:
    """Content of the braces that open at `start` (the rest of the line if they never close), and where it ends."""
    window = text[start : start + MAX_STATEMENT]
    depth = 0
    for brace in re.finditer(r"[{}]", window):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return window[1 : brace.start()], start + brace.end()
        if depth < 0:
            break
    line = window.partition("\n")[0]
    return line, start + len(line)


def _direct(statement: str) -> tuple[bool, Fraction | None, str]:
    """Does the statement open with a number? Then also its value (None if left open) and what follows the first number."""
    statement = plain(statement)
    first = _NUMBER.search(statement)
    if not first or not _LEAD.fullmatch(statement, 0, first.start()):
        return False, None, ""
    values = list(islice(readings(statement), 1)) if _value(first) is not None else [None]
    return bool(values), values[0] if values else None, statement[first.end() :]


def _last_statement(text: str) -> Answer:
    """The number that a text without cues leaves its reader with."""
    last = _last_digit(text)
    if last < 0:
        return Answer(None, "undecided" if _REFUSAL.search(text) else "none")
    if (first := _FIRST.match(text)) and not (first[0][-1:].isalpha() and _CONCLUSION.search(text, first.end())):
        direct, value, rest = _direct(first[1])
        if direct and value is not None and not _BULLET.match(text):
            return Answer(value, "first")
    for check in _CHECK.finditer(text) if "check" in text or "verif" in text or "proof" in text else ():
        if _DIGIT.search(text, 0, check.start()):
            if not _CORRECTION.search(text, check.end()):
                text = text[: check.start()]
                last = _last_digit(text)
            break
    begin = max(0, last - MAX_STATEMENT)
    for stop in _STOP.finditer(text, begin, last):
        begin = stop.end()
    after = text[last + 1 :]
    sentence = text[begin : last + 1] + _sentence(after[:MAX_STATEMENT])
    asked = _QUESTION.match(sentence) and after[len(sentence) - (last + 1 - begin) :].startswith("?")
    if asked or _REFUSAL.search(sentence) or _REFUSAL.search(after) or _WITHDRAWN.search(after):
        return Answer(None, "undecided")
    bullet = _BULLET.sub("", sentence, count=1)
    previous = text[max(0, begin - MAX_STATEMENT) : begin].rstrip().rpartition("\n")[2]
    if (
        _BARE.fullmatch(bullet)
        and _BARE.fullmatch(_BULLET.sub("", previous, count=1))
        and previous.strip() != sentence.strip()
    ):
        return Answer(None, "undecided")  # a list of guesses, one a line
    for bold in reversed(list(_BOLD.finditer(sentence))):
        direct, value, _ = _direct(bold[1])
        if direct and "=" not in sentence[bold.end() :]:
            return Answer(value, "bold" if value is not None else "undecided")
    sentence = plain(bullet)
    because = _BECAUSE.search(sentence)
    if because and _DIGIT.search(sentence, 0, because.start()) and not _CONCLUSION.search(sentence, because.end()):
        sentence = sentence[: because.start()]
    outside = _ASIDE.sub(" ", sentence)
    sentence = outside if _DIGIT.search(outside) else sentence
    _, equals, result = sentence.rpartition("=")
    if equals and not _TURN.search(result):  # 8 * 60 = 480 cans in 8 hours
        direct, value, _ = _direct(result)
        if direct and value is not None:
            return Answer(value, "last_number")
    values = list(readings(sentence))
    value = values[-1] if values else None
    if (
        len(values) > 1 and not equals and (shown := text.rfind("=", 0, begin)) >= 0
    ):  # 8 * 60 = 480. So 480 cans in 8 hours.
        direct, result_before, _ = _direct(text[shown + 1 : min(begin, shown + 60)])
        value = result_before if direct and result_before is not None and result_before in values else value
    return Answer(value, "last_number" if value is not None else "undecided")


def _last(values: Iterator[Fraction | None]) -> Fraction | None:
    last = deque(values, maxlen=1)
    return last[0] if last else None


def _last_digit(text: str) -> int:
    return max(map(text.rfind, "0123456789"))


def _sentence(text: str) -> str:
    stop = _STOP.search(text)
    return text[: stop.start()] if stop else text


def _next_line(text: str, start: int) -> str:
    return text[start : start + MAX_STATEMENT].lstrip().partition("\n")[0]


# 3. The number in a statement -------------------------------------------------------------------------------------------

_MARKUP = [
    (re.compile(pattern), plain_form)
    for pattern, plain_form in (
        (r"\\[dtc]?frac\s*\{\s*(-?[\d.,]{1,30})\s*\}\s*\{\s*([\d.,]{1,30})\s*\}", r" \1/\2 "),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r" \1/\2 "),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"\\[,;: ]|~|\\q?quad\b", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\\(?:times|cdot)\b", "*"),
        (r"\\div\b", "÷"),
        (r"\\(?:approx|simeq|equiv|to|rightarrow|implies)\b", "="),
        (r"\^\s*\{?\s*\\(?:circ|prime)\s*\}?", " "),  # degrees
        (r"\^\s*\{", "^"),
        (r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf|tt)|mbox|bm|left|right|displaystyle|[()\[\]])", " "),
        (r"[{}`]|\*\*|(?<!\d)_|_(?!\d)", " "),
        (r" {2,}", " "),
    )
]
_MARKED = re.compile(r"[\\{*_`^~]")
_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_WORDS = {word: value for value, word in enumerate(_UNITS.split())}
_WORDS |= {
    word: 10 * value
    for value, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)
}
_WORDS |= {"hundred": 100, "thousand": 1000, "million": 10**6}
_SPELLED = re.compile(rf"(?<![\w-])(?!one [a-z])(?:{'|'.join(_WORDS)})(?:(?:\s|-|\sand\s)(?:{'|'.join(_WORDS)}))*\b")

_NUMBER = re.compile(
    r"""(?<![a-z0-9^])(?:
      (?P<mixed>\d{1,9}+\ (?:and\ )?\d{1,3}+\s?/\s?\d{1,4}+(?!\d))
    | (?P<date>\d{4}-\d\d?-\d\d?(?!\d))
    | (?P<digits>\d{1,3}+(?:\ \d{3}(?!\d|-[a-z]))++(?:[.,]\d++)?+ | (?:\d++|\.\d++)(?:[.,'_]\d++)*+)
      (?P<power>e[+-]?\d++ | \s?[*x]\s?10\s?\^\s?-?\d++ | \s?\^\s?-?\d++)?+
      (?P<over>(?:\s?/\s?\d[\d,.]*+)*+)
      (?P<ratio>(?:\s?:\s?\d++)*+)
      (?:\s?(?P<scale>(?:hundred|thousand|million|billion|trillion|lakh|crore|k)\b|[万亿億]))?+
    )
    (?P<spoiled>\s?\^|[²³⁴-⁹]|[xyz](?![a-z])|\s?(?:pi\b|π|\\pi|√|\\sqrt))?+""",
    re.VERBOSE,
)
_SCALE = {"hundred": 100, "thousand": 1000, "k": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE |= {"lakh": 10**5, "crore": 10**7, "万": 10**4, "亿": 10**8, "億": 10**8}
_NAMED_SCALE = {Fraction(_SCALE[word]): word for word in ("thousand", "million", "billion", "trillion")}
_POINT = re.compile(  # 18, 18.50, .5 | 1,200 and 1 200.5, 1'200, 1_200 | 12,34,567
    r"\d+(?:\.\d+)?|\.\d+|[1-9]\d{0,2}([,'_ ])\d{3}(?:\1\d{3})*(?:\.\d+)?|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?"
)
_COMMA = re.compile(  # 1.200,50 | 1.200.000 | 18,50 | 0,125
    r"[1-9]\d{0,2}(?:[. ']\d{3})+,\d\d?|[1-9]\d{0,2}(?:\.\d{3}){2,}|\d+,\d\d?|0,\d+"
)
_SIGN = re.compile(
    r"(?:(?:^|[\s=(\[:,*+/~≈<>\"'$])-|(?:^|[=(:≈$]|\b(?:is|be|equals))\s?-\s|\b(?:minus|negative)\s)(?:[$]\s?)?$"
)
_OPERATOR = re.compile(
    r"(?:[\s)\]%]|(?<=\s)[a-z]+\s)*+(?:[-+*/÷x^]|plus\b|minus\b|times\b|divided by\b|multiplied by\b)[\s(\[$]*-?[$]?"
)
_ALTERNATIVE = re.compile(
    r"\s*|[\s%?]*(?:[,;/&|~—?-]|\.\.+|…|\b(?:and|or|to|maybe|perhaps|possibly|vs)\b\.?)(?:\s*\b(?:and|or|maybe|perhaps|possibly)\b)*[\s$(]*-?[$]?"
    r"|(?: [\w%]+){0,2} and [$]?|(?: (?!round)[\w%]+)? to [$]?|.*(?:\bor\b|或).*"
)
# Words right before a number, by what they make of it: not the answer | a quantity it is compared with | no plain number.
_NEGATED = (" not", "n't", " never", " rather than", " instead of")
_REFERENCE = (" the", " out of", " of all", " than", " per")
_UNREADABLE = ("√", "sqrt", "±", "\\pm", " log", " ln")
_YEAR = re.compile(r"(?:19|20)\d\d")
_ATTRIBUTE = re.compile(r"-[a-z]|\s*(?:[a-z]+ )?(?:more|less|fewer|[a-z]+er) (?:[a-z]+ )?than [$]?\d")


def plain(statement: str) -> str:
    """A statement without LaTeX and Markdown, its number words as digits if it has no digits."""
    if _MARKED.search(statement):
        for pattern, plain_form in _MARKUP:
            statement = pattern.sub(plain_form, statement)
    return statement if _DIGIT.search(statement) else _spelled(statement)


def _spelled(text: str) -> str:
    """'one hundred and five eggs' -> '105 eggs'."""

    def digits(words: re.Match[str]) -> str:
        total = group = 0
        for value in (_WORDS[word] for word in re.split(r"\W+", words[0]) if word != "and"):
            if value == 100:
                group = (group or 1) * value
            elif value > 100:
                total, group = total + (group or 1) * value, 0
            else:
                group += value
        return str(total + group)

    return _SPELLED.sub(digits, text)


def readings(statement: str) -> Iterator[Fraction | None]:
    """The numbers that a plain statement offers, in order; None for one left open (5 or 6, 3 * 6, 2:3).

    Numbers that belong together count once: '3 * 6 = 18' is 18, '5, 6 or 7' is None, 'not 20 but 18' is 18.
    """

    def after(words: tuple[str, ...], number: re.Match[str]) -> bool:
        return (" " + statement[max(0, number.start() - 20) : number.start()]).rstrip(" $(").endswith(words)

    numbers = [number for number in _NUMBER.finditer(statement) if not after(_NEGATED, number)]
    if len(numbers) > 1:  # out of 24, than 12, at 10:30 are no answers while another number stands beside them
        own = [
            n
            for n in numbers
            if not (n["ratio"] or after(_REFERENCE, n) or _ATTRIBUTE.match(statement, n.end()))
            and not (after((" in", " by"), n) and _YEAR.fullmatch(n[0]))
        ]
        numbers = own or numbers
    group: list[tuple[re.Match[str], bool]] = []  # numbers that compete, each with: is it negative
    left: list[tuple[re.Match[str], bool]] = []  # the left side of an equation, which answers in 18 = 3 * 6
    is_sum = False

    def committed() -> Fraction | None:
        values = {None if after(_UNREADABLE, n) else _value(n, negative) for n, negative in (left if is_sum else group)}
        return values.pop() if len(values) == 1 else None

    end = 0
    for number in numbers:
        gap = statement[end : number.start()]
        end = number.end()
        is_operator = bool(group) and _OPERATOR.fullmatch(gap) is not None
        signed = (number, not is_operator and _SIGN.search(gap[-16:]) is not None)
        if group and ("=" in gap or "≈" in gap):
            left = left if is_sum else group
            group, is_sum = [signed], False
        elif is_operator:
            is_sum = True
        elif group and _ALTERNATIVE.fullmatch(gap):
            group.append(signed)
        else:
            if group:
                yield committed()
            group, left, is_sum = [signed], [], False
    if group:
        yield committed()


def _value(number: re.Match[str], negative: bool = False) -> Fraction | None:
    """Exact value of a `_NUMBER`, which holds no sign; None for what only looks like a number."""
    if number["spoiled"] or number["date"] or number["ratio"]:
        return None
    if number["mixed"]:
        whole, above, below = map(int, re.findall(r"\d+", number["mixed"]))
        value = whole + Fraction(above, below) if below else None
        return -value if value and negative else value
    value = _digits(number["digits"])
    if value is not None and (power := number["power"]):
        exponent = re.split(r"[e^]\s?", power)[-1]
        if len(exponent) > 3 or abs(int(exponent)) > MAX_EXPONENT or (power.lstrip()[0] == "^" and value != 10):
            return None
        value = Fraction(10) ** int(exponent) * (1 if power.lstrip()[0] == "^" else value)
    if value is not None and (over := number["over"]):
        below = _digits(over.strip(" /").rstrip(",."))  # None for a second slash: 3/4/2024 is a date
        value = value / below if below else None
    if value is not None and (scale := number["scale"]):
        value *= _SCALE[scale]
    return -value if value and negative else value


def _digits(text: str) -> Fraction | None:
    """Value of digits with separators, '1,234.50' or '1.234,50'; None when they mean nothing, '1,2,3'."""
    if len(text) > MAX_NUMBER:
        return None
    if text.isdecimal():
        return Fraction(int(text))
    if _POINT.fullmatch(text):
        return Fraction(re.sub(r"[,'_ ]", "", text))
    if _COMMA.fullmatch(text):
        return Fraction(re.sub(r"[.' ]", "", text).replace(",", "."))
    return None


# Rewards ----------------------------------------------------------------------------------------------------------------

_HASH_LINE = re.compile(r"#### (-?(?:\d{1,40}|[1-9]\d{0,2}(?:,\d{3}){1,12})(?:\.\d{1,20})?)[ \t\r]*", re.ASCII)


@lru_cache(maxsize=65_536)  # every gold is met once per completion of its group
def parse_gold(text: str) -> Fraction:
    """A reference answer such as '18', '-3', '1,200', '$5' or '2.5' as an exact value; ValueError if it is no number."""
    parts = re.fullmatch(r"([\s$+-]*)([\d.].*?)[\s$%.]*", plain(visible_text(text) or ""), re.DOTALL)
    number = _NUMBER.fullmatch(parts[2]) if parts else None
    value = _value(number) if number else None
    if parts is None or value is None or parts[1].count("-") > 1:
        raise ValueError(
            f"the reference answer {text[:80]!r} is not a number; expected one such as 18, -3, 1,200 or 2.5"
        )
    return -value if "-" in parts[1] else value


def agrees(answer: Answer, gold: str, completion: Completion) -> bool:
    """Whether an answer extracted from `completion` is exactly the reference answer.

    '26 billion miles' is 26000000000 and also answers a question that asks for billions, whose reference is 26.
    """
    value, reference = answer.value, parse_gold(gold)
    if value is None or value == reference:
        return value is not None
    scale = value / reference if reference else None
    return scale in _NAMED_SCALE and _NAMED_SCALE[scale] in (visible_text(completion) or "")


def correctness_reward(completion: Completion, gold: str) -> float:
    """1.0 when the completion commits to exactly the reference answer, else 0.0 (see `agrees`)."""
    return float(agrees(extract_answer(completion), gold, completion))


def format_reward(completion: Completion) -> float:
    """1.0 when the completion ends in its only `####`, a line `#### number` as GSM8K writes it, else 0.0."""
    text = (spoken_text(completion) or "").rstrip()
    return float(text.count("####") == 1 and _hash_line(text[text.rfind("\n") + 1 :]) is not None)


def strict_answer(completion: Completion) -> Fraction | None:
    """The number on the last line that starts with `####`; None unless that line is `#### number` as GSM8K writes it."""
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

    Returns `total` (weighted sum), `correct` and `format` (0.0 or 1.0, not weighted), `truncated` (as given) and `kind` (see
    `Answer`). `weights` has the keys `correct` and `format`; left out: 1.0 and 0.1. A truncated completion is graded on what
    it says, for it may have answered before it was cut; whether it enters the loss is for the trainer to decide.
    """
    weights = {"correct": 1.0, "format": 0.1} if weights is None else weights
    answer = extract_answer(text)
    correct, form = float(agrees(answer, gold, text)), format_reward(text)
    total = weights["correct"] * correct + weights["format"] * form
    return {"total": total, "correct": correct, "format": form, "truncated": truncated, "kind": answer.kind}
