#!/usr/bin/env bash
# Installs missing Debian packages without starting their services, now or at the next boot.
# Each argument is a package, or package:program if another package may provide the program. The script never removes
# a package: it fails on a machine where that would be necessary (because of Docker's own containerd, for example).
# A package that the machine's own suites lack (valkey-server on Debian 12) comes from the distribution's backports,
# through a private apt configuration: the machine's own sources stay unchanged.
set -euo pipefail

missing=()
for wanted in "$@"; do
  package=${wanted%%:*} program=${wanted##*:}
  command -v "$program" >/dev/null ||
    dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
    missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "packages: install these first (this needs root on Debian): ${missing[*]}" >&2
  exit 1
fi
echo "packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive

# Only one instance may run at a time, because the file below is shared.
exec 9>/run/lock/openfilter-packages
flock 9
work=$(mktemp -d)
chmod 755 "$work" # apt drops to its own user to download

# Debian's way to say "install, but do not start" is exit code 101 from this file. The signature identifies a file that a killed run
# of this script left behind.
policy=/usr/sbin/policy-rc.d
signature='# made by packages.sh of OpenFilter Pipelines'
forget_policy() { if grep -qxF "$signature" "$policy" 2>/dev/null; then rm -f "$policy"; fi; }
trap 'forget_policy; rm -rf "$work"' EXIT
forget_policy
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\n%s\nexit 101\n' "$signature" >"$policy"
  chmod 755 "$policy"
fi

apt() { apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >"$work/apt.log" 2>&1 || {
  echo "packages: apt-get $* failed:" >&2
  tail -n 20 "$work/apt.log" >&2
  exit 1
}; }
install() { apt install -y --no-install-recommends --no-remove "$@"; }

# Writes the machine's package sources with their suite renamed to the release's backports.
backports_sources() {
  local release
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mkdir -p "$work/parts" "$work/lists/partial"
  { find /etc/apt/sources.list.d -name '*.sources' -exec cat {} + 2>/dev/null || true; } |
    awk -v RS= -v ORS='\n\n' -v suite="$release" '$0 ~ "Suites:[^\n]*[ \t]" suite "([ \t\n]|-updates)"' |
    sed -E "s/^Suites:.*/Suites: $release-backports/" >"$work/parts/backports.sources"
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
    sed -nE "s/^(deb[[:space:]].*[[:space:]])$release([[:space:]].*)$/\1$release-backports\2/p" >"$work/parts/backports.list"
}

apt update
normal=() from_backports=()
for package in "${missing[@]}"; do
  if [ -n "$(apt-cache madison "$package" 2>/dev/null)" ]; then normal+=("$package"); else from_backports+=("$package"); fi
done
[ ${#normal[@]} -eq 0 ] || install "${normal[@]}"
if [ ${#from_backports[@]} -gt 0 ]; then
  backports_sources
  private=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$work/parts" -o "Dir::State::Lists=$work/lists")
  apt "${private[@]}" update
  # valkey-server needs exactly the same version of valkey-tools, which only the backports have.
  also=()
  for package in "${from_backports[@]}"; do
    while read -r dependency; do
      [ -n "$(apt-cache madison "$dependency" 2>/dev/null)" ] || also+=("$dependency")
    done < <(apt-cache "${private[@]}" show --no-all-versions "$package" |
      sed -nE 's/^Depends: //p' | tr ',' '\n' | sed -E 's/^ *([a-z0-9.+-]+).*/\1/')
  done
  (cd "$work" && chmod 777 . && apt "${private[@]}" download "${from_backports[@]}" "${also[@]}")
  install "$work"/*.deb
fi

if command -v systemctl >/dev/null; then
  for package in "${missing[@]}"; do
    dpkg -L "$package" | sed -nE 's#.*/systemd/system/([^/@]+\.(service|socket))$#\1#p' |
      while read -r unit; do systemctl --quiet disable "$unit" 2>/dev/null || true; done
  done
fi
