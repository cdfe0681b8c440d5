#!/usr/bin/env bash
# Makes room for a build: room.sh CACHE TARGET. Each checkout has a target folder of its own in the cache (the Makefile says
# why), so the folders of checkouts that are gone would fill the disk; here they are removed. A disk that fills up in the
# middle of a build kills the linker with "Bus error", which helps nobody, so too little room is said before.
set -euo pipefail
cache=$1 target=$2 needed_gib=12

mkdir -p "$target"
pwd -P >"$target/checkout"
for folder in "$cache"/target "$cache"/target-*; do
  [ -d "$folder" ] || continue
  checkout=$(cat "$folder/checkout" 2>/dev/null || true)
  if [ ! -e "$checkout/Makefile" ]; then
    echo "room: removing $folder, whose checkout ${checkout:-(unknown)} is gone"
    rm -rf "$folder"
  fi
done

[ -d "$target/debug/deps" ] && exit 0 # what is built already needs little more
free_gib=$(($(df --output=avail -k "$target" | tail -n 1) / 1024 / 1024))
if [ "$free_gib" -lt "$needed_gib" ]; then
  echo "room: a first build needs about $needed_gib GiB in $target, and $free_gib GiB are free there: free some, or set" >&2
  echo "      XDG_CACHE_HOME to a folder on a larger disk" >&2
  exit 1
fi
