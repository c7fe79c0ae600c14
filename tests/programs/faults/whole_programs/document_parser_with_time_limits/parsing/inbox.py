import json
import random
from pathlib import Path


def deposit(root: Path, mails: int = 4000) -> None:
    """Writes the inbox as the mail gateway delivers it: one JSON object per mail."""
    root.mkdir(parents=True, exist_ok=True)
    for part in range(2):
        target = root / f"part{part}.jsonl"
        if target.exists():
            continue
        rng = random.Random(part)
        with open(target, "w") as out:
            for number in range(mails):
                words = [f"w{rng.randrange(400)}" for _ in range(rng.randint(6, 40))]
                mail = {"body": " ".join(words), "topic": len(words) % 4}
                if number < 140 and rng.random() < 0.3:  # the old gateway delivers HTML
                    mail["body"] = "<div><p>" + mail["body"].replace(" w1", "</p><p> w1") + "</p></div>"
                if part == 1 and number == 137:
                    mail["body"] = "<div><p></p></div>"
                out.write(json.dumps(mail) + "\n")
