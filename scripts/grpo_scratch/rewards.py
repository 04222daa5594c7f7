"""The grader: what a completion finally answers, and what that earns. The only one in the project.

A completion is read as a careful human would read it, in three steps:

1. `visible_text` - the text after the thinking, in one alphabet (ASCII digits, one minus sign, one kind of space);
2. `extract_answer` - the statement that commits: the last of `#### n`, a box, "the answer is n", ..., else the last sentence
   with a number in it. Later words win; what only checks or explains does not count;
3. `readings` - the number in that statement. Alternatives, ranges, ratios, times, dates and sums left open are no number.

Everything is linear in the length of the text: regular expressions are possessive or bounded, what is parsed is capped, and
nothing is ever evaluated (no powers, no eval, no floats). Values are exact fractions, compared without a tolerance.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

Completion = str | Sequence[Mapping[str, Any]]

MAX_TOKEN = 60  # characters of one number; longer ones are no answer to a word problem
MAX_EXPONENT = 30  # of scientific notation, so that 1e999999999 costs nothing
MAX_STATEMENT = 400  # characters read after a cue
MAX_CUES = 40  # cues looked at, from the end


class Answer(NamedTuple):
    """What a completion commits to.

    `kind` says how it was found: hash, boxed, tag, phrase, correction, bold, first, last_number; or why there is no value:
    none (no number), unfinished (thinking never closed), undecided (alternatives, a ratio, a refusal, no plain number).
    """

    value: Fraction | None
    kind: str


# ---- 1. the text that counts --------------------------------------------------------------------------------------------


class _Fold(dict[int, str]):
    """Character table for `str.translate`, filled as characters turn up."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        if (digit := unicodedata.decimal(char, None)) is not None:
            folded = str(digit)  # full-width, Arabic-Indic, Devanagari, mathematical bold, ...
        elif unicodedata.decomposition(char).startswith("<fraction>"):
            folded = " " + unicodedata.normalize("NFKC", char).replace("⁄", "/")  # 1½ -> 1 1/2
        elif 0xFF01 <= code <= 0xFF5E:
            folded = chr(code - 0xFEE0)  # full-width punctuation and letters
        else:  # currency signs become $, odd spaces become a space, zero-width and direction marks vanish
            folded = {"Sc": "$", "Zs": " ", "Cf": ""}.get(category, char)
        if len(self) < 50_000:
            self[code] = folded
        return folded


_FOLD = _Fold({code: chr(code) for code in range(128)})
_FOLD.update(str.maketrans({**dict.fromkeys("−–‐‑﹣⁻", "-"), **dict.fromkeys("’‘ʼ′", "'"), "×": "*", "·": "*", "⋅": "*", "⁄": "/",
                            "、": ",", "٫": ".", "٬": ",", "。": ". ", "→": "=", "⇒": "=", "∶": ":"}))  # fmt: skip
_THINK = re.compile(r"<(/?)(?:think|thinking|thought|reasoning|scratchpad)>")
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end)\|>|</s>")


