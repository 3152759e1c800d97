#!/bin/sh
# Signs the checksums of a release with a private key, and checks the signature with its public key. It uses no service.
#
#   test/release/sign.sh COSIGN KEY FOLDER
#
# The variable COSIGN_PASSWORD has the password of the key. The public key of NAME.key is NAME.pub.
set -eu
cosign=$1 key=$2 folder=$3
[ -f "$key" ] || { echo "sign: KEY must name a private key of cosign: cosign generate-key-pair makes one" >&2; exit 1; }
config=$(mktemp)
trap 'rm -f "$config"' EXIT
"$cosign" signing-config create --out "$config" # without a transparency log and a time stamp
"$cosign" sign-blob --yes --signing-config "$config" --key "$key" --bundle "$folder/SHA256SUMS.sigstore.json" "$folder/SHA256SUMS"
"$cosign" verify-blob --key "${key%.key}.pub" --insecure-ignore-tlog=true --bundle "$folder/SHA256SUMS.sigstore.json" "$folder/SHA256SUMS"
