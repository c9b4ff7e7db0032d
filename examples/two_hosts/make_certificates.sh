#!/bin/sh
# Makes an authority, and a certificate each for prefill-0 and decode-0 of tenant acme, in the folder $1.
# For a try: in a cluster the authority is yours, and its key is on none of these hosts.
set -eu
cd "$1"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 \
    -keyout authority.key -out authority.pem -subj "/CN=an authority for a try"
for engine in prefill decode; do
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 \
        -keyout $engine.key -out $engine.pem -subj "/CN=$engine" \
        -CA authority.pem -CAkey authority.key -addext basicConstraints=critical,CA:FALSE \
        -addext "subjectAltName=URI:kvxfer://acme/$engine/$engine-0"
done