def completion_text(completion: Completion) -> str:
    """The text of a completion: itself, or the content of the last assistant message of a conversation."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    return ""


def spoken_text(completion: Completion) -> str | None:
    """What follows the thinking, up to the end of the turn; None when the thinking was never closed."""
    text = completion_text(completion)
    if "<" in text:
        if end := _END_OF_TURN.search(text):
            text = text[: end.start()]
        last = None
        for last in _THINK.finditer(text.lower()):
            pass
        if last:
            return text[last.end() :] if last[1] else None
    return text


def visible_text(completion: Completion) -> str | None:
    """`spoken_text` in lower case and one alphabet, so that the patterns below see one way of writing."""
    text = spoken_text(completion)
    if text is None:
        return None
    return text.lower() if text.isascii() else text.translate(_FOLD).lower()


# ---- 3. numbers in a statement ------------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"""(?<![a-z0-9^])(?:
      (?P<mixed>[0-9]{1,9}+\ (?:and\ )?[0-9]{1,3}+\s?/\s?[0-9]{1,4}+(?![0-9]))
    | (?P<iso>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?![0-9]))
    | (?P<run>(?:[0-9]{1,3}+(?:\ [0-9]{3}(?![0-9]))++(?:[.,][0-9]++)?+ | (?:[0-9]++|\.[0-9]++)(?:[.,'_][0-9]++)*+))
      (?P<exponent>e[+-]?[0-9]++ | \s?[*x]\s?10\s?\^\s?-?[0-9]++)?+
      (?P<over>(?:\s?/\s?[0-9][0-9,.]*+)*+)
      (?P<ratio>(?:\s?:\s?[0-9]++)*+)
      (?:\s?(?P<scale>(?:hundred|thousand|million|billion|trillion|lakh|crore)\b|k\b|[万亿億]))?+
    )
    (?P<bad>\s?\^|[²³⁴-⁹]|[xyz]\b|\s?(?:pi\b|π|\\pi|√|\\sqrt))?+""",
    re.VERBOSE,
)
_SCALE = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
          "lakh": 10**5, "crore": 10**7, "万": 10**4, "亿": 10**8, "億": 10**8}  # fmt: skip
_POINT = re.compile(  # 18 | 18.50 | .5 | 1,200 | 1 200.5 | 1'200 | 1_200 | 12,34,567
    r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[1-9][0-9]{0,2}([,'_ ])[0-9]{3}(?:\1[0-9]{3})*(?:\.[0-9]+)?|"
    r"[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?"
)
_COMMA = re.compile(  # 1.200,50 | 1.200.000 | 18,50 | 0,125
    r"[1-9][0-9]{0,2}(?:[. '][0-9]{3})+,[0-9]{1,2}|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}|[0-9]+,[0-9]{1,2}|0,[0-9]+"
)


def _plain(text: str) -> Fraction | None:
    """Value of digits with separators, e.g. '1,234.50'; None when the grouping means nothing ('1,2,3')."""
    if len(text) > MAX_TOKEN:
        return None
    if text.isdigit():
        return Fraction(int(text))
    if _POINT.fullmatch(text):
        return Fraction(re.sub(r"[,'_ ]", "", text))
    if _COMMA.fullmatch(text):
        return Fraction(re.sub(r"[.' ]", "", text).replace(",", "."))
    return None


def _token_value(match: re.Match[str]) -> Fraction | None:
    """Exact value of one `_NUMBER` match without its sign; None for what only looks like a number."""
    if match["bad"] or match["iso"]:
        return None
    if match["mixed"]:
        whole, above, below = (int(part) for part in re.findall(r"[0-9]+", match["mixed"]))
        return whole + Fraction(above, below) if below else None
    value = _plain(match["run"])
    if value is None or match["ratio"]:
        return None
    if exponent := match["exponent"]:
        power = re.split(r"[e^]\s?", exponent)[-1]
        if len(power) > 3 or abs(int(power)) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** int(power)
    if over := match["over"]:
        below = _plain(over.strip().removeprefix("/").strip().rstrip(",."))
        if not below:  # a date such as 3/4/2024, or a division by zero
            return None
        value /= below
    return value * _SCALE[match["scale"]] if match["scale"] else value


_LATEX = [(re.compile(pattern), new) for pattern, new in (
    (r"\\[dtc]?frac\s*\{\s*(-?[0-9.,]{1,30})\s*\}\s*\{\s*([0-9.,]{1,30})\s*\}", r" \1/\2 "),
    (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r" \1/\2 "),
    (r"\{,\}", ","), (r"\\!", ""), (r"\\[,;: ]|~|\\q?quad\b", " "), (r"\\([$%#&_])", r"\1"),
    (r"\\(?:times|cdot)\b", "*"), (r"\\div\b", "÷"), (r"\\(?:approx|simeq|equiv|to|rightarrow|implies)\b", "="),
    (r"\^\s*\{?\s*\\(?:circ|prime)\s*\}?", " "), (r"\^\s*\{", "^"),
    (r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf|tt)|mbox|bm|left|right|displaystyle|[()\[\]])", " "),
    (r"[{}`]|\*\*|(?<![0-9])_|_(?![0-9])", " "),
)]  # fmt: skip
_SIGN = re.compile(r"(?:(?:^|[\s=(\[:,*+/~≈<>\"'])-|(?:^|[=(:≈]|\b(?:is|be|equals))\s?-\s|\b(?:minus|negative)\s)$")
_OPERATOR = re.compile(r"[\s)\]]*(?:[-+*/÷x^]|times|plus|minus|divided by|multiplied by)[\s(\[$]*")
_ALTERNATIVE = re.compile(
    r"[\s%]*(?:[,;/&~—]|\.\.+|…)?\s*(?:(?:and|or|to|maybe|perhaps|possibly|versus|vs)\b\.?\s*)*[$(]*\s*-?[$]?\s*"
    r"|[\s\w%,($]{0,30}\b(?:and|to)\s+[$]?\s*|.*(?:\bor\b|或).*"
)
_NEGATED = re.compile(r"(?:\bnot|n't|\bnever|\brather than|\binstead of)\s+[$]?\s*$")
_REFERENCE = re.compile(r"\b(?:out of|of the|of all|of all the|each of the|than|per)\s+[$]?\s*$")


def readings(statement: str) -> list[Fraction | None]:
    """The numbers that a statement offers, in order; None for one that is left open (5 or 6, 3 * 6, 2:3).

    Numbers that belong together count once: '3 * 6 = 18' is 18, '5, 6 or 7' is None, 'not 20 but 18' is 18.
    """
    tokens = [match for match in _NUMBER.finditer(statement)]
    kept = [token for token in tokens if not _NEGATED.search(statement, max(0, token.start() - 20), token.start())]
    if len(kept) > 1:
        main = [token for token in kept if not _REFERENCE.search(statement, max(0, token.start() - 20), token.start())]
        kept = main or kept
    found: list[Fraction | None] = []
    options: set[Fraction | None] = set()
    left: Fraction | None = None  # the lone number before an '=', as in 18 = 3 * 6
    open_sum = False
    end = 0
    for token in kept:
        gap = statement[end : token.start()]
        value = _token_value(token)
        bare = gap.rstrip(" $")
        linked = bool(options)
        if value is not None and _SIGN.search(gap[: len(bare) + 1] if gap[len(bare) :].startswith(" ") else bare):
            if not (linked and _OPERATOR.fullmatch(gap)):
                value = -value
        if linked and ("=" in gap or "≈" in gap) and "\n" not in gap:
            left = next(iter(options)) if len(options) == 1 and not open_sum else left
            options, open_sum = {value}, False
        elif linked and _OPERATOR.fullmatch(gap):
            open_sum = True
        elif linked and _ALTERNATIVE.fullmatch(gap):
            options.add(value)
        else:
            if linked:
                found.append(left if open_sum else options.copy().pop() if len(options) == 1 else None)
            options, open_sum, left = {value}, False, None
        end = token.end()
    if options:
        found.append(left if open_sum else options.pop() if len(options) == 1 else None)
    return found


# ---- 2. the statement that commits --------------------------------------------------------------------------------------

_CUE = re.compile(
    r"(?P<hash>\#{4,}+)|\\(?:boxed|fbox|framebox)\b(?P<boxed>)|<answer>(?P<tag>)|"
    r"(?P<phrase>\b(?:answer|(?:final|correct|corrected|right) (?:result|total|value|amount|number|solution))\b|答案|答え|正解|정답|"
    r"\b(?:ans|réponse|respuesta|antwort|risposta|resposta|ответ)\b)"
)
_LINK = re.compile(
    r"[\s*_'\")]*+(?:(?:to|for)\s[^.\n:=]{1,80}?\s(?=is\b))?(?:[,\s]*(?:therefore|thus|then|now|so|finale?)[,\s]*)?"
    r"(?:\s*(?:is|are|was|be|should be|must be|would be|will be|might be|may be|could be|comes to|equals|of|es|est|ist|lautet|é|è)\b"
    r"|是|为|為|は|은|는|\s*[:=>—]+|\s*-+>?\s|\s*\n)[\s*_:：>—]*+(?:[-•+]\s)?\s*"
)
_LEAD = re.compile(  # what may stand between a cue and its number
    r"(?:[^\w]|_|\b(?:about|approximately|approx|around|roughly|exactly|only|just|simply|therefore|thus|then|now|also|probably|"
    r"that|is|be|a|the|total|of|equal|equals|to|it|usd|eur|gbp|us|rs|inr|cad|aud|final|answer|minus|negative|[a-z]|"
    r"\w+(?=\s?[=:]))\b)*+"
)
_STOP = re.compile(r"\n|[.!?](?=\s+[^\s0-9]|\s*$)")
_HEADING = re.compile(r"\s*(?:(?:step|part|case|question|problem|section|day|week|example|method|option)\b|[0-9]{1,2}[.)]\s+[a-z])")
_REFUSAL = re.compile(
    r"\b(?:can(?:not|'t| not)|could(?: not|n't)|unable to|not able to|impossible to|do(?: not|n't)) "
    r"(?:be )?(?:determine|know|answer|solve|tell|say|calculate|compute)|\b(?:not enough|insufficient) information"
)
_RETRACT = re.compile(
    r"\b(?:wait|actually|correction|oops|sorry|mistake|wrong|incorrect|should (?:be|have been)|scratch that|i meant|"
    r"on second thought|let me (?:redo|recalculate|correct|fix)|not (?:right|correct)|no,)"
)
_WITHDRAWN = re.compile(r"\b(?:wrong|incorrect|mistake|scratch that|not (?:right|correct))\b")
_AFFIRM = re.compile(r"(?<!not )\b(?:correct|right|confirm\w*|match\w*|consistent|yes|indeed|stands|verified|checks out)\b")
_CHECK = re.compile(
    r"\(?\b(?:(?:check|verification|proof)\s*:|(?:to|we can|you can|let's|let me|let us) (?:quickly )?(?:double[- ]?check|verify|check)\b)"
)
_BECAUSE = re.compile(r"\b(?:because|since|given that)\b")
_THEREFORE = re.compile(r"\b(?:so|thus|therefore|hence|total|finally)\b|=")
_FIRST = re.compile(
    r"[\s*]*[^\s.,;:=\n][^.,;:=\n]{0,40}?[*]*(?:[.,;:—-]|\n)\s*"
    r"(?:reason|because|since|explanation|here's|this is because|that's because|why|proof|as\b)"
)
_BOLD = re.compile(r"(?:\*\*|__)([^*\n]{1,80})(?:\*\*|__)")
_GUESSES = re.compile(r"[\W_]*(?:(?:or|and|maybe|perhaps|possibly|also|alternatively|the|so|final|correct|is)\b[\W_]*){0,4}")


def clean_statement(text: str) -> str:
    """A statement without LaTeX and Markdown, so that `readings` sees plain numbers and words."""
    if "\\" in text or "{" in text or "*" in text or "_" in text or "`" in text or "^" in text:
        for pattern, new in _LATEX:
            text = pattern.sub(new, text)
    return text


def _sentence(text: str) -> str:
    stop = _STOP.search(text)
    return text[: stop.start()] if stop else text


def _direct(statement: str) -> tuple[bool, Fraction | None]:
    """(does the statement open with a number, that number)."""
    statement = clean_statement(statement)
    first = _NUMBER.search(statement)
    if not first or not _LEAD.fullmatch(statement, 0, first.start()):
        return False, None
    found = readings(statement)
    return bool(found), found[0] if found else None


def _box(text: str, start: int) -> tuple[str, int]:
    """Content of the braces that open at `start` (a whole line when they never close) and where it ends."""
    window = text[start : start + MAX_STATEMENT]
    if not window.lstrip().startswith("{"):
        return _sentence(window), start + len(_sentence(window))
    depth = 0
    for at, char in enumerate(window):
        depth += (char == "{") - (char == "}")
        if char == "}" and depth == 0:
            return window[:at].lstrip()[1:], start + at + 1
    line = window.partition("\n")[0]
    return line, start + len(line)


class _Commit(NamedTuple):
    value: Fraction | None
    kind: str
    start: int
    end: int


def _committed(text: str, cue: re.Match[str]) -> _Commit | None:
    """What the cue commits to; None when it is only a word or a heading."""
    kind = cue.lastgroup or ""
    start = cue.end()
    if kind == "boxed":
        content, end = _box(text, start)
        if not content.strip(" {}"):
            return None
        found = readings(clean_statement(content))
        return _Commit(found[-1] if len(found) == 1 else None, kind, cue.start(), end)
    if kind == "phrase":
        link = _LINK.match(text, start, start + MAX_STATEMENT)
        if not link:
            return None
        start = link.end()
    window = text[start : start + MAX_STATEMENT]
    line = window.split("</answer>")[0] if kind == "tag" else window.partition("\n")[0]
    statement = line if kind in ("hash", "tag") else _sentence(line)
    end = start + len(statement)
    if kind == "hash" and _HEADING.match(statement):
        return None
    direct, value = _direct(statement)
    if direct:
        return _Commit(value, kind, cue.start(), end)
    if kind in ("hash", "tag") and statement.strip(" *") and not text[end:].strip():  # words, on the last line
        found = readings(clean_statement(statement))
        return _Commit(found[-1] if found else None, kind, cue.start(), end)
    return None


def _commits(text: str) -> Iterator[_Commit]:
    """The commitments of the text, last one first."""
    cues = list(_CUE.finditer(text))[-MAX_CUES:]
    for cue in reversed(cues):
        if commit := _committed(text, cue):
            yield commit


def _last_statement(text: str) -> Answer:
    """The number that the last sentence with a number in it leaves us with."""
    if _REFUSAL.search(text):
        return Answer(None, "undecided")
    if not any(char in text for char in "0123456789"):
        return Answer(None, "none")
    if first := _FIRST.match(text):
        direct, value = _direct(first[0])
        if direct and value is not None:
            return Answer(value, "first")
    for check in _CHECK.finditer(text):
        if re.search("[0-9]", text[: check.start()]):
            if not _RETRACT.search(text, check.end()):
                text = text[: check.start()]
            break
    last = max(text.rfind(digit) for digit in "0123456789")
    begin = max(0, last - MAX_STATEMENT)
    for stop in _STOP.finditer(text, begin, last):
        begin = stop.end()
    sentence = text[begin : last + 1] + _sentence(text[last + 1 : last + MAX_STATEMENT])
    for bold in reversed(list(_BOLD.finditer(sentence))):
        direct, value = _direct(bold[1])
        if direct:
            return Answer(value, "bold") if value is not None else Answer(None, "undecided")
    sentence = clean_statement(re.sub(r"^\s*(?:[-•+*]|[0-9]{1,2}[.)])\s+(?=.*[0-9])", "", sentence))
    because = _BECAUSE.search(sentence)
    if because and re.search("[0-9]", sentence[: because.start()]) and not _THEREFORE.search(sentence, because.end()):
        sentence = sentence[: because.start()]
    outside = re.sub(r"\([^()]*\)", " ", sentence)
    found = readings(outside if re.search("[0-9]", outside) else sentence)
    if not found or found[-1] is None:
        return Answer(None, "undecided")
    return Answer(found[-1], "last_number")


def extract_answer(text: Completion) -> Answer:
    """The number that a completion finally commits to, as an exact value, and how it was found. Never raises.

    Accepts text or chat messages (the last assistant message counts).
    """
    seen = visible_text(text)
    if seen is None:
        return Answer(None, "unfinished")
    commits = _commits(seen)
    last = next(commits, None)
    if last is None:
        return _last_statement(seen)
    tail = seen[last.end :]
    if re.match(r"[\s.,;]*or\b[^.\n]*[0-9]", tail[:MAX_STATEMENT]):
        return Answer(None, "undecided")
    if _REFUSAL.search(tail):
        return Answer(None, "undecided")
    if _RETRACT.search(tail) and not _AFFIRM.search(tail):
        if any(char in tail for char in "0123456789"):
            later = _last_statement(tail)
            return Answer(later.value, "correction") if later.value is not None else later
        if _WITHDRAWN.search(tail):
            return Answer(None, "undecided")
    before = next(commits, None)
    if before and before.kind == last.kind and before.value != last.value:
        if _GUESSES.fullmatch(seen[before.end : last.start][:MAX_STATEMENT]):
            return Answer(None, "undecided")
    return Answer(last.value, last.kind) if last.value is not None else Answer(None, "undecided")


# ---- rewards ------------------------------------------------------------------------------------------------------------

_HASH_LINE = re.compile(r"#### (-?(?:[0-9]{1,40}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,12})(?:\.[0-9]{1,20})?)[ \t\r]*")


def parse_gold(text: str) -> Fraction:
    """A reference answer as an exact value, e.g. '1,200', '-3', '$5'. ValueError that names the text if it is no number."""
    statement = clean_statement(visible_text(str(text)) or "")
    whole = re.fullmatch(r"\s*-?\s*[$]?\s*-?\s*([0-9.].*?)[\s%.]*", statement, re.DOTALL)
    number = _NUMBER.fullmatch(whole[1]) if whole else None
    value = _token_value(number) if number else None
    if value is None:
        raise ValueError(f"the reference answer {text[:80]!r} is not a number; expected one such as 18, -3, 1,200 or 2.5")
    return -value if "-" in statement.split(whole[1])[0] else value  # type: ignore[index]


def correctness_reward(completion: Completion, gold: str) -> float:
    """1.0 when the completion commits to exactly the reference answer, else 0.0."""
    return float(extract_answer(completion).value == parse_gold(gold))


def _final_line(completion: Completion) -> tuple[int, re.Match[str] | None]:
    """(number of #### marks, the last #### line if it has GSM8K's own form `#### number`)."""
    text = spoken_text(completion) or ""
    marks = text.count("####")
    if not marks:
        return 0, None
    start = text.rfind("####")
    if start and text[start - 1] != "\n":
        return marks, None
    return marks, _HASH_LINE.fullmatch(text[start:].partition("\n")[0])


def format_reward(completion: Completion) -> float:
    """1.0 when the completion ends with exactly one line `#### number`, written as GSM8K writes it, else 0.0."""
    marks, line = _final_line(completion)
    last = (spoken_text(completion) or "").rstrip().rpartition("\n")[2]
    return float(marks == 1 and line is not None and last.startswith("####"))


def strict_match(completion: Completion, gold: str) -> bool:
    """Whether the last `####` line has GSM8K's form and its number equals the reference answer."""
    _, line = _final_line(completion)
    return line is not None and Fraction(line[1].replace(",", "")) == parse_gold(gold)


def total_reward(
    text: Completion, gold: str, truncated: bool = False, weights: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Everything a trainer logs about one completion.

    Returns `total` (weighted sum), `correct` and `format` (0.0 or 1.0, unweighted), `truncated` and `kind` (see `Answer`).
    A truncated completion is graded on what it says: one that states its answer before it is cut off has answered; whether
    it enters the loss is the trainer's decision. `weights` has the keys `correct` and `format`.
    """
    weights = weights or {"correct": 1.0, "format": 0.1}
    answer = extract_answer(text)
    correct = float(answer.value == parse_gold(gold))
    form = format_reward(text)
    total = weights.get("correct", 0.0) * correct + weights.get("format", 0.0) * form
    return {"total": total, "correct": correct, "format": form, "truncated": truncated, "kind": answer.kind}
