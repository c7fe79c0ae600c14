import re

AMOUNT = re.compile(r"^(?:[a-z ]*)((?:\d+,?)+)(?:\.\d\d)?$")
SPACES = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Brings labels of amounts into one form: thousands without commas, cents kept."""
    text = SPACES.sub(" ", text.strip().lower())
    found = AMOUNT.match(text)  # <- here
    if found:
        text = text.replace(found.group(1), found.group(1).replace(",", ""))
    return text
