"""The maths verifier: field cases, 200 more pairs by kind, golds checked at load, workers that are killed for real."""

import threading

import pytest
from reward_samples import group

from verl.core.errors import DataError, RewardError
from verl.core.types import Failed
from verl.rewards import RewardSource, Scorer, build_rewards
from verl.rewards.math_text import extract, last_box


@pytest.fixture(scope="module")
def rewards():
    composition = build_rewards([RewardSource(verifier="math")])
    yield composition
    composition.close()


def score(rewards, pairs):
    """Scores of (response, gold) pairs, in one call."""
    groups = [group([response], id=str(i), answer=gold) for i, (response, gold) in enumerate(pairs)]
    rewards.check([g.task for g in groups])
    Scorer(rewards).score(groups)
    return [g.samples[0].score for g in groups]


def test_every_spelling_of_a_gold_fraction(rewards):
    """Field case D001."""
    responses = [r"\boxed{\frac34}", r"\boxed{\tfrac{3}{4}}", r"\boxed{\dfrac{3}{4}}", r"\boxed{3/4}", r"\boxed{.75}",
                 r"\boxed{6/8}", r"\boxed{\frac43}", r"\boxed{3}"]
    for gold in [r"\dfrac{3}{4}", r"$\frac34$", "3/4", "0.75"]:
        assert score(rewards, [(r, gold) for r in responses]) == [1, 1, 1, 1, 1, 1, 0, 0], gold


