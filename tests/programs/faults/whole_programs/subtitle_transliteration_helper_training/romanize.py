"""Romanizes lines from standard input; letters without a rule are copied and reported."""

import sys

GREEK = dict(zip("αβγδεζηθικλμνξοπρςστυφχψω", "abgdezhqiklmnxoprsstyfcyw"))
RUSSIAN = dict(zip("абвгдежзийклмнопрстуфхцчшщъыьэюя", "abvgdejziyklmnoprstufhccss'y'eua"))
RULES = {**GREEK, **RUSSIAN, " ": " "}


def romanize(line: str, number: int) -> str:
    out = []
    for column, letter in enumerate(line):
        if letter in RULES:
            out.append(RULES[letter])
        else:
            print(f"line {number}, column {column}: no rule for U+{ord(letter):04X}", file=sys.stderr, flush=True)
            out.append("?")
    return "".join(out)


def main():
    for number, line in enumerate(sys.stdin, start=1):
        sys.stdout.write(romanize(line.rstrip("\n"), number) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
