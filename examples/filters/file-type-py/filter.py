#!/usr/bin/env python3
"""A sample filter that stays running: loads its model once, then tells the type of one file after the other."""

import json
import sys


def load():
    # The model: a type, where its signature stands in the file, and the signature. Load your own here.
    return [("application/pdf", 0, b"%PDF"), ("application/zip", 0, b"PK\3\4"), ("image/gif", 0, b"GIF8"),
            ("image/jpeg", 0, b"\xff\xd8\xff"), ("image/png", 0, b"\x89PNG\r\n\x1a\n"), ("image/webp", 8, b"WEBP"),
            ("video/mp4", 4, b"ftyp"), ("video/x-matroska", 0, b"\x1aE\xdf\xa3")]


def process(model, file):
    with open(file["input"], "rb") as stream:
        head = stream.read(64)
    kinds = [kind for kind, start, signature in model if head[start:].startswith(signature)]
    if not kinds:  # no further attempt will change that
        return {"ok": False, "reason": "the file is of no known type", "retry": False}
    with open(file["out"] + "/type.json", "w") as result:
        json.dump({"source": file["source"], "type": kinds[0]}, result)
    return {"ok": True}


model = load()
print(f"loaded {len(model)} signatures")
for line in sys.stdin:
    try:
        answer = process(model, json.loads(line))
    # Another attempt may succeed, for example after a full disk. Any other error ends the filter, which is started again.
    except OSError as error:
        answer = {"ok": False, "reason": str(error), "retry": True}
    # The answer must start a line. Without `flush` it would stay in a buffer, and the file would time out.
    print("::openfilter::" + json.dumps(answer), flush=True)
