"""The grader agrees with a careful reader, is as safe as it says, and grades files from the command line."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.grpo_scratch.rewards import (
    correctness_reward,
    extract_answer,
    format_reward,
    parse_gold,
    strict_answer,
    strict_match,
    total_reward,
)

ROOT = Path(__file__).parents[1]
HANDED = ROOT.parent / "shared" / "cases" / "grader.jsonl"

# Completions, each with the number that a reader takes from it (None: it commits to none). Judged by hand, then run.
# fmt: off
READ_BY_HAND: dict[str, list[tuple[str, str | None]]] = {
    "the #### line": [
        ("Nine eggs at two dollars each.\n#### 18", "18"), ("#### 18\n", "18"), ("####18", "18"), ("#####  18", "18"),
        ("so the bill is split #### 18", "18"), ("#### 18.", "18"), ("#### **18**", "18"), ("#### `18`", "18"),
        ("#### (18)", "18"), ("#### ~18", "18"), ("#### = 18", "18"), ("#### 18 dollars", "18"),
        ("#### $18.00 per day", "18"), ("#### Answer: 18", "18"), ("#### The answer is 18.", "18"),
        ("#### x = 18", "18"), ("#### 3 * 6 = 18", "18"), ("#### 18 = 3 * 6", "18"), ("#### 3 * 6", None),
        ("#### 5-6", None), ("#### 5 to 6", None), ("#### 5, 6, 7", None), ("#### 5 6 7", None),
        ("#### 18 or 20", None), ("#### 18\n#### 19\n#### 20", None), ("#### 18\n#### 18", "18"),
        ("#### 18\n\nI hope this helps!", "18"), ("#### 18\n\nCheck: 18 - 6 = 12, as the task says.", "18"),
        ("#### 18\nWait, Sunday is missing, so it should be 21.", "21"),
        ("#### 18\nWait, let me double-check: 3 * 6 = 18. Correct.", "18"),
        ("#### Step 1: count the 3 baskets\nThere are 3.\n#### Step 2: multiply\n3 * 6 = 18", "18"),
        ("#### 1. Eggs left\n16 - 7 = 9\n#### 2. Money\n9 * 2 = 18", "18"), ("#### unknown", None),
        ("#### inf", None), ("#### none of 5 and 6", None), ("#### -$5", "-5"), ("#### $-5", "-5"),
        ("#### - 5", "-5"), ("#### −5", "-5"), ("#### +5", "5"), ("#### 1,234.50", "1234.5"), ("#### 007", "7"),
        ("#### 10:30", None), ("#### 12/25/2024", None), ("#### 2024-12-25", None), ("#### 3/4", "3/4"),
        ("#### 50 %", "50"), ("#### 18<|im_end|>", "18"), ("#### eighteen", "18"), ("#### twenty-five dollars", "25"),
    ],
    "boxes": [
        ("$\\boxed{18}$", "18"), ("\\[\n\\boxed{18}\n\\]", "18"), ("\\boxed{\\boxed{18}}", "18"),
        ("\\boxed{ 18 \\text{ km/h}}", "18"), ("\\boxed{\\mathbf{18}}", "18"),
        ("\\boxed{\\textbf{Answer: } 18}", "18"), ("\\boxed{x = 18}", "18"), ("\\boxed{\\$1{,}234.50}", "1234.5"),
        ("\\boxed{12\\,500}", "12500"), ("\\boxed{12,\\!500}", "12500"), ("\\boxed{12\\;500}", "12500"),
        ("\\boxed{50\\%}", "50"), ("\\boxed{-7}", "-7"), ("\\boxed{\\frac{3}{4}}", "3/4"),
        ("\\boxed{\\dfrac{1}{2}}", "1/2"), ("\\boxed{-\\frac{1}{2}}", "-1/2"), ("\\boxed{\\frac12}", "1/2"),
        ("\\boxed{2\\frac{1}{2}}", "5/2"), ("\\boxed{18^\\circ}", "18"), ("\\boxed{18\\text{ cm}^2}", "18"),
        ("\\boxed{1.8 \\times 10^{1}}", "18"), ("\\boxed{\\text{18 apples and 6 pears}}", None),
        ("\\boxed{5, 6}", None), ("\\boxed{5} or \\boxed{6}", None), ("\\boxed{5}, \\boxed{6}", None),
        ("\\boxed{\\{5, 6\\}}", None), ("\\boxed{18\\pi}", None), ("\\boxed{2^5}", None),
        ("\\boxed{\\sqrt{18}}", None), ("\\boxed{x}", None), ("\\boxed{}", None),
        ("The answer is 18.\n\\boxed{}", "18"),
        ("\\boxed{3} baskets were wrong, the corrected number is \\boxed{4}.", "4"),
        ("\\boxed{18}. To verify, 18 - 6 = 12.", "18"), ("\\boxed{18} dollars, which is 6 more than 12.", "18"),
        ("\\boxed{18}\n#### 20", "20"), ("#### 20\nThe final answer is \\boxed{18}", "18"), ("\\fbox{\\$ 42}", "42"),
        ("\\boxed{\\text{Total} = 42}", "42"), ("\\boxed{\\left(18\\right)}", "18"), ("\\boxed{18", "18"),
        ("\\boxed{eighteen}", "18"), ("\\boxed{42.0}", "42"), ("\\boxed{1\\text{ }200}", "1200"),
    ],
    "phrases": [
        ("The answer is 18.", "18"), ("The answer is: 18", "18"), ("THE ANSWER IS 18!", "18"),
        ("**Answer:** 18", "18"), ("**Answer: 18**", "18"), ("Answer - 18 apples", "18"), ("Answer: -18", "-18"),
        ("Answer = 18", "18"), ("Answer\n18", "18"), ("### Final Answer\n\n**18** cookies", "18"),
        ("Final answer:\n\n\\[ 18 \\]", "18"), ("Final Answer: $18$", "18"),
        ("Final answer: Tom has 18 apples.", "18"), ("The final answer is therefore $18.", "18"),
        ("Thus, the answer to the question is 18 hours.", "18"), ("The correct answer should be 18.", "18"),
        ("The answer is x = 18.", "18"), ("The answer is 3 + 15 = 18.", "18"), ("The answer is 18, not 20.", "18"),
        ("The answer is not 20 but 18.", "18"), ("The answer isn't 20, it's 18.", "18"),
        ("The answer is 18 because 3 times 6 is 18 and 2 are extra for the 20 guests.", "18"),
        ("The answer is 18 apples in 3 baskets.", "18"), ("18 is the answer.", "18"),
        ("So 18 is the final answer, since 3 * 6 = 18 and not 20.", "18"),
        ("The answer is 7 or 8.\nMore precisely, the answer is 8.", "8"), ("The answer is 18. Or 20.", None),
        ("The answer is 18 or possibly 20.", None), ("The answer is either 18 apples or 20 apples.", None),
        ("The answer is 18, or 20 if Sunday counts.", None), ("The answer is between 5 and 6.", None),
        ("The answer is 5-6.", None), ("The answer is 5, 6 or 7.", None),
        ("The answer is 17. The answer is 18. The answer is 19.", None), ("The answer is 18 (20 with tax).", "18"),
        ("The answer is 18. Wait, that is wrong. It must be 20.", "20"),
        ("The answer is 18. Actually, no: 3 * 7 = 21.", "21"), ("The answer is 18. Hmm, that is wrong.", None),
        ("The answer is 18. The tickets cost 6 each, so 18 is what 3 people pay.", "18"),
        ("The answer is 2:3.", None), ("The answer is 10:30 am.", None), ("The answer is 5 pm.", "5"),
        ("The answer is the number of apples, which we find as 3 * 6 = 18.", "18"),
        ("The answer cannot be determined from the 3 numbers given.", None), ("The answer is unknown.", None),
        ("I don't know the answer. Perhaps 18?", None), ("<think>3 * 6</think><answer>18</answer>", "18"),
        ("<answer>\n$18\n</answer>", "18"), ("<answer>5 or 6</answer>", None), ("La respuesta es 18.", "18"),
        ("Die Antwort ist 18.", "18"), ("La réponse est 18.", "18"), ("Ответ: 18", "18"), ("答案是18。", "18"),
        ("答案：18个苹果", "18"), ("所以，她每天赚18美元。", "18"), ("答えは18です。", "18"),
        ("The answer is eighteen.", "18"), ("Final answer: twenty-one eggs", "21"),
        ("The answer is one hundred and five.", "105"),
    ],
    "the last statement": [
        ("She has 18 eggs.", "18"), ("18", "18"), ("18.", "18"), ("$18", "18"), ("**18**", "18"),
        ("16 - 3 - 4 = 9\n9 * 2 = 18", "18"), ("She sells 9 eggs and makes 9 * 2 = $18 every day.", "18"),
        ("There are 9 eggs left. So she makes 9 * $2 = $18.", "18"),
        ("She has 9 eggs.\nTherefore she makes **$18** a day for her 9 eggs.", "18"),
        ("**Step 1:** 3 * 6 = 18\n**Step 2:** 18 - 5 = 13", "13"), ("3 * 6 = 18 apples.", "18"),
        ("So each of the 3 children gets 6 apples.", "6"), ("He got 18 out of 24 points.", "18"),
        ("He is 18 years old, 6 more than 12.", "18"), ("Tom has 18 apples, which is 6 more than 12.", "18"),
        ("They finish painting 18 walls by 10:30.", "18"), ("It is 10:30.", None), ("The ratio is 2 : 3.", None),
        ("They meet on March 5, 2024.", None), ("They meet on 12/25/2024.", None), ("It takes 5 or 6 days.", None),
        ("It takes 5-6 days.", None), ("It takes between 5 and 6 days.", None), ("Maybe 5, maybe 6, maybe 7.", None),
        ("5, 6, 7, 8", None), ("5\n6\n7\n8", None), ("18\n18", "18"),
        ("There are 18 apples because 3 baskets hold 6 each.", "18"),
        ("Because there are 3 baskets of 6, there are 18 apples.", "18"), ("18, since 3 * 6 = 18.", "18"),
        ("18 apples. Explanation: each of the 3 baskets holds 6.", "18"),
        ("18\n\nExplanation: there are 3 baskets with 6 apples.", "18"),
        ("18\n\nTom has 3 baskets and each of them holds 6 apples.", "18"),
        ("She needs 18 eggs (3 boxes of 6).", "18"), ("She needs 18 eggs. (Check: 18 / 6 = 3.)", "18"),
        ("She needs 18 eggs. Let's verify: 18 / 6 = 3 boxes.", "18"),
        ("I cannot determine the number from 3 and 6.", None), ("I am not sure.", None),
        ("No number here, COVID-nineteen aside.", None), ("The paper is A4.", None), ("He runs 5 km.", "5"),
        ("x = 18", "18"), ("Total: 18", "18"), ("Total cost = $5 + $13 = $18", "18"), ("So x equals 18.", "18"),
        ("- Apples: 6\n- Pears: 12\n- Total: 18", "18"), ("  12\n+  6\n----\n  18", "18"),
        ("| item | price |\n|---|---|\n| tea | 6 |\n| total | 18 |", "18"),
        ("So it is 18.\n\nThank you for the question. Have a good day.", "18"),
    ],
    "ways of writing a number": [
        ("#### 1 200", "1200"), ("#### 1\xa0200", "1200"), ("#### 1\u202f200\u202f000", "1200000"),
        ("#### 1'200", "1200"), ("#### 1’200", "1200"), ("#### 1_200", "1200"), ("#### 1.200,50", "1200.5"),
        ("#### 1.200.000", "1200000"), ("#### 12,34,567", "1234567"), ("#### 1,200,000.00", "1200000"),
        ("#### 1.200", "1.2"), ("#### 18,50 €", "18.5"), ("#### 0.50", "1/2"), ("#### .5", "1/2"),
        ("#### 18.0000", "18"), ("#### 18.5", "18.5"), ("#### 1.8e1", "18"), ("#### 1.8E+1", "18"),
        ("#### 1.8 × 10^1", "18"), ("#### 10^3", "1000"), ("#### 1 1/2", "3/2"), ("#### 1½", "3/2"),
        ("#### ½", "1/2"), ("#### 3⁄4", "3/4"), ("#### 1/0", None), ("#### 1.2.3", None), ("#### 1,2,3", None),
        ("#### 1,2345", None), ("#### 1.5 million", "1500000"), ("#### 5k", "5000"), ("#### 5 km", "5"),
        ("#### 18€", "18"), ("#### €18", "18"), ("#### £18", "18"), ("#### ₹1,20,000", "120000"),
        ("#### US$18", "18"), ("#### USD 18", "18"), ("#### Rs. 500", "500"), ("#### Rs.500", "500"),
        ("#### 18 USD", "18"), ("#### 60 km/h", "60"), ("#### 18 m³", "18"), ("#### 18°C", "18"), ("#### ٤٢", "42"),
        ("#### ४२", "42"), ("#### 𝟒𝟐", "42"), ("#### －５", "-5"), ("#### ６０％", "60"),
        ("#### \u200b18\ufeff", "18"), ("#### 1\xad200", "1200"), ("The answer is minus 5.", "-5"),
        ("The answer is negative 5 degrees.", "-5"), ("The answer is –5.", "-5"), ("The answer is—18.", "18"),
        ("#### 123456789012345678901234567890", "123456789012345678901234567890"), ("#### 1e31", None),
        ("#### " + "9" * 100, None),
    ],
    "thinking": [
        ("<think>5</think>18", "18"), ("It is 5.</think>\n\nShe has 18.", "18"), ("<think>It is 18. #### 18", None),
        ("The answer is 5.<think>no, 18", None), ("<think>5</think><think>6</think>\n#### 18", "18"),
        ("<THINK>5</THINK>18", "18"), ("<thinking>5</thinking>\nThe answer is 18.", "18"),
        ("<think>18</think>", None),
    ],
    "whole solutions": [
        ("To find out how much Maya earns, multiply 12 by 4.\n\n12 × 4 = 48\n\n**Maya earns $48.**", "48"),
        ("Let's break it down:\n\n1. Morning: 5 loaves\n2. Afternoon: 8 loaves\n\nTotal:"
         " 5 + 8 = **13 loaves**", "13"),
        ("1. Monday: 5\n2. Tuesday: 8\n3. Total: 5 + 8 = 13", "13"),
        ("Step 1: 4 × 3 = 12.\nStep 2: 12 − 5 = 7.\n\nSo there are 7 left.", "7"),
        ("So, \\(4 \\times 12 = 48\\) cupcakes.", "48"), ("So, $4 \\times 12 = 48$ cupcakes in total.", "48"),
        ("Therefore\n\\[\n4 \\times 12 = 48\n\\]", "48"), ("Therefore,\n$$\\frac{96}{2} = 48.$$", "48"),
        ("Hence the total is \\(\\frac{96}{2}=48\\).", "48"), ("So Lea has $\\frac{1}{2}$ of the cake.", "1/2"),
        ("**Final Answer**\n\n\\(\\boxed{48}\\)", "48"), ("**Final Answer**\n\n48", "48"),
        ("**Answer**\n\n> 48 cupcakes", "48"), ("# Answer\n48", "48"), ("## Answer: 48", "48"),
        ("Answer:\n\n48 cupcakes", "48"), ("Answer: 16 - 7 = 9 eggs. So 9 * 2 = 18 dollars.", "18"),
        ("Answer:\n16 - 7 = 9 eggs are left.\n9 * 2 = 18 dollars.", "18"),
        ("Answer: 3 boxes hold 18 apples. Each box has 6 apples. Two boxes are empty, so 12 remain.", "12"),
        ("Answer: 18\nExplanation: 3 boxes with 6 apples.", "18"),
        ("Answer: 18 apples\n\nHere is why. Each of the 3 boxes holds 6.", "18"),
        ("The answer is: **18** apples.\n\nLet me know if you have questions!", "18"),
        ("The total cost is $29.99, so rounded to the nearest dollar it is $30.", "30"),
        ("She spent 3/4 of her money.", "3/4"), ("It takes him 2 1/2 hours.", "5/2"),
        ("The average speed is 60 km/h.", "60"), ("They need 18 more chairs.", "18"),
        ("He is 18 years older than his sister.", "18"), ("Lena is 12 years old.", "12"),
        ("The percentage is 25%.", "25"), ("It costs 5 dollars per kilogram.", "5"), ("It costs $5/kg.", "5"),
        ("In 2030 she will be 42 years old.", "42"), ("She will be 42 years old in 2030.", "42"),
        ("So 42 is the number of jars.", "42"), ("So the 3 friends pay 42 dollars.", "42"),
        ("So 42 dollars are paid by the 3 friends.", "42"),
        ("6 * 7 = 42. So 42 dollars are paid by the 3 friends.", "42"),
        ("She has $1,000 - $958 = $42 left in her account.", "42"), ("x + 8 = 50\nx = 50 - 8\nx = 42", "42"),
        ("2x = 84, so x = 42.", "42"), ("Solving for x gives x = 84/2 = 42.", "42"), ("x = 84 / 2", "42"),
        ("We get 6 · 7 = 42 as the result.", "42"), ("6 x 7 = 42", "42"), ("6*7=42", "42"), ("= 42", "42"),
        ("42 = 6 * 7", "42"), ("The result: 42!", "42"), ("... and that makes 42 ...", "42"),
        ("That makes forty-two.", "42"), ("approx. 42", "42"), ("≈ 42", "42"), ("$\\approx 42$", "42"),
        ("The profit is -$42.", "-42"), ("The loss gives a profit of −42 dollars.", "-42"), ("5 - 47 = -42", "-42"),
        ("5 - 47 = - 42", "-42"), ("The balance is $-42.00.", "-42"), ("0", "0"), ("The answer is 0.", "0"),
        ("The answer is -0.", "0"), ("There are no apples left.", None),
    ],
    "hedges and sprays": [
        ("#### 18 | 20", None), ("#### 18\n#### 20", None), ("#### 18; 20", None), ("#### [18, 20]", None),
        ("#### 18 20", None), ("#### 18? 20?", None), ("#### ±18", None), ("#### 18 (or 20)", None),
        ("#### 18, maybe 20", None), ("#### 18/20/22", None), ("#### 17...19", None), ("#### 17 – 19", None),
        ("#### 17~19", None), ("#### approximately 17 to 19", None), ("\\boxed{17 \\text{ or } 19}", None),
        ("\\boxed{17}\\boxed{19}", None), ("\\boxed{17} and \\boxed{19}", None), ("\\boxed{17\\text{–}19}", None),
        ("$\\boxed{17}$ or $\\boxed{19}$", None), ("\\boxed{\\pm 17}", None), ("The answer is 17 or 18 or 19.", None),
        ("The answer is 17 and 18.", None), ("The answer is 17; 18; 19.", None),
        ("The answer could be 17. The answer could be 18.", None), ("Answer: 17\nAnswer: 18\nAnswer: 19", None),
        ("Possible answers:\n1. 17\n2. 18\n3. 19", None), ("Possible answers:\n- 17\n- 18", None),
        ("It is 17, 18 or 19.", None), ("17 or 18", None), ("Either 17 or 18.", None), ("17/18?", "17/18"),
        ("Could it be 18?", None), ("Is it 18?", None), ("Perhaps 18?", None), ("#### 17 18 19 20 21 22 23", None),
        ("The answer is 18 (i.e. 18.0).", "18"), ("The answer is 18 or 18.0.", "18"),
        ("The answer is 18 = 18.", "18"), ("The answer is A. 18", "18"), ("The answer is (B) 18.", "18"),
        ("The answer is B.", None),
    ],
    "corrections": [
        ("The answer is 20. No, wait, Monday counts twice, so the answer is 18.", "18"),
        ("The answer is 20. Sorry, I meant 18.", "18"), ("#### 20\n\nCorrection: #### 18", "18"),
        ("#### 20\nOops, I forgot the tip. The total is 18.", "18"),
        ("\\boxed{20}. Hold on, actually it is 18.", "18"), ("So 20. Actually, 18.", "18"),
        ("So she has 20. Wait, that's wrong.", None), ("\\boxed{20} is wrong.", None),
        ("\\boxed{20} is wrong. The correct value is 18.", "18"),
        ("\\boxed{18}\n\nActually, let me double-check: 3 * 6 = 18. Yes, it is right.", "18"),
        ("\\boxed{18} Wait, does 18 - 6 = 12? Yes, so this is consistent.", "18"),
        ("#### 18\nNote that 20 would be wrong because Monday counts once.", "18"),
        ("The answer is 18. There were 4 wrong answers and 14 right ones.", "18"),
        ("There are 4 wrong answers.", "4"), ("She made 3 mistakes.", "3"),
        ("The answer is 18, I was wrong about 20.", "18"), ("Initially I thought 20, but the answer is 18.", "18"),
        ("It should be 18 instead of 20.", "18"), ("It's not 20, it's 18.", "18"), ("It's 18, not 20.", "18"),
    ],
    "after the answer": [
        ("#### 18\n#### Explanation\n3 boxes of 6 and 2 lids", "18"),
        ("\\boxed{18}\n\n**Check:** 18 - 6 = 12 ✓", "18"),
        ("The answer is 18.\n\nVerification: 3 * 6 = 18 and 20 - 2 = 18.", "18"),
        ("So there are 18.\n\nVerification: 20 - 2 = 18, and 18 / 6 = 3.", "18"), ("So there are 18 (20 - 2).", "18"),
        ("So there are 18, as 20 - 2 = 18.", "18"), ("18 apples, because 3 boxes hold 6 each.", "18"),
        ("18 (3 boxes of 6)", "18"), ("Tom has 18. Therefore the answer is 18. This took 3 steps.", "18"),
        ("#### 18\n(3 boxes with 6)", "18"), ("The answer is 18 dollars for 3 people.", "18"),
        ("#### 18 dollars for 3 people", "18"), ("<answer>18</answer> I used 3 steps.", "18"),
        ("\\boxed{18} (in 3 steps)", "18"), ("The answer, 18, is 6 more than 12.", "18"),
    ],
    "odd forms": [
        ("####: 18", "18"), ("####\n18", "18"), ("#### \\boxed{18}", "18"), ("#### $\\boxed{18}$", "18"),
        ("#### 18$", "18"), ("#### $18$", "18"), ("#### \\$18", "18"), ("#### \\(18\\)", "18"), ("#### 18\\%", "18"),
        ("#### 18 percent", "18"), ("#### 18 per cent", "18"), ("#### 18 apples and no pears", "18"),
        ("#### 18 #### 18", "18"), ("\\boxed{18}.", "18"), ("\\boxed {18}", "18"), ("\\boxed{~18~}", "18"),
        ("\\boxed{\\;18\\;}", "18"), ("\\boxed{18\\ \\text{dollars}}", "18"), ("\\boxed{\\text{\\$}18}", "18"),
        ("\\boxed{\\mathrm{18\\,km}}", "18"), ("\\boxed{18\\,\\text{m/s}}", "18"), ("\\boxed{18.}", "18"),
        ("\\boxed{+18}", "18"), ("\\boxed{(18)}", "18"), ("\\boxed{18 = 3 \\cdot 6}", "18"),
        ("\\boxed{3 \\cdot 6 = 18}", "18"), ("\\boxed{\\textdollar 18}", "18"), ("\\boxed{1.5}", "3/2"),
        ("\\boxed{1{,}000{,}000}", "1000000"), ("\\boxed{1 000 000}", "1000000"), ("\\boxed{1\\!000}", "1000"),
        ("\\boxed{\\frac{18}{1}}", "18"), ("\\boxed{\\tfrac{3}{4}}", "3/4"), ("\\boxed{\\cfrac{3}{4}}", "3/4"),
        ("\\boxed{3/4}", "3/4"), ("\\boxed{\\frac{\\sqrt{3}}{2}}", None), ("\\boxed{\\text{None}}", None),
        ("\\boxed{?}", None), ("\\boxed{\\infty}", None), ("\\boxed{2:3}", None), ("\\boxed{10:30}", None),
        ("\\boxed{18x}", None), ("\\boxed{x^2}", None), ("\\boxed{3x + 6}", None), ("\\boxed{18 + x}", None),
        ("\\boxed{\\{18\\}}", "18"), ("\\boxed{[18]}", "18"), ("\\boxed{\\mathbf{\\$18.00}}", "18"),
        ("\\boxed{18 \\text{ (or 20)}}", None), ("\\boxed{18\\text{ apples}} \\text{ in 3 boxes}", "18"),
        ("The answer is 18th.", "18"), ("The answer is 1.", "1"), ("The answer is 1,000.", "1000"),
        ("The answer is 1,000,", "1000"), ("The answer is $1,000.00!", "1000"), ("The answer is ~$18.", "18"),
        ("The answer is about 18 or so.", "18"), ("The answer is 18...", "18"), ("The answer is \"18\".", "18"),
        ("The answer is '18'.", "18"), ("The answer is 18°.", "18"), ("The answer is 18 °F.", "18"),
        ("The answer is 18 m^2.", "18"), ("The answer is 18 m2.", "18"), ("The answer is 18m.", "18"),
        ("The answer is 18cm.", "18"), ("The answer is 18kg of rice.", "18"), ("The answer is Rs. 18.", "18"),
        ("The answer is US$ 18.", "18"), ("The answer is EUR 18.", "18"), ("The answer is 18 EUR.", "18"),
        ("The answer is 18¢.", "18"), ("The answer is ¢18.", "18"), ("The answer is 18,-.", "18"),
        ("The answer is 18.-", "18"), ("The answer is 1.8k.", "1800"), ("The answer is 2 dozen.", "2"),
        ("The answer is 1/3.", "1/3"), ("The answer is 33⅓.", "100/3"), ("The answer is 33 1/3 %.", "100/3"),
        ("The answer is 1e3.", "1000"), ("The answer is 1E-2.", "1/100"), ("The answer is 1e1000000.", None),
        ("The answer is 10^9.", "1000000000"), ("The answer is 10^10^10.", None), ("The answer is 2**10.", None),
        ("The answer is 0x12.", None), ("The answer is NaN.", None), ("The answer is ∞.", None),
        ("The answer is ④②.", None), ("The answer is Ⅳ.", None), ("The answer is 四十二.", None),
        ("{\"answer\": 18}", "18"), ("{\"reasoning\": \"3 * 6\", \"answer\": \"18\"}", "18"), ("answer=18", "18"),
        ("ANSWER: $18", "18"), ("Ans: 18", "18"), ("A: 18", "18"), ("Result: 18", "18"), ("Solution: 18", "18"),
        ("Output: 18", "18"), ("La respuesta final es 18.", "18"), ("Die Antwort lautet 18 Euro.", "18"),
        ("L'antwort ist 18.", "18"), ("La réponse est : 18", "18"), ("答案为：18", "18"), ("答案：\\boxed{18}", "18"),
        ("因此，总共有18个。", "18"), ("共１８個です。", "18"), ("정답은 18입니다.", "18"), ("答案是5或6。", None),
        ("答案是3.5万。", "35000"),
    ],
    "habits and tricks": [
        ("Janet has 18 eggs left.\n\nSo the answer is $\\boxed{18}$ eggs.\n\nThe answer is: 18", "18"),
        ("The answer is \\boxed{18}.\n\nThe answer is 18 eggs per day.", "18"), ("#### 18 eggs\n#### 18", "18"),
        ("#### $18\n\nThe final answer is $18.", "18"),
        ("So she sells 9 eggs. $9 \\times 2 = 18$. She makes $18 dollars every day.", "18"),
        ("She makes $18 every day at the farmers' market.", "18"), ("She makes 18$ every day.", "18"),
        ("Therefore, Janet makes $9 \\times \\$2 = \\$18$ every day.", "18"),
        ("Therefore, Janet makes \\( 9 \\times 2 = 18 \\) dollars.", "18"), ("Total = 9 × $2\n      = $18", "18"),
        ("Total revenue: 9 eggs * $2/egg = $18/day", "18"), ("Profit = $200,000 - $130,000 = $70,000", "70000"),
        ("Profit = $200,000 – $130,000 = $70,000.", "70000"),
        ("So the total profit is 200000 - 130000 = 70000 dollars, or $70,000.", "70000"),
        ("It costs 1.50 + 2.25 = 3.75 dollars.", "3.75"), ("It costs £3.75.", "3.75"), ("It costs 3,75 €.", "3.75"),
        ("It takes 1 hour and 30 minutes = 90 minutes.", "90"), ("It takes 90 minutes (1.5 hours).", "90"),
        ("It takes 1.5 hours, which is 90 minutes.", "90"), ("She has $45 - $27 = $18. So she has $18 left.", "18"),
        ("She has 18 cookies left after giving away 27.", "18"),
        ("45 - 27 = 18. She has 18 cookies left after giving away 27.", "18"),
        ("So 45 - 27 = 18 cookies are left after giving away 27.", "18"),
        ("There are 5 × 8 = 40 students. Since 3 are absent, 37 are present.", "37"),
        ("There are 40 students, so 40 - 3 = 37 are present.", "37"),
        ("The width is 6 cm and the length is 12 cm, so the area is 72 cm².", "72"),
        ("The area is 6 cm × 12 cm = 72 square centimeters.", "72"), ("The area is 72 sq. ft.", "72"),
        ("The volume is 8 m^3.", "8"), ("The train arrives at 5 p.m.", "5"),
        ("The train arrives after 5 hours.", "5"), ("On day 5 he has 32 stamps.", "32"),
        ("After 5 days he has 32 stamps.", "32"), ("He scored 90% on the test.", "90"),
        ("The discount is 20% of $50, which is $10.", "10"), ("20% of $50 is $10, so she pays $40.", "40"),
        ("She pays $50 × 0.8 = $40.", "40"), ("Each gets 1/4 of the pie.", "1/4"),
        ("He ate 3/8, so 5/8 of the pizza is left.", "5/8"), ("5/8", "5/8"), ("There are 12 (a dozen) eggs.", "12"),
        ("He needs at least 7 boxes.", "7"), ("He needs a minimum of 7 boxes.", "7"),
        ("He needs more than 7 boxes.", "7"), ("7 boxes are enough.", "7"), ("The number is 7.", "7"),
        ("So, the number we are looking for is 7!", "7"), ("That's it: 7.", "7"), ("Let x = 7. Then 2x = 14.", "14"),
        ("We need x such that 2x + 4 = 18.\n2x = 14\nx = 7", "7"), ("x = 14/2 = 7", "7"),
        ("\\begin{align*}\n2x &= 14 \\\\\nx &= 7\n\\end{align*}", "7"),
        ("\\begin{aligned} x &= 7 \\end{aligned}", "7"), ("$$x = \\frac{14}{2} = 7$$", "7"), ("$x=7$", "7"),
        ("\\(x = -7\\)", "-7"), ("Answer: x = -7", "-7"), ("The answer is $-7$.", "-7"), ("The answer is -$7.", "-7"),
        ("The answer is a loss of $7.", "7"), ("The temperature is -7°C.", "-7"), ("The temperature is −7 °C.", "-7"),
        ("The temperature is 7 degrees below zero.", "7"), ("18 18 18 18\n#### 18", "18"),
        ("#### 1\n#### 2\n#### 3\n#### 4\n#### 5", None), ("#### 18\n\n#### 19", None),
        ("#### 18\nor\n#### 19", None), ("#### 18 and 19", None), ("#### 18, 19", None), ("#### 18,19", "18.19"),
        ("#### 18-19", None), ("#### {18, 19}", None), ("#### 18 ≤ x ≤ 20", None), ("#### x > 18", "18"),
        ("#### N/A", None), ("#### TBD", None), ("#### ?", None), ("#### [your answer]", None), ("#### number", None),
        ("#### <number>", None), ("#### $", None), ("#### -", None), ("#### 18-", "18"), ("#### 1 8", None),
        ("#### 1.8.0", None), ("#### 18e", "18"), ("#### e18", None), ("#### 18 + 0", None), ("#### 36/2", "18"),
        ("#### 2*9", None), ("#### sqrt(324)", None), ("#### 0018", "18"),
        ("#### 18.000000000000000000001", "18.000000000000000000001"), ("#### 17.999999", "17.999999"),
        ("#### 18,", "18"), ("#### 18;", "18"), ("#### 18:", "18"), ("#### \"18\"", "18"), ("#### '18'", "18"),
        ("#### <b>18</b>", "18"), ("#### <18>", "18"), ("#### 18\\", "18"), ("#### 18</s>", "18"),
        ("#### 18<|endoftext|>Question: next\n#### 20", "18"), ("#### 18\n```", "18"), ("```\n#### 18\n```", "18"),
        ("> #### 18", "18"), ("**#### 18**", "18"), ("- #### 18", "18"), ("#### **Answer: $18**", "18"),
        ("#### Final Answer: \\boxed{18}", "18"), ("#### Final Answer\n\\boxed{18}", "18"),
        ("#### Final Answer\n18", "18"), ("#### Final Answer\nThe jar holds 18 sweets.", "18"),
        ("#### Conclusion\nThe 3 jars hold 18 sweets.", "18"), ("#### Total\n3 * 6 = 18", "18"),
        ("#### Given: 3 jars\n#### Find: sweets\n3 * 6 = 18", "18"),
        ("#### 3 jars\nEach jar holds 6 sweets, so there are 18.", "18"), ("<think>\n</think>\n18", "18"),
        ("<think>a</think>\n\n<think>b", None), ("</think>18", "18"), ("<think>x</think> I think it is 18.", "18"),
        ("The word <think> opens a block. The answer is 18.", None),
        ("<reasoning>3*6</reasoning><answer>$18</answer>", "18"), ("<answer>18", "18"), ("<answer></answer>", None),
        ("<answer>x</answer>", None), ("<answer>20</answer> Wait, <answer>18</answer>", "18"),
        ("<answer>20</answer><answer>18</answer>", None), ("Answer: ۱۸", "18"), ("Answer: १८", "18"),
        ("Answer: ๑๘", "18"), ("الجواب: ١٨", "18"), ("答案：１８", "18"), ("答案是 18 元。", "18"),
        ("所以答案是：\\boxed{18}。", "18"), ("總共是 1,200 元", "1200"), ("Итак, ответ: 18 рублей.", "18"),
        ("Всего 1 200 рублей.", "1200"), ("Insgesamt sind es 1.200,00 €.", "1200"),
        ("En tout, il y a 1 200,50 euros.", "1200.5"), ("Le total est 18.", "18"), ("El total es 18.", "18"),
        ("La respuesta correcta es 18.", "18"), ("A resposta é 18.", "18"), ("La risposta è 18.", "18"),
        ("It is 18, or maybe 19.", None), ("It is 18 or so.", "18"), ("It is 18 — or 19.", None),
        ("I would say 18. Or 19.", None), ("Either it is 18 or it is 19.", None),
        ("It could be 18, it could be 19.", None), ("It is somewhere between 18 and 19.", None),
        ("It is 18±1.", None), ("It is 18 to 19.", None), ("It is 18 to the nearest whole number.", "18"),
        ("The answer is 18 or less.", "18"), ("The answer lies between 18 and 19.", None),
        ("The answer is one of 18, 19, 20.", None), ("The answer is definitely 18.", "18"),
        ("The answer is, I believe, 18.", "18"), ("I believe the answer to be 18.", "18"), ("My answer: 18", "18"),
        ("My final answer is 18. Thanks!", "18"), ("Answer is 18", "18"), ("answer 18", "18"),
        ("The answer → 18", "18"), ("The answer is\u2060 18", "18"), ("The answer is : : 18", "18"),
        ("The answer is \\$18", "18"), ("The answer is 18 ✅", "18"), ("The answer is 1️⃣8️⃣", "18"), ("✅ 18", "18"),
        ("Answer: **\\$18.00**", "18"), ("Answer: *18*", "18"), ("Answer: _18_", "18"), ("Answer: __18__", "18"),
        ("Answer: `18`", "18"), ("Answer: ~~20~~ 18", "18"),
    ],
    "what stands around it": [
        ("So it is 12.\n#### nan", None), ("So it is 12.\n#### unknown", None), ("#### 18\n#### Notes", "18"),
        ("So 3 * 6 = 18. <answer>x</answer>", None), ("#### 18\n\nSorry for the long text, I used 3 steps.", "18"),
        ("<answer>18</answer>\n5", "18"), ("So it is 12.\n#### ", "12"),
        ("So it is 12.\n\\boxed{\\text{unknown}}", None), ("#### 18\nThe answer is hopefully clear.", "18"),
        ("#### 18\n\nNote: the 3 baskets should be full.", "18"),
        ("The answer is 18. They had to wait 5 minutes.", "18"), ("#### 20\nOops, the right number is 18.", "18"),
        ("#### 20\nWait, I need to correct this: there are 18.", "18"),
        ("\\boxed{18}\n\nWait, let me verify: 18 - 6 = 12. OK.", "18"),
        ("\\boxed{18}\n\nWait, is that right? 18 - 6 = 12. Yes.", "18"),
        ("#### 18\nI don't know if that helps.", "18"), ("#### 18\nI do not know the answer.", None),
        ("The answer is 18, but it cannot be determined for sure.", "18"), ("Answer (in dollars): 18", "18"),
        ("**Answer (rounded):** 18", "18"), ("The answer you are looking for is 18. It took 3 steps.", "18"),
        ("The answer in dollars is 18. It took 3 steps.", "18"), ("The answers are 17 and 18.", None),
        ("18.33 rounded to 2 decimals", "18.33"), ("It costs $18.33 rounded to 2 decimal places.", "18.33"),
        ("It is 18.33, which rounds to 18.", "18"), ("Rounded to 2 decimal places, it is 18.33.", "18.33"),
        ("Day 3: 18", "18"), ("Step 5: 18 jars", "18"), ("Total (5 items): 18", "18"), ("Round 2: 18 points", "18"),
        ("\\boxed{18^{\\text{th}}}", "18"), ("\\boxed{18^\\text{th}}", "18"), ("\\boxed{18^{\\circ}\\text{C}}", "18"),
        ("x^2 = 324, x = 18", "18"), ("√324 = 18", "18"), ("\\sqrt{324} = 18", "18"), ("5! = 120", "120"),
        ("18/24 = 3/4 = 75%", "75"), ("18.33 ≈ 18", "18"), ("#### 18 (not 20)", "18"), ("#### not 18", None),
        ("#### 18, not 20", "18"), ("#### The temperature drops by 10, to -10", "-10"),
        ("The answer: eighteen (18)", "18"), ("100% sure the answer is 18.", "18"),
        ("The answer is 18, I'm 100% sure.", "18"), ("\\boxed{\\text{18 out of 20}}", "18"),
        ("\\boxed{18 \\text{ cm} \\times 20 \\text{ cm}}", None), ("\\boxed{\\text{The answer is } 18}", "18"),
        ("\\boxed{18\\text{ or }18}", "18"), ("\\boxed{\\$18 \\text{ per hour}}", "18"),
        ("#### 18<end_of_turn>", "18"), ("#### 18 [1]", "18"),
        ("The final price is $18. The tax was 2 dollars.", "18"),
        ("The total is $20. He pays half, so he pays $10.", "10"), ("The result is 18. Check: 18 + 2 = 20.", "18"),
        ("Thus 18 students passed and 2 failed. The answer is 18.", "18"),
        ("The answer is 18.\n\n**Explanation**\n\nThere are 3 rows of 6.", "18"),
        ("The answer is 18.\n\nStep 1: 3 rows\nStep 2: 6 each\nStep 3: 3 * 6 = 18", "18"),
        ("**18**\n\nThere are 3 rows of 6 chairs.", "18"), ("**18 chairs**\n\nThere are 3 rows of 6 chairs.", "18"),
        ("18 chairs\n\nThere are 3 rows of 6 chairs.", "18"), ("$18\n\nEach of the 3 tickets costs $6.", "18"),
        ("There are 3 rows of 6 chairs.\n\n**18 chairs**", "18"), ("Of the 24 pupils, 18 like maths.", "18"),
        ("18 of the 24 pupils like maths.", "18"), ("18 out of 24 pupils like maths.", "18"),
        ("Each of 3 children gets 6.", "6"), ("They each get 6.", "6"), ("6 each", "6"), ("6 apples each", "6"),
        ("6 per child", "6"), ("In 4 weeks he saves $72.", "72"), ("4 * 18 = 72\nHe saves $72 in 4 weeks.", "72"),
        ("He saves 4 * 18 = $72 in 4 weeks.", "72"), ("If he works 4 weeks, he saves $72.", "72"),
        ("72 dollars in 4 weeks.\n#### 72", "72"), ("She has $5.50 left.", "5.5"),
        ("She has 550 cents, i.e. $5.50.", "5.5"), ("She has $5.50 = 550 cents.", "550"), ("It's 3 o'clock.", "3"),
        ("It's 15:00.", None), ("Score 3-2.", None), ("3:2", None), ("3 : 2", None), ("1/2/2023", None),
        ("Version 1.2.3", None), ("Call 555-1234.", None), ("ISBN 978-3-16-148410-0", None), ("2,5 kg", "2.5"),
        ("0,5", "0.5"), ("1.234.567", "1234567"), ("1.234.567,89", "1234567.89"), ("12.345,6", "12345.6"),
        ("1 234 567,89", "1234567.89"), ("1 234 567.89", "1234567.89"), ("1'234'567.89", "1234567.89"),
        ("1,234,56", None), ("12 34", None), ("1 23", None), ("1234 567", None), ("1,23,456", "123456"),
        ("12,345,678.9", "12345678.9"), ("$.50", "0.5"), ("-.5", "-0.5"), ("-1 1/2", "-3/2"), ("3 1/2%", "7/2"),
        ("2⅔", "8/3"), ("1,5 Millionen", "1.5"), ("3 million", "3000000"), ("3.2 billion people", "3200000000"),
        ("2 hundred", "200"), ("$2k", "2000"), ("2K", "2000"), ("2 k", "2000"), ("5M", "5"), ("2 lakh", "200000"),
        ("twelve", "12"), ("Twelve.", "12"), ("minus twelve", "-12"), ("The answer is twelve hundred.", "1200"),
        ("two thousand and six", "2006"), ("one", "1"), ("There is one left.", "1"), ("No one is left.", None),
        ("a dozen", None), ("\\boxed{\\text{twelve}}", "12"), ("ninety-nine", "99"),
        ("one hundred twenty-three thousand four hundred fifty-six", "123456"),
    ],
    "more whole solutions": [
        ("To determine how many cookies each child gets, we divide 24 by 4:\n\n\\[\n\\frac{24}{4}"
         " = 6\n\\]\n\nTherefore, each child gets 6 cookies.", "6"),
        ("Let's solve this step-by-step:\n1. Initial: 20 apples\n2. Gives away: 8 apples\n3."
         " Remaining: 20 - 8 = 12 apples\n\nTherefore, she has 12 apples remaining.", "12"),
        ("**Solution:**\n\nFirst day: 15 pages\nSecond day: 15 × 2 = 30 pages\n\n**Total:**"
         " 15 + 30 = **45 pages**", "45"),
        ("The total number of legs is $4 \\times 5 + 2 \\times 3 = 26$.", "26"),
        ("Thus, the total cost is \\$26.50.", "26.5"),
        ("Thus the cost of 3 shirts is $3 \\times \\$15 = \\$45$. The answer is $\\boxed{45}$ dollars.", "45"),
        ("Step 3: Find the difference.\n45 - 26 = 19\n\nSo Ben is 19 cm taller than Ana.\n\n#### 19", "19"),
        ("First, 5*4=20. Then 20/2=10. Finally 10+7=17. So the final answer is 17.", "17"),
        ("He read 12 pages on Monday, 18 on Tuesday. Total=12+18=30.", "30"), ("Ana: 12\nBen: 18\nTotal: 30", "30"),
        ("30 pages in total (12 on Monday, 18 on Tuesday).", "30"),
        ("It takes 30 / 6 = 5 hours to fill the tank at 6 litres an hour.", "5"),
        ("The tank holds 30 litres; at 6 litres an hour it is full after 5 hours.", "5"),
        ("So there are 9 more girls than boys.", "9"),
        ("There are 14 girls and 5 boys, so there are 9 more girls than boys.", "9"),
        ("There are 9 more girls than boys, since 14 - 5 = 9.", "9"),
        ("You'd need 9 boxes. Let me explain: each box holds 8 pens and you have 70.", "9"),
        ("You'd need 9 boxes.\n\nHere's how: 70 pens / 8 pens per box = 8.75, which we round up to 9.", "9"),
        ("70 / 8 = 8.75, so 9 boxes are needed.", "9"),
        ("70 / 8 = 8.75, and since we can't buy part of a box, she needs 9.", "9"), ("8.75 rounds up to 9.", "9"),
        ("70 ÷ 8 = 8 remainder 6, so she needs 9 boxes.", "9"),
        ("The speed is 300 miles / 5 hours = 60 miles per hour.", "60"), ("The speed is 300/5 = 60 mph.", "60"),
        ("Speed = 60mph", "60"), ("Her age is (40 + 2) / 2 = 21.", "21"), ("So $a = 21$.", "21"),
        ("Hence, \\(a = \\boxed{21}\\) and \\(b = 19\\).", "21"),
        ("The final answer is: \\boxed{21\\ \\text{years}}", "21"),
        ("The final answer is: $\\boxed{\\text{21 years old}}$", "21"), ("**The answer is 21.**", "21"),
        ("***Answer: 21***", "21"), ("Answer:21", "21"), ("Answer :21", "21"), ("answer:\t21", "21"),
        ("The answer is\n\n21", "21"), ("The answer is\n$$21$$", "21"), ("The answer is:\n```\n21\n```", "21"),
        ("The answer is:\n| 21 |", "21"), ("The answer is:\n\n\\begin{equation}\n21\n\\end{equation}", "21"),
        ("So the answer would be 21 years.", "21"), ("I think the answer is 21", "21"),
        ("The answer must be 21!", "21"), ("The answer is 21.0 years.", "21"),
        ("The answer is 21 (twenty-one).", "21"), ("The answer is twenty-one (21).", "21"),
        ("Final answer: 21 years, 4 months", None), ("Final answer: $21.5K", "21500"),
        ("#### 1 hour 30 minutes", None), ("It takes 1 hour and 30 minutes.", None), ("6 ft 2 in", None),
        ("Final answer: 21,5", "21.5"), ("Final answer: 0.21 (21%)", "0.21"), ("Final answer: 21% (0.21)", "21"),
        ("Final Answer: The final answer is 21. I hope it is correct.", "21"),
        ("Final Answer: The final answer is $\\boxed{21}$. I hope it is correct.", "21"),
        ("#### 21\n\nThe answer is 21.", "21"), ("#### 21 years.\n\nLet me know if you need anything else!", "21"),
        ("Ben is 21 years old.\n\nExplanation:\nLet b be Ben's age. Then 2b - 2 = 40, so b = 21.", "21"),
        ("Ben is 21 years old. We get this from 2b = 42.", "21"), ("Ben is 21. (2 * 21 - 2 = 40)", "21"),
        ("Ben is 21.\n\nProof: 2 * 21 - 2 = 40.", "21"), ("Ben is 21. To double-check: 2 * 21 - 2 = 40.", "21"),
        ("Ben is 21. We can verify this: 2 * 21 = 42, 42 - 2 = 40.", "21"),
        ("b = 21\n\nVerify: 2(21) - 2 = 40 ✓", "21"), ("b = 21. Double check: 2*21-2=40.", "21"),
        ("Ben has 21 marbles left, not 19.", "21"), ("It's 21 — because 42/2 = 21.", "21"), ("21.", "21"),
        ("  21  ", "21"), ("\n\n21\n\n", "21"), ("=21", "21"), ("21=21", "21"), ("(21)", "21"), ("[21]", "21"),
        ("\"21\"", "21"),
    ],
    "a last round": [
        ("Each box holds 12 eggs, and the shop sold 15 boxes, so 12 x 15 = 180 eggs were sold.", "180"),
        ("To get the perimeter we add all sides: 7 + 7 + 4 + 4 = 22 metres.", "22"),
        ("Perimeter = 2(7 + 4) = 22 m", "22"), ("We have 2 × (7 + 4) = 2 × 11 = 22.", "22"),
        ("That leaves Omar with 40% of his pocket money.", "40"),
        ("So 40% of the pocket money is left, which is $12.", "12"),
        ("He therefore has to wait another 25 minutes.", "25"), ("It'll take them 3 more days.", "3"),
        ("She must score at least 88 on the last test.", "88"), ("Lina's total: **$56**", "56"),
        ("**Lina pays a total of $56.**", "56"), ("7 tickets × $8 = **$56**", "56"),
        ("Total: 7 × 8 = 56 → **$56**", "56"),
        ("$$7 \\cdot 8 = \\boxed{56}$$\n\nLina pays 56 dollars for the 7 tickets.", "56"),
        ("The answer is \\(56\\) dollars.", "56"), ("The final answer is \\( \\$56 \\).", "56"),
        ("So our final answer is fifty-six.", "56"), ("The answer to this problem is 56 dollars.", "56"),
        ("Answer: Lina pays $56.", "56"), ("Answer: 7 × 8 = 56", "56"),
        ("Answer: 7 × 8 = 56 dollars\n\nExplanation: Each of the 7 tickets costs $8.", "56"),
        ("Answer: $56\n\nEach of the 7 tickets costs $8.", "56"), ("#### 7 × 8 = $56", "56"),
        ("####  56.00 dollars", "56"), ("### Answer\n\n$56", "56"), ("---\n**Answer: 56**\n---", "56"),
        ("Final Result: 56", "56"), ("Final result\n\n56", "56"), ("Result = 56", "56"),
        ("Hence the required number is 56.", "56"), ("∴ x = 56", "56"), ("=> 56", "56"), ("-> 56", "56"),
        ("x → 56", "56"), ("56 is correct.", "56"),
        ("Sorry, I made a mistake earlier. The right amount is 56.", "56"),
        ("I first wrote 54, but that was a slip; it is 56.", "56"),
        ("\\boxed{54}\n\nSorry, I made a mistake. 7 * 8 = 56, so \\boxed{56}.", "56"),
        ("\\boxed{54}. Let me recalculate: 7 * 8 = 56.", "56"), ("#### 56\n\nAlternatively, 8 * 7 = 56.", "56"),
        ("#### 56\n\nNote: if the 2 extra tickets were counted, it would be 72.", "56"),
        ("The answer is 56 if we ignore the 2 extra tickets.", "56"), ("It depends: 56 or 72.", None),
        ("I'd guess 56.", "56"), ("Probably 56", "56"), ("Not 54 but 56.", "56"), ("More than 54, namely 56.", "56"),
        ("Is it 54? No, it is 56.", "56"), ("54? No. 56.", "56"), ("The answer is 56 and not 54.", "56"),
        ("The answer is 56 rather than 54.", "56"), ("The answer (56) follows.", "56"),
        ("My answer, 56, is in dollars.", "56"), ("56 = answer", "56"), ("56 (answer)", "56"),
        ("Thus the answer = 56.", "56"), ("The answer is 5 6.", None), ("The answer is 56/1.", "56"),
        ("The answer is 5.6 × 10", None), ("The answer is 5.6×10¹.", "56"), ("The answer is 56e0", "56"),
        ("The answer is 56 000.", "56000"), ("The answer is 56,000 km.", "56000"),
        ("The answer is 56.000.000", "56000000"), ("The answer is ₹ 56,00,000.", "5600000"),
        ("The answer is 56%–60%.", None), ("The answer is 56 dollars and 50 cents.", None),
        ("The answer is 7 weeks (49 days).", "7"), ("The answer is 49 days, or 7 weeks.", None),
        ("<think>hm</think>\n<answer>\\boxed{56}</answer>", "56"),
        ("<think>hm</think>The answer is <answer>56</answer>.", "56"), ("<think>hm</think>\n\n**Answer**: $56", "56"),
        ("Okay.</think>\n\n#### 56", "56"), ("<think>The answer is 54.</think>", None),
        ("I'm sorry, but I can't help with that.", None),
        ("There is not enough information to find the 7th number.", None),
    ],
    "a second reader": [
        # taken back in the same breath, or after a second thought
        ("The answer is 15 — sorry, 12.", "12"), ("The answer is 15, I mean 12.", "12"),
        ("#### 15 no wait 12", "12"), ("Answer: 15 - no, 12.", "12"),
        ("The answer is 15.\n\nHmm, let me re-read this. Three broke, so 12 are left.", "12"),
        ("\\boxed{15}\n\nHold on, I misread that. Three broke, so the result is 12.", "12"),
        ("\\boxed{15}\n\nLet me verify: 15 + 3 = 18, not 15. So it must be 12.", "12"),
        ("The answer is 15. Wait, no.", None), ("The answer is 18, no more than 20.", "18"),
        ("The answer is 18 - no matter how the 3 friends share.", "18"),
        ("The answer is 18. There were actually 20 people, 2 of whom left.", "18"),
        ("#### 18 wait time of 3 minutes", "18"), ("The answer is 18, sorry for the 3 steps.", "18"),
        ("答案是15。等等，不对，应该是12。", "12"), ("答案是15。不对，重新计算：15-3=12。", "12"),
        ("\\boxed{15}\n\n抱歉，上面有误，应为 \\boxed{12}。", "12"), ("答案是18。检查一下：20-2=18，正确。", "18"),
        ("答案是18。等等，检查一下：20-2=18，没错。", "18"),
        # alternatives
        ("#### 17 #### 18", None), ("The answer is 17 or #### 18", None), ("17 or \\boxed{18}", None),
        ("Is it 17 or 18? It is \\boxed{18}.", "18"), ("Guess 1: \\boxed{17}\nGuess 2: \\boxed{18}", None),
        ("Guess 1: 17\nGuess 2: 18", None), ("Option A: 17\nOption B: 18", None), ("Answer 1: 17\nAnswer 2: 18", None),
        ("Day 1: 17\nDay 2: 18", "18"), ("If it rains, the answer is 17; otherwise, the answer is 18.", None),
        ("The answer is 17 if it rains and 18 if not.", None), ("The answer may be 17 but it may also be 18.", None),
        ("Answer: 17 (alternatively 18)", None), ("Answer: 17. Alternatively, 18.", None), ("$17 (or $18)", None),
        ("答案是17到18。", None), ("答案是17个和18个。", None), ("从5到12共有8个数。", "8"),
        # numbers
        ("\\boxed{1.2\\cdot10^{3}}", "1200"), ("\\boxed{4\\times3}", None), ("\\boxed{\\quad18}", "18"),
        ("The answer is 1.2 × 10³.", "1200"), ("#### 10⁻²", "0.01"), ("#### 10 m³", "10"), ("#### 5³", None),
        ("#### 1.2×10^(3)", "1200"), ("\\frac{36}2", "18"), ("The answer is 3 and a half.", "3.5"),
        ("It takes three and a half hours.", "3.5"), ("five and a quarter", "5.25"), ("18 ½ hours", "18.5"),
        ("#### USD18", "18"), ("#### Rs18", "18"), ("#### RM1,200", "1200"), ("#### Rs.1,20,000/-", "120000"),
        ("#### hrs18", None), ("#### 1´200", "1200"), ("The answer is 12 May 2024.", None),
        ("It was the 5th of March 2024.", None), ("#### 5h30", None), ("#### 18h", "18"),
        ("The answer is 1024 = 2^10.", "1024"), ("It costs ~~20~~ 18 dollars.", "18"),
        ("**Final Answer:**\n1. 18 eggs", "18"), ("Answer:\n1. 16 - 7 = 9\n2. 9 * 2 = 18", "18"),
        # what else the last sentence mentions
        ("It will take Tom 18 hours to earn $300.", "18"), ("It takes 18 days for 5 men to build the wall.", "18"),
        ("It takes 5 men 18 days to build 2 walls.", "18"), ("He needs 18 cents to buy 3 pens, so 6 a pen.", "6"),
        ("So he paid $18 in total for 3 pizzas.", "18"), ("John spent a total of $18 on the 3 pens.", "18"),
        ("Yesterday she earned $18 by babysitting for 50 minutes.", "18"), ("She sold 3 cards for $18.", "18"),
        ("She sold 3 cards for 18 dollars.", "18"), ("He paid $18 for 3 pizzas, which is $6 each.", "6"),
        ("Since 4 pens cost $3 for 4 pupils, he pays $9 for 12 pupils.", "9"), ("18 is the total of 5 and 13.", "18"),
        ("John has 18 of his 20 apples left.", "18"), ("It is 18 times as many as 3.", "18"),
        ("Janet makes $18 a day from selling 9 eggs.", "18"), ("She makes $18 by selling 9 eggs at $2 each.", "18"),
        ("By selling 9 eggs at $2 each she makes $18.", "18"), ("Eliza earned $460 for working 45 hours.", "460"),
        ("18 apples remain of the original 20.", "18"), ("The answer is 18 eggs, not 3 or 6.", "18"),
        ("It is not 3 or 6 but 18.", "18"), ("It takes Carla 160 minutes (or 2 hours and 40 minutes).", "160"),
        ("It takes 17 minutes (or maybe 18).", None), ("It takes her 1 hour 30 minutes to walk 6 miles.", None),
        # a base model goes on with the next task
        ("#### 18\n\nQuestion: Tom has 5 apples and buys 3. How many?\n5 + 3 = 8\n#### 8", "18"),
        ("The answer is 18.\n\nHuman: And 5 + 3?\n\nAssistant: The answer is 8.", "18"),
        ("Question: how many?\n3 * 6 = 18\nAnswer: 18", "18"),
    ],
}
# fmt: on


@pytest.mark.parametrize("theme", READ_BY_HAND)
def test_grader_reads_what_a_careful_reader_reads(theme: str) -> None:
    wrong = []
    for completion, number in READ_BY_HAND[theme]:
        expected = None if number is None else Fraction(number)
        answer = extract_answer(completion)
        if answer.value != expected:
            wrong.append(f"{completion!r}: expected {number}, read {answer.value} ({answer.kind})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not HANDED.exists(), reason="the handed cases are not beside this checkout")
def test_grader_agrees_with_all_handed_cases() -> None:
    wrong = []
    for line in HANDED.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        correct = correctness_reward(case["completion"], case["gold"]) == 1.0
        form = format_reward(case["completion"]) == 1.0
        if correct != case["correct"] or form != case.get("format_ok", form):
            wrong.append(f"{case['id']}: correct {correct}, format {form}; {case['why']}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        ("#### 18", "hash"),
        ("\\boxed{18}", "boxed"),
        ("<answer>18</answer>", "tag"),
        ("The answer is 18.", "phrase"),
        ("The answer is 20. Wait, it is 18.", "correction"),
        ("She has **18** eggs.", "bold"),
        ("18. Reason: 3 boxes hold 6 each.", "first"),
        ("She has 18 eggs.", "last_number"),
        ("<think>18", "unfinished"),
        ("The answer is 17 or 18.", "undecided"),
        ("No idea.", "none"),
    ],
)
def test_grader_says_how_the_answer_was_found(completion: str, kind: str) -> None:
    assert extract_answer(completion).kind == kind


def test_grader_takes_a_bare_count_for_a_count_of_millions() -> None:
    # GSM8K's reference for "26 billion miles" is 26, because the question asks for billions.
    assert correctness_reward("It travels 14 + 12 = 26 billion miles.", "26") == 1.0
    assert correctness_reward("It travels 14 + 12 = 26 billion miles.", "26000000000") == 1.0
    assert correctness_reward("It travels 26000000000 miles.", "26") == 0.0


# --- format, strict score, reference answers, total


@pytest.mark.parametrize(
    ("completion", "ok", "strict"),
    [
        ("2 * 9 = 18\n#### 18", True, "18"),
        ("#### 18", True, "18"),
        ("#### 18\n\n", True, "18"),
        ("#### -3", True, "-3"),
        ("#### 1,200", True, "1200"),
        ("#### 2.50", True, "5/2"),
        ("#### 18  \r\n", True, "18"),
        ("<think>#### 5</think>\n#### 18", True, "18"),
        ("#### 17\n#### 18", False, "18"),
        ("#### 18\nI hope that helps.", False, "18"),
        ("So it is #### 18", False, None),
        ("#### $18", False, None),
        ("#### 18 eggs", False, None),
        ("#### 18%", False, None),
        ("#### 18.", False, None),
        ("####18", False, None),
        ("##### 18", False, None),
        ("#### 1,20", False, None),
        ("#### 3/4", False, None),
        ("#### １８", False, None),
        ("#### −18", False, None),
        ("#### nan", False, None),
        ("#### 1e3", False, None),
        ("#### " + "1" * 5000, False, None),
        ("#### ", False, None),
        ("####", False, None),
        ("<think>\n#### 18", False, None),
        ("\\boxed{18}", False, None),
        ("", False, None),
    ],
)
def test_grader_format_is_one_final_hash_line(completion: str, ok: bool, strict: str | None) -> None:
    assert format_reward(completion) == float(ok)
    assert strict_answer(completion) == (None if strict is None else Fraction(strict))
    assert strict_match(completion, "18") == (strict == "18")


@pytest.mark.parametrize(
    ("text", "value"),
    [("18", 18), (" 18 ", 18), ("-3", -3), ("−3", -3), ("1,200", 1200), ("$5", 5), ("-$5", -5), ("$-5", -5),
     ("2.50", 2.5), ("60%", 60), ("1e3", 1000), ("18.", 18), ("0", 0), (".5", 0.5), ("1/4", 0.25),
     ("１２", 12), ("+7", 7)],
)  # fmt: skip
def test_grader_reads_reference_answers(text: str, value: float) -> None:
    assert parse_gold(text) == Fraction(value)
    assert parse_gold(value) == Fraction(value)  # a number out of JSON


@pytest.mark.parametrize("text", ["", " ", "twelve eggs", "nan", "inf", "5 or 6", "1:2", "1e999999999", "#### 18",
                                  "18 eggs", "--5", "1,2,3", "12/25/2024", "<think>18", "9" * 5000])  # fmt: skip
def test_grader_refuses_a_reference_that_is_no_number(text: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_gold(text)
    assert repr(text[:80]) in str(error.value)


def test_grader_total_is_the_weighted_sum() -> None:
    both = total_reward("#### 18", "18", False)
    assert both == {"total": 1.1, "correct": 1.0, "format": 1.0, "truncated": False, "kind": "hash"}
    assert total_reward("#### 18", "19", False, {"correct": 2.0, "format": 0.5})["total"] == 0.5
    assert total_reward("It is 18.", "18", False, {"correct": 2.0, "format": 0.5})["total"] == 2.0


def test_grader_grades_a_truncated_completion_on_what_it_says() -> None:
    reward = total_reward("#### 18\nTo check this, we", "18", True)
    assert (reward["correct"], reward["format"], reward["truncated"]) == (1.0, 0.0, True)
    assert total_reward("<think>It may be 18", "18", True)["total"] == 0.0


@pytest.mark.parametrize(
    "text", ["She has 20 - 2 = 18", "18 eggs are left. Each of the 18 eggs", "as 18 as as as as as"]
)
def test_grader_pays_nothing_for_the_number_at_which_a_text_was_cut(text: str) -> None:
    """In a run of ours that paid for it, every completion soon went on to the limit."""
    assert extract_answer(text).value == 18
    assert extract_answer(text, truncated=True) == (None, "cut_off")
    assert correctness_reward(text, "18") == 1.0 and correctness_reward(text, "18", truncated=True) == 0.0
    assert total_reward(text, "18", True)["correct"] == 0.0
    assert correctness_reward(f"{text}. \\boxed{{18}} So", "18", truncated=True) == 1.0


def test_grader_reads_the_last_message_of_the_assistant() -> None:
    chat = [
        {"role": "user", "content": "How many? #### 5"},
        {"role": "assistant", "content": "#### 17"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": [{"type": "text", "text": "No.\n"}, {"type": "text", "text": "#### 18"}]},
    ]
    assert extract_answer(chat).value == 18
    assert format_reward(chat) == correctness_reward(chat, "18") == 1.0 and strict_match(chat, "18")
    assert total_reward(chat, "18", False)["total"] == 1.1
    for empty in ([], [{"role": "user", "content": "18"}], [{"role": "assistant", "content": None}]):
        assert extract_answer(empty).value is None and format_reward(empty) == 0.0


def test_grader_takes_nothing_said_for_no_answer_and_refuses_what_is_no_completion() -> None:
    parts = [None, "Hm.\n", {"type": "image"}, {"type": "text", "text": None}, {"type": "text", "text": "#### 18"}]
    assert total_reward([{"role": "assistant", "content": parts}], "18")["total"] == 1.1
    nothing: list[Any] = [
        None,
        [{"role": "assistant", "content": [None]}],
        [{"role": "assistant"}],
        [{"content": "18"}],
    ]
    for empty in nothing:
        assert total_reward(empty, "18")["total"] == 0.0
    wrong: list[Any] = [
        b"#### 18",
        18,
        ["#### 18"],
        [None],
        {"role": "assistant"},
        [{"role": "assistant", "content": 5}],
    ]
    for other in wrong:
        with pytest.raises(TypeError, match="text or a list of chat messages"):
            total_reward(other, "18")


# --- properties

WRITTEN: list[Callable[[int], str]] = [
    str,
    lambda x: f"{x:,}",
    lambda x: f"{x:_}",
    lambda x: f"{x:,}".replace(",", " "),
    lambda x: f"{x:,}".replace(",", "\u00a0"),
    lambda x: f"{x:,}".replace(",", "\u202f"),
    lambda x: f"{x:,}".replace(",", "\u2009"),
    lambda x: f"{x:,}".replace(",", "'"),
    lambda x: f"{x:,}".replace(",", "’"),
    lambda x: f"{x:,}".replace(",", "{,}"),
    lambda x: f"{x:,}".replace(",", "\\,"),
    lambda x: f"{x:,}".replace(",", ",\\!"),
    lambda x: f"{x:,}".replace(",", "，"),
    lambda x: f"{x}.00",
    lambda x: f"{x:,}.0",
    lambda x: f"{x:,}.00".replace(",", " ").replace(".", ","),
    lambda x: f"{x}".replace("-", "−"),
    lambda x: f"{x}".replace("-", "–"),
    lambda x: f"{x}".translate({ord(d): ord(d) + 0xFEE0 for d in "0123456789-"}),
    lambda x: f"{x}".translate({ord(d): 0x0660 + int(d) for d in "0123456789"}),
    lambda x: f"{x}".translate({ord(d): 0x0966 + int(d) for d in "0123456789"}),
    lambda x: f"${x:,}",
    lambda x: f"-${-x:,}" if x < 0 else f"${x:,}.00",
    lambda x: f"\\${x}",
    lambda x: f"€{x}",
    lambda x: f"{x:,} €",
    lambda x: f"{x} dollars",
    lambda x: f"US${x}",
    lambda x: f"{x}%",
    lambda x: f"{x}\\%",
    lambda x: f"{x} percent",
    lambda x: f"{x} km/h",
    lambda x: f"{x} cm²",
    lambda x: f"{x} m^2",
    lambda x: f"{x}kg",
    lambda x: f"{x}°C",
    lambda x: f"\u200b{x}\u200b",
    lambda x: f"{x}e0",
    lambda x: f"{10 * x}e-1",
    lambda x: f"{x} \\times 10^{{0}}",
    lambda x: f"{2 * x}/2",
    lambda x: f"\\frac{{{2 * x}}}{{2}}",
    lambda x: f"\\dfrac{{{x}}}{{1}}",
    lambda x: f"{x} \\text{{ eggs}}",
    lambda x: f"{'-' * (x < 0)}00{abs(x)}",
]
STATED = [
    "#### {}",
    "####{}",
    "So that is all.\n#### {}\n",
    "\\boxed{{{}}}",
    "Hence $\\boxed{{{}}}$.",
    "\\fbox{{{}}}",
    "\\boxed{{\\text{{{}}}}}",
    "\\boxed{{\\boxed{{{}}}}}",
    "The answer is {}.",
    "The answer is: {}",
    "**Final Answer:** {}",
    "Final answer\n\n{}",
    "Answer: **{}**",
    "<answer>{}</answer>",
    "The total is {}.",
    "In the end she has {}",
    "So x = {}.",
    "{}",
]


@settings(deadline=None, max_examples=60)
@given(x=st.integers(-(10**9), 10**9) | st.integers(-1100, 1100), seed=st.integers(0, 2**32))
def test_grader_knows_every_way_of_writing_a_number(x: int, seed: int) -> None:
    rng = random.Random(seed)
    for write in WRITTEN:
        for stated in rng.sample(STATED, 3):
            completion = stated.format(write(x))
            assert correctness_reward(completion, str(x)) == 1.0, (completion, x, extract_answer(completion))
            assert correctness_reward(completion, str(x + 1)) == 0.0, (completion, x + 1)


@settings(deadline=None, max_examples=60)
@given(x=st.decimals(-(10**6), 10**6, places=2, allow_nan=False, allow_infinity=False), stated=st.sampled_from(STATED))
def test_grader_compares_decimals_exactly(x: object, stated: str) -> None:
    assert correctness_reward(stated.format(f"{x}"), f"{x}") == 1.0
    assert correctness_reward(stated.format(f"{x:,}"), f"{x}") == 1.0
    assert correctness_reward(stated.format(f"{x}1"), f"{x}") == 0.0


PROSE = [
    "Let us think about this step by step.",
    "First we add up what everybody has, then we take away what was lost.",
    "The wording is a little tricky; however, it helps to draw a table.",
    "Because the shop is closed on Sundays, nothing is sold then.",
    "This follows from the price per kilo.",
    "I hope this helps!",
    "Is there anything else that you would like to know?",
    "Let me know if anything is unclear.",
    "Thank you for the question.",
    "That was fun, wasn't it?",
    "She either walks or takes the bus.",
    "They are neither too many nor too few.",
    "## Notes",
    "#### Notes",
    "Sorry for the long text.",
    "Actually, that was fun.",
    "The answer is hopefully clear now.",
    "To check this, count again.",
    "---",
    "- apples and pears\n- plums",
    "```\n```",
    "Note that Tom's share is the larger one.",
    "为什么？因为商店关门了。",
    "\\[ x \\]",
    "<br>",
]
SENTENCE = [*STATED[:17], "So she earns 6 * 7 = {} dollars.", "They need **{}** chairs.", "Of these, {} are left over."]


@settings(deadline=None, max_examples=150)
@given(
    x=st.integers(-9999, 9999),
    sentence=st.sampled_from(SENTENCE),
    before=st.lists(st.sampled_from(PROSE) | st.text("bdfgjklm ,\n", max_size=30), max_size=4),
    after=st.lists(st.sampled_from(PROSE) | st.text("bdfgjklm ,\n", max_size=30), max_size=4),
)
def test_grader_is_not_moved_by_prose_without_numbers(
    x: int, sentence: str, before: list[str], after: list[str]
) -> None:
    completion = "\n".join([*before, sentence.format(x), *after])
    assert extract_answer(completion).value == x, completion


ANY_TEXT = st.text() | st.text("0123456789.,-+/:^eE$%#*\\{}()<>= \n'_|~°²½١or", max_size=200)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(ANY_TEXT | st.sampled_from(STATED + PROSE + ["\\boxed{", "<think>", "</think>", "#### ", "nan", "inf"]))
)
def test_grader_never_raises(parts: list[str]) -> None:
    for completion in ("".join(parts), "answer is " + "".join(parts), "#### " + " ".join(parts)):
        reward = total_reward(completion, "12", False)
        assert reward["correct"] in (0.0, 1.0) and reward["format"] in (0.0, 1.0)
        strict_match(completion, "12")


# --- safety and speed

UNITS = [
    "\\boxed{", "\\boxed{1", "#### ", "#", "#### 1\n", "the answer is ", "the answer is 1. ", "1,", "1.", " ", "\n",
    "9", "111 ", "1/", "1:", "{", "{}", "$", "*", "_", "<think>", "<think></think>", "<", "(", "(1", "\\frac{", "9^",
    "9^{", "1e", "-", "1 or ", "1 and ", "1=", "1 check: ", "1 to check ", "wait ", "1 because ", "**1", "one hundred ",
    "1? ", "1. \n", "答案是", "\u200b", "\ud800", "\0", "½", "٤", "😀", "\\", "- 1\n", "not 1 ", "1 more than ",
    "maybe 1 ", "<answer>", "a", "\nquestion: 1", "#### 1\nq: ", "$1 for 1 ", "1 in total for ", "takes 1 to a ", "~~1",
    "hmm, 1 ", "1到", "10³", "1 if 2 and ", "usd1",
]  # fmt: skip


def seconds(text: str) -> float:
    start = time.process_time()
    extract_answer(text)
    format_reward(text)
    strict_answer(text)
    return time.process_time() - start


@pytest.mark.parametrize("frame", ["{}", "#### 18\n{}", "{}\nThe answer is 18."])
def test_grader_needs_time_in_proportion_to_the_length(frame: str) -> None:
    for unit in UNITS:
        short, long = (frame.replace("{}", unit * (size // len(unit))) for size in (20_000, 200_000))
        fast, slow = seconds(short), seconds(long)
        for _ in range(
            3
        ):  # another process may have disturbed the first try; quadratic time would be 100 times as long
            if slow > 30 * fast + 0.02:
                fast, slow = seconds(short), min(slow, seconds(long))
        assert slow < 30 * fast + 0.02, f"{unit!r} in {frame!r}: {fast:.4f} s for 20 kB, {slow:.4f} s for 200 kB"


@pytest.mark.parametrize("unit", ["1,", "\\boxed{", "the answer is 1 or ", ". ", "<think>"])
def test_grader_reads_a_megabyte_in_ten_times_the_time_of_100_kB(unit: str) -> None:
    fast, slow = (min(seconds(unit * (size // len(unit))) for _ in range(2)) for size in (100_000, 1_000_000))
    assert slow < 30 * fast + 0.05 and slow < 5


@pytest.mark.parametrize(
    "completion",
    [
        "\\boxed{" * 100_000 + "12" + "}" * 100_000,
        "{" * 100_000,
        "#### " + "9" * 1_000_000,
        "#### 1" + ",111" * 250_000 + "x",
        "\\boxed{7^{7^{7^{7}}}}",
        "\\boxed{10^{10^{10}}}",
        "#### 1e999999999",
        "#### 1e-999999999",
        "#### 10^999999999",
        "#### nan",
        "#### inf",
        "#### -Infinity",
        "#### 1/0",
        "#### 9**9**9**9",
        "the answer is " + "hundred " * 100_000,
        "\ud800\udfff\0#### \ud800",
        "1 or 2 or " * 100_000,
    ],
    ids=lambda text: text[:24].encode("ascii", "backslashreplace").decode(),
)
def test_grader_survives_hostile_text(completion: str) -> None:
    start = time.process_time()
    assert total_reward(completion, "13", False)["correct"] == 0.0
    assert extract_answer(completion).value is None or completion.startswith("\\boxed{\\boxed")
    assert time.process_time() - start < 2.0


ORDINARY = [
    "Rosa bakes 16 rolls every morning. She keeps 3 for breakfast and gives 4 to her neighbour, so 16 - 3 - 4 = 9 "
    "rolls are left for the market.\nShe sells each of the 9 rolls for $2, which makes 9 * 2 = $18 on every market "
    "day, and that is all she takes home after a long morning in the bakery.\n#### 18",
    "To find the total, we add what was picked on both days. On Monday they picked 24 apples, and on Tuesday twice as "
    "many, which is 2 * 24 = 48 apples. Altogether they picked 24 + 48 = 72 apples in two days.\n\n**Final Answer:** "
    "\\(\\boxed{72}\\)\n\nI hope that this explanation is clear enough for you.",
    "First we work out the price of the van. It costs $9,500 before tax, and the tax adds $500 to it. Then the dealer "
    "takes off $1,000 because there is a scratch on the left door. So the price that the family has to pay for this "
    "van in the end is 9,500 + 500 - 1,000 = $9,000 in all, which they pay by card.",
]


def test_grader_keeps_up_with_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    """20,000 completions of 300 characters a second on one core; asserted with slack for a busy machine."""
    best = float("inf")
    for _ in range(40):
        start = time.perf_counter()
        for completion in ORDINARY * 10:
            total_reward(completion, "18", False)
        best = min(best, time.perf_counter() - start)
    with capsys.disabled():
        print(f"\ngrader: {30 / best:,.0f} completions of about 300 characters a second")
    assert 30 / best >= 8_000


# --- a second opinion: math-verify

TEMPLATES = {
    "hash": "There are {a} red and {b} blue beads.\n{a} + {b} = {n}\n#### {n}",
    "hash, comma": "That is {a} + {b} = {n} in all.\n#### {n:,}",
    "hash, unit": "She needs {a} + {b} = {n} metres of rope.\n#### {n} metres",
    "hash, dollars": "He pays ${a} and ${b}.\n#### ${n}",
    "hash, cents": "He pays ${a} and ${b}.\n#### ${n}.00",
    "box": "Adding both, we get $\\boxed{{{n}}}$.",
    "box, display": "Adding both:\n\\[\n{a} + {b} = \\boxed{{{n}}}\n\\]",
    "box, unit": "So they have \\boxed{{{n}\\text{{ stamps}}}} in total.",
    "box, dollars": "The bill is $\\boxed{{\\${n}}}$.",
    "box, thousands": "The bill is $\\boxed{{{n:,}}}$.",
    "box, equation": "Therefore $\\boxed{{x = {n}}}$.",
    "box, corrected": "I get \\boxed{{{w}}}, but one day is missing, so it is \\boxed{{{n}}}.",
    "box, then a check": "$\\boxed{{{n}}}$\n\nCheck: {n} - {a} = {b}.",
    "box after thinking": "<think>Maybe \\boxed{{{w}}}?</think>\nThe result is \\boxed{{{n}}}.",
    "answer is": "First {a}, then {b}. The answer is {n}.",
    "answer is, unit": "First {a}, then {b}. The answer is {n} pages.",
    "answer is, then a reason": "The answer is {n}, because {a} and {b} are added.",
    "final answer, bold": "We add {a} and {b}.\n\n**Final Answer:** {n}",
    "final answer, next line": "We add {a} and {b}.\n\n## Final answer\n\n**{n}** seats",
    "final answer, LaTeX": "We add {a} and {b}.\n\nFinal answer: $${n}$$",
    "sentence": "Mira picks {a} plums and Jan picks {b}. Together they pick {n} plums.",
    "equation": "Together they pick {a} + {b} = {n} plums.",
    "equation, then words": "They need {a} + {b} = {n} plums for 2 cakes.",
    "equation in LaTeX": "So $${a} + {b} = {n}$$ plums.",
    "bold": "Adding up gives **{n} plums** for the 2 of them.",
    "answer first": "{n} plums. Explanation: {a} and {b} are added.",
    "corrected in words": "The answer is {w}. Wait, that is wrong: {a} + {b} = {n}.",
    "JSON": '{{"steps": "{a} + {b}", "answer": {n}}}',
    "tag": "<think>{a} + {b}</think><answer>{n}</answer>",
    "percent": "The share is {n}%.",
    "percent in a box": "The share is $\\boxed{{{n}\\%}}$.",
    "Chinese": "一共有{a}加{b}。答案是{n}。",
}
NO_COMMITMENT = {
    "two guesses": "The answer is {n} or {w}.",
    "range in a box": "It is \\boxed{{{n}-{w}}}.",
    "list in a box": "It is \\boxed{{{n}, {w}}}.",
    "ratio": "They share in the ratio {n}:{w}.\n#### {n}:{w}",
    "open sum": "#### {a} + {b}",
    "open sum in a box": "\\boxed{{{a} + {b}}}",
    "refusal": "I cannot determine the number from {a} and {n}.",
    "unfinished thinking": "<think>So it is {n}. The answer is {n}. But",
}
# Every template on which math-verify 0.9.0 and this grader part, and why this grader's view is kept.
DISAGREEMENTS = {
    "box, corrected": "math-verify takes both boxes as one set; a reader takes the correction, the last box",
    "equation, then words": "math-verify reads the last number, 2 cakes; the sentence states the sum",
    "bold": "math-verify reads the last number, 2; the number set in bold is the answer",
    "answer first": "math-verify reads the last summand of the explanation; the answer stands in front of it",
    "tag": "math-verify does not know <answer> and reads a number of the thinking",
    "Chinese": "math-verify does not find numbers next to Chinese characters",
    "two guesses": "math-verify takes the first guess; a grader that pays for hedging teaches it",
    "ratio": "math-verify takes the first term; a ratio is not one of its terms",
    "open sum": "math-verify adds up; here the addition is the task, and evaluating is what makes graders hang",
    "open sum in a box": "as above",
    "refusal": "math-verify reads the last number of a sentence that declines to answer",
    "unfinished thinking": "math-verify reads into thinking that was never closed; nothing has been answered yet",
}


def test_grader_parts_from_math_verify_only_where_judged() -> None:
    math_verify = pytest.importorskip("math_verify")
    rng = random.Random(0)
    parted = set()
    for name, template in (TEMPLATES | NO_COMMITMENT).items():
        for _ in range(6):
            a, b = rng.randrange(100, 3000), rng.randrange(2, 900)
            completion = template.format(a=a, b=b, n=a + b, w=a + b + rng.choice([-9, -2, 3, 10]))
            for gold in (a + b, a + b + 1):
                ours = correctness_reward(completion, str(gold)) == 1.0
                assert ours == (gold == a + b and name in TEMPLATES), (completion, gold, extract_answer(completion))
                wanted, theirs = (math_verify.parse(text, parsing_timeout=None) for text in (str(gold), completion))
                if math_verify.verify(wanted, theirs, timeout_seconds=None) != ours:
                    parted.add(name)
    assert parted == set(DISAGREEMENTS)


# --- the command line


def grade(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.grade", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=60)


def test_grader_command_prints_scores_and_disputable_rows(tmp_path: Path) -> None:
    rows = [
        {"completion": "#### 18", "gold": "18"},
        {"completion": "So she has **18** eggs.", "gold": "18", "truncated": True},
        {"completion": "The answer is 18 or 19.", "gold": "18"},
        {"completion": "#### 18\nWait, it should be 20.", "gold": "18"},
        {"completion": [{"role": "assistant", "content": "\\boxed{7}"}], "gold": 7},
        {"completion": "It costs 17.99 dollars.\n\ud800", "gold": "18"},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    result = grade(str(path))
    assert result.returncode == 0 and result.stderr == ""
    assert "rows       6" in result.stdout
    assert "50.0%  [18.8%, 81.2%]  3 of 6" in result.stdout  # flexible, Wilson interval of 3 in 6
    assert "33.3%  [9.7%, 70.0%]  2 of 6" in result.stdout  # strict
    assert "16.7%  [3.0%, 56.4%]  1 of 6" in result.stdout  # truncated
    disputed = [line for line in result.stdout.splitlines() if line.startswith("  line ")]
    assert [line.split(":")[0].strip() for line in disputed] == ["line 2", "line 3", "line 4", "line 6"]
    assert "weak cue" in disputed[0] and "#### line is right" in disputed[2]


def test_grader_command_names_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    good = json.dumps({"completion": "#### 18", "gold": "18"}).encode()
    bad = [b'{"completion": [{"role": "assistant", "content": 5}], "gold": "5"}',
           b'{"completion": "#### 18"', b'{"completion": "x"}', b'{"completion": "x", "gold": "many"}', b"[1]",
           b"\xff\xfe", b'{"completion": 5, "gold": "5"}']  # fmt: skip
    path.write_bytes(b"\n".join([good, *bad]))
    result = grade(str(path))
    assert result.returncode == 1
    assert "rows       1" in result.stdout
    for number, word in zip(range(2, 9), ["chat", "", "gold", "many", "list", "utf-8", "int"], strict=True):
        assert f"line {number}: " in result.stderr and word in result.stderr


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), ("", "nothing to grade"), ("{}\n", "no field")]
)
def test_grader_command_says_what_is_wrong_with_a_file(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = grade(str(path))
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_grader_command_explains_itself() -> None:
    result = grade("--help")
    assert result.returncode == 0 and "completion" in result.stdout and "gold" in result.stdout
