#!/usr/bin/env bash
# Prepares a target folder for a build: room.sh CACHE TARGET.
# - Removes the target folders of deleted checkouts, which would otherwise fill the disk: each checkout has its own in the cache
#   (the Makefile says why). A folder that does not name its checkout may be in use, and stays.
# - Seeds a new folder with the dependencies that another checkout has compiled, which saves most of a first build.
# - Checks the free space before a first build, because a disk that fills up kills the linker with an unhelpful "Bus error".
set -euo pipefail
cache=$1 target=$2 needed_gib=12

# Only one instance runs at a time, so any half-made folder was left by one that was killed.
mkdir -p "$cache"
exec 9>"$cache/.room.lock"
flock 9

# Copies the compiled crates of the registry. Cargo identifies them by version, features and compiler, and reuses or recompiles them.
# Workspace members are left out: they have the same names in every checkout, and cargo would mistake one for the other.
seed() {
  local from=$1/debug to=$2/debug members member
  mkdir -p "$to/deps"
  # Copied first because cargo writes fingerprints last: everything they list exists, even during a build in that folder.
  cp -a --reflink=auto "$from/.fingerprint" "$from/build" "$to/"
  find "$from/deps" -maxdepth 1 -type f \( ! -perm -100 -o -name '*.so' \) -exec cp -a --reflink=auto -t "$to/deps" {} +
  # Searched, not listed: the upgrade test runs this for an older commit, whose members may be in other folders.
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
    echo "room: removing $folder, because its checkout $checkout no longer exists"
    rm -rf "$folder"
  fi
done
rm -rf "$cache"/seeding-*
# Clones left by killed tests of older versions; no test runs for a whole day.
find "$cache" -mindepth 1 -maxdepth 1 -name '.tmp*' -mtime +0 -exec rm -rf {} +

if [ ! -d "$target/debug/deps" ]; then # an existing build needs little more space
  free_gib=$(($(df --output=avail -k "$cache" | tail -n 1) / 1024 / 1024))
  if [ "$free_gib" -lt "$needed_gib" ]; then
    echo "room: a first build needs about $needed_gib GiB in $cache, but only $free_gib GiB are free: free some space, or" >&2
    echo "      set XDG_CACHE_HOME to a folder on a larger disk" >&2
    exit 1
  fi
fi

newest=$(ls -td "$cache"/target-????????????/debug/.fingerprint 2>/dev/null | head -n 1 || true)
if [ ! -e "$target" ] && [ -n "$newest" ]; then
  echo "room: reusing compiled dependencies of another checkout"
  # The copy has another name until it is complete. Its shell stops at the first failure, for example when a build removes a file during
  # the copy; everything is then compiled.
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
