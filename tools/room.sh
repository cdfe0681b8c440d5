#!/usr/bin/env bash
# Makes a target folder ready for a build: room.sh CACHE TARGET. Each checkout has a target folder of its own in the cache (the
# Makefile says why), so the folders of checkouts that are gone would fill the disk: they are removed. A folder that does not say
# whose it is may be in use, and stays. A new folder begins with the dependencies that another checkout has compiled, which is most
# of a first build. A disk that fills up in the middle of a build kills the linker with "Bus error", which helps nobody, so too
# little room is said before.
set -euo pipefail
cache=$1 target=$2 needed_gib=12

# One of us at a time: what is half made is then left over from one that was killed.
mkdir -p "$cache"
exec 9>"$cache/.room.lock"
flock 9

# Copies what comes from the registry, which cargo knows by version, features and compiler, and takes or compiles again. Members
# of the workspace have the same names in every checkout, and cargo would take one for the other.
seed() {
  local from=$1/debug to=$2/debug members member
  mkdir -p "$to/deps"
  # First, because it is written last: whatever it says is there, is there, also while somebody builds in that folder.
  cp -a --reflink=auto "$from/.fingerprint" "$from/build" "$to/"
  find "$from/deps" -maxdepth 1 -type f \( ! -perm -100 -o -name '*.so' \) -exec cp -a --reflink=auto -t "$to/deps" {} +
  # Wherever they are: the test of upgrades calls this for an older commit, which may have its members elsewhere.
  members=$(find . -mindepth 2 -maxdepth 4 \( -name target -o -name '.?*' \) -prune -o -name Cargo.toml -exec sed -n 's/^name = "\(.*\)"/\1/p' {} +)
  for member in $members; do
    rm -rf "$to"/{.fingerprint,build}/"$member"-[0-9a-f]* "$to"/deps/{,lib}"${member//-/_}"-[0-9a-f]*
  done
  pwd -P >"$2/checkout"
}

for folder in "$cache"/target-* "$cache"/readme-*; do
  [ -s "$folder/checkout" ] && [ "$folder" != "$target" ] || continue
  checkout=$(<"$folder/checkout")
  if [ ! -e "$checkout/Makefile" ]; then
    echo "room: removing $folder, whose checkout $checkout is gone"
    rm -rf "$folder"
  fi
done
rm -rf "$cache"/seeding-*
# Clones that killed tests of older versions have left; nobody tests for a day.
find "$cache" -mindepth 1 -maxdepth 1 -name '.tmp*' -mtime +0 -exec rm -rf {} +

if [ ! -d "$target/debug/deps" ]; then # what is built already needs little more
  free_gib=$(($(df --output=avail -k "$cache" | tail -n 1) / 1024 / 1024))
  if [ "$free_gib" -lt "$needed_gib" ]; then
    echo "room: a first build needs about $needed_gib GiB in $cache, and $free_gib GiB are free there: free some, or set" >&2
    echo "      XDG_CACHE_HOME to a folder on a larger disk" >&2
    exit 1
  fi
fi

newest=$(ls -td "$cache"/target-????????????/debug/.fingerprint 2>/dev/null | head -n 1 || true)
if [ ! -e "$target" ] && [ -n "$newest" ]; then
  echo "room: taking the compiled dependencies of another checkout, what fits of them"
  # Under another name until it is whole. In a shell of its own, which stops at the first failure (a file that goes while somebody
  # builds there, say): then everything is compiled.
  part="$cache/seeding-${target##*/}"
  if bash -euo pipefail -c "$(declare -f seed); seed \"\$@\"" seed "${newest%/debug/.fingerprint}" "$part"; then
    mkdir -p "$(dirname "$target")"
    mv "$part" "$target"
  else
    rm -rf "$part"
  fi
fi
mkdir -p "$target"
pwd -P >"$target/checkout"
