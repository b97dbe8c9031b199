#!/bin/sh
# Installs a release of DIY Service Mesh from a folder of `make release` that a web server serves.
set -eu

usage() {
  cat <<'TEXT'
Usage: BASE_URL=URL sh install.sh

Downloads the programs of a release, checks their SHA-256 sum, unpacks them into
PREFIX/lib/diy-service-mesh, and links PREFIX/bin/mesh. Needs curl, tar, gzip and sha256sum.

  BASE_URL     the address of the release: the folder with SHA256SUMS
  PREFIX       default: ~/.local
  VERSION      the version of the release: rejects any other one, such as an earlier release with
               a valid signature
  PUBLIC_KEY   file with the public key (PEM) of those who made the release: requires and checks
               the signature of SHA256SUMS, with openssl
TEXT
}

main() {
  case ${1:-} in
  '') ;;
  -h | --help) usage && exit ;;
  *) fail "unknown argument \"$1\", expected none or --help" ;;
  esac
  [ -n "${BASE_URL:-}" ] || fail "BASE_URL is not set, expected the address of a release. Example: BASE_URL=https://releases.example.com/0.1.0 sh install.sh"
  prefix=${PREFIX:-${HOME:?is not set: set PREFIX}/.local}
  check_machine
  library=$prefix/lib/diy-service-mesh
  mkdir -p "$prefix/bin" "$library" || fail "cannot create $library: set PREFIX to a folder that you may write"
  temporary=$library/.install-$$
  trap 'rm -rf "$temporary"' EXIT
  trap 'exit 130' INT TERM HUP
  mkdir "$temporary"
  download
  activate
}

check_machine() {
  for program in curl tar gzip sha256sum ${PUBLIC_KEY:+openssl}; do
    command -v "$program" >/dev/null || fail "program $program not found: install it with your package manager"
  done
  machine="$(uname -s) $(uname -m)"
  case $machine in
  'Linux x86_64') platform=linux-amd64 ;;
  'Linux aarch64') platform=linux-arm64 ;;
  *) fail "no programs for $machine, expected Linux x86_64 or Linux aarch64" ;;
  esac
}

# Leaves the checked archive in the temporary folder.
download() {
  fetch SHA256SUMS
  if [ -n "${PUBLIC_KEY:-}" ]; then
    fetch SHA256SUMS.sig
    say "checking the signature of SHA256SUMS with $PUBLIC_KEY"
    openssl pkeyutl -verify -rawin -pubin -inkey "$PUBLIC_KEY" -sigfile "$temporary/SHA256SUMS.sig" -in "$temporary/SHA256SUMS" >/dev/null ||
      fail "SHA256SUMS is not signed with the key of $PUBLIC_KEY: do not use these files"
  fi
  # Lines are SUM, two spaces, NAME.
  while read -r sum file; do
    case $file in
    diy-service-mesh-${VERSION:-*}-$platform.tar.gz)
      archive=$file
      echo "$sum  $file" >"$temporary/sum"
      ;;
    esac
  done <"$temporary/SHA256SUMS"
  [ -n "${archive:-}" ] || fail "the release at $BASE_URL has no programs for $platform: SHA256SUMS lists no diy-service-mesh-${VERSION:-VERSION}-$platform.tar.gz"
  fetch "$archive"
  say "checking its SHA-256 sum"
  (cd "$temporary" && sha256sum -c sum >/dev/null 2>&1) || fail "$archive differs from its sum in SHA256SUMS: download it again, and do not use it if this repeats"
}

# Unpacks the archive, and replaces the folder and the link by renames: an installation is complete or absent.
activate() {
  name=${archive%.tar.gz}
  say "unpacking to $library/$name"
  tar -xzf "$temporary/$archive" -C "$temporary" || fail "cannot unpack $archive into $library: is the disk full?"
  [ ! -e "$library/$name" ] || mv "$library/$name" "$temporary/replaced"
  mv "$temporary/$name" "$library/$name"
  say "linking $prefix/bin/mesh"
  ln -s "$library/$name/bin/mesh" "$temporary/mesh"
  mv -f "$temporary/mesh" "$prefix/bin/mesh"
  say "installed $("$prefix/bin/mesh" --version). To remove it: rm -r $library $prefix/bin/mesh"
  case :$PATH: in
  *:"$prefix/bin":*) say "next: mesh demo" ;;
  *) say "next: $prefix/bin/mesh demo    ($prefix/bin is not in PATH)" ;;
  esac
}

fetch() {
  say "downloading $BASE_URL/$1"
  curl --fail --silent --show-error --location --proto-redir '=https' --retry 2 --output "$temporary/$1" "$BASE_URL/$1" ||
    fail "cannot download $BASE_URL/$1: check BASE_URL, the network, and the space in $library"
}

say() { printf 'install: %s\n' "$*"; }

fail() {
  printf 'install: %s\n' "$*" >&2
  exit 1
}

main "$@"
