#!/usr/bin/env python3
"""A sample filter that is started once per file: counts the words of a text and writes them to words.json."""

import json
import os
import sys

# Another attempt would not help. The run lists this exit code in nonRetryableExitCodes.
BAD_FILE = 3


def main():
    out = os.environ.get("OUTPUT_PATH") or "/ws/out/" + os.environ["OPENFILTER_FILTER"]
    try:
        with open(os.environ["SOURCE_PATH"], encoding="utf-8") as text:
            words = sum(len(line.split()) for line in text)
    except UnicodeDecodeError:
        print("the file is not UTF-8 text", file=sys.stderr)
        return BAD_FILE
    # Any other exception ends Python with exit code 1: the file is tried again.
    with open(out + "/words.json", "w") as result:
        json.dump({"words": words}, result)
    return 0


sys.exit(main())
