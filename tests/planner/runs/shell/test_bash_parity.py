"""Words that the evaluator finds are those that bash passes. Bash runs only on text that these tests make."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.planner.runs.shell import script_of_text

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")

PROBE = 'probe() { [ $# = 0 ] || printf "%s\\x1f" "$@"; printf "\\x1e"; }\n'
ARGUMENTS = ("p1", "p 2")

CASES = (Path(__file__).parent / "cases.txt").read_text().removesuffix("\n").split("\n###\n")


def bash_words(text: str) -> list[list[str]]:
    """Return the words of each call of `probe` in bash."""
    command = ["bash", "--norc", "-c", PROBE + text, "script", *ARGUMENTS]
    run = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, timeout=20)
    return [call.split("\x1f")[:-1] for call in run.stdout.split("\x1e")[:-1]]


def our_words(text: str) -> list[list[str]]:
    """Return the words of each call of `probe` by our evaluation, all of which must be known."""
    script = script_of_text(text, "script.sh", {}, ARGUMENTS)
    calls = [c for c in script.commands if c.words[0].text == "probe"]
    assert not any(word.unknown for call in calls for word in call.words)
    return [[word.text for word in call.words[1:]] for call in calls]


@pytest.mark.parametrize("text", CASES)
def test_cases(text: str) -> None:
    assert our_words(text) == bash_words(text)


LETTERS = st.text("ab1 _.:/=,-'\"", max_size=6)
NAMES = st.sampled_from(["A", "B", "C"])
SINGLE = LETTERS.map(lambda t: "'" + t.replace("'", "'\\''") + "'")
EXPANSIONS = st.builds(
    lambda name, form: form.replace("X", name),
    NAMES,
    st.sampled_from(
        [
            "$X", "${X}", "${#X}", "${X:-d e}", "${X:+s t}", "${X%b*}", "${X%%[.:]*}", "${X#*a}", "${X##*/}",
            "${X/a/zz}", "${X//b/}", "${X:1}", "${X:1:2}", "${X: -2}", "${X^^}", "$(echo $X)", '$(echo "$X")',
            "${L[0]}", "${L[1]}", "${#L[@]}", "$((N+3*2))", "$1", "$2", "$#", "${L[*]}", "${X:-$N}",
        ]
    ),
)  # fmt: skip
LISTS = st.sampled_from(['"${L[@]}"', "${L[@]}", '"$@"', '"${L[@]:1}"', "$*", '"${L[*]}"', '"${!L[@]}"'])
WORDS = st.one_of(
    SINGLE,
    EXPANSIONS,
    LISTS,
    EXPANSIONS.map(lambda e: f'"{e}"'),
    EXPANSIONS.map(lambda e: f'"x{e}-y"'),
    st.tuples(EXPANSIONS, EXPANSIONS).map("-".join),
    st.sampled_from(["a", "--flag", "{a,b}c", "{1..3}", "x=1", '""']),
)
PROBES = st.lists(WORDS, min_size=1, max_size=4).map(lambda words: "probe " + " ".join(words))
NUMBERS = st.integers(-9, 99)
ASSIGNMENTS = st.one_of(
    st.tuples(NAMES, SINGLE | EXPANSIONS).map("=".join),
    st.tuples(NAMES, SINGLE).map("+=".join),
    NUMBERS.map(lambda n: f"N={n}"),
    NUMBERS.map(lambda n: f"((N += {n}))"),
    st.lists(SINGLE | WORDS, max_size=3).map(lambda words: f"L=({' '.join(words)})"),
    st.lists(WORDS, max_size=2).map(lambda words: f"L+=({' '.join(words)})"),
    st.lists(SINGLE, max_size=3).map(lambda words: f"set -- {' '.join(words)}"),
    st.just("shift"),
)
CONDITIONS = st.one_of(
    st.builds("[ {} {} {} ]".format, st.just('"$A"'), st.sampled_from(["=", "!="]), SINGLE),
    st.builds("[[ $N {} {} ]]".format, st.sampled_from(["-lt", "-eq", "-ge"]), NUMBERS),
    st.sampled_from(
        ['[ -z "$B" ]', '[ -n "$B" ]', "[[ $C == a* ]]", "((N % 2))", "true", "false", "[[ -n $A && ! $B = a ]]"]
    ),
)


def compound(commands: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return compound commands of these."""
    body = st.lists(commands, min_size=1, max_size=3).map("\n".join)
    return st.one_of(
        st.builds("if {}; then\n{}\nelse\n{}\nfi".format, CONDITIONS, body, body),
        st.builds('for I in {}; do\nprobe "$I"\n{}\ndone'.format, WORDS, body),
        st.builds("for ((K=0; K<2; K++)); do\n{}\ndone".format, PROBES),
        st.builds("case $A in a*) {}\n;; '') probe e;; *) {}\n;; esac".format, commands, commands),
        st.builds("f() {{ local A=$1; {}\n}}\nf {}".format, body, WORDS),
        st.builds("{} && {}".format, CONDITIONS, commands),
        st.builds("{} || {}".format, CONDITIONS, commands),
        st.builds("(\n{}\n)".format, body),
        body.map(
            lambda b: (
                'eval "' + b.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'
            )
        ),
    )


COMMANDS = st.recursive(st.one_of(PROBES, ASSIGNMENTS), compound, max_leaves=6)
SCRIPTS = st.lists(COMMANDS, min_size=1, max_size=6).map(
    lambda commands: "\n".join(
        ["A=a.b B= C='c d' N=5 L=(one 'two words')", *commands, 'probe "$A" "$B" "$C" "$N" "${L[@]}"']
    )
)


@settings(max_examples=60, deadline=None)
@given(SCRIPTS)
def test_generated_scripts(text: str) -> None:
    assert our_words(text) == bash_words(text)
