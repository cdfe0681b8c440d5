#!/bin/sh
# A sample filter that is started once per file: writes the SHA-256 checksum of the file to sha256.txt.
set -eu
out="${OUTPUT_PATH:-/ws/out/$OPENFILTER_FILTER}"

# Another attempt would not help. The run lists 3 in nonRetryableExitCodes.
if [ ! -s "$SOURCE_PATH" ]; then
  echo "the file is empty" >&2
  exit 3
fi
checksum=$(sha256sum <"$SOURCE_PATH")
echo "${checksum%% *}" >"$out/sha256.txt"
