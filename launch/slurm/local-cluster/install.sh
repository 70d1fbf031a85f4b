#!/usr/bin/env bash
# Installs what cluster.sh needs: Slurm, munge, and the tools that make network namespaces.
#
#     launch/slurm/local-cluster/install.sh [FURTHER PACKAGES ...]
#
# Debian and Ubuntu packages, about 15 MB. What is there already is left alone, so it may run as often as you like.
# No service is started or enabled, and no file of the machine's own Slurm in /etc/slurm is read or written.
set -euo pipefail

PACKAGES=(slurmctld slurmd slurm-client munge iproute2 util-linux "$@")
# One program of each package, in the same order; that of a further one has its name.
PROGRAMS=(slurmctld slurmd srun munged ip unshare "$@")

PATH=$PATH:/usr/sbin:/sbin

say() { echo "install.sh: $*" >&2; }

missing_packages() {
  local i
  for i in "${!PACKAGES[@]}"; do
    command -v "${PROGRAMS[$i]}" >/dev/null || echo "${PACKAGES[$i]}"
  done
}

# Runs as root: itself, or by sudo where that asks for no password.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo -n -- "$@"
  fi
}

# Packages start their service when they are installed; this cluster needs none, and a container cannot start one.
apt_install() {
  local policy=/usr/sbin/policy-rc.d mine=no status=0
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
    mine=yes
  fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install \
    --yes --quiet --no-install-recommends "$@" >&2 || status=$?
  [ "$mine" = no ] || as_root rm -f "$policy"
  return "$status"
}

main() {
  local missing
  mapfile -t missing < <(missing_packages)
  if [ "${#missing[@]}" = 0 ]; then
    say "all there: $(slurmctld -V)"
    return 0
  fi
  local command="apt-get install --no-install-recommends ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    say "ERROR: ${missing[*]} not found, and no apt-get here to install them with"
    say "next action: install slurmctld, slurmd, srun, munged, ip and unshare by your system's packages, or use a" \
      "container: docs/slurm.md, 'Other systems'"
    return 1
  fi
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    say "ERROR: ${missing[*]} not found, and installing them takes root: you are $(id -un), and sudo asks for a password"
    say "next action: sudo $command"
    return 1
  fi
  say "installing ${missing[*]}"
  if ! apt_install "${missing[@]}"; then
    # Fresh containers come without package lists.
    as_root apt-get --quiet update >&2 || true
    apt_install "${missing[@]}" || {
      say "ERROR: the packages could not be installed; apt-get's own words are above"
      say "next action: sudo apt-get update && sudo $command"
      return 1
    }
  fi
  mapfile -t missing < <(missing_packages)
  if [ "${#missing[@]}" != 0 ]; then
    say "ERROR: ${missing[*]} installed, but their programs are not found in $PATH"
    return 1
  fi
  say "installed: $(slurmctld -V)"
}

main
