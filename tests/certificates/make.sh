#!/bin/sh
# Makes the certificates that the tests use, for a hundred years: two authorities, what each signed, a name that is not
# the host's, and one that was valid in the year 2000. They guard nothing: their keys are here for everybody to read.
set -eu
cd "$(dirname "$0")"

authority() { # FILE
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj "/CN=$1 of the tests" \
        -addext "keyUsage=critical,keyCertSign" -keyout "$1.key" -out "$1.pem"
}

signed() { # FILE AUTHORITY NAMES
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1 of the tests" \
        -keyout "$1.key" -out "$1.csr"
    printf 'subjectAltName=%s\n' "$3" > "$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days 36500 -extfile "$1.ext" -out "$1.pem"
    rm "$1.csr" "$1.ext" "$2.srl"
}

expired() { # FILE AUTHORITY
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1 of the tests" \
        -keyout "$1.key" -out "$1.csr"
    : > index
    mkdir made
    printf '%s\n' '[ca]' 'default_ca=d' '[d]' 'database=index' 'new_certs_dir=made' 'rand_serial=yes' 'default_md=sha256' \
        'policy=p' '[p]' 'commonName=supplied' > ca.cnf
    openssl ca -batch -config ca.cnf -cert "$2.pem" -keyfile "$2.key" -startdate 20000101000000Z \
        -enddate 20000102000000Z -notext -in "$1.csr" -out "$1.pem"
    rm -r "$1.csr" index index.* ca.cnf made
}

authority ca
authority other-ca
signed node ca IP:127.0.0.1,DNS:localhost
signed named ca DNS:tq.test
signed stranger other-ca IP:127.0.0.1,DNS:localhost
expired expired ca
