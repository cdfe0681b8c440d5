#!/usr/bin/env bash
# Times suites.
#   suite.sh NAME COMMAND…         runs a suite and notes its seconds
#   suite.sh --each NAME COMMAND…  as above, for a `cargo test` of many suites: also notes those that take a second or more
#   suite.sh --all COMMAND…        runs a command that runs suites, then prints what they noted, also when one has failed
# A suite that runs outside of --all is only run. The notes are in the target folder: one line per suite, with its seconds, how
# it ended and its name.
set -euo pipefail

# One line per suite; the one that failed is marked.
print_table() {
  [ -s "$SUITES" ] || return 0
  printf '\nseconds per suite\n'
  while read -r seconds ended name; do
    if [ "$ended" = failed ]; then ended='  FAILED'; else ended=; fi
    printf '%7s  %s%s\n' "$seconds" "$name" "$ended"
  done <"$SUITES"
  printf '%7s  all, with what is between them\n' "$SECONDS"
}

# The suites of a `cargo test`, from what it prints.
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
  # The folder is left to the first suite: room.sh brings compiled dependencies only into one that is not there yet.
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