FIELD = {
    "D010": [(r"\boxed{2\frac{2}{3}}", "8/3", 1), (r"\boxed{2 2/3}", r"\frac{8}{3}", 1), (r"\boxed{2 2/3}", "2", 0),
             (r"\boxed{2\frac{2}{3}}", "4/3", 0), (r"\boxed{-1\frac{1}{2}}", "-3/2", 1),
             (r"\boxed{-1\frac{1}{2}}", "-1/2", 0), (r"\boxed{4 10/3}", "10", 0)],
    "D017": [(r"\boxed{8,000}", "8000", 1), (r"\boxed{8{,}000}", "8000", 1), (r"\boxed{\$8{,}000}", "8000", 1),
             (r"\boxed{1,234,567.5}", "1234567.5", 1), (r"\boxed{8.000}", "8000", 0), (r"\boxed{(1,2)}", "12", 0),
             (r"\boxed{12}", "(1,2)", 0), (r"\boxed{8,00}", "800", 0)],
    "D021": [(r"we get \boxed{7} ... more text ... so the final answer is \boxed{", "7", 0), (r"\boxed{}", "7", 0),
             (r"\boxed{\frac{1}{2}", "1/2", 0), (r"\boxed{\text{see }\{a\}}", r"\text{see }\{a\}", 1)],
    "D025": [(r"\boxed{35\%}", r"$35\%$", 1), (r"\boxed{35}\%", r"$35\%$", 1), (r"\boxed{35 percent}", r"$35\%$", 1),
             (r"\boxed{35\text{ percent}}", r"$35\%$", 1), (r"\boxed{3.5\%}", r"$35\%$", 0),
             (r"\boxed{53\%}", r"$35\%$", 0)],
    "D045": [("20 + 38 = 58 ... check: 57 + 1 = 58, total 1052.\n\nFinal Answer: **58**", "58", 1),
             ("... so 437 + 2*234 = 905. The count is **73**.\n\nAnswer: **73**.", "73", 1),
             ("... so 437 + 2*234 = 905. The count is **73**.\n\nAnswer: **73**.", "234", 0),
             ("Answer: __73__", "73", 1)],
    "D068": [(r"\boxed{(3,1)}", "(1,3)", 0), (r"\boxed{\{3,1\}}", r"\{1,3\}", 1), (r"\boxed{[1,3]}", "[1,3)", 0),
             (r"\boxed{\left( 3, \pi/2 \right)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
             (r"\boxed{(3, \frac{2\pi}{3})}", r"\left( 3, \frac{\pi}{2} \right)", 0), (r"\boxed{5}", "x=5", 1),
             (r"\boxed{\{1,1,3\}}", r"\{1,3\}", 1),
             (r"\boxed{(-\infty,2)\cup(2,\infty)}", r"(2,\infty)\cup(-\infty,2)", 1)],
}


@pytest.mark.parametrize("case", FIELD)
def test_field_cases(rewards, case):
    """Field cases D010, D017, D021, D025, D045, D068."""
    pairs = FIELD[case]
    assert score(rewards, [p[:2] for p in pairs]) == [p[2] for p in pairs]


# gold | equal answers ... || unequal answers ...   (each answer stands in a box)
KINDS = {
    "integers": r"""
        12 | 12 | +12 | 12.0 | 012 | $12$ | \text{12} || -12 | 1.2 | 120 | 21
        -5 | -5 | −5 | - 5 | -5.00 || 5 | 1/-5
        0 | 0 | -0 | 0.0 | 0/3 | 0\% || 1 | 0.0000001 | -1e-9
        1000000 | 1,000,000 | 1{,}000{,}000 | 10^6 | 1\times10^6 | 1 000 000 | 1e6 || 1000001 | 100000 | 1,000,00
        123456789012345678901 | 123456789012345678901 || 123456789012345678900""",
    "decimals": r"""
        0.1 | .1 | 0.10 | 1/10 | 10\% | \frac{1}{10} || 0.11 | 1 | 0.01
        2.5 | 2.5 | 2.50 | 5/2 | 2\frac12 | 2 1/2 || 2.51 | 25 | 2,5
        0.0000001 | 1e-7 | 10^{-7} || 2e-7 | 0 | 0.00000011
        3.14 | 3.14 || \pi | 3.1 | 3.141""",
    "fractions": r"""
        \frac{1}{3} | 1/3 | \frac13 | 2/6 | 0.333333 | 0.\overline{3} | \dfrac{1}{3} | \frac{-1}{-3} || 0.33 | 3 | 1/4 | 0.4
        -\frac{7}{2} | -7/2 | -3.5 | \frac{-7}{2} | \frac{7}{-2} | -3\frac{1}{2} || 7/2 | -2/7 | -2.5
        \frac{22}{7} | 22/7 | 3\frac17 | 3 1/7 || 3.14 | \pi | 3/7""",
    "mixed": r"""
        1\frac{3}{4} | 7/4 | 1.75 | 1 3/4 | 175\% || 3/4 | 13/4 | 1.34""",
    "percent": r"""
        12.5\% | 12.5\% | 12.5 percent | 12.50\% | 12.5 | 0.125 | \frac{1}{8} || 125\% | 1.25 | 12.6\%
        50 | 50\% | 50 \% || 5\% | 500\%""",
    "currency and units": r"""
        18 | \$18 | \$18.00 | 18 dollars | 18\text{ dollars} | €18 || \$1.8 | 81
        1500000 | 1.5 million | 1.5\text{ million} | 1500 thousand || 1.5 | 15 million | 1.5 billion
        2 | 2 cm | 2 apples || 2 sin x | 2 or x | 2 and 3
        90 | 90^\circ | 90° | 90^{\circ} | 90\text{ degrees} || 9^\circ | 45^\circ
        5 | 5\text{ cm} | 5 \text{ cm}^2 | 5 cm | 5\mathrm{ m} || 50\text{ cm} | 0.5 m""",
    "roots and powers": r"""
        \sqrt{2} | \sqrt2 | 2^{1/2} | \sqrt{\frac{8}{4}} | 1.41421356 | √2 || 1.41 | \sqrt{3} | 2 | \sqrt[3]{2}
        3\sqrt{2} | \sqrt{18} | 3 \sqrt 2 | 3\cdot\sqrt{2} || 2\sqrt{3} | \sqrt{6}
        \frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}} | \frac{\sqrt3}3 || \frac{3}{\sqrt{3}} | \frac{\sqrt{3}}{2}
        2^{10} | 1024 | 4^5 || 1023 | 20
        \sqrt{2}\times 10^{-8} | \sqrt{2}\cdot10^{-8} || \sqrt{3}\times10^{-8} | 0""",
    "constants": r"""
        2\pi | 2\pi | 2π | \pi\cdot 2 | \tau - \tau + 2\pi || \pi | 6.28 | 2
        \frac{\pi}{2} | \pi/2 | 0.5\pi | \frac12\pi || \pi | \frac{2}{\pi}
        e^2 | e^2 | e\cdot e | \exp(2) || 2e | 7.39
        \log_2 8 | 3 | \log_{2}{8} || 4
        5! | 120 | 5\cdot4! || 25
        \infty | ∞ | +\infty || -\infty | 10^9""",
    "complex": r"""
        3+4i | 4i+3 | 3 + 4i || 3-4i | 4+3i | 7i
        -1 | i^2 | -1 || i | 1""",
    "expressions": r"""
        x+1 | 1+x | x + 1 | \frac{2x+2}{2} || x-1 | y+1 | x
        (x+1)^2 | x^2+2x+1 | (1+x)(x+1) || x^2+1 | (x-1)^2
        \frac{n(n+1)}{2} | \frac{n^2+n}{2} | n(n+1)/2 || \frac{n(n-1)}{2} | n^2
        \frac{a}{b} | a/b || \frac{b}{a} | ab
        \sin^2 x | 1-\cos^2 x || \cos^2 x | \sin x""",
    "equations": r"""
        x=5 | 5 | x = 5 | x=10/2 || y=5 | x=6 | x=-5
        y=2x+1 | 2x+1 | y=1+2x || y=2x | x=2y+1
        x+y=3 | y+x=3 | 2x+2y=6 || 3 | x+y=4 | x-y=3
        5 | x=5 | y = 5 || x=6""",
    "relations": r"""
        x<3 | 3>x | x < 3 || x\le 3 | x>3 | x<4
        x\ge 2 | x \geq 2 | x≥2 || x>2 | x\le 2
        x>2 | (2,\infty) || [2,\infty) | (-\infty,2)""",
    "pairs": r"""
        (1,2) | (1,2) | (1, 2) | \left(1,2\right) | (1.0, 4/2) | (\frac22,2) || (2,1) | (1,3) | 1,2,3 | [1,2] | \{1,2\} | 1
        (1,2,3) | (1,2,3) || (1,2) | (1,3,2) | (1,2,3,4)
        (1,000) | (1,000) || 1000""",
    "sets and lists": r"""
        \{1,2\} | \{2,1\} | 1,2 | 2, 1 | 1 and 2 | \left\{1,2\right\} | x=1 or x=2 | \{1,2,2\} || \{1,3\} | 1 | \{1,2,3\} | (1,2)
        1,2,3 | 3,2,1 | 1, 2, 3 | 1, 2, and 3 | \{1,2,3\} || 1,2 | 1,2,4 | 1,2,3,4 | 6
        \pm 2 | 2,-2 | ±2 | -2, 2 | \{-2,2\} || 2 | -2 | \pm 3
        1\pm\sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2} || 1+\sqrt2 | 1\pm\sqrt{3}
        \emptyset | \varnothing | ∅ | \{\} || 0 | \{0\}""",
    "intervals": r"""
        [1,3) | [1,3) | \left[1,3\right) | x\in[1,3) || [1,3] | (1,3) | (1,3] | [1,4)
        (-\infty,2] | (-∞, 2] | x \le 2 || (-\infty,2) | [2,\infty) | (-\infty,3]
        (0,1)\cup(2,3) | (2,3)\cup(0,1) | (0,1) ∪ (2,3) || (0,1) | (0,1)\cup(2,4) | (0,3) | (0,1)\cap(2,3)
        \mathbb{R}\setminus\{2\} | (-\infty,2)\cup(2,\infty) || (-\infty,2)""",
    "matrices": r"""
        \begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix} || \begin{pmatrix}1&2\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ 4/2 \end{pmatrix} || \begin{pmatrix}2\\1\end{pmatrix}
        \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix} || \begin{pmatrix}1&3\\2&4\end{pmatrix}""",
    "words": r"""
        \text{Monday} | Monday | \text{monday} | \mathrm{Monday} || Tuesday | 1
        \text{(B)} | B | (B) | \text{B} || A | (C) | \text{(A)}
        a | a || A | b
        11_2 | 11_{2} || 11_3 | 12_2
        \text{no solution} | no solution | \text{No solution} || \text{solution} | 0""",
}


def pairs_of(kind):
    for line in KINDS[kind].strip().split("\n"):
        right, _, wrong = line.strip().partition(" || ")
        gold, *same = right.split(" | ")
        yield from ((gold, answer.strip(), 1) for answer in same)
        yield from ((gold, answer.strip(), 0) for answer in wrong.split(" | "))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_and_unequal_answers(rewards, kind):
    rows = list(pairs_of(kind))
    got = score(rewards, [(rf"so \boxed{{{answer}}}.", gold) for gold, answer, _ in rows])
    assert [row for row, value in zip(rows, got) if row[2] != value] == []


def test_the_table_holds_two_hundred_pairs():
    rows = [row for kind in KINDS for row in pairs_of(kind)]
    assert len(set(rows)) >= 200 and 0.4 < sum(r[2] for r in rows) / len(rows) < 0.6


@pytest.mark.parametrize("response, answer", [
    (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\{a\}}", r"\{a\}"), (r"\boxed{\boxed{3}}", "3"), (r"\fbox{4}", "4"),
    (r"\boxed 5", "5"), (r"\boxed{\text{a \} b}}", r"\text{a \} b}"), (r"\boxed{1} \boxed{2", ""), ("none", None),
])
def test_the_last_complete_box_with_matched_braces(response, answer):
    assert last_box(response) == answer


@pytest.mark.parametrize("response, answer", [
    ("The answer is 4. I hope it is correct.", "4"), ("Answer: 3\nFinal answer: 5", "5"), ("x\n#### 7", "7"),
    ("**Answer:** $\\frac{1}{2}$ because 3", "\\frac{1}{2}"), ("so $x+1$ and then $x+2$.", "x+2"), ("It makes 12.", "12"),
    ("The answer is **12**", "12"), ("5 plus 7 is 12, as asked", "12"), ("", ""), ("3/4", "3/4"), ("no idea", "no idea"),
    ("I think 1, 2, 3", "3"), ("= 42.", "42"), ("Answer: 6 (since 2*3=6)", "6"), ("the answer is 6, not 7.", "6"),
])
def test_where_the_final_answer_is_found(response, answer):
    assert extract(response) == answer


def test_golds_that_cannot_be_read_are_refused_at_load(rewards):
    """Field case D021 (an empty gold) and D001 (a gold that parses to nothing)."""
    for gold in ["", r"\boxed{}", "$$", r"\frac{1}{", "(1,2", ["1", "2"]]:
        with pytest.raises(DataError, match="every answer to it would score 0"):
            rewards.check([group(["x"], answer=gold).task])


def test_scoring_works_from_a_thread(rewards):
    """Field case D025: expressions and percentages, scored outside the main thread."""
    got = []
    thread = threading.Thread(target=lambda: got.extend(score(rewards, [(r"\boxed{35\%}", r"$35\%$"),
                                                                        (r"\boxed{1+x}", "x+1")])))
    thread.start()
    thread.join(60)
    assert got == [1, 1]


def test_text_that_is_no_mathematics_never_raises(rewards):
    """Field case D036 and whatever else a model may write."""
    texts = ["\ufffd", "\\boxed{\ufffd}", "\\boxed{((((}", "\\boxed{" + "(" * 5000, "\\boxed{" + "9" * 5000 + "}",
             "\\boxed{__import__('os')}", "\\boxed{\\frac{1}{0}}", "\\boxed{1/0}", "$", "$$", "\\", "\x00", "\\boxed{\\pm}",
             "Answer:", "####", "\\boxed{,}", "\\boxed{1e999}", "\\boxed{=}", "\\boxed{x=}", "\\boxed{\\cup}"]
    for gold in ["7", "x+1", "(1,2)"]:
        assert score(rewards, [(text, gold) for text in texts]) == [0] * len(texts)


def test_degenerate_outputs_take_no_time_worth_mentioning(rewards):
    """Repetitions as a collapsed policy writes them; each was quadratic or worse in a naive search (minutes here)."""
    n = 20000
    texts = ["\\(" * n, "$" * n, "\\[" * n, "\\boxed{" * n, "9" * n, "1," * n, "answer is " * n, "####" * n, "(" * n,
             "\\boxed{" + " " * n + "}", "\\boxed{" + "1," * n + "}", "\\boxed{" + "{" * n, "\\text{" * n, "1 a" * n]
    assert score(rewards, [(text, "(7,8)") for text in texts]) == [0] * len(texts)


def test_a_failing_grader_is_an_error_and_not_a_row_of_zeros(rewards):
    source = build_rewards([RewardSource(verifier="math", timeout_s=1e-6)])
    g = group([r"\boxed{1+x}"], answer="x+1")
    with pytest.raises(RewardError, match="all of them failed"):
        Scorer(source).score([g])
    assert isinstance(g.samples[0].rewards["math"], Failed) and g.samples[0].score is None
    source.close()
