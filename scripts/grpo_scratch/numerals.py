"""Numbers as people write them in a statement: `readings` turns '3 * 6 = $1,018.50 a day' into exact fractions.

Nothing is evaluated but single fractions: no sums, no powers but those of ten, no float, no eval. The length of a
number and the size of an exponent are capped, so that '1e999999999' or a megabyte of digits costs nothing. Statements
come in lower case, with ASCII digits, and short: the caller bounds them.
"""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

MAX_NUMBER = 60  # characters of one number
MAX_EXPONENT = 30  # of scientific notation

# LaTeX and Markdown to plain text, in this order.
_MARKUP = [(re.compile(pattern), new) for pattern, new in (
    (r"~~[^~]{0,80}~~", " "),  # struck out
    (r"\\[dtc]?frac\s*(?:\{\s*(-?[\d.,]{1,30})\s*\}|(\d))\s*(?:\{\s*([\d.,]{1,30})\s*\}|(\d))", r" \1\2/\3\4 "),
    (r"(?<=\d)\*\*(?=\d)", "^"),
    (r"\{,\}", ","),
    (r"\\!", ""),
    (r"\\[,;: ]|~|\\q?quad(?![a-z])", " "),
    (r"\\([$%#&_])", r"\1"),
    (r"\\(?:times|cdot)(?![a-z])", "*"),
    (r"\\div(?![a-z])", "÷"),
    (r"\\(?:approx|simeq|equiv|to|rightarrow|implies)(?![a-z])", "="),
    (r"\^\s*\{?\s*\\(?:circ|prime|text|mathrm)(?![a-z])", " "),  # degrees
    (r"\^\s*[{(]", "^"),
    (r"(?<=10)-?[²³¹⁰⁴-⁹]+", lambda power: "^" + unicodedata.normalize("NFKC", power[0])),
    (r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf|tt)|mbox|bm|left|right|displaystyle|[()\[\]])", " "),
    (r"[{}`]|\*\*|(?<!\d)_|_(?!\d)", " "),
    (r" {2,}", " "),
)]  # fmt: skip
_MARKED = re.compile(r"[\\{*_`^~²³¹⁰⁴-⁹]")

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: value for value, word in enumerate(_UNITS.split())}
_WORDS |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_WORDS |= {"hundred": 100, "thousand": 1000, "million": 10**6}
_WORD = "|".join(_WORDS)
_PRONOUN = r"one (?:of|that|who|which|can|could|must|more|another|is|has|needs?|way|day)\b"
_PART = {"half": " 1/2", "third": " 1/3", "quarter": " 1/4"}
_PARTS = re.compile(r"(?<=\d) and (?:a|one)[ -](half|third|quarter)\b")
_SPELLED = re.compile(rf"(?<![\w-])(?<!no )(?!{_PRONOUN})(?:{_WORD})(?:(?:\s|-|\sand\s)(?:{_WORD})){{0,8}}\b")

