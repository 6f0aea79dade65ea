# Functions that the scripts in hack/ share. Source it; it changes to the root of the repository.
# shellcheck shell=sh

caller_dir=$PWD
cd "$(dirname "$0")/.." || exit 1

# Debian packages of the tests that write kernel rules, of the test cluster, and of the images.
kernel_packages="iptables nftables ipset conntrack iproute2"
cluster_packages="$kernel_packages containerd runc containernetworking-plugins busybox-static curl netcat-openbsd"
image_packages="debootstrap"
# A kernel that has IPVS, and what loads its modules.
uml_packages="$kernel_packages user-mode-linux kmod"

# ensure_packages PACKAGE... installs those Debian packages that are missing.
ensure_packages() {
  missing=
  for package in "$@"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
  done
  [ -z "$missing" ] && return
  if [ "$(id -u)" != 0 ]; then
    echo "These Debian packages are missing; install them as root: apt-get install$missing" >&2
    exit 1
  fi
  echo "Installing$missing" >&2
  # The lists may be absent or name versions that are gone from the mirror. Services of the packages (containerd) must
  # not start: the cluster runs its own. An image without init has a policy-rc.d already; only an absent one is added.
  policy=
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    policy=/usr/sbin/policy-rc.d
    printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy
  fi
  # shellcheck disable=SC2086
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; } >&2
  status=$?
  [ -z "$policy" ] || rm -f "$policy"
  return $status
}

# ensure_toolchain says what is missing to build.
ensure_toolchain() {
  for program in cargo "$@"; do
    command -v "$program" >/dev/null && continue
    case $program in
      cargo) echo "cargo is missing: install Rust with rustup (https://rustup.rs)" >&2 ;;
      go) echo "go is missing: install Go 1.26 or later (https://go.dev/dl)" >&2 ;;
      *) echo "$program is missing" >&2 ;;
    esac
    exit 1
  done
}

# target_dir prints the folder of what cargo builds.
target_dir() { cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/'; }

# run_tool BINARY ARGUMENT... builds a binary of the e2e crate and becomes it, in the caller's folder.
run_tool() {
  binary=$1
  shift
  cargo build --quiet --package pointsman-e2e --bin "$binary" || exit 1
  target=$(target_dir)
  cd "$caller_dir" || exit 1
  exec "$target/debug/$binary" "$@"
}

# ensure_cargo_deny installs the checker of dependencies, in the version that deny.toml was written for.
ensure_cargo_deny() {
  cargo deny --version 2>/dev/null | grep -qx 'cargo-deny 0.20.2' && return
  echo "Installing cargo-deny" >&2
  # Outside the repository, whose toolchain file and target folder are not for it.
  (cd / && cargo install --quiet --locked --version 0.20.2 cargo-deny) >&2
}
