"""Cleaning of scraped tutorials."""

import re

BOILERPLATE = re.compile(r"^(cookie|subscribe|share this)\b.*$", re.I | re.M)
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.S)
EMPHASIS = re.compile(r"(\*\*|__)(.+?)\1")
NOTICE = re.compile(r"^(?:[-=*#~]+\s?)+(?P<title>[A-Z][\w ]*)(?:\s?[-=*#~]+)+$")


def clean(text):
    text = BOILERPLATE.sub("", text)
    text = FENCE.sub(lambda m: m.group(2), text)
    text = EMPHASIS.sub(lambda m: m.group(2), text)
    lines = []
    for line in text.splitlines():
        banner = NOTICE.match(line.strip())  # <- here
        lines.append(banner.group("title") if banner else line)
    return "\n".join(lines)