DIGIT = re.compile(r"\d")
# Groups that give nothing back are written (?>...): before 3.11.5 Python takes a possessive (...)*+ wrongly where the
# group itself can be read in several ways (python/cpython#106052).
NUMBER = re.compile(
    r"""(?=[\d.])(?:(?<![a-z0-9^])|(?:(?<=\b(?:usd|eur|gbp|inr|cad|aud|chf|cny|rmb))|(?<=\br[sm]))(?=\d))(?:
      (?P<mixed>\d{1,9}+\ {1,2}(?:and\ )?\d{1,3}+\s?/\s?\d{1,4}+(?!\d))
    | (?P<date>\d{4}-\d\d?-\d\d?(?!\d)
        | \d\d?(?:st|nd|rd|th)?\ (?:of\ )?(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]{0,6},?\ \d{4})
    | (?P<digits>\d{1,3}+(?>(?:\ \d{3}(?!\d|-[a-z]))+)(?>(?:[.,]\d++)?) | (?:\d++|\.\d++)(?>(?:[.,'_]\d++)*))
      (?>(?P<power>e[+-]?\d++ | \s?[*x]\s?10\s?\^\s?-?\d++ | \s?\^\s?-?\d++)?)
      (?P<over>(?>(?:\s?/\s?\d[\d,.]*+)*))
      (?P<ratio>(?>(?:(?::|\s:\s|h(?=\d\d(?!\d)))\d++)*))
      (?>(?:\s?(?P<scale>(?:hundred|thousand|million|billion|trillion|lakh|crore|k)\b|[万亿億]))?)
    )
    (?>(?P<spoiled>\s?\^|[²³⁴-⁹]|[xyz](?![a-z])|\s?(?:pi\b|π|\\pi|√|\\sqrt))?)""",
    re.VERBOSE,
)
_SCALE = {"hundred": 100, "thousand": 1000, "k": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE |= {"lakh": 10**5, "crore": 10**7, "万": 10**4, "亿": 10**8, "億": 10**8}
_POINT = re.compile(  # 18, 18.50, .5 | 1,200 and 1 200.5, 1'200, 1_200 | 12,34,567
    r"\d+(?:\.\d+)?|\.\d+|[1-9]\d{0,2}([,'_ ])\d{3}(?:\1\d{3})*(?:\.\d+)?|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?"
)
_COMMA = re.compile(  # 1.200,50 | 1.200.000 | 18,50 | 0,125
    r"[1-9]\d{0,2}(?:[. ']\d{3})+,\d\d?|[1-9]\d{0,2}(?:\.\d{3}){2,}|\d+,\d\d?|0,\d+"
)
# Between two numbers, or before the first one.
_SIGN = re.compile(
    r"(?:(?:^|[\s=(\[:,*+/~≈<>\"'$])-|(?:^|[=(:≈$]|\b(?:is|be|equals))\s?-\s|\b(?:minus|negative)\s)(?:[$]\s?)?$"
)
_OPERATOR = re.compile(
    r"(?>(?:[\s)\]%]|(?<=\s)[a-z]+\s)*)(?:[-+*/÷x^]|(?:plus|minus|times|divided by|multiplied by)\b)[\s(\[$]*-?[$]?"
)
_ALTERNATIVE = re.compile(
    r"\s*"  # 5 6 7
    r"|[\s%?]*(?:[,;/&|~—?-]|\.\.+|…|\b(?:and|or|to|maybe|perhaps|possibly|vs)\b\.?)"  # 5, 6 | 5-6 | 5 to 6
    r"(?:\s*\b(?:and|or|maybe|perhaps|possibly)\b)*[\s$(]*-?[$]?"
    r"|(?: [\w%]+){0,2} and [$]?|(?: (?!round)[\w%]+)? to [$]?|\s?[^\W\da-z]?\s?[到至和与]\s?"  # 5 eggs and 6 | 5到6
    # 5, or 6 | 5 if it rains and 6 if not
    r"|.*(?:\bor\b|[或<>≤≥]|\b(?:otherwise|alternatively)\b|\balso be\b|\bif\b.*\b(?:and|but)\b).*"
)
# 1 hour 30 minutes is neither 1 nor 30.
_COMPOUND = re.compile(
    r" ?(?:years?|hours?|hrs?|h|dollars?|feet|foot|ft),?(?: and)? \d+ ?(?:months?|minutes?|mins?|m|cents?|inch|in)\b"
)
# Words right before a number, by what they make of it: not the answer | a known quantity | no plain number.
_NEGATED = (" not", "n't", " never", " rather than", " instead of")
_NOR = re.compile(r",? n?or [$]?")  # not 5 or 6
_REFERENCE = (" the", " those", " these", " original", " his", " its", " their", " out of", " of all", " of her",
              " than", " as many as", " per")  # fmt: skip
_UNREADABLE = ("√", "sqrt", "±", "\\pm", " log", " ln")
_YEAR = re.compile(r"(?:19|20)\d\d")
# What follows a number that only describes or compares: 6-inch pencils, 6 more than 12.
_ATTRIBUTE = re.compile(
    r"-[a-z]|\s(?:decimals?|significant|digits?)\b|\s*(?:[a-z]+ )?(?:more|less|fewer|[a-z]+er) (?:[a-z]+ )?than [$]?\d"
)


def plain(statement: str) -> str:
    """A statement without LaTeX and Markdown, its number words as digits if it has no digits."""
    if _MARKED.search(statement):
        for pattern, new in _MARKUP:
            statement = pattern.sub(new, statement)
    statement = statement if DIGIT.search(statement) else spelled_out(statement)
    return _PARTS.sub(lambda part: _PART[part[1]], statement) if " and " in statement else statement


def spelled_out(text: str) -> str:
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
    own: list[re.Match[str]] = []
    known: list[re.Match[str]] = []  # quantities that the answer is compared with; they count when nothing else is left
    negated = 0  # where the last negated number ends
    for number in NUMBER.finditer(statement):
        words = _words_before(number)
        if words.endswith(_NEGATED) or (negated and _NOR.fullmatch(statement, negated, number.start())):
            negated = number.end()
        else:
            is_known = number["ratio"] or words.endswith(_REFERENCE) or _ATTRIBUTE.match(statement, number.end())
            (known if is_known or (_YEAR.fullmatch(number[0]) and words.endswith((" in", " by"))) else own).append(
                number
            )
    group: list[tuple[re.Match[str], bool]] = []  # numbers that compete, each with: is it negative
    left: list[tuple[re.Match[str], bool]] = []  # the left side of an equation: the answer in 18 = 3 * 6
    is_sum = False
    end = 0
    for number in own or known:
        gap = statement[end : number.start()]
        end = number.end()
        is_operator = bool(group) and _OPERATOR.fullmatch(gap) is not None
        negative = not is_operator and ("-" in gap or "minus" in gap or "negative" in gap) and _SIGN.search(gap[-16:])
        signed = (number, bool(negative))
        if group and ("=" in gap or "≈" in gap):
            left = left if is_sum else group
            group, is_sum = [signed], False
        elif is_operator:
            is_sum = True
        elif group and (_ALTERNATIVE.fullmatch(gap) or _COMPOUND.match(gap + number[0] + statement[end : end + 8])):
            group.append(signed)
        else:
            if group:
                yield _agreed(left) if is_sum else _either(left, group)
            group, left, is_sum = [signed], [], False
    if group:
        yield _agreed(left) if is_sum else _either(left, group)


def _words_before(number: re.Match[str]) -> str:
    return (" " + number.string[max(0, number.start() - 20) : number.start()]).rstrip(" $(")


def _either(left: list[tuple[re.Match[str], bool]], right: list[tuple[re.Match[str], bool]]) -> Fraction | None:
    """The value of an equation: of its right side, or of its left side if the right is one number not read, 8 = 2^3."""
    value = _agreed(right)
    return _agreed(left) if value is None and len(right) == 1 and left else value


def _agreed(group: list[tuple[re.Match[str], bool]]) -> Fraction | None:
    """The one value of numbers that compete; None when they differ or one is unreadable."""
    values = [None if _words_before(n).endswith(_UNREADABLE) else number_value(n, negative) for n, negative in group]
    return values[0] if values and all(value == values[0] for value in values[1:]) else None


def number_value(number: re.Match[str], negative: bool = False) -> Fraction | None:
    """Exact value of a `NUMBER`, which holds no sign; None for what only looks like a number."""
    mixed, date, digits, power, over, ratio, scale, spoiled = number.groups()
    if spoiled or date or ratio:
        return None
    value = _mixed(mixed) if mixed else _digits(digits)
    if power and value is not None:
        base, exponent = re.fullmatch(r"\s?(\^|e|[*x]\s?10\s?\^)\s?(.*)", power).groups()  # type: ignore[union-attr]
        if len(exponent) > 3 or abs(int(exponent)) > MAX_EXPONENT or (base == "^" and value != 10):
            return None  # of powers, only those of ten are numbers
        value = Fraction(10) ** int(exponent) * (1 if base == "^" else value)
    if over and value is not None:
        below = _digits(over.strip(" /").rstrip(",."))  # None for a second slash: 3/4/2024 is a date
        value = value / below if below else None
    if scale and value is not None:
        value *= _SCALE[scale]
    return -value if negative and value is not None else value


def _mixed(text: str) -> Fraction | None:
    whole, above, below = map(int, re.findall(r"\d+", text))
    return whole + Fraction(above, below) if below else None


@lru_cache(maxsize=4096)  # the same few numbers fill most texts, and making a Fraction is what takes the time
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
