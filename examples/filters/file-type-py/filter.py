#!/usr/bin/env python3
"""A sample filter that stays running: loads its model once, then tells the type of one file after the other.

Python 3 and nothing else. README.md says how to make a filter of your own from it.
"""

import json
import sys

# The model: a type, where its signature stands in the file, and the signature. Load your own here.
SIGNATURES = """
application/pdf     0  25504446
application/zip     0  504b0304
image/gif           0  47494638
image/jpeg          0  ffd8ff
image/png           0  89504e470d0a1a0a
image/webp          8  57454250
video/mp4           4  66747970
video/x-matroska    0  1a45dfa3
"""


class Refused(Exception):
    """The file cannot be processed, and no further attempt will change that."""


def load():
    rows = (line.split() for line in SIGNATURES.split("\n") if line)
    return [(kind, int(offset), bytes.fromhex(signature)) for kind, offset, signature in rows]


def process(model, file):
    with open(file["input"], "rb") as stream:
        head = stream.read(64)
    kinds = [kind for kind, offset, signature in model if head[offset:].startswith(signature)]
    if not kinds:
        raise Refused("the file is of no known type")
    with open(file["out"] + "/type.json", "w") as result:
        json.dump({"source": file["source"], "type": kinds[0]}, result)


model = load()
print(f"loaded {len(model)} signatures")
for line in sys.stdin:
    try:
        process(model, json.loads(line))
        answer = {"ok": True}
    except Refused as refused:
        answer = {"ok": False, "reason": str(refused), "retry": False}
    # Another attempt may succeed, for example after a full disk. Any other error ends the filter, which is started again.
    except OSError as error:
        answer = {"ok": False, "reason": str(error), "retry": True}
    # The answer must start a line. Without `flush` it would stay in a buffer, and the file would time out.
    print("::openfilter::" + json.dumps(answer), flush=True)
