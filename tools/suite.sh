#!/usr/bin/env bash
# Times suites.
#   suite.sh NAME COMMAND…         runs a suite and records its seconds
#   suite.sh --each NAME COMMAND…  does the same for a `cargo test` of many suites, and records each that fails or takes a second or more
#   suite.sh --all COMMAND…        runs a command that runs suites, then prints their records, even if one failed
# Outside --all a suite runs without a record. The records are in the target folder: one line per suite, with its seconds, its result
# and its name.
set -euo pipefail

# One line per suite; a failed one is marked.
print_table() {
  [ -s "$SUITES" ] || return 0
  printf '\nseconds per suite\n'
  while read -r seconds ended name; do
    if [ "$ended" = failed ]; then ended='  FAILED'; else ended=; fi
    printf '%7s  %s%s\n' "$seconds" "$name" "$ended"
  done <"$SUITES"
  printf '%7s  total, including the time between suites\n' "$SECONDS"
}

# Reads the suites of a `cargo test` from its output.
suites_of() {
  awk '
    $1 == "Running" {
      name = $NF; gsub(/^.*\/|-[0-9a-f]+\)$/, "", name)
      if ($2 == "unittests") name = name " (unit)"
    }
    $1 == "Doc-tests" { name = $2 " (doc)" }
    /^test result: / {
      seconds = $NF; sub(/s$/, "", seconds)
      failed = $3 ~ /^FAILED/
      if (seconds + 0 >= 1 || failed) printf "%.0f %s - %s\n", seconds, failed ? "failed" : "ok", name
    }' "$1"
}

if [ "$1" = --all ]; then
  shift
  export SUITES=${CARGO_TARGET_DIR:-target}/suites
  # Do not create the folder here: room.sh seeds compiled dependencies only if it does not exist yet.
  rm -f "$SUITES"
  trap print_table EXIT
  "$@"
  exit
fi

each=
if [ "$1" = --each ]; then
  each=yes
  shift
fi
name=$1
shift
if [ -z "${SUITES:-}" ]; then exec "$@"; fi

mkdir -p "$(dirname "$SUITES")"
code=0
if [ -n "$each" ]; then
  "$@" 2>&1 | tee "$SUITES.log" || code=$?
else
  "$@" || code=$?
fi
if [ "$code" = 0 ]; then ended=ok; else ended=failed; fi
echo "$SECONDS $ended $name" >>"$SUITES"
if [ -n "$each" ]; then
  suites_of "$SUITES.log" >>"$SUITES"
  rm -f "$SUITES.log"
fi
exit "$code"
